"""Operators of ONNX that TVM's importer does not know, or seldom gets, compared with ONNX Runtime."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tvm

from eqtune.errors import UnsupportedModelError
from eqtune.frontends import load_model
from eqtune.frontends.verify import compare
from eqtune.machine import detect_target
from eqtune.runtime import ModelRunner

onnx = pytest.importorskip("onnx")
ort = pytest.importorskip("onnxruntime")

pytestmark = pytest.mark.unoptimised

CACHE = np.zeros((2, 3, 5, 4), "float32")
GRID = np.arange(24, dtype="float32").reshape(2, 3, 4)


INT32_MAXIMA = np.full((2, 3), 2**31 - 1, "int32")


def largest_difference(
    name: str, *inputs: Any, opset: int = 21, constants: tuple[int, ...] = (), **attrs: Any
) -> float:
    """Of a model of one node from ONNX Runtime's result; inputs at the positions in `constants` are constants."""
    helper = onnx.helper
    arrays = {f"x{index}": np.asarray(value) for index, value in enumerate(inputs)}
    fixed = {f"x{index}" for index in constants}
    graph = helper.make_graph(
        [helper.make_node(name, list(arrays), ["y"], **attrs)],
        name,
        [
            helper.make_tensor_value_info(key, helper.np_dtype_to_tensor_dtype(value.dtype), value.shape)
            for key, value in arrays.items()
            if key not in fixed
        ],
        [helper.make_tensor_value_info("y", helper.np_dtype_to_tensor_dtype(arrays["x0"].dtype), arrays["x0"].shape)],
        [onnx.numpy_helper.from_array(arrays[key], key) for key in fixed],
    )
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)
    given = [value for key, value in arrays.items() if key not in fixed]
    imported = load_model(proto)
    assert imported.reference is not None
    (expected,) = imported.reference(*given)
    (result,) = ModelRunner(tvm.compile(imported.mod, "llvm"))(*given)
    assert result.shape == expected.shape
    return float(np.abs(result - expected).max())


def assert_equal(name: str, array: Any, constants: dict[str, Any], outputs: str = "y", **options: Any) -> None:
    """A model of one node of `array` and constants ("-" in their names leaves one out) computes what ONNX Runtime does,
    of the same dtypes."""
    helper = onnx.helper
    opset, tolerance = options.pop("opset", 21), options.pop("tolerance", 1e-6)
    any_size = options.pop("any_size", False)
    names = ["x", *("" if key.startswith("-") else key for key in constants)]
    results = outputs.split()
    graph = helper.make_graph(
        [helper.make_node(name, names, results, **options)],
        name,
        [helper.make_tensor_value_info("x", helper.np_dtype_to_tensor_dtype(array.dtype), array.shape)],
        [onnx.ValueInfoProto(name=key) for key in results],
        [onnx.numpy_helper.from_array(np.asarray(constants[key]), key) for key in names[1:] if key],
    )
    opsets = [helper.make_opsetid(*entry) for entry in {options.get("domain", ""): 1, "": opset}.items()]
    proto = helper.make_model(graph, opset_imports=opsets, ir_version=10 if opset > 8 else 3)
    session = ort.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    expected = session.run(None, {"x": array})
    del proto.graph.output[:]
    for key, value in zip(results, expected, strict=True):
        kind = helper.np_dtype_to_tensor_dtype(value.dtype)
        proto.graph.output.append(helper.make_tensor_value_info(key, kind, value.shape))
    imported = load_model(proto, any_size=any_size)
    _, relative = compare(ModelRunner(tvm.compile(imported.mod, "llvm"))(array), expected)
    assert relative <= tolerance


@pytest.mark.parametrize("p", [1, 2])
@pytest.mark.parametrize("axis", [0, 1, -1])
def test_rows_are_divided_by_their_norms_and_zeros_stay(p: int, axis: int) -> None:
    assert largest_difference("LpNormalization", GRID * (GRID > 5), p=p, axis=axis) < 1e-6


@pytest.mark.parametrize(("batch_axis", "time_axis"), [(1, 0), (0, 1)])
def test_sequences_are_reversed_as_far_as_they_go(batch_axis: int, time_axis: int) -> None:
    lengths = np.array([1, 2, 0] if batch_axis else [3, 2], "int64")
    attrs = {"batch_axis": batch_axis, "time_axis": time_axis}
    assert largest_difference("ReverseSequence", GRID, lengths, **attrs) == 0
    assert largest_difference("ReverseSequence", GRID, lengths, constants=(1,), **attrs) == 0


