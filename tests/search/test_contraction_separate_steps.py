"""LLVM mixes no steps of a reduction where that would spill a tile's sums."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm
from tvm.s_tir import Schedule

from eqtune.search.space import Decision, Hardware, build_space
from eqtune.search.space.contraction.separate_steps import separate_steps
from eqtune.search.space.lowering import prepare_for_lowering
from eqtune.search.space.marks import SEPARATE_STEPS

sys.path.insert(0, str(Path(__file__).parent))
from test_space_contraction import conv, matmul

WIDE = tvm.target.Target({"kind": "llvm", "mcpu": "znver4"})
"""Has the 32 registers that the tiles need; nothing runs on it."""

VALUES = {"m2": 1, "nr": 32, "ku": 1, "chunk": 1, "order": 0, "depth": 0, "pack": 3, "pad": 0, "far_weights": 0}


def scheduled(mr: int, layout: str = "NCHW", weights: str = "OIHW") -> Any:
    """A 3 x 3 convolution of 27 x 28 outputs with 64 channels."""
    space = build_space(conv(32, 27, 64, 3, layout, weights, padding=1), Hardware(threads=1))
    return space.apply(Decision("tiled_columns", VALUES | {"mr": mr})).mod["main"]


def longest_loop(function: Any) -> tuple[int, int]:
    """Multiply-adds between a label and a jump back to it, the most there are, and vectors on the stack there."""
    mod = tvm.IRModule({"main": prepare_for_lowering(function).with_attr("global_symbol", "main")})
    lines = tvm.compile(mod, WIDE).mod.inspect_source("s").split("\n")
    start: dict[str, int] = {}
    found = [(0, 0)]
    for number, line in enumerate(lines):
        if label := re.match(r"(\.LBB\d+_\d+):", line):
            start = {label[1]: number}  # a loop around others begins before their labels
        elif (jump := re.match(r"\s+j\w+\s+(\.LBB\d+_\d+)", line)) and jump[1] in start:
            body = lines[start[jump[1]] : number]
            stack = sum("zmm" in part and "(%rsp)" in part for part in body)
            found.append((sum("vfmadd" in part for part in body), stack))
    return max(found)


def test_only_large_tiles_keep_the_loop_over_taps() -> None:
    """Of 28 sums, not of 14. Written out, there would be three times as many products between two jumps."""
    large, small = scheduled(14), scheduled(7)
    assert [SEPARATE_STEPS in function.script() for function in (large, small)] == [True, False]
    assert longest_loop(large) == (28, 0)


def test_two_steps_around_requests_for_weights_do_not_spill() -> None:
    """Beside 28 sums there is room for the vectors of one step, beside 24 of both: 609 instead of 251 us."""
    far = Hardware(threads=2, l2_bytes=2 * 1024**2, l3_bytes=480 * 1024**2)
    space = build_space(matmul((784, 512), (512, 128), weights=[1]), far)
    outside = {"order": 1, "depth": 2, "far_weights": 1}
    large, small = (
        space.apply(Decision("tiled_columns", VALUES | {"mr": mr, "ku": 2, **outside})).mod["main"] for mr in (14, 12)
    )
    assert [SEPARATE_STEPS in function.script() for function in (large, small)] == [True, False]
    assert longest_loop(large) == (56, 0)


@pytest.mark.parametrize(
    ("depth", "registers", "separate"), [(512, 32, True), (512, 16, False), (8, 32, False)], ids=["", "16", "unasked"]
)
def test_steps_are_separate_only_around_requests_beside_many_registers(
    depth: int, registers: int, separate: bool
) -> None:
    """Beside 16, two threads of Zen 3 lose 10 to 40 % of 3 x 3 windows; without requests, the most."""
    far = Hardware(threads=2, vector_registers=registers, l2_bytes=2 * 1024**2, l3_bytes=480 * 1024**2)
    space = build_space(matmul((784, depth), (depth, 128), weights=[1]), far)
    tile = {"mr": 14, "nr": 32} if registers == 32 else {"mr": 6, "nr": 32}
    outside = {"order": 1, "depth": 2, "ku": 2, "far_weights": 1}
    function = space.apply(Decision("tiled_columns", VALUES | tile | outside)).mod["main"]
    assert (SEPARATE_STEPS in function.script()) == separate


def test_narrow_vectors_are_counted_one_by_one() -> None:
    """Tiles of 56 columns are seven vectors of 8."""
    space = build_space(conv(32, 27, 56, 3, "NCHW", "OIHW", padding=1), Hardware(threads=1))
    scripts = [
        space.apply(Decision("tiled_columns", VALUES | {"mr": mr, "nr": 56})).mod["main"].script() for mr in (3, 4)
    ]
    assert [SEPARATE_STEPS in script for script in scripts] == [False, True]


def test_a_mark_on_another_kind_of_loop_is_refused() -> None:
    schedule = Schedule(conv(32, 27, 64, 3, "NCHW", "OIHW", padding=1))
    loop = schedule.get_loops(schedule.get_sblock("conv2d_nchw"))[0]
    schedule.parallel(loop)
    schedule.annotate(loop, SEPARATE_STEPS, 1)
    with pytest.raises(ValueError, match="at once"):
        separate_steps(schedule.mod["main"])


def test_loops_over_channels_need_no_mark() -> None:
    function = scheduled(14, "NHWC", "HWIO")
    assert SEPARATE_STEPS not in function.script()
    assert separate_steps(function).same_as(function)


def test_the_convolution_stays_the_same() -> None:
    rng = np.random.default_rng(0)
    function = scheduled(14)
    shapes = [tuple(int(extent) for extent in parameter.ty.shape) for parameter in function.params]
    arrays = [rng.standard_normal(shape).astype("float32") for shape in shapes]
    results = []
    for prepare in (prepare_for_lowering, lambda unprepared: unprepared):
        tensors = [tvm.runtime.tensor(array) for array in arrays]
        mod = tvm.IRModule({"main": prepare(function).with_attr("global_symbol", "main")})
        tvm.compile(mod, tvm.target.Target("llvm"))["main"](*tensors)
        results.append(tensors[-1].numpy())
    np.testing.assert_allclose(*results, rtol=1e-4, atol=1e-4)
