"""Windows that roll down an image: right for all strides, windows and ends; each row of the image is read once."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm
from numpy.typing import NDArray
from tvm import tirx
from tvm.ir.expr import TensorLoad
from tvm.relax import op
from tvm_ffi import structural_map

from eqtune.search.space import build_space
from eqtune.search.space.base import Space
from eqtune.search.space.expressions import nodes_of
from eqtune.search.space.hardware import Hardware
from eqtune.search.space.lowering import prepare_for_lowering
from eqtune.search.space.marks import ROLLING, ROLLING_STEP, WINDOW_ROW
from eqtune.search.space.memory_bound.rolling_sums import roll_windows

sys.path.insert(0, str(Path(__file__).parent))
from guard_pages import stays_inside
from test_masked_windows import HARDWARE, Shape, assert_right_inside, compiled, depthwise, masked, pool
from test_memory_bound import kernel, run_points

FAMILY = "rolling_windows"


def with_residual(image: Shape, window: tuple[int, int], **attributes: Any) -> tuple[Callable[..., Any], list[Shape]]:
    build, shapes = depthwise(image, window, **attributes)
    return lambda b, x, w, bias, residual: b.emit(op.add(build(b, x, w, bias), residual)), [*shapes, image]


CASES: dict[str, tuple[Callable[..., Any], list[Shape]]] = {
    "depthwise": depthwise((1, 3, 12, 28), (3, 3), padding=1),
    "depthwise, short rows": depthwise((2, 3, 7, 7), (3, 3), padding=1),
    "depthwise, stride 2": depthwise((1, 3, 7, 37), (3, 3), padding=1, strides=2),
    "depthwise, padded on one side": depthwise((1, 2, 8, 34), (3, 3), padding=(0, 0, 1, 1), strides=2),
    "depthwise, high window": depthwise((1, 2, 9, 20), (5, 3), padding=(2, 1)),
    "depthwise, high window, stride 2": depthwise((1, 2, 9, 20), (5, 3), padding=(2, 1), strides=2),
    "depthwise, stride 3 of 4": depthwise((1, 2, 13, 20), (4, 3), padding=(1, 1), strides=(3, 1)),
    "depthwise, no padding": depthwise((1, 2, 9, 20), (3, 3)),
    "depthwise, two rows of a high window": depthwise((1, 2, 2, 20), (5, 3), padding=(2, 1)),
    "depthwise, five vectors": depthwise((1, 2, 6, 77), (3, 3), padding=1),
    "depthwise, residual": with_residual((1, 3, 8, 28), (3, 3), padding=1),
    "max pool, stride 2": pool(
        op.nn.max_pool2d, (1, 3, 11, 35), pool_size=(3, 3), strides=(2, 2), padding=(1, 1), ceil_mode=True
    ),
    "max pool": pool(op.nn.max_pool2d, (1, 3, 9, 40), pool_size=(2, 2), strides=(1, 1)),
    "average pool": pool(op.nn.avg_pool2d, (1, 3, 10, 35), pool_size=(3, 3), padding=(1, 1)),
}


def all_points(space: Space) -> NDArray[np.int64]:
    (sketch,) = space.sketches
    grid = np.indices([len(knob.values) for knob in sketch.knobs]).reshape(len(sketch.knobs), -1).T
    points = np.concatenate([np.zeros((len(grid), 1), dtype=np.int64), grid], axis=1)
    return points[space.legal(points)]


@pytest.mark.parametrize("name", CASES)
def test_sums_are_right_at_all_ends_and_nothing_beside_the_output_is_written(name: str) -> None:
    mod = kernel(*CASES[name])
    space = masked(mod, family=FAMILY)
    assert_right_inside(mod, CASES[name][1], space, all_points(space))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_infinities_and_nan_stay_where_they_are(dtype: str) -> None:
    build, shapes = pool(op.nn.max_pool2d, (1, 2, 9, 21), pool_size=(3, 3), padding=(1, 1))
    mod = kernel(build, shapes, [dtype])
    space = masked(mod, family=FAMILY)
    image = np.random.default_rng(0).standard_normal(shapes[0]).astype(dtype)
    image[0, 0, :4] = -np.inf
    image[0, 1, 5, 5] = np.inf
    padded = np.pad(image, [(0, 0), (0, 0), (1, 1), (1, 1)], constant_values=-np.inf)
    expected = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), (2, 3)).max((-1, -2))
    for result in run_points(mod, space, all_points(space), [image]):
        np.testing.assert_array_equal(result, expected)


def test_nothing_beside_the_image_is_read() -> None:
    build, shapes = depthwise((1, 16, 9, 33), (3, 3), padding=(1, 0, 1, 0), strides=2)
    mod = kernel(build, shapes)
    space = masked(mod, Hardware(threads=1), FAMILY)
    points = all_points(space)
    arguments = [tuple(int(extent) for extent in param.shape) for param in mod["main"].params]
    library = compiled({f"k{i}": prepared(space, p) for i, p in enumerate(points)})
    for number, point in enumerate(points):
        assert stays_inside(library[f"k{number}"], arguments), str(space.decision(point))


def test_weights_of_images_that_are_not_there_are_not_read() -> None:
    """Threads that share images unevenly have places for more images than there are."""

    def serial(loop: Any) -> Any:
        if loop.kind != tirx.ForKind.PARALLEL:
            return loop
        return tirx.For(loop.loop_var, loop.min, loop.extent, tirx.ForKind.SERIAL, loop.body)

    mod = kernel(*CASES["depthwise"])  # of a fourth image, weights would reach beyond the next multiple of 64 bytes
    space = masked(mod, Hardware(threads=4), FAMILY)
    points = [point for point in all_points(space) if space.decision(point).values["workers"] == 2]
    arguments = [tuple(int(extent) for extent in param.shape) for param in mod["main"].params]
    functions = [prepared(space, point) for point in points]
    serials = [function.with_body(structural_map(function.body, (tirx.For, serial))) for function in functions]
    library = compiled({f"k{number}": function for number, function in enumerate(serials)})
    assert points
    for number, point in enumerate(points):
        assert stays_inside(library[f"k{number}"], arguments), str(space.decision(point))


def prepared(space: Space, point: Any) -> Any:
    return prepare_for_lowering(space.apply(space.decision(point)).mod["main"])


def test_a_row_is_pooled_once_for_all_windows_it_is_in() -> None:
    build, shapes = pool(op.nn.max_pool2d, (1, 2, 9, 16), pool_size=(3, 3), padding=(1, 1))
    space = masked(kernel(build, shapes), family=FAMILY)
    point = next(p for p in all_points(space) if space.decision(p).values["lanes"] == 16)
    (rows,) = (loop for loop in nodes_of(prepared(space, point).body, tirx.For) if int(loop.extent) == 9 - 2)
    assert rows.script().count("llvm.masked.load") == 3  # not 9


def test_weights_are_loaded_before_the_rows_of_an_image() -> None:
    """In threads, LLVM does not know that results are not written over weights."""
    mod = kernel(*CASES["depthwise"])
    space = masked(mod, family=FAMILY)
    function = prepared(space, all_points(space)[-1])
    _, weights, *_ = function.params
    loads = [load for load in nodes_of(function.body, TensorLoad) if load.source.same_as(weights)]
    (rows,) = (loop for loop in nodes_of(function.body, tirx.For) if int(loop.extent) == 12 - 2)
    assert len(loads) == 9
    assert not [load for load in nodes_of(rows, TensorLoad) if load.source.same_as(weights)]


def test_windows_that_share_no_row_do_not_roll() -> None:
    for build, shapes in (
        pool(op.nn.max_pool2d, (1, 3, 9, 40), pool_size=(2, 2), strides=(2, 2)),
        depthwise((1, 2, 9, 20), (3, 3), padding=2, dilation=2),
    ):
        names = {sketch.name for sketch in build_space(kernel(build, shapes), HARDWARE).sketches}
        assert "masked_windows" in names
        assert FAMILY not in names


def forged(function: Any, mark: str, value: int | None) -> Any:
    def forge(loop: Any) -> Any:
        if mark not in loop.annotations:
            return loop
        marks = {name: int(old) for name, old in loop.annotations.items() if name != mark}
        marks |= {} if value is None else {mark: value}
        return tirx.For(loop.loop_var, loop.min, loop.extent, loop.kind, loop.body, annotations=marks)

    return function.with_body(structural_map(function.body, (tirx.For, forge)))


@pytest.mark.parametrize(("mark", "value"), [(ROLLING, 0), (ROLLING_STEP, 0), (ROLLING_STEP, None), (WINDOW_ROW, None)])
def test_a_forged_mark_is_refused(mark: str, value: int | None) -> None:
    space = masked(kernel(*CASES["depthwise"]), family=FAMILY)
    function = space.apply(space.decision(all_points(space)[0])).mod["main"]
    with pytest.raises(ValueError, match="marked to roll"):
        roll_windows(forged(function, mark, value))


@pytest.mark.parametrize("step", [2, 5])
def test_a_forged_step_changes_no_result(step: int) -> None:
    build, shapes = CASES["depthwise"]
    mod = kernel(build, shapes)
    space = masked(mod, family=FAMILY)
    function = space.apply(space.decision(all_points(space)[0])).mod["main"]
    library = compiled({"k": prepare_for_lowering(forged(function, ROLLING_STEP, step)), "untuned": mod["main"]})
    rng = np.random.default_rng(0)
    inputs = [tvm.runtime.tensor(rng.standard_normal(shape).astype(np.float32)) for shape in shapes]
    result, expected = (tvm.runtime.tensor(np.zeros(shapes[0], np.float32)) for _ in range(2))
    library["k"](*inputs, result)
    library["untuned"](*inputs, expected)
    np.testing.assert_allclose(result.numpy(), expected.numpy(), rtol=1e-5, atol=1e-5)