@pytest.mark.parametrize("constants", [(), (1,)])
def test_coordinates_may_count_from_the_end(constants: tuple[int, ...]) -> None:
    places = np.array([[-1, 0], [0, -2]], "int64")
    assert largest_difference("ScatterND", GRID, places, -np.ones((2, 4), "float32"), constants=constants) == 0
    added = {"reduction": "add", "constants": constants}
    assert largest_difference("ScatterND", GRID, places, -np.ones((2, 4), "float32"), **added) == 0


@pytest.mark.parametrize(("mode", "starts"), [("linear", [1, 3]), ("circular", [4, 2])])
def test_caches_are_written_at_a_place_of_each_batch(mode: str, starts: list[int]) -> None:
    update = np.arange(1, 49, dtype="float32").reshape(2, 3, 2, 4)
    assert largest_difference("TensorScatter", CACHE, update, np.array(starts, "int64"), opset=24, mode=mode) == 0
    assert largest_difference("TensorScatter", CACHE, update, opset=24) == 0


@pytest.mark.parametrize("attrs", [{}, {"exclusive": 1}, {"reverse": 1}, {"exclusive": 1, "reverse": 1}])
def test_products_so_far(attrs: dict[str, int]) -> None:
    assert largest_difference("CumProd", GRID / 8, np.int64(1), opset=26, constants=(1,), **attrs) < 1e-4


@pytest.mark.parametrize("equation", ["bij,bkj->bki", "...ij,...jk", "bij,bij->b", "bii->bi", "bij->jb"])
def test_einstein_sums(equation: str) -> None:
    square = np.arange(32, dtype="float32").reshape(2, 4, 4)
    operands = [square, (square * square) % 29][: 1 + ("," in equation)]  # whose product is not symmetric
    difference = largest_difference("Einsum", *operands, equation=equation)
    assert difference == 0


def test_indices_counted_from_the_end() -> None:
    places = np.array([[[0, -1], [-3, 2]], [[1, -2], [2, 0]]], "int64")
    assert largest_difference("GatherElements", GRID, places, axis=1) == 0
    assert largest_difference("GatherND", GRID, places[..., :1] % 2 - 1, opset=13) == 0
    assert largest_difference("Gather", GRID, places, axis=1) == 0
    assert largest_difference("ScatterElements", GRID, places, 9 + places.astype("float32"), axis=-1) == 0
    assert largest_difference("ScatterND", GRID[0], np.array([[-1], [0]], "int64"), -GRID[0, :2], opset=16) == 0


@pytest.mark.parametrize("name", ["Max", "Min"])
def test_the_largest_of_several_tensors(name: str) -> None:
    assert largest_difference(name, GRID, 23 - GRID, np.full((4,), 11.0, "float32")) == 0
    assert largest_difference(name, GRID) == 0


@pytest.mark.parametrize("dtype", ["float32", "int64"])
@pytest.mark.parametrize("axis", [0, 1, -1])
def test_values_of_any_type_where_an_index_says(axis: int, dtype: str) -> None:
    helper = onnx.helper
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    graph = helper.make_graph(
        [helper.make_node("OneHot", ["x", "depth", "values"], ["y"], axis=axis)],
        "one hot",
        [helper.make_tensor_value_info("x", onnx.TensorProto.INT64, [4, 3])],
        [helper.make_tensor_value_info("y", kind, [None] * 3)],
        [
            onnx.numpy_helper.from_array(np.array(5), "depth"),
            onnx.numpy_helper.from_array(np.array([-2, 7], dtype), "values"),
        ],
    )
    imported = load_model(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9))
    assert imported.reference is not None
    index = np.arange(12).reshape(4, 3) % 7 - 1  # before the first, and beyond the last
    (expected,) = imported.reference(index)
    (result,) = ModelRunner(tvm.compile(imported.mod, "llvm"))(index)
    assert result.dtype == expected.dtype
    np.testing.assert_array_equal(result, expected)


@pytest.mark.parametrize("axis", [-1, 1])
def test_means_and_deviations_of_a_norm(axis: int) -> None:
    weights = {"g": GRID[0, 0] if axis == -1 else GRID[0]}
    assert_equal("LayerNormalization", GRID, weights, "y mean inverse", axis=axis, tolerance=1e-5)


