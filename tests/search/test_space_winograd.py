"""Winograd's transforms get a sketch of their own, and every candidate computes what the unscheduled kernel does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import tvm
from tvm import relax

from eqtune.machine import detect_target
from eqtune.measure.arguments import Interface
from eqtune.measure.build import split_packing
from eqtune.search.graph.attributes import WinogradData, WinogradResult
from eqtune.search.graph.minimal_filtering import matrices
from eqtune.search.graph.winograd_ops import winograd_conv2d, winograd_data, winograd_result
from eqtune.search.space import Hardware, build_space
from eqtune.search.space.contraction.prefetch import FAR, NEAR
from eqtune.search.space.lowering import prepare_for_lowering
from eqtune.tasks import Task, extract_tasks, lower_to_kernels

HARDWARE = Hardware(threads=2)


def kernel(shape: Sequence[int], outputs: int, *, image: tuple[int, int] | None = None) -> Task:
    """The transform of an image of this shape; or of products of it into an image, with a bias and a relu."""
    x = relax.Var("x", relax.TensorType(shape, "float32"))
    builder = relax.BlockBuilder()
    with builder.function("main", [x]):
        with builder.dataflow():
            if image is None:
                result = builder.emit(winograd_data(x, WinogradData((outputs,) * 2, (3, 3), (1, 1, 1, 1))))
            else:
                bias = relax.const(np.arange(shape[-1], dtype="float32") - 3)
                result = builder.emit(winograd_result(x, WinogradResult((outputs,) * 2, (3, 3), *image)))
                result = builder.emit(relax.op.nn.relu(builder.emit(relax.op.add(result, bias))))
            result = builder.emit_output(result)
        builder.emit_func_output(result)
    (task,) = extract_tasks(lower_to_kernels(builder.get(), detect_target(2)))
    return task


def run(function: Any, arguments: Sequence[np.ndarray[Any, Any]], result: Sequence[int]) -> np.ndarray[Any, Any]:
    library = tvm.compile(tvm.IRModule({"main": function.with_attr("global_symbol", "main")}), detect_target(2))
    output = tvm.runtime.tensor(np.full(result, np.nan, dtype="float32"))
    library["main"](*(tvm.runtime.tensor(argument) for argument in arguments), output)
    return output.numpy()


@pytest.mark.parametrize(
    ("shape", "image", "outputs"),
    [((1, 12, 12, 16), None, 4), ((2, 7, 9, 24), None, 2), ((16, 36, 16), (12, 12), 2), ((36, 8, 24), (7, 13), 4)],
    ids=["data", "ragged data", "result", "ragged result"],
)
def test_every_candidate_computes_the_same(shape: tuple[int, ...], image: tuple[int, int] | None, outputs: int) -> None:
    task = kernel(shape, outputs, image=image)
    space = build_space(task.mod, HARDWARE)
    assert [sketch.name for sketch in space.sketches] == ["winograd"]
    (sketch,) = space.sketches
    shapes = [[int(extent) for extent in parameter.shape] for parameter in task.mod["main"].params]
    rng = np.random.default_rng(0)
    arguments = [rng.standard_normal(extents).astype("float32") for extents in shapes[:-1]]
    expected = run(prepare_for_lowering(task.mod["main"]), arguments, shapes[-1])
    assert np.isfinite(expected).all()
    values = np.stack(np.meshgrid(*(knob.values for knob in sketch.knobs), indexing="ij"), -1).reshape(
        -1, len(sketch.knobs)
    )
    values = values[sketch.legal(values)]
    assert len(values) > 4
    assert np.isfinite(sketch.latency_s(values)).all()
    for row in values:
        schedule = sketch.apply({knob.name: int(v) for knob, v in zip(sketch.knobs, row, strict=True)})
        actual = run(prepare_for_lowering(schedule.mod["main"]), arguments, shapes[-1])
        np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("outputs_of_tile", "taps", "height", "width"),
    [((4, 4), (3, 3), 8, 24), ((4, 4), (3, 3), 7, 13), ((1, 6), (1, 7), 5, 15), ((4, 1), (3, 1), 9, 5)],
    ids=["whole tiles", "ragged tiles", "rows", "columns"],
)
def test_one_kernel_is_the_convolution(
    outputs_of_tile: tuple[int, int], taps: tuple[int, int], height: int, width: int
) -> None:
    """Every form of the nest, with a bias and a relu: against the sums of the definition."""
    inputs, outputs = 16, 32
    rng = np.random.default_rng(0)
    kernel = rng.standard_normal((*taps, inputs, outputs))
    down, across = (np.array(of_dimension.weight) for of_dimension in map(matrices, outputs_of_tile, taps))
    weight = np.einsum("ai,bj,ijco->abco", down, across, kernel).reshape(-1, inputs, outputs).astype("float32")
    around = (taps[0] // 2, taps[1] // 2)
    x = relax.Var("x", relax.TensorType((2, height, width, inputs), "float32"))
    w = relax.Var("w", relax.TensorType(weight.shape, "float32"))
    builder = relax.BlockBuilder()
    with builder.function("main", [x, w], attrs={"num_input": 2}):
        with builder.dataflow():
            result = builder.emit(winograd_conv2d(x, w, WinogradData(outputs_of_tile, taps, around * 2)))
            result = builder.emit_output(builder.emit(relax.op.nn.relu(result)))
        builder.emit_func_output(result)
    (task,) = extract_tasks(lower_to_kernels(builder.get(), detect_target(2)))
    (sketch,) = build_space(task.mod, HARDWARE).sketches
    assert sketch.name == "winograd_conv2d"
    tiles = -(-height // outputs_of_tile[0]) * -(-width // outputs_of_tile[1])
    products = 2 * len(weight) * 2 * tiles * inputs * outputs
    assert products < task.flops < 1.6 * products  # transforms are short: each element takes one row of a matrix
    image = rng.standard_normal((2, height, width, inputs)).astype("float32")
    padded = np.pad(image.astype("float64"), ((0, 0), *((n, n) for n in around), (0, 0)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, taps, (1, 2))
    expected = np.maximum(np.einsum("nyzcij,ijco->nyzo", windows, kernel), 0)
    values = np.stack(np.meshgrid(*(knob.values for knob in sketch.knobs), indexing="ij"), -1)
    values = values.reshape(-1, len(sketch.knobs))
    values = values[sketch.legal(values)]
    assert np.isfinite(sketch.latency_s(values)).all()
    assert np.isfinite(sketch.features(values)).any(axis=0).sum() > 10
    for place, row in enumerate(values[rng.permutation(len(values))[:8]]):
        chosen = {knob.name: int(v) for knob, v in zip(sketch.knobs, row, strict=True)}
        schedule = sketch.apply(chosen | {"far_weights": place % 2})
        function, packing = split_packing(schedule.mod["main"], Interface.of(task.mod["main"]))
        assert packing is not None
        nr = int(row[3])
        panels = np.ascontiguousarray(weight.reshape(-1, inputs, outputs // nr, nr).transpose(0, 2, 1, 3))
        lowered = prepare_for_lowering(function)
        assert [name in lowered.script() for name in (NEAR, FAR)] == [bool(place % 2)] * 2
        actual = run(lowered, [image, panels], expected.shape)
        np.testing.assert_allclose(actual, expected, atol=3e-5 * np.abs(expected).max())
