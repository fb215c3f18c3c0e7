"""Pooling and depthwise convolutions with channels first: right at borders, and nothing beside a row is touched."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm
from tvm import te, tirx, topi
from tvm.relax import op
from tvm_ffi import structural_map

from eqtune.search.space import build_space
from eqtune.search.space.base import Space
from eqtune.search.space.hardware import Hardware
from eqtune.search.space.lowering import prepare_for_lowering
from eqtune.search.space.marks import MASKED_LANES
from eqtune.search.space.memory_bound.masked_lanes import mask_lanes

sys.path.insert(0, str(Path(__file__).parent))
from guard_pages import stays_inside
from test_memory_bound import TARGET, kernel, legal_points, run_points

HARDWARE = Hardware(threads=2)
BESIDE = 64
"""Elements in front of and behind an output; one vector of bytes, which keeps it aligned."""

Shape = tuple[int, ...]


def depthwise(image: Shape, window: tuple[int, int], **attributes: Any) -> tuple[Callable[..., Any], list[Shape]]:
    channels = image[1]

    def build(b: Any, x: Any, w: Any, bias: Any) -> Any:
        return b.emit(op.nn.relu(b.emit(op.add(b.emit(op.nn.conv2d(x, w, groups=channels, **attributes)), bias))))

    return build, [image, (channels, 1, *window), (1, channels, 1, 1)]


def grouped(image: Shape, groups: int, outputs: int, **attributes: Any) -> tuple[Callable[..., Any], list[Shape]]:
    def build(b: Any, x: Any, w: Any, bias: Any) -> Any:
        return b.emit(op.nn.relu(b.emit(op.add(b.emit(op.nn.conv2d(x, w, groups=groups, **attributes)), bias))))

    filters = groups * outputs
    return build, [image, (filters, image[1] // groups, 3, 3), (1, filters, 1, 1)]


def pool(kind: Any, image: Shape, **attributes: Any) -> tuple[Callable[..., Any], list[Shape]]:
    return lambda b, x: b.emit(kind(x, **attributes)), [image]


CASES: dict[str, tuple[Callable[..., Any], list[Shape]]] = {
    "depthwise": depthwise((1, 3, 12, 28), (3, 3), padding=1),
    "depthwise, short rows": depthwise((2, 3, 7, 7), (3, 3), padding=1),
    "depthwise, stride 2": depthwise((1, 3, 7, 37), (3, 3), padding=1, strides=2),
    "depthwise, padded on one side": depthwise((1, 2, 8, 34), (3, 3), padding=(0, 0, 1, 1), strides=2),
    "depthwise, large window": depthwise((1, 2, 6, 20), (3, 5), padding=(1, 2)),
    "depthwise, dilated": depthwise((1, 2, 9, 20), (3, 3), padding=2, dilation=2),
    "depthwise, no padding": depthwise((1, 2, 9, 20), (3, 3)),
    "grouped": grouped((1, 8, 14, 28), 2, 4, padding=1),
    "grouped, short rows": grouped((2, 6, 7, 7), 2, 2, padding=1),
    "grouped, ragged rows": grouped((1, 8, 13, 20), 2, 4),
    "grouped, stride 2": grouped((1, 8, 7, 37), 4, 2, padding=1, strides=2),
    "grouped, more outputs than inputs": grouped((1, 4, 6, 20), 2, 6),
    "max pool, stride 2": pool(
        op.nn.max_pool2d, (1, 3, 11, 35), pool_size=(3, 3), strides=(2, 2), padding=(1, 1), ceil_mode=True
    ),
    "max pool, no padding": pool(op.nn.max_pool2d, (1, 3, 9, 40), pool_size=(2, 2), strides=(2, 2)),
    "average pool": pool(op.nn.avg_pool2d, (1, 3, 10, 35), pool_size=(3, 3), padding=(1, 1)),
}


def masked(mod: Any, hardware: Hardware = HARDWARE, family: str = "masked_windows") -> Space:
    return Space([sketch for sketch in build_space(mod, hardware).sketches if sketch.name == family])


def compiled(functions: dict[str, Any]) -> Any:
    named = {name: function.with_attr("global_symbol", name) for name, function in functions.items()}
    with tvm.transform.PassContext(config={"tirx.disable_cse_tir": True}):
        return tvm.compile(tvm.IRModule(named), target=tvm.target.Target(TARGET)).jit()


@pytest.mark.parametrize("name", CASES)
def test_borders_are_right_and_nothing_beside_the_output_is_written(name: str) -> None:
    mod = kernel(*CASES[name])
    space = masked(mod)
    assert_right_inside(mod, CASES[name][1], space, legal_points(space, 5, seed=0))


def assert_right_inside(mod: Any, shapes: list[Shape], space: Space, points: Any) -> None:
    """Schedules at these points compute what the kernel does, and write nothing beside its output."""
    rng = np.random.default_rng(0)
    inputs = [tvm.runtime.tensor(rng.standard_normal(shape).astype(np.float32)) for shape in shapes]
    size = [int(extent) for extent in mod["main"].params[-1].shape]
    functions = {
        f"k{i}": prepare_for_lowering(space.apply(space.decision(p)).mod["main"]) for i, p in enumerate(points)
    }
    library = compiled({"untuned": mod["main"], **functions})
    expected = tvm.runtime.tensor(np.zeros(size, dtype=np.float32))
    library["untuned"](*inputs, expected)
    for number, point in enumerate(points):
        around = np.full(2 * BESIDE + int(np.prod(size)) + BESIDE, 7.0, dtype=np.float32)
        start = BESIDE + (-around.ctypes.data // 4) % 16
        output = around[start : start + int(np.prod(size))].reshape(size)
        library[f"k{number}"](*inputs, tvm.runtime.from_dlpack(output))
        np.testing.assert_allclose(output, expected.numpy(), rtol=1e-5, atol=1e-5, err_msg=str(space.decision(point)))
        output[:] = 7.0
        assert (around == 7.0).all(), f"{space.decision(point)} writes beside its output"


def test_lanes_that_skip_columns_do_not_read_beyond_the_last() -> None:
    build, shapes = depthwise((1, 16, 9, 33), (3, 3), padding=(1, 0, 1, 0), strides=2)
    mod = kernel(build, shapes)
    arguments = [tuple(int(extent) for extent in param.shape) for param in mod["main"].params]
    assert arguments[-1][-1] == 16  # whole vectors
    space = masked(mod, Hardware(threads=1))
    points = legal_points(space, 4, seed=0)
    library = compiled(
        {f"k{i}": prepare_for_lowering(space.apply(space.decision(p)).mod["main"]) for i, p in enumerate(points)}
    )
    for number, point in enumerate(points):
        assert stays_inside(library[f"k{number}"], arguments), str(space.decision(point))


def test_a_padded_image_is_not_copied() -> None:
    build, shapes = CASES["depthwise"]
    space = masked(kernel(build, shapes))
    script = prepare_for_lowering(space.apply(space.decision(legal_points(space, 1, seed=0)[0])).mod["main"]).script()
    assert "pad_temp" not in script
    assert "llvm.masked.load" in script


def test_tiles_of_a_grouped_convolution_have_several_of_its_outputs() -> None:
    build, shapes = CASES["grouped"]
    (sketch,) = masked(kernel(build, shapes)).sketches
    assert {knob.name: knob.values for knob in sketch.knobs}["outputs"] == (1, 2, 4)


def test_groups_of_many_channels_are_left_to_tiles_of_channels() -> None:
    build, shapes = grouped((1, 64, 7, 28), 2, 4, padding=1)
    assert all(sketch.name != "masked_windows" for sketch in build_space(kernel(build, shapes), HARDWARE).sketches)


def test_cpus_without_masked_loads_get_no_masks() -> None:
    build, shapes = CASES["average pool"]
    names = {sketch.name for sketch in build_space(kernel(build, shapes), Hardware(vector_bytes=16)).sketches}
    assert names
    assert "masked_windows" not in names


def test_a_product_over_channels_is_no_window() -> None:
    def build(b: Any, x: Any, w: Any) -> Any:
        return b.emit(op.nn.conv2d(x, w, padding=1))

    mod = kernel(build, [(1, 4, 8, 16), (8, 4, 3, 3)])
    assert all(sketch.name != "masked_windows" for sketch in build_space(mod, HARDWARE).sketches)


def test_what_is_computed_under_a_condition_is_left_to_others() -> None:
    def pooled(x: Any) -> Any:
        clipped = te.compute(x.shape, lambda *i: te.max(x(*i), tirx.const(0.0, "float32")), "clipped")
        return topi.nn.pool2d(clipped, (3, 3), (1, 1), (1, 1), (1, 1, 1, 1), "max", layout="NCHW")

    mod = kernel(lambda b, x: b.emit_te(pooled, x), [(1, 2, 9, 20)])
    names = {sketch.name for sketch in build_space(mod, HARDWARE).sketches}
    assert names
    assert "masked_windows" not in names


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "bool"])
def test_numbers_that_tvm_takes_for_others_in_memory_are_not_masked(dtype: str) -> None:
    def build(b: Any, x: Any) -> Any:
        return b.emit(op.astype(b.emit(op.nn.max_pool2d(x, (3, 3), (1, 1), (1, 1))), dtype))

    names = {sketch.name for sketch in build_space(kernel(build, [(1, 3, 6, 13)]), HARDWARE).sketches}
    assert ("masked_windows" in names) == (dtype == "float32")


def test_what_stands_beside_an_image_is_the_same_everywhere() -> None:
    def pooled(x: Any, beside: Any) -> Any:
        zero, one, three = (tirx.const(n, "int64") for n in (0, 1, 3))
        taps = [te.reduce_axis((zero, three)) for _ in range(2)]
        height, width = x.shape[2:]

        def tap(n: Any, c: Any, i: Any, j: Any) -> Any:
            y, z = i + taps[0], j + taps[1]
            inside = tirx.all(y >= one, y < height + one, z >= one, z < width + one)
            return te.sum(tirx.if_then_else(inside, x[n, c, y - one, z - one], beside[c]), taps)

        return te.compute(x.shape, tap, "pooled")

    mod = kernel(lambda b, x, beside: b.emit_te(pooled, x, beside), [(1, 3, 9, 20), (3,)])
    space = build_space(mod, HARDWARE)
    inputs = [np.ones((1, 3, 9, 20), "float32"), np.arange(3, dtype="float32")]
    padded = np.broadcast_to(inputs[1][:, None, None], (3, 11, 22)).copy()
    padded[:, 1:-1, 1:-1] = 1.0
    expected = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), (1, 2)).sum((-1, -2))
    for result in run_points(mod, space, legal_points(space, 2, 0), inputs):
        np.testing.assert_array_equal(result[0], expected)


@pytest.mark.parametrize("divide", [op.floor_divide, op.floor_mod, op.multiply])
def test_no_integer_is_divided_by_what_is_masked(divide: Any) -> None:
    """Rows of 20 leave lanes that would be 0 / 0, which ends the process."""

    def build(b: Any, x: Any, w: Any, y: Any) -> Any:
        return b.emit(divide(b.emit(op.nn.conv2d(x, w, groups=3, padding=1)), y))

    mod = kernel(build, [(1, 3, 9, 20), (3, 1, 3, 3), (1, 3, 9, 20)], ["int32"] * 3)
    names = {sketch.name for sketch in build_space(mod, HARDWARE).sketches}
    assert names
    assert ("masked_windows" in names) == (divide is op.multiply)


@pytest.mark.parametrize("times", [0.5, 2])
def test_a_forged_mark_is_refused(times: float) -> None:
    """Marks may come from records of others; rows would be written beyond their end, or in part."""
    build, shapes = depthwise((1, 2, 9, 40), (3, 3), padding=1)
    space = masked(kernel(build, shapes))
    function = space.apply(space.decision(legal_points(space, 1, 0)[0])).mod["main"]

    def forge(loop: Any) -> Any:
        if MASKED_LANES not in loop.annotations:
            return loop
        mark = {MASKED_LANES: int(times * int(loop.annotations[MASKED_LANES]))}
        return tirx.For(loop.loop_var, loop.min, loop.extent, loop.kind, loop.body, annotations=mark)

    with pytest.raises(ValueError, match="longer"):
        mask_lanes(function.with_body(structural_map(function.body, (tirx.For, forge))))