@pytest.mark.parametrize("options", [{}, {"momentum": 0.25, "epsilon": 0.01}], ids=str)
def test_running_statistics_of_a_batch_norm_in_training(options: dict[str, float]) -> None:
    names = ("scale", "shift", "mean", "variance")
    constants = {name: np.linspace(1, i + 2, 3, dtype="float32") for i, name in enumerate(names)}
    options |= {"training_mode": 1, "opset": 15}
    assert_equal("BatchNormalization", GRID, constants, "y running_mean running_variance", **options)


@pytest.mark.parametrize("axis", [-1, 1])
def test_a_layer_norm_of_doubles(axis: int) -> None:
    x = 100 + 1e-4 * GRID.astype("float64")
    weights = {"g": x[0, 0] if axis == -1 else x[0], "b": x[1, 0] if axis == -1 else x[1]}
    assert_equal("LayerNormalization", x, weights, axis=axis, epsilon=1e-9, tolerance=1e-9)


def test_a_root_mean_square_norm_of_doubles() -> None:
    x = 100 + GRID.astype("float64") / 3
    assert_equal("RMSNormalization", x, {"g": x[0, 0]}, opset=23, stash_type=0, tolerance=1e-14)


@pytest.mark.parametrize("options", [{}, {"axes": [-1, 1]}], ids=str)
def test_norms_by_mean_and_deviation_of_values_far_from_zero(options: dict[str, Any]) -> None:
    images = 100 + np.random.default_rng(0).standard_normal((2, 3, 4, 5)).astype("float32") / 10
    assert_equal("MeanVarianceNormalization", images, {}, tolerance=1e-4, **options)


@pytest.mark.parametrize(
    ("name", "constants", "options"),
    [
        ("GlobalLpPool", {}, {}),
        ("InstanceNormalization", {"g": np.ones(3, "float16"), "b": np.ones(3, "float16")}, {}),
        ("LRN", {}, {"size": 3, "alpha": 0.1}),
        ("LpNormalization", {}, {"p": 2}),
        ("MeanVarianceNormalization", {}, {}),
        ("ReduceL2", {"axes": np.array([2])}, {}),
        ("ThresholdedRelu", {}, {}),
    ],
)
def test_operators_of_several_steps_are_rounded_once(name: str, constants: Any, options: Any) -> None:
    """Squares of 300 are infinite in float16, which ONNX Runtime computes in float32."""
    images = 300 * np.random.default_rng(0).standard_normal((2, 3, 4, 5))
    assert_equal(name, images.astype("float16"), constants, tolerance=2e-3, **options)


@pytest.mark.parametrize(("name", "rank"), [("ScatterElements", 2), ("ScatterND", 1)])
@pytest.mark.parametrize("reduction", ["add", "mul"])
def test_what_is_scattered_in_float16_is_rounded_once(name: str, rank: int, reduction: str) -> None:
    """Three hundred ones and a bit; ONNX Runtime does not run such nodes in float16."""
    helper, half = onnx.helper, onnx.TensorProto.FLOAT16
    places = np.zeros((300, 1), "int64")
    updates = (1 + np.linspace(0, 0.02, 300)).astype("float16").reshape([300, 1][:rank])
    graph = helper.make_graph(
        [helper.make_node(name, ["x", "i", "u"], ["y"], reduction=reduction)],
        name,
        [helper.make_tensor_value_info("x", half, [2, 1][:rank])],
        [helper.make_tensor_value_info("y", half, [2, 1][:rank])],
        [onnx.numpy_helper.from_array(places, "i"), onnx.numpy_helper.from_array(updates, "u")],
    )
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    (found,) = ModelRunner(tvm.compile(load_model(proto).mod, "llvm"))(np.ones([2, 1][:rank], "float16"))
    wide = updates.astype("float64")
    exact = 1 + wide.sum() if reduction == "add" else wide.prod()
    np.testing.assert_allclose(found.reshape(-1), [exact, 1], rtol=1e-3)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("Gemm", {"alpha": 0.01, "beta": 2.0}),
        ("Gemm", {"alpha": 0.01, "transA": 1, "transB": 1}),
        ("FusedGemm", {"alpha": 0.01, "domain": "com.microsoft", "activation": "Relu"}),
        ("FusedMatMul", {"alpha": 0.01, "domain": "com.microsoft"}),
    ],
)
@pytest.mark.parametrize("size", [1e-3, 1e2])
def test_products_in_float16_are_scaled_before_they_are_rounded(name: str, options: Any, size: float) -> None:
    """Those of 100 may be infinite, and a hundredth of 0.001 has few digits."""
    rng = np.random.default_rng(0)
    left, right, bias = (rng.standard_normal((64, 64)) for _ in range(3))
    constants = {"w": (100 * right).astype("float16"), "b": (size * bias).astype("float16")}
    constants = {"w": constants["w"]} if name == "FusedMatMul" else constants
    assert_equal(name, (size * left).astype("float16"), constants, tolerance=2e-3, **options)


