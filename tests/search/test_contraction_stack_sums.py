"""The sums of a tile are kept in registers: nothing is written but results, and later loops carry none of them."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import tvm
from tvm import relax
from tvm.s_tir import Schedule
from tvm.script import tirx as T

from eqtune.search.space import Decision, Hardware, build_space
from eqtune.search.space.contraction.stack_sums import sums_on_stack
from eqtune.search.space.lowering import narrow_indices, prepare_for_lowering
from eqtune.tasks import extract_tasks, lower_to_kernels

ROWS, COLUMNS, DEPTH = 49, 64, 40
CONFIG = {"tirx.disable_assert": True, "tirx.disable_cse_tir": True}
WIDE = tvm.target.Target({"kind": "llvm", "mcpu": "znver4"})
"""Has the 32 registers that the tile needs; nothing runs on it."""


def product() -> Any:
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((ROWS, DEPTH), "float32"))
    w = relax.Var("w", relax.TensorType((DEPTH, COLUMNS), "float32"))
    with builder.function("main", [x, w]):
        with builder.dataflow():
            result = builder.emit_output(relax.op.matmul(x, w))
        builder.emit_func_output(result)
    (task,) = extract_tasks(lower_to_kernels(builder.get(), WIDE))
    return task.mod


def product_with_ragged_rows(mr: int = 10) -> Any:
    """Scheduled with tiles of two vectors: the last one of 9 rows needs nearly as many registers as those of 10."""
    space = build_space(product(), Hardware(threads=1))
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


def test_many_sums_live_on_the_stack_as_few_do() -> None:
    """TVM itself puts those of 7 rows there, and takes those of 8 from its workspace, where LLVM stores them twice."""
    unprepared, prepared = (
        [compiled(prepare(product_with_ragged_rows(mr)), WIDE).mod.inspect_source("s") for mr in (7, 8)]
        for prepare in (narrow_indices, prepare_for_lowering)
    )
    assert ["TVMBackendAllocWorkspace" in source for source in unprepared] == [False, True]
    assert not any("TVMBackendAllocWorkspace" in source or "memset" in source for source in prepared)


def test_what_other_loops_read_stays_where_it_is() -> None:
    """A product whose sums are written back after all tiles are done needs all of them at once."""
    schedule = Schedule(product())
    sums = schedule.cache_write(schedule.get_sblock("matmul"), 0, "local")
    schedule.decompose_reduction(schedule.get_sblock("matmul"), schedule.get_loops(schedule.get_sblock("matmul"))[2])
    assert len(schedule.get_loops(sums)) == 2
    function = schedule.mod["main"]
    assert sums_on_stack(function).same_as(function)


def copy_through_local(begin: int) -> Any:
    """In 4 steps, 8 numbers go to a local buffer, of which 16 are then read, from `begin` before the first one on."""

    @T.prim_func(private=True, s_tir=True)
    def main(x: T.Buffer((80,), "float32"), out: T.Buffer((64,), "float32")):
        local = T.sblock_alloc_buffer((80,), scope="local")
        for i in range(4):
            for j in range(8):
                with T.sblock("fill"):
                    v = T.axis.spatial(80, 16 + i * 16 + j)
                    local[v] = x[v]
            for j in range(16):
                with T.sblock("read"):
                    v = T.axis.spatial(80, 16 + i * 16 + j)
                    out[v - 16] = local[v - begin]

    return main


def test_the_box_holds_all_that_is_read_or_nothing_is_moved() -> None:
    """Schedules may be of others: what they read was perhaps never written, but is no memory of somebody else."""
    after, before = copy_through_local(0), copy_through_local(4)
    assert re.search(r"decl_buffer\(\(16,\), scope=\"local\"|local = .*\(16,\)", sums_on_stack(after).script())
    assert sums_on_stack(before).same_as(before)


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
    assert sums_on_stack(function).same_as(function)
