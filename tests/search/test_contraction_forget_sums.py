"""Sums that were written back take no registers from the loops that follow."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import tvm
from tvm import relax

from eqtune.search.space import Decision, Hardware, build_space
from eqtune.search.space.contraction.forget_sums import forget_sums
from eqtune.search.space.lowering import narrow_indices, prepare_for_lowering
from eqtune.tasks import extract_tasks, lower_to_kernels

ROWS, COLUMNS, DEPTH = 49, 64, 40
CONFIG = {"tirx.disable_assert": True, "tirx.disable_cse_tir": True}
WIDE = tvm.target.Target({"kind": "llvm", "mcpu": "znver4"})
"""Has the 32 registers that the tile needs; nothing runs on it."""


def product_with_ragged_rows(mr: int = 10) -> Any:
    """Scheduled with tiles of two vectors: the last one of 9 rows needs nearly as many registers as those of 10."""
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((ROWS, DEPTH), "float32"))
    w = relax.Var("w", relax.TensorType((DEPTH, COLUMNS), "float32"))
    with builder.function("main", [x, w]):
        with builder.dataflow():
            result = builder.emit_output(relax.op.matmul(x, w))
        builder.emit_func_output(result)
    (task,) = extract_tasks(lower_to_kernels(builder.get(), WIDE))
    space = build_space(task.mod, Hardware(threads=1))
    values = {"mr": mr, "m2": 1, "nr": 32, "ku": 1, "chunk": 1, "order": 0, "depth": 0, "pack": 0, "pad": 0}
    return space.apply(Decision("tiled_columns", values)).mod["main"]


def compiled(function: Any, target: Any) -> Any:
    mod = tvm.IRModule({"main": function.with_attr("global_symbol", "main")})
    with tvm.transform.PassContext(config=CONFIG):
        return tvm.compile(mod, target)


def spilled_vectors(function: Any) -> int:
    return len(re.findall(r"zmm\d+, -?\d*\(%rsp\)", compiled(function, WIDE).mod.inspect_source("s")))


def test_a_ragged_tile_does_not_spill() -> None:
    function = product_with_ragged_rows()
    assert spilled_vectors(prepare_for_lowering(function)) < 5 < spilled_vectors(narrow_indices(function))


def test_few_sums_live_on_the_stack() -> None:
    sources = [compiled(product_with_ragged_rows(mr), WIDE).mod.inspect_source("s") for mr in (7, 8)]
    assert ["TVMBackendAllocWorkspace" in source for source in sources] == [False, True]


def test_the_product_stays_the_same() -> None:
    rng = np.random.default_rng(0)
    x, w = (rng.standard_normal(shape).astype("float32") for shape in ((ROWS, DEPTH), (DEPTH, COLUMNS)))
    out = tvm.runtime.tensor(np.full((ROWS, COLUMNS), 7, "float32"))
    target = tvm.target.Target({"kind": "llvm", "mcpu": "x86-64-v3"})
    library = compiled(prepare_for_lowering(product_with_ragged_rows()), target).jit()
    library["main"](tvm.runtime.tensor(x), tvm.runtime.tensor(w), out)
    np.testing.assert_allclose(out.numpy(), x @ w, rtol=1e-4, atol=1e-4)


def test_a_function_without_local_sums_is_left_alone() -> None:
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((8, 16), "float32"))
    with builder.function("main", [x]):
        with builder.dataflow():
            result = builder.emit_output(relax.op.sum(x, axis=1))
        builder.emit_func_output(result)
    (task,) = extract_tasks(lower_to_kernels(builder.get(), WIDE))
    function = task.mod["main"]
    assert forget_sums(function).same_as(function)