@pytest.mark.parametrize("axis", [0, -3, 1])
def test_a_root_mean_square_norm_of_all_axes(axis: int) -> None:
    assert_equal("RMSNormalization", GRID, {"g": GRID[0] if axis == 1 else GRID}, axis=axis, opset=23)


@pytest.mark.parametrize("opset", [9, 10, 13])
def test_all_is_kept_without_training(opset: int) -> None:
    assert_equal("Dropout", GRID, {}, "y mask", opset=opset)


def test_training_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="training_mode"):
        assert_equal("Dropout", GRID, {"ratio": np.float32(0.5), "training": np.array(True)})


def test_slices_by_attributes() -> None:
    assert_equal("Slice", GRID, {}, opset=9, starts=[1, 0], ends=[9, -2], axes=[1, 2])
    assert_equal("Slice", GRID, {}, opset=9, starts=[1, 0], ends=[9, -2])


@pytest.mark.parametrize("step", [1, -1])
def test_slices_may_be_empty(step: int) -> None:
    bounds = {"starts": [0, 2 * step], "ends": [2, step], "axes": [1, -1], "steps": [1, step]}
    assert_equal("Slice", GRID, bounds)


@pytest.mark.parametrize("sizes", [[1, 0, 2, 0], [0, 3]])
def test_parts_may_be_empty(sizes: list[int]) -> None:
    outputs = "a b c d"[: 2 * len(sizes)]
    assert_equal("Split", GRID, {"sizes": sizes}, outputs, axis=1)
    assert_equal("Split", GRID, {}, outputs, opset=11, axis=-2, split=sizes)


@pytest.mark.parametrize("name", ["ReduceL1", "ReduceL2", "ReduceLogSum", "ReduceLogSumExp", "ReduceSumSquare"])
def test_elements_are_reduced_one_by_one_without_axes(name: str) -> None:
    array = GRID + 1 if "Log" in name else GRID - 9
    assert_equal(name, array, {}, noop_with_empty_axes=1)
    assert_equal(name, array, {"axes": np.zeros(0, "int64")}, noop_with_empty_axes=1)
    assert_equal(name, array, {"axes": [1]}, noop_with_empty_axes=1)


@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_means_of_integers_are_integers(dtype: str) -> None:
    assert_equal("ReduceMean", (GRID[:, 1:] - 11).astype(dtype), {"axes": [0, 1]}, opset=18)
    assert_equal("ReduceMean", GRID.astype(dtype), {}, opset=13)


@pytest.mark.parametrize("name", ["ReduceMax", "ReduceMin"])
@pytest.mark.parametrize("axes", [{}, {"axes": [0, 2]}], ids=str)
def test_whether_any_or_all_are_true(name: str, axes: dict[str, Any]) -> None:
    assert_equal(name, GRID % 5 > 2, axes, opset=20)


def test_logarithms_of_integers_are_refused_by_name() -> None:
    with pytest.raises(UnsupportedModelError, match="ReduceLogSum of int32"):
        assert_equal("ReduceLogSum", GRID.astype("int32") + 1, {})


@pytest.mark.parametrize("signs", [{}, {"detect_negative": 0}, {"detect_positive": 0}], ids=str)
def test_infinities_of_a_sign(signs: dict[str, int]) -> None:
    assert_equal("IsInf", np.array([-np.inf, 1, np.inf, np.nan], "float32"), {}, **signs)


def test_no_infinities_are_looked_for() -> None:
    assert_equal("IsInf", np.array([-np.inf, np.inf], "float32"), {}, detect_negative=0, detect_positive=0)


@pytest.mark.parametrize("attrs", [{"dtype": 11, "k": -1}, {"dtype": 6, "k": 1}, {"dtype": 1}], ids=str)
def test_diagonals_of_another_type(attrs: dict[str, int]) -> None:
    assert_equal("EyeLike", GRID[0], {}, **attrs)


@pytest.mark.parametrize(
    ("wanted", "attrs"), [([5, 2, 3], {}), ([4, 1], {"axes": [-1, 0]}), ([3, 7], {"axes": [0, 2]})]
)
def test_the_middle_of_a_tensor_or_zeros_around_it(wanted: list[int], attrs: dict[str, Any]) -> None:
    assert_equal("CenterCropPad", GRID + 1, {"shape": np.array(wanted)}, **attrs)


