"""Resized images with channels first: vectors and shuffles must give what TVM's gathers give, bit by bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tvm
import tvm_ffi
from tvm import relax, tirx

from eqtune.machine import detect_target
from eqtune.schedules.overwritable import overwritable
from eqtune.search.space import Hardware, build_space
from eqtune.search.space.lowering import prepare_for_lowering
from eqtune.search.space.marks import PICKED_LANES
from eqtune.search.space.memory_bound.picked_lanes import pick_lanes
from eqtune.tasks import extract_tasks, lower_to_kernels

TARGET = detect_target(2)
HARDWARE = Hardware(threads=2)
op = relax.op


def resized(
    shape: tuple[int, ...], size: tuple[int, int], after: Callable[[Any, Any], Any] | None = None, **attributes: Any
) -> Any:
    """The kernel that resizes an image, and computes something `after` that of it and another."""
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType(shape, "float32"))
    other = relax.Var("other", relax.TensorType((*shape[:2], *size), "float32"))
    with builder.function("main", [x, other] if after else [x]):
        with builder.dataflow():
            image = builder.emit(op.image.resize2d(x, size, layout="NCHW", **attributes))
            if after:
                image = builder.emit(after(image, other))
            result = builder.emit_output(image)
        builder.emit_func_output(result)
    (task,) = extract_tasks(lower_to_kernels(builder.get(), TARGET))
    return task.mod


def run(function: Any) -> Any:
    """The output for random inputs."""
    module = tvm.compile(tvm.IRModule({"main": function.with_attr("global_symbol", "main")}), TARGET).jit()
    random = np.random.default_rng(0)
    *inputs, output = ([int(extent) for extent in param.shape] for param in function.params)
    arrays = [random.standard_normal(shape).astype("float32") for shape in inputs] + [np.zeros(output, "float32")]
    tensors = [tvm.runtime.tensor(array) for array in arrays]
    module["main"](*tensors)
    return tensors[-1].numpy()


NEAREST = {"method": "nearest_neighbor", "coordinate_transformation_mode": "asymmetric", "rounding_method": "floor"}


@pytest.mark.parametrize(
    ("shape", "size", "attributes"),
    [
        ((1, 3, 9, 32), (18, 64), NEAREST),
        ((2, 3, 5, 20), (10, 40), NEAREST),
        ((1, 2, 6, 24), (9, 36), {**NEAREST, "coordinate_transformation_mode": "half_pixel"}),
        ((1, 3, 8, 32), (16, 64), {"method": "linear", "coordinate_transformation_mode": "half_pixel"}),
        ((1, 3, 7, 11), (15, 53), {"method": "linear", "coordinate_transformation_mode": "align_corners"}),
        ((1, 2, 8, 40), (4, 20), {"method": "linear", "coordinate_transformation_mode": "half_pixel"}),
        ((1, 2, 6, 17), (12, 34), {"method": "cubic", "coordinate_transformation_mode": "half_pixel"}),
    ],
    ids=["nearest", "ragged", "by-one-and-a-half", "linear", "short-rows", "halved", "cubic"],
)
@pytest.mark.parametrize("after", [None, lambda x, y: op.nn.relu(op.add(x, y))], ids=["alone", "added"])
def test_vectors_pick_what_gathers_load(shape: Any, size: Any, attributes: Any, after: Any) -> None:
    mod = resized(shape, size, after, **attributes)
    (sketch,) = (sketch for sketch in build_space(mod, HARDWARE).sketches if sketch.name == "resample")
    expected = run(mod["main"])
    for lanes in sketch.knobs[0].values:
        for workers in sketch.knobs[1].values:
            function = prepare_for_lowering(sketch.apply({"lanes": lanes, "workers": workers}).mod["main"])
            text = str(function)
            assert text.count("T.vectorized") == -(-size[1] // lanes)
            assert "T.Shuffle" in text
            np.testing.assert_allclose(run(function), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    "after",
    [
        lambda x, y: op.concat([x, y], axis=1),
        lambda x, y: op.nn.relu(op.concat([y, x, y], axis=1)),
        lambda x, y: op.nn.pad(op.add(x, y), [0, 0, 0, 0, 1, 1, 0, 0]),
    ],
    ids=["in front", "between others", "between zeros"],
)
def test_only_rows_that_are_there_are_loaded(after: Any) -> None:
    mod = resized((1, 3, 9, 32), (18, 64), after, **NEAREST)
    (sketch,) = (sketch for sketch in build_space(mod, HARDWARE).sketches if sketch.name == "resample")
    expected = run(mod["main"])
    for lanes in sketch.knobs[0].values:
        function = prepare_for_lowering(sketch.apply({"lanes": lanes, "workers": 1}).mod["main"])
        np.testing.assert_array_equal(run(function), expected)
        anywhere, under_conditions = _picks(function.body), []
        tvm_ffi.structural_walk(
            function.body, (tirx.IfThenElse, lambda branch, found=under_conditions: found.extend(_picks(branch)))
        )
        assert anywhere
        assert all(any(pick.same_as(other) for other in under_conditions) for pick in anywhere)


def test_rows_that_threads_do_not_share_evenly_end_with_the_image() -> None:
    """51 rows are 26 for one of two threads; on a machine of four that is a choice."""
    mod = resized((1, 17, 1, 16), (3, 64), **NEAREST)
    (sketch,) = (s for s in build_space(mod, Hardware(threads=4)).sketches if s.name == "resample")
    function = prepare_for_lowering(sketch.apply({"lanes": 8, "workers": 2}).mod["main"])
    compiled = tvm.compile(tvm.IRModule({"main": function.with_attr("global_symbol", "main")}), TARGET).jit()
    beyond = np.from_dlpack(tvm.runtime.tensor(np.full((54, 64), 7.0, "float32")))
    image = tvm.runtime.from_dlpack(beyond[:51].reshape(1, 17, 3, 64))
    compiled["main"](tvm.runtime.tensor(np.ones((1, 17, 1, 16), "float32")), image)
    assert (beyond[:51] == 1.0).all()
    assert (beyond[51:] == 7.0).all()


def test_rows_whose_vectors_overlap_are_not_written_over_what_is_added() -> None:
    """What two vectors share would be added twice."""
    mod = resized((1, 2, 5, 20), (10, 40), op.add, **NEAREST)
    (sketch,) = (sketch for sketch in build_space(mod, HARDWARE).sketches if sketch.name == "resample")
    found = {lanes: overwritable(sketch.apply({"lanes": lanes, "workers": 1}).mod["main"]) for lanes in (8, 16)}
    assert found[8]
    assert not found[16]  # 40 = 2 * 16 + 8


def test_vectors_longer_than_the_row_are_refused() -> None:
    """Marks may come from records of others; the vector would begin in front of the row."""
    mod = resized((1, 3, 9, 32), (18, 64), **NEAREST)
    (sketch,) = (sketch for sketch in build_space(mod, HARDWARE).sketches if sketch.name == "resample")
    function = sketch.apply({"lanes": sketch.knobs[0].values[0], "workers": 1}).mod["main"]

    def forge(loop: Any) -> Any:
        if PICKED_LANES not in loop.annotations:
            return loop
        return tirx.For(loop.loop_var, loop.min, loop.extent, loop.kind, loop.body, annotations={PICKED_LANES: 128})

    with pytest.raises(ValueError, match="vectors of 128"):
        pick_lanes(function.with_body(tvm_ffi.structural_map(function.body, (tirx.For, forge))))


def _picks(statement: Any) -> list[Any]:
    found: list[Any] = []
    tvm_ffi.structural_walk(statement, (tirx.Shuffle, found.append))
    return found


def test_rows_are_preferred_to_gathers() -> None:
    mod = resized((1, 64, 64, 64), (128, 128), **NEAREST)
    space = build_space(mod, HARDWARE)
    best = {}
    for sketch in space.sketches:
        values = np.array(np.meshgrid(*[knob.values for knob in sketch.knobs])).reshape(len(sketch.knobs), -1).T
        best[sketch.name] = sketch.latency_s(values[sketch.legal(values)]).min()
    assert best["resample"] < 0.8 * best["elementwise"]


@pytest.mark.parametrize(
    ("shape", "size"), [((1, 2, 8, 320), (4, 40)), ((1, 2, 8, 4), (8, 6))], ids=["far apart", "no whole vector"]
)
def test_what_vectors_cannot_pick_is_left_to_others(shape: Any, size: Any) -> None:
    mod = resized(shape, size, **NEAREST)
    assert all(sketch.name != "resample" for sketch in build_space(mod, HARDWARE).sketches)


def test_places_that_come_from_data_are_left_to_others() -> None:
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((4, 64), "float32"))
    places = relax.Var("places", relax.TensorType((64,), "int64"))
    with builder.function("main", [x, places]):
        with builder.dataflow():
            result = builder.emit_output(op.take(x, places, axis=1))
        builder.emit_func_output(result)
    (task,) = extract_tasks(lower_to_kernels(builder.get(), TARGET))
    assert all(sketch.name != "resample" for sketch in build_space(task.mod, HARDWARE).sketches)
