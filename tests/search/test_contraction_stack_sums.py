"""The sums of a tile are kept in registers: nothing is written but results, and later loops carry none of them."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.s_tir import Schedule
from tvm.script import tirx as T

from eqtune.search.space import Decision, Hardware, build_space
from eqtune.search.space.contraction.stack_sums import sums_on_stack
from eqtune.search.space.lowering import narrow_indices, prepare_for_lowering

sys.path.insert(0, str(Path(__file__).parent))
from test_space_contraction import kernel, matmul

ROWS, COLUMNS, DEPTH = 49, 64, 40
CONFIG = {"tirx.disable_assert": True, "tirx.disable_cse_tir": True}
WIDE = tvm.target.Target({"kind": "llvm", "mcpu": "znver4"})
"""Has the 32 registers that the tile needs; nothing runs on it."""


def product() -> Any:
    return matmul((ROWS, DEPTH), (DEPTH, COLUMNS))


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


def copy_through_local(begin: int, end: int) -> Any:
    """In 4 steps, 16 numbers go to a local buffer, of which those from `begin` to `end` are then read."""

    @T.prim_func(private=True, s_tir=True)
    def main(x: T.Buffer((80,), "float32"), out: T.Buffer((4, end - begin), "float32")):
        local = T.sblock_alloc_buffer((80,), scope="local")
        for i in range(4):
            for j in range(16):
                with T.sblock("fill"):
                    v = T.axis.spatial(80, 8 + i * 16 + j)
                    local[v] = x[v]
            for j in range(end - begin):
                with T.sblock("read"):
                    v, w = T.axis.remap("SS", [i, j])
                    out[v, w] = local[8 + v * 16 + w + begin] + T.float32(1)

    return main


def run(function: Any, *inputs: Any) -> Any:
    """The last of its parameters, that many numbers."""
    shape = [int(extent) for extent in function.params[-1].ty.shape]
    out = tvm.runtime.tensor(np.full(shape, 7, "float32"))
    compiled(function, tvm.target.Target("llvm")).jit()["main"](*map(tvm.runtime.tensor, inputs), out)
    return out.numpy()


def test_a_tile_begins_anywhere_and_is_moved_whole() -> None:
    x = np.arange(80, dtype="float32")
    function = sums_on_stack(copy_through_local(3, 16))
    assert "tvm_stack_alloca" in function.script()
    np.testing.assert_array_equal(run(function, x), 1 + x[8 : 8 + 64].reshape(4, 16)[:, 3:])


@pytest.mark.parametrize(("begin", "end"), [(-1, 16), (0, 17)])
def test_what_is_read_beside_the_tile_may_be_of_another_one(begin: int, end: int) -> None:
    function = copy_through_local(begin, end)
    assert sums_on_stack(function).same_as(function)


def test_sums_that_a_loop_around_carries_stay_where_they_are() -> None:
    """Written back after each half of the reduction, they are summed over two runs of the sequence."""
    schedule = Schedule(product())
    block = schedule.get_sblock("matmul")
    sums = schedule.cache_write(block, 0, "local")
    i, j, k = schedule.get_loops(block)
    half, rest = schedule.split(k, [2, None])
    schedule.reorder(half, i, j, rest)
    schedule.reverse_compute_at(sums, schedule.get_loops(block)[2])
    function = schedule.mod["main"]
    assert sums_on_stack(function).same_as(function)


@pytest.mark.parametrize("kind", ["unroll", "vectorize"])
def test_no_tile_in_a_loop_that_is_written_out_is_moved(kind: str) -> None:
    """Each copy of the loop's body would have its own place on the stack."""
    schedule = Schedule(tvm.IRModule({"main": copy_through_local(0, 16)}))
    getattr(schedule, kind)(schedule.get_loops(schedule.get_sblock("fill"))[0])
    function = schedule.mod["main"]
    assert sums_on_stack(function).same_as(function)


def test_the_product_stays_the_same() -> None:
    rng = np.random.default_rng(0)
    x, w = (rng.standard_normal(shape).astype("float32") for shape in ((ROWS, DEPTH), (DEPTH, COLUMNS)))
    out = tvm.runtime.tensor(np.full((ROWS, COLUMNS), 7, "float32"))
    target = tvm.target.Target({"kind": "llvm", "mcpu": "x86-64-v3"})
    library = compiled(prepare_for_lowering(product_with_ragged_rows()), target).jit()
    library["main"](tvm.runtime.tensor(x), tvm.runtime.tensor(w), out)
    np.testing.assert_allclose(out.numpy(), x @ w, rtol=1e-4, atol=1e-4)


def test_a_function_without_local_sums_is_left_alone() -> None:
    function = kernel([(8, 16)], set(), lambda emit, x: relax.op.sum(x, axis=1))["main"]
    assert sums_on_stack(function).same_as(function)