BOXES = np.array([[[0, 0, 1, 1], [0.5, 0.5, 1.5, 1.5], [2, 2, 3, 3], [0, 0.25, 1, 1.25], [0, 0.25, 1, 1]]], "float32")


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"overlap": np.float32(0.25 / 1.75)},
        {"overlap": np.float32(0.7), "score": np.float32(0.3)},
        {"-overlap": None, "score": np.float32(-0.5)},
    ],
    ids=str,
)
@pytest.mark.parametrize("most", [2, 2**60])
def test_boxes_that_overlap_more_are_left_out(most: int, options: dict[str, Any]) -> None:
    scores = np.array([[[0.9, 0.5, 0.4, -0.1, 0.2], [-1, 0.2, 0.3, 0.4, 0.1]]], "float32")
    constants = {"scores": scores, "most": np.int64([most]), **options}
    assert_equal("NonMaxSuppression", BOXES, constants, opset=11, any_size=True)


def test_models_that_choose_boxes_are_of_open_sizes() -> None:
    helper, scores = onnx.helper, np.random.default_rng(0).random((1, 2, 5), "float32")
    numbers = {"most": np.int64([2]), "overlap": np.float32([0.5]), "last": np.int64(2), "first": np.int64([0])}
    graph = helper.make_graph(
        [
            helper.make_node("NonMaxSuppression", ["boxes", "scores", "most", "overlap"], ["chosen"]),
            helper.make_node("Gather", ["chosen", "last"], ["places"], axis=1),
            helper.make_node("Squeeze", ["boxes", "first"], ["one"]),
            helper.make_node("Gather", ["one", "places"], ["y"]),
        ],
        "detections",
        [helper.make_tensor_value_info(name, 1, x.shape) for name, x in (("boxes", BOXES), ("scores", scores))],
        [helper.make_tensor_value_info("y", 1, ["count", 4])],
        [onnx.numpy_helper.from_array(np.asarray(array), name) for name, array in numbers.items()],
    )
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=10)
    with pytest.raises(UnsupportedModelError, match=r"a shape that depends on data.*: end the model before it, or"):
        load_model(proto)
    model = load_model(proto, any_size=True)
    assert model.reference is not None
    (expected,) = model.reference(BOXES, scores)
    for _ in range(2):  # the second time with kernels that are known
        (result,) = ModelRunner(tvm.compile(model.mod, detect_target(2), relax_pipeline="eqtune"))(BOXES, scores)
        np.testing.assert_array_equal(result, expected)


def test_how_many_boxes_are_chosen_is_a_constant_above_zero() -> None:
    with pytest.raises(UnsupportedModelError, match="chooses no boxes"):
        assert_equal("NonMaxSuppression", BOXES, {"scores": np.zeros((1, 1, 5), "float32")}, opset=11)
    with pytest.raises(UnsupportedModelError, match="NonMaxSuppression needs a constant max_output_boxes_per_class"):
        largest_difference("NonMaxSuppression", BOXES, np.zeros((1, 1, 5), "float32"), np.int64([2]))


@pytest.mark.parametrize("pads", [[0, -1, 1, 1, 0, 2], [-1, 1, 2, 0, 0, -2]])
def test_what_is_repeated_is_cut_first(pads: list[int]) -> None:
    assert_equal("Pad", GRID, {"pads": pads}, mode="wrap")


@pytest.mark.parametrize(("base", "exponent"), [("float32", "int64"), ("float64", "float32"), ("int64", "float32")])
def test_powers_are_of_the_type_of_their_base(base: str, exponent: str) -> None:
    for number in (2, 3):
        assert_equal("Pow", GRID.astype(base), {"exponent": np.array(number, exponent)})
    each = np.array([0, 1, 2, 3], exponent)
    assert largest_difference("Pow", GRID.astype(base), each) <= 1e-3


def test_swish_without_its_number() -> None:
    assert_equal("Swish", GRID - 5, {}, opset=24)
    assert_equal("Swish", GRID - 5, {}, opset=24, alpha=0.5)


