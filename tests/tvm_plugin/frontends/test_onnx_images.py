"""Operators of ONNX on images that TVM's importer does not know, against ONNX Runtime."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tvm

from eqtune.errors import UnsupportedModelError
from eqtune.frontends import load_model, verify_import
from eqtune.runtime import ModelRunner

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

pytestmark = pytest.mark.unoptimised
helper = onnx.helper


def model(name: str, shape: tuple[int, ...], constants: dict[str, Any], opset: int = 18, **attributes: Any) -> Any:
    """One node of "x" and constants, those that are None left out."""
    given = {key: np.asarray(value) for key, value in constants.items() if value is not None}
    node = helper.make_node(name, ["x", *(key if key in given else "" for key in constants)], ["y"], **attributes)
    graph = helper.make_graph(
        [node],
        "images",
        [helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, [None] * max(4, len(shape)))],
        [onnx.numpy_helper.from_array(value, key) for key, value in given.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=9 if opset > 8 else 3)


@pytest.mark.parametrize(
    ("places", "attributes"),
    [(16, {}), (9, {"strides": [2, 2], "pads": [1, 1, 1, 1]}), (4, {"dilations": [2, 2]})],
)
def test_windows_are_added_up(places: int, attributes: Any) -> None:
    proto = model("Col2Im", (2, 3 * 9, places), {"size": [6, 6], "taps": [3, 3]}, **attributes)
    assert verify_import(load_model(proto)) < 1e-6


@pytest.mark.parametrize(("size", "taps", "places"), [([8], [4], 5), ([3, 4, 5], [2, 1, 3], 2 * 4 * 3)])
def test_windows_of_one_or_three_axes_are_added_up(size: list[int], taps: list[int], places: int) -> None:
    proto = model("Col2Im", (2, 3 * int(np.prod(taps)), places), {"size": size, "taps": taps})
    assert verify_import(load_model(proto)) < 1e-6


@pytest.mark.parametrize(
    ("sizes", "scales", "attributes"),
    [
        ([2, 3, 4, 9], None, {"mode": "linear"}),
        ([2, 3, 5, 4], None, {"mode": "cubic"}),
        (None, np.float32([1, 1, 0.4, 0.5]), {"mode": "cubic", "cubic_coeff_a": -0.5, "exclude_outside": 1}),
        (None, np.float32([1, 1, 0.7, 0.7]), {"mode": "linear"}),
        (None, np.float32([0.7, 0.5]), {"mode": "linear", "axes": [-1, 2]}),
        ([5, 3], None, {"mode": "cubic", "axes": [2, 3], "keep_aspect_ratio_policy": "not_larger"}),
    ],
)
def test_images_are_resized_without_aliases(sizes: Any, scales: Any, attributes: Any) -> None:
    proto = model("Resize", (2, 3, 10, 8), {"roi": None, "scales": scales, "sizes": sizes}, antialias=1, **attributes)
    assert verify_import(load_model(proto)) < 1e-5


@pytest.mark.parametrize("mode", ["linear", "cubic", "nearest"])
@pytest.mark.parametrize(
    ("sizes", "scales", "attributes"),
    [
        ([2, 3, 7, 12], None, {}),
        (None, np.float32([1, 1, 1.5, 2]), {}),
        ([12, 5], None, {"axes": [3, 2]}),
        ([5, 12], None, {"axes": [2, 3], "keep_aspect_ratio_policy": "not_larger"}),
    ],
    ids=["sizes", "scales", "axes", "not-larger"],
)
def test_images_are_resized(sizes: Any, scales: Any, attributes: Any, mode: str) -> None:
    proto = model("Resize", (2, 3, 10, 8), {"roi": None, "scales": scales, "sizes": sizes}, mode=mode, **attributes)
    assert verify_import(load_model(proto)) < 1e-5


@pytest.mark.parametrize("mode", ["linear", "cubic"])
@pytest.mark.parametrize(
    ("sizes", "scales", "attributes"),
    [
        (None, np.float32([1, 1, 1.3, 0.7]), {}),
        (None, np.float32([1.3, 0.5]), {"axes": [3, 2]}),
        ([5, 12], None, {"axes": [2, 3], "keep_aspect_ratio_policy": "not_smaller"}),
    ],
    ids=["scales", "axes", "not-smaller"],
)
def test_factors_are_not_the_quotients_of_sizes(sizes: Any, scales: Any, attributes: Any, mode: str) -> None:
    proto = model("Resize", (2, 3, 11, 9), {"roi": None, "scales": scales, "sizes": sizes}, mode=mode, **attributes)
    assert verify_import(load_model(proto)) < 1e-5


@pytest.mark.parametrize("axes", [[2, 3], [3, 2], [-1, -2], [1, 3, 2]], ids=str)
def test_a_region_of_some_axes_is_resized(axes: list[int]) -> None:
    region = {1: (0.0, 1.0, 3), 2: (0.2, 0.9, 5), 3: (0.4, 0.6, 4)}
    begins, ends, sizes = zip(*(region[axis % 4] for axis in axes), strict=True)
    constants = {"roi": np.float32([*begins, *ends]), "scales": None, "sizes": np.array(sizes)}
    options = {"mode": "linear", "coordinate_transformation_mode": "tf_crop_and_resize", "axes": axes}
    assert verify_import(load_model(model("Resize", (2, 3, 11, 9), constants, **options))) < 1e-6


@pytest.mark.parametrize("mode", ["linear", "cubic"])
@pytest.mark.parametrize("place", ["asymmetric", "pytorch_half_pixel"])
@pytest.mark.parametrize("factors", [[1, 1, 1.6, 2.3], [1, 1, 0.6, 0.13]])
def test_pixels_begin_where_they_are_said_to(factors: list[float], place: str, mode: str) -> None:
    scales = {"roi": None, "scales": np.float32(factors)}
    proto = model("Resize", (2, 3, 11, 9), scales, mode=mode, coordinate_transformation_mode=place)
    assert verify_import(load_model(proto)) < 1e-5


@pytest.mark.parametrize("place", ["half_pixel", "align_corners"])
@pytest.mark.parametrize(("shape", "mode"), [((6, 8), "linear"), ((6, 8), "cubic"), ((3, 6, 8), "linear")])
def test_one_image_is_resized_to_twice_its_sides(shape: tuple[int, ...], mode: str, place: str) -> None:
    scales = {"roi": None, "scales": np.float32([*[1] * (len(shape) - 2), 2, 2])}
    proto = model("Resize", shape, scales, mode=mode, coordinate_transformation_mode=place)
    del proto.graph.output[0].type.tensor_type.shape.dim[len(shape) :]
    assert verify_import(load_model(proto)) < 1e-5


@pytest.mark.parametrize("mode", ["linear", "cubic", "nearest"])
@pytest.mark.parametrize("place", ["align_corners", "half_pixel_symmetric"])
@pytest.mark.parametrize("size", [[1, 1], [5, 1], [9, 14]])
def test_pixels_are_where_their_corners_or_the_middle_say(size: list[int], place: str, mode: str) -> None:
    sizes = {"roi": None, "scales": None, "sizes": [1, 2, *size]}
    proto = model("Resize", (1, 2, 5, 7), sizes, mode=mode, coordinate_transformation_mode=place)
    assert verify_import(load_model(proto)) < 1e-5


@pytest.mark.parametrize("place", ["half_pixel", "asymmetric", "align_corners"])
def test_volumes_are_resized_by_factors(place: str) -> None:
    scales = {"roi": None, "scales": np.float32([1, 1, 1.6, 2, 0.5])}
    proto = model("Resize", (1, 2, 3, 4, 5), scales, mode="linear", coordinate_transformation_mode=place, opset=19)
    assert verify_import(load_model(proto)) < 1e-5


@pytest.mark.parametrize("mode", ["linear", "nearest"])
@pytest.mark.parametrize(("name", "opset"), [("Upsample", 8), ("Upsample", 9), ("Resize", 10)])
@pytest.mark.parametrize("factors", [[1.0, 1.0, 2.0, 2.0], [1.0, 1.0, 1.5, 2.5]])
def test_images_were_resized_by_factors_before(name: str, opset: int, factors: list[float], mode: str) -> None:
    constants = {} if opset == 8 else {"scales": np.float32(factors)}
    attributes = {"scales": factors} if opset == 8 else {}
    proto = model(name, (1, 4, 7, 6), constants, opset, mode=mode, **attributes)
    assert verify_import(load_model(proto)) < 1e-6


@pytest.mark.parametrize("where", ["SAME_LOWER", "SAME_UPPER"])
@pytest.mark.parametrize(("window", "step"), [(2, 2), (3, 2), (2, 3)])
def test_the_last_steps_of_a_pooling_are_padded(window: int, step: int, where: str) -> None:
    proto = model("MaxPool", (1, 6, 13, 16), {}, kernel_shape=[window, window], strides=[step, step], auto_pad=where)
    assert verify_import(load_model(proto)) == 0


@pytest.mark.parametrize("sides", [(5,), (8, 5)])
@pytest.mark.parametrize("attributes", [{}, {"pads": 1}, {"dilations": 2}], ids=str)
def test_powers_of_windows_that_reach_beyond_the_image(sides: tuple[int, ...], attributes: dict[str, int]) -> None:
    count = len(sides)
    many = {key: [number] * count * (2 if key == "pads" else 1) for key, number in attributes.items()}
    plain = {"kernel_shape": [2] * count, "strides": [2] * count, "ceil_mode": 1, "p": 3}
    assert verify_import(load_model(model("LpPool", (1, 2, *sides), {}, 22, **plain, **many))) < 1e-6


@pytest.mark.parametrize("name", ["AveragePool", "LpPool", "MaxPool"])
@pytest.mark.parametrize("where", ["SAME_LOWER", "SAME_UPPER", "VALID"])
@pytest.mark.parametrize("ceil", [0, 1])
def test_windows_with_dilations_are_padded_as_others(name: str, where: str, ceil: int) -> None:
    options = {"kernel_shape": [3, 2], "strides": [2, 3], "dilations": [2, 2], "ceil_mode": ceil, "auto_pad": where}
    assert verify_import(load_model(model(name, (1, 2, 10, 8), {}, 22, **options))) < 1e-6


def test_places_of_maxima_that_nobody_reads() -> None:
    proto = model("MaxPool", (1, 2, 4, 5, 6), {}, kernel_shape=[2, 2, 2])
    proto.graph.node[0].output.append("")
    assert verify_import(load_model(proto)) == 0


@pytest.mark.parametrize("mode", ["linear", "nearest", "cubic"])
@pytest.mark.parametrize("sides", [(1, 4), (4, 1)])
def test_a_single_pixel_is_reflected(mode: str, sides: tuple[int, int]) -> None:
    grid = np.random.default_rng(0).uniform(-2, 2, (1, 3, 3, 2)).astype("float32")
    options = {"mode": mode, "padding_mode": "reflection", "align_corners": 1}
    assert verify_import(load_model(model("GridSample", (1, 2, *sides), {"grid": grid}, 20, **options))) < 1e-5


@pytest.mark.parametrize(
    "attributes",
    [
        {},
        {"pads": [1, 0, 0, 1]},
        {"auto_pad": "SAME_LOWER"},
        {"ceil_mode": 1, "dilations": [2, 1]},
        {"pads": [0, 1, 1, 0], "storage_order": 1},
    ],
    ids=["plain", "padded", "same", "dilated", "along columns"],
)
def test_the_places_of_maxima(attributes: Any) -> None:
    node = helper.make_node("MaxPool", ["x"], ["y", "places"], kernel_shape=[2, 3], strides=[2, 2], **attributes)
    results = [("y", onnx.TensorProto.FLOAT), ("places", onnx.TensorProto.INT64)]
    graph = helper.make_graph(
        [node],
        "places",
        [helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, (2, 3, 9, 8))],
        [helper.make_tensor_value_info(name, kind, [None] * 4) for name, kind in results],
    )
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    assert verify_import(load_model(proto)) == 0


@pytest.mark.parametrize("kind", ["INT8", "UINT8"])
def test_the_places_of_maxima_of_bytes(kind: str) -> None:
    node = helper.make_node("MaxPool", ["x"], ["y", "places"], kernel_shape=[3, 3], pads=[1, 1, 1, 1])
    byte = getattr(onnx.TensorProto, kind)
    results = [helper.make_tensor_value_info("y", byte, [None] * 4)]
    results.append(helper.make_tensor_value_info("places", onnx.TensorProto.INT64, [None] * 4))
    graph = helper.make_graph([node], "places", [helper.make_tensor_value_info("x", byte, (1, 2, 6, 5))], results)
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    assert verify_import(load_model(proto)) == 0


def test_maxima_are_put_back_where_one_axis_was_padded() -> None:
    places = np.array([[[[0, 3, 5], [13, 14, 17]]]])
    options = {"kernel_shape": [3, 2], "strides": [2, 2], "pads": [1, 0, 1, 0]}
    assert verify_import(load_model(model("MaxUnpool", (1, 1, 2, 3), {"places": places}, **options))) == 0


def test_maxima_are_put_back_into_an_image_of_a_given_size() -> None:
    places = np.array([[[[5, 7], [13, 15]]]])
    proto = model(
        "MaxUnpool", (1, 1, 2, 2), {"places": places, "size": [1, 1, 5, 5]}, kernel_shape=[2, 2], strides=[2, 2]
    )
    assert verify_import(load_model(proto)) == 0


@pytest.mark.parametrize("scale", [1.0, 0.8])
@pytest.mark.parametrize("place", ["half_pixel", "output_half_pixel"])
def test_boxes_are_moved_by_half_a_pixel_of_the_image(place: str, scale: float) -> None:
    boxes = {"boxes": np.float32([[0, 0, 4, 4], [1, 1, 5.5, 3.2]]), "batches": [0, 1]}
    sizes = {"output_height": 3, "output_width": 2, "sampling_ratio": 2, "spatial_scale": scale}
    proto = model("RoiAlign", (2, 2, 7, 8), boxes, coordinate_transformation_mode=place, **sizes)
    assert verify_import(load_model(proto)) < 1e-5


@pytest.mark.parametrize("scale", [1.0, 0.5])
@pytest.mark.parametrize("place", ["half_pixel", "output_half_pixel"])
@pytest.mark.parametrize("samples", [0, 1])
def test_boxes_without_a_side(place: str, scale: float, samples: int) -> None:
    """As models put them behind those that they found."""
    boxes = {"boxes": np.float32([[0, 0, 4, 4], [0, 0, 0, 0], [2, 1, 2, 5], [1, 3, 5, 3]])}
    sizes = {"output_height": 3, "output_width": 2, "sampling_ratio": samples, "spatial_scale": scale}
    constants = boxes | {"batches": [0] * 4}
    proto = model("RoiAlign", (1, 2, 7, 8), constants, coordinate_transformation_mode=place, **sizes)
    assert verify_import(load_model(proto)) < 1e-5


def test_boxes_of_images_that_are_not_there_are_of_the_nearest() -> None:
    """Not of what lies beside them in memory; ONNX Runtime refuses them."""
    boxes = {"boxes": np.float32([[0, 0, 4, 4], [1, 1, 5.5, 3.2]]), "batches": [0, 1]}
    proto = model("RoiAlign", (2, 2, 7, 8), boxes, output_height=3, output_width=2, sampling_ratio=2)
    del proto.graph.initializer[1]
    proto.graph.input.append(helper.make_tensor_value_info("batches", onnx.TensorProto.INT64, [2]))
    run = ModelRunner(tvm.compile(load_model(proto).mod, "llvm"))
    x = np.random.default_rng(0).standard_normal((2, 2, 7, 8)).astype("float32")
    np.testing.assert_array_equal(run(x, np.array([-1, 2]))[0], run(x, np.array([0, 1]))[0])


def test_the_largest_of_a_box_s_samples_is_refused() -> None:
    boxes = {"boxes": np.float32([[0, 0, 4, 4]]), "batches": [0]}
    with pytest.raises(UnsupportedModelError, match="RoiAlign with mode=max cannot be imported"):
        load_model(model("RoiAlign", (1, 2, 7, 8), boxes, mode="max", output_height=3, output_width=2))


@pytest.mark.parametrize("where", ["NOTSET", "SAME_LOWER", "SAME_UPPER"])
@pytest.mark.parametrize("size", [[16, 16], [15, 17], [18, 16]])
def test_transposed_convolutions_to_a_size(size: list[int], where: str) -> None:
    weights = {"w": np.random.default_rng(0).standard_normal((4, 5, 3, 3)).astype("float32")}
    proto = model("ConvTranspose", (1, 4, 8, 8), weights, strides=[2, 2], output_shape=size, auto_pad=where)
    assert verify_import(load_model(proto)) < 1e-6


@pytest.mark.parametrize("rounding", ["round_prefer_floor", "round_prefer_ceil", "floor", "ceil"])
@pytest.mark.parametrize("place", ["half_pixel", "half_pixel_symmetric", "asymmetric", "align_corners"])
@pytest.mark.parametrize("factors", [[1, 1, 1.3, 0.7], [2, 1.7, 0.5, 1.1]])
def test_nearest_pixels_of_any_axes_by_any_factors(factors: list[float], place: str, rounding: str) -> None:
    options = {"mode": "nearest", "coordinate_transformation_mode": place, "nearest_mode": rounding}
    proto = model("Resize", (2, 3, 11, 9), {"roi": None, "scales": np.float32(factors), "sizes": None}, **options)
    assert verify_import(load_model(proto)) == 0


@pytest.mark.parametrize(
    ("proto", "message"),
    [
        (model("Col2Im", (1, 9, 12), {"size": [6, 5], "taps": [3, 3]}, pads=[0, 0, 0, 1]), "different pads"),
        (
            model(
                "Resize",
                (2, 3, 10, 8),
                {"roi": None, "scales": None, "sizes": [2, 3, 4, 4]},
                antialias=1,
                mode="linear",
                coordinate_transformation_mode="align_corners",
            ),
            "align_corners",
        ),
        (
            model("ConvTranspose", (1, 4, 8, 8), {"w": np.zeros((4, 5, 3, 3), "float32")}, output_shape=[12, 12]),
            "a step or more beyond what it computes",
        ),
        (model("AffineGrid", (1, 2, 3), {"size": [1, 1, 1, 4]}, 20, align_corners=1), "a side is 1"),
    ],
    ids=["pads", "corners", "larger", "one pixel"],
)
def test_what_is_refused_is_named(proto: Any, message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        load_model(proto)