@pytest.mark.parametrize(
    ("name", "function", "attrs"),
    [
        ("Softplus", lambda x: np.log1p(np.exp(x)), {}),
        ("Mish", lambda x: x * np.tanh(np.log1p(np.exp(x))), {}),
        ("Tanh", np.tanh, {}),
        ("Elu", lambda x: 2 * np.expm1(x), {"alpha": 2.0}),
        ("Celu", lambda x: 2 * np.expm1(x / 2), {"alpha": 2.0}),
        ("Selu", lambda x: 1.0507009873554805 * 1.6732632423543772 * np.expm1(x), {}),
    ],
)
def test_digits_of_small_doubles(name: str, function: Any, attrs: dict[str, float]) -> None:
    x = -np.array([1e-30, 1e-9, 0.1, 0.3, 2, 20, 80])
    helper = onnx.helper
    sides = [[helper.make_tensor_value_info(key, onnx.TensorProto.DOUBLE, x.shape)] for key in "xy"]
    graph = helper.make_graph([helper.make_node(name, ["x"], ["y"], **attrs)], name, *sides)
    imported = load_model(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10))
    (result,) = ModelRunner(tvm.compile(imported.mod, "llvm"))(x)
    np.testing.assert_allclose(result, function(x), rtol=1e-15)


def test_messages_name_the_operators_only() -> None:
    with pytest.raises(UnsupportedModelError, match=r"translate RMSNormalization of RMSNormalization: nn.rms_norm"):
        largest_difference("RMSNormalization", GRID, np.ones(5, "float32"), constants=(1,), opset=23)


def test_shapes_that_are_inputs_are_refused() -> None:
    fill = onnx.numpy_helper.from_array(np.array([5]))
    with pytest.raises(UnsupportedModelError, match="has a shape that depends on data"):
        largest_difference("ConstantOfShape", np.array([1]), value=fill)


def test_messages_name_the_operator_whose_input_is_no_constant() -> None:
    with pytest.raises(UnsupportedModelError, match="cannot translate ReduceSum of ReduceSum: Only constant axes"):
        largest_difference("ReduceSum", GRID, np.array([1]))


def test_version_10_says_by_an_input_how_many_are_the_largest() -> None:
    assert_equal("TopK", GRID, {"k": np.int64([2])}, "values places", opset=10, axis=1)


@pytest.mark.parametrize("shape", [(1, 1, 4), (2, 1, 4), (1, 3, 4)], ids=str)
def test_weights_of_a_norm_may_be_repeated(shape: tuple[int, ...]) -> None:
    weights = {name: np.random.default_rng(seed).random(shape, "float32") for seed, name in enumerate("gb")}
    assert_equal("LayerNormalization", GRID, weights, tolerance=1e-5)
    assert_equal("LayerNormalization", GRID, weights, "y mean inverse", tolerance=1e-5)


def test_weights_of_a_norm_of_as_many_elements_along_all_axes_are_repeated() -> None:
    x = np.random.default_rng(0).random((4, 4, 4), "float32")
    assert_equal("LayerNormalization", x, {"g": x + 1, "b": x - 1}, tolerance=1e-5)


@pytest.mark.parametrize("axis", [0, 1])
def test_weights_of_a_root_mean_square_norm_may_be_repeated(axis: int) -> None:
    assert_equal("RMSNormalization", GRID, {"g": GRID[0, 0]}, axis=axis, opset=23)


def assert_text_equal(body: str, kind: str = "float[9,2]", opset: int = 13) -> None:
    """A model in ONNX's text form, of "x" and with the result "y", computes what ONNX Runtime does."""
    text = f'<ir_version: 8, opset_import: ["" : {opset}]> several ({kind} x) => ({kind} y) {{ {body} }}'
    imported = load_model(onnx.parser.parse_model(text))
    assert imported.reference is not None
    inputs = imported.random_inputs()
    (expected,) = imported.reference(*inputs)
    (result,) = ModelRunner(tvm.compile(imported.mod, "llvm"))(*inputs)
    assert compare([result], [expected])[1] < 1e-6


@pytest.mark.parametrize("parts", ["(x, four)", "(x, sizes)", "(x)"])
def test_parts_of_a_sequence_are_as_long_as_is_said(parts: str) -> None:
    assert_text_equal(
        f"""
        four = Constant <value = int64 {{4}}> ()
        sizes = Constant <value = int64[3] {{2, 3, 4}}> ()
        first = Constant <value = int64 {{0}}> ()
        parts = SplitToSequence <axis = 0> {parts}
        part = SequenceAt (parts, first)
        middle = ReduceMean <axes = [0]> (part)
        joined = ConcatFromSequence <axis = 0> (parts)
        y = Add (joined, middle)
        """
    )


def test_a_tensor_is_inserted_before_a_place_that_counts_from_the_end() -> None:
    assert_text_equal(
        """
        last = Constant <value = int64 {-1}> ()
        twice = Add (x, x)
        half = SequenceConstruct (x, twice)
        none = Sub (x, x)
        all = SequenceInsert (half, none, last)
        y = SequenceAt (all, last)
        """
    )


def test_a_sequence_may_have_another_name() -> None:
    assert_text_equal(
        """
        last = Constant <value = int64 {-1}> ()
        twice = Add (x, x)
        both = SequenceConstruct (x, twice)
        same = Identity (both)
        y = SequenceAt (same, last)
        """,
        opset=16,
    )


def test_one_part_is_all() -> None:
    assert_text_equal("part = Split <axis = 1> (x) y = Neg (part)")


def test_integers_are_concatenated_for_any_operator() -> None:
    assert_text_equal(
        """
        two = Constant <value = int64[2] {1, 2}> ()
        one = Constant <value = int64[1] {3}> ()
        three = Concat <axis = 0> (two, one)
        y = Add (x, three)
        """,
        "int64[3]",
    )


def test_a_shape_may_be_made_of_an_element_of_a_constant() -> None:
    assert_text_equal(
        """
        sizes = Constant <value = int64[3] {2, 9, 4}> ()
        second = Constant <value = int64 {1}> ()
        first = Constant <value = int64[1] {0}> ()
        rest = Constant <value = int64[1] {-1}> ()
        nine = Gather <axis = 0> (sizes, second)
        vector = Unsqueeze (nine, first)
        shape = Concat <axis = 0> (vector, rest)
        y = Reshape (x, shape)
        """
    )


@pytest.mark.parametrize("opset", [17, 19])
def test_bytes_become_numbers_of_the_type_of_their_scale(opset: int) -> None:
    constants = {"scale": np.float16(0.1), "zero": np.int8(2)}
    x = np.arange(-128, 128, dtype="int8")
    assert_equal("DequantizeLinear", x, constants, opset=opset, domain="com.microsoft", tolerance=1e-3)


def test_a_vector_times_quantised_columns() -> None:
    rng = np.random.default_rng(0)
    weights = {"w": rng.integers(-60, 60, (8, 4), "int8"), "ws": rng.uniform(0.001, 0.003, 4).astype("float32")}
    constants = {"xs": np.float32(0.5), "xz": np.uint8(5), **weights, "wz": np.zeros(4, "int8")}
    constants |= {"ys": np.float32(0.25), "yz": np.uint8(130)}
    assert_equal("QLinearMatMul", rng.integers(0, 100, 8, "uint8"), constants)


@pytest.mark.parametrize("name", ["ReduceMax", "ReduceMin", "ReduceProd"])
def test_rows_of_constants_are_no_sizes(name: str) -> None:
    node = onnx.helper.make_node(name, ["table", "axes"], ["row"], keepdims=0)
    assert_equal_added(node, {"table": np.array([[1, 5], [7, 2]]), "axes": np.array([1])})


def test_numbers_that_their_new_type_does_not_have_are_no_sizes() -> None:
    node = onnx.helper.make_node("Cast", ["most"], ["narrow"], to=onnx.TensorProto.INT32)
    assert_equal_added(node, {"most": np.array([2**63 - 1, -5])})


def assert_equal_added(node: onnx.NodeProto, constants: dict[str, Any]) -> None:
    """A model that adds what a node makes of integers to its input, of any number of rows, is right."""
    helper = onnx.helper
    graph = helper.make_graph(
        [
            node,
            helper.make_node("Cast", node.output, ["real"], to=onnx.TensorProto.FLOAT),
            helper.make_node("Add", ["x", "real"], ["y"]),
        ],
        "added",
        [helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, ["n", 2])],
        [helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, ["n", 2])],
        [onnx.numpy_helper.from_array(array, key) for key, array in constants.items()],
    )
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    imported = load_model(proto, any_size=True)
    assert imported.reference is not None
    x = np.zeros((3, 2), "float32")
    (result,) = ModelRunner(tvm.compile(imported.mod, "llvm"))(x)
    np.testing.assert_array_equal(result, imported.reference(x)[0])


def test_infinities_below_a_threshold_are_zeros() -> None:
    assert_equal("ThresholdedRelu", np.array([-np.inf, -1, 0.5, 2, np.inf], "float32"), {}, alpha=0.75)


def result_of(body: str, array: Any, result: str) -> Any:
    """What a model in ONNX's text form, of "x" and with "y" of a shape as the result, makes of an array."""
    kind = {"float32": "float", "float64": "double"}[str(array.dtype)]
    sizes = ",".join(map(str, array.shape))
    head = f'<ir_version: 8, opset_import: ["" : 18]> one ({kind}[{sizes}] x) => ({kind}[{result}] y)'
    imported = load_model(onnx.parser.parse_model(f"{head} {{ {body} }}"))
    (found,) = ModelRunner(tvm.compile(imported.mod, "llvm"))(array)
    return found


def test_logarithms_of_sums_with_infinities() -> None:
    """Not ONNX Runtime's, which are no numbers for some axes."""
    x = np.array([[-np.inf, -np.inf], [-np.inf, 0], [np.inf, 1], [np.inf, -np.inf], [1, 2]], "float32")
    body = "axes = Constant <value = int64[1] {1}> () y = ReduceLogSumExp <keepdims = 0> (x, axes)"
    np.testing.assert_allclose(result_of(body, x, "5"), np.logaddexp.reduce(x, axis=1), rtol=1e-6)
    np.testing.assert_allclose(result_of("y = ReduceLogSumExp (x)", x[4:], "1,1"), [[2.3132617]], rtol=1e-6)


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-6), ("float64", 1e-14)])
def test_digits_of_small_inverse_hyperbolic_tangents(dtype: str, tolerance: float) -> None:
    x = np.array([1e-30, -1e-9, 0.1, -0.3, 0.9, 0.999], dtype)
    np.testing.assert_allclose(result_of("y = Atanh (x)", x, "6"), np.arctanh(x), rtol=tolerance)


def test_the_largest_may_be_in_any_order() -> None:
    assert_text_equal(
        """
        three = Constant <value = int64[1] {3}> ()
        values, places = TopK <axis = 0, sorted = 0> (x, three)
        middle = ReduceMean <axes = [0]> (values)
        y = Add (x, middle)
        """
    )


@pytest.mark.parametrize(("count", "attrs"), [(3, {"axis": 1}), (3, {"axis": -1}), (10, {})], ids=str)
def test_elements_that_a_known_condition_chooses(count: int, attrs: dict[str, int]) -> None:
    assert_equal("Compress", GRID, {"chosen": np.arange(count) % 2 == 0}, **attrs)


def test_integers_shrink_by_fractions() -> None:
    assert_equal("Shrink", np.arange(-6, 7, dtype="int32"), {}, lambd=1.5, bias=1.5)


@pytest.mark.parametrize(("name", "attribute", "field"), [("Softmax", "axis", "i"), ("LeakyRelu", "alpha", "f")])
def test_zeros_need_not_be_written(name: str, attribute: str, field: str) -> None:
    """Of attributes: protobuf's third version leaves them out."""
    helper = onnx.helper
    node = helper.make_node(name, ["x"], ["y"], **{attribute: 0 if field == "i" else 0.0})
    node.attribute[0].ClearField(field)
    sides = [[helper.make_tensor_value_info(key, onnx.TensorProto.FLOAT, GRID.shape)] for key in "xy"]
    graph = helper.make_graph([node], name, *sides)
    imported = load_model(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8))
    assert imported.reference is not None
    (result,) = ModelRunner(tvm.compile(imported.mod, "llvm"))(GRID - 9)
    assert compare([result], imported.reference(GRID - 9))[1] < 1e-6


@pytest.mark.parametrize(("name", "array"), [("ArgMax", np.zeros((2, 3), "uint8")), ("ArgMin", INT32_MAXIMA)])
@pytest.mark.parametrize("last", [0, 1])
def test_one_of_equal_integers_is_the_extremum(name: str, array: Any, last: int) -> None:
    assert_equal(name, array, {}, axis=1, select_last_index=last)


@pytest.mark.parametrize(("left", "right"), [((8,), (8, 4)), ((4, 8), (8,)), ((8,), (8,))])
def test_integer_products_of_vectors(left: tuple[int, ...], right: tuple[int, ...]) -> None:
    a, b = (np.arange(np.prod(shape), dtype="uint8").reshape(shape) for shape in (left, right))
    zeros = {"a_zero": np.array([3], "uint8"), "b_zero": np.array([2], "uint8")}
    assert_equal("MatMulInteger", a, {"b": b, **zeros}, tolerance=0)


def test_halves_are_quantised_by_quotients_of_float32() -> None:
    halves = np.random.default_rng(1).standard_normal(10000).astype("float16")
    assert_equal("QuantizeLinear", halves, {"scale": np.float16(0.01), "zero": np.int8(3)}, tolerance=0)
