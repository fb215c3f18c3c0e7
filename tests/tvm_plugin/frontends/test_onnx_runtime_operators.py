"""Operators that ONNX Runtime's optimisers write: what is imported computes what ONNX Runtime does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

onnx = pytest.importorskip("onnx")
ort = pytest.importorskip("onnxruntime")

from onnx import TensorProto as P  # noqa: E402
from onnx import helper  # noqa: E402

import eqtune  # noqa: E402
from eqtune.compile.executable import build_executable  # noqa: E402
from eqtune.frontends import load_model, verify_import  # noqa: E402
from eqtune.machine import detect_target  # noqa: E402
from eqtune.runtime import ModelRunner  # noqa: E402
from eqtune.tasks.lower import lower_to_kernels  # noqa: E402
from eqtune.transform.fold_weights import FoldWeights  # noqa: E402

pytestmark = pytest.mark.unoptimised

DOMAIN = "com.microsoft"
TARGET = detect_target(1)

Shapes = dict[str, tuple[int, ...]]


def proto(kind: str, inputs: Shapes, constants: dict[str, Any], order: str, outputs: str = "y", **attrs: Any) -> Any:
    """A model of one node, which reads the names in `order` ("-" leaves one out) and of which `outputs` are wanted."""
    names, results = (["" if name == "-" else name for name in text.split()] for text in (order, outputs))
    node = helper.make_node(kind, names, results, **({"domain": DOMAIN} | attrs))
    graph = helper.make_graph(
        [node],
        "one",
        [helper.make_tensor_value_info(name, P.FLOAT, shape) for name, shape in inputs.items()],
        [helper.make_tensor_value_info(name, P.FLOAT, ()) for name in results if name],
        [onnx.numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()],
    )
    opsets = [helper.make_opsetid(domain, version) for domain, version in {"": 17, DOMAIN: 1}.items()]
    return helper.make_model(graph, opset_imports=opsets, ir_version=8)


def with_ranks(model: Any) -> Any:
    """With the shapes of the outputs, as ONNX Runtime finds them: files have at least how many axes there are."""
    unknown = onnx.ModelProto()
    unknown.CopyFrom(model)
    for value in unknown.graph.output:
        value.type.tensor_type.ClearField("shape")
    session = ort.InferenceSession(unknown.SerializeToString(), providers=["CPUExecutionProvider"])
    rng = np.random.default_rng(0)
    arrays = session.run(None, {x.name: rng.random(x.shape, np.float32) for x in session.get_inputs()})
    del model.graph.output[:]
    for value, array in zip(unknown.graph.output, arrays, strict=True):
        model.graph.output.append(helper.make_tensor_value_info(value.name, P.FLOAT, array.shape))
    return model


def weights(*shape: int, seed: int = 0) -> Any:
    return (0.3 * np.random.default_rng(seed + sum(shape)).standard_normal(shape)).astype(np.float32)


def assert_equal(model: Any, tolerance: float = 2e-5) -> None:
    imported = load_model(with_ranks(model))
    inputs = imported.random_inputs(0)
    kernels = lower_to_kernels(FoldWeights()(imported.mod), TARGET)
    actual = ModelRunner(build_executable(kernels, TARGET))(*inputs)
    expected = imported.reference(*inputs)
    assert len(actual) == len(expected)
    for ours, theirs in zip(actual, expected, strict=True):
        assert ours.shape == theirs.shape
        np.testing.assert_allclose(ours, theirs, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("activation", "numbers"),
    [
        ("", ()),
        ("Relu", ()),
        ("Sigmoid", ()),
        ("Tanh", ()),
        ("LeakyRelu", (0.2,)),
        ("Clip", (-0.5, 0.7)),
        ("HardSigmoid", (0.3, 0.4)),
    ],
)
def test_a_convolution_with_an_activation(activation: str, numbers: tuple[float, ...]) -> None:
    attrs: dict[str, Any] = {"kernel_shape": [3, 3], "pads": [1, 1, 1, 1]}
    if activation:
        attrs |= {"activation": activation}
    if numbers:
        attrs |= {"activation_params": numbers}
    constants = {"w": weights(6, 4, 3, 3), "b": weights(6)}
    assert_equal(proto("FusedConv", {"x": (1, 4, 7, 7)}, constants, "x w b", **attrs))


def test_a_convolution_with_an_addend() -> None:
    inputs = {"x": (1, 4, 7, 7), "z": (1, 6, 5, 5)}
    constants = {"w": weights(6, 4, 3, 3), "b": weights(6)}
    assert_equal(proto("FusedConv", inputs, constants, "x w b z", kernel_shape=[3, 3], activation="Relu"))


def test_another_activation_is_refused_by_name() -> None:
    model = proto("FusedConv", {"x": (1, 4, 7, 7)}, {"w": weights(6, 4, 3, 3)}, "x w", activation="Mish")
    with pytest.raises(eqtune.UnsupportedModelError, match="the activation Mish"):
        load_model(model)


@pytest.mark.parametrize("transposed", [0, 1])
def test_a_product_with_an_activation(transposed: int) -> None:
    constants = {"w": weights(*((5, 8) if transposed else (8, 5))), "b": weights(5)}
    attrs = {"activation": "LeakyRelu", "activation_alpha": 0.3, "alpha": 0.5, "transB": transposed}
    assert_equal(proto("FusedGemm", {"x": (3, 8)}, constants, "x w b", **attrs))


PRODUCTS: list[tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]] = [
    ((2, 3, 4, 5), (2, 3, 5, 6), {"alpha": 0.125}),
    ((2, 3, 5, 4), (2, 3, 6, 5), {"transA": 1, "transB": 1}),
    ((4, 5), (3, 6, 5), {"transB": 1}),
    ((5,), (5, 6), {"alpha": 2.0}),
]
ONLY_FUSED: list[tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]] = [
    ((4, 2, 3, 5), (2, 3, 5, 6), {"transBatchA": 1}),
    ((5, 2, 3, 4), (2, 3, 5, 6), {"transBatchA": 1, "transA": 1}),
]


@pytest.mark.parametrize(
    ("kind", "left", "right", "attrs"),
    [("TransposeMatMul", *case) for case in PRODUCTS] + [("FusedMatMul", *case) for case in PRODUCTS + ONLY_FUSED],
)
def test_a_product_of_transposed_operands(
    kind: str, left: tuple[int, ...], right: tuple[int, ...], attrs: dict[str, Any]
) -> None:
    assert_equal(proto(kind, {"a": left, "b": right}, {}, "a b", **attrs))


@pytest.mark.parametrize("kind", ["Gelu", "QuickGelu", "FastGelu"])
def test_activations(kind: str) -> None:
    assert_equal(proto(kind, {"x": (3, 40)}, {}, "x"))


@pytest.mark.parametrize("order", ["x s g b c", "x s g b", "x s g - c", "x s g"])
@pytest.mark.parametrize("outputs", ["y", "y - - t"])
def test_a_norm_of_a_sum(order: str, outputs: str) -> None:
    constants = {"g": weights(16), "b": weights(16, seed=1), "c": weights(16, seed=2)}
    kept = {name: value for name, value in constants.items() if name in order.split()}
    inputs = {"x": (2, 5, 16), "s": (2, 5, 16)}
    assert_equal(proto("SkipLayerNormalization", inputs, kept, order, outputs, epsilon=0.05))


@pytest.mark.parametrize("order", ["x s g c", "x s g"])
@pytest.mark.parametrize("outputs", ["y", "y - - t"])
def test_a_root_mean_square_norm_of_a_sum(order: str, outputs: str) -> None:
    kept = {
        name: value for name, value in {"g": weights(16), "c": weights(16, seed=2)}.items() if name in order.split()
    }
    inputs = {"x": (2, 5, 16), "s": (2, 5, 16)}
    assert_equal(proto("SkipSimplifiedLayerNormalization", inputs, kept, order, outputs, epsilon=0.05))


def test_a_norm_that_onnx_runtime_puts_among_onnx_s_operators() -> None:
    attrs = {"axis": -1, "epsilon": 0.05, "stash_type": 1}
    assert_equal(
        proto("SimplifiedLayerNormalization", {"x": (2, 5, 16)}, {"g": weights(16)}, "x g", domain="", **attrs)
    )


def test_a_norm_that_onnx_runtime_puts_among_older_operators_of_onnx() -> None:
    """ONNX has it from version 17 on; what is optimised keeps the version that it had. Also in a branch."""
    constants = {"g": weights(16), "b": weights(16, seed=1)}
    model = proto("LayerNormalization", {"x": (2, 5, 16)}, constants, "x g b", domain="", epsilon=0.05)
    model.opset_import[0].version = 13
    assert_equal(model)
    result = helper.make_tensor_value_info("y", P.FLOAT, (2, 5, 16))
    normed = helper.make_graph(list(model.graph.node), "normed", [], [result])
    negated = helper.make_graph([helper.make_node("Neg", ["x"], ["y"])], "negated", [], [result])
    del model.graph.node[:], model.graph.output[:]
    model.graph.node.append(helper.make_node("If", ["c"], ["z"], then_branch=normed, else_branch=negated))
    model.graph.input.append(helper.make_tensor_value_info("c", P.BOOL, ()))
    model.graph.output.append(helper.make_tensor_value_info("z", P.FLOAT, (2, 5, 16)))
    assert verify_import(load_model(model)) < 1e-5


MASK = np.array([[1, 1, 1, 0, 0, 1], [1, 0, 1, 1, 1, 1]], np.int32)
LATER = np.tril(np.ones((2, 6, 6), np.int32))


@pytest.mark.parametrize("mask", [None, MASK, LATER, np.array([4, 6], np.int32)], ids=["all", "some", "each", "first"])
@pytest.mark.parametrize("attrs", [{}, {"unidirectional": 1}, {"scale": 0.2}], ids=lambda attrs: "".join(attrs))
def test_attention_with_one_product_for_its_operands(mask: Any, attrs: dict[str, Any]) -> None:
    constants = {"w": weights(16, 48), "b": weights(48)}
    if mask is not None:
        constants["m"] = mask
    order = "x w b" + (" m" if mask is not None else "")
    assert_equal(proto("Attention", {"x": (2, 6, 16)}, constants, order, num_heads=4, **attrs))


@pytest.mark.parametrize("counted", [[0, 0, 1, 1], [1, 1, 0, 0]])
def test_later_places_are_not_seen_where_a_mask_leaves_no_other(counted: list[int]) -> None:
    constants = {"w": weights(8, 24), "b": weights(24), "m": np.array([counted], np.int32)}
    assert_equal(proto("Attention", {"x": (1, 4, 8)}, constants, "x w b m", num_heads=2, unidirectional=1))


def test_later_places_are_counted_from_the_first_key() -> None:
    inputs = {"q": (2, 5, 8), "k": (2, 3, 8), "v": (2, 3, 8)}
    assert_equal(proto("MultiHeadAttention", inputs, {}, "q k v", num_heads=2, unidirectional=1))


def test_keys_after_the_last_query_are_refused() -> None:
    inputs = {"q": (2, 3, 8), "k": (2, 5, 8), "v": (2, 5, 8)}
    with pytest.raises(eqtune.UnsupportedModelError, match="keys after the last query"):
        load_model(proto("MultiHeadAttention", inputs, {}, "q k v", num_heads=2, unidirectional=1))


def test_attention_with_a_cache() -> None:
    inputs = {"x": (2, 6, 16), "p": (2, 2, 4, 3, 4)}
    constants = {"w": weights(16, 48), "b": weights(48)}
    assert_equal(proto("Attention", inputs, constants, "x w b - p", "y n", num_heads=4, unidirectional=1))


def test_a_cache_of_which_an_input_tells_how_much_counts_is_refused_by_name() -> None:
    constants = {"w": weights(16, 48), "b": weights(48, seed=1), "n": np.int32([3])}
    model = proto(
        "Attention",
        {"x": (2, 1, 16), "p": (2, 2, 4, 5, 4)},
        constants,
        "x w b - p - n",
        "y s",
        num_heads=4,
        past_present_share_buffer=1,
    )
    with pytest.raises(eqtune.UnsupportedModelError, match=r"Attention of .* with past_present_share_buffer"):
        load_model(model)


def test_attention_with_an_addend_and_values_of_another_width() -> None:
    inputs = {"x": (2, 6, 16), "r": (2, 4, 6, 6)}
    constants = {"w": weights(16, 40), "b": weights(40), "m": MASK}
    attrs = {"num_heads": 4, "qkv_hidden_sizes": [16, 16, 8]}
    assert_equal(proto("Attention", inputs, constants, "x w b m - r", **attrs))
    read = proto("Attention", inputs, constants, "x w b m - r", **attrs)
    read.graph.node[0].output[0] = "attended"
    read.graph.node.append(helper.make_node("Neg", ["attended"], ["y"]))
    assert_equal(read)


def test_a_cache_of_keys_and_values_apart() -> None:
    inputs = {"q": (2, 2, 16), "k": (2, 2, 16), "v": (2, 2, 16), "a": (2, 4, 3, 4), "c": (2, 4, 3, 4)}
    assert_equal(proto("MultiHeadAttention", inputs, {}, "q k v - - - a c", "y n m", num_heads=4, unidirectional=1))


def test_packed_operands_are_refused_by_name() -> None:
    with pytest.raises(eqtune.UnsupportedModelError, match="MultiHeadAttention of packed operands"):
        load_model(proto("MultiHeadAttention", {"q": (2, 6, 4, 3, 4)}, {}, "q", num_heads=4))


def test_a_cache_that_is_written_in_place_is_refused_by_name() -> None:
    inputs = {"q": (2, 2, 16), "k": (2, 2, 16), "v": (2, 2, 16), "a": (2, 4, 8, 4), "c": (2, 4, 8, 4)}
    constants = {"n": np.array([3], np.int32)}
    with pytest.raises(eqtune.UnsupportedModelError, match="MultiHeadAttention whose cache is written in place"):
        load_model(proto("MultiHeadAttention", inputs, constants, "q k v - - - a c n", "y s t", num_heads=4))


@pytest.mark.parametrize(
    ("inputs", "constants", "order"),
    [
        ({"q": (2, 6, 16), "k": (2, 9, 16), "v": (2, 9, 8)}, {}, "q k v"),
        ({"q": (2, 6, 16), "k": (2, 9, 16), "v": (2, 9, 16)}, {"b": weights(48)}, "q k v b"),
        ({"q": (2, 6, 16), "k": (2, 6, 16), "v": (2, 6, 16)}, {"m": MASK}, "q k v - m"),
        ({"q": (2, 6, 16), "k": (2, 4, 9, 4), "v": (2, 4, 9, 4)}, {}, "q k v"),
        ({"q": (2, 6, 16), "k": (2, 6, 16), "v": (2, 6, 16), "r": (1, 4, 6, 6)}, {}, "q k v - - r"),
    ],
    ids=["apart", "biased", "masked", "crossed", "addend"],
)
def test_attention_of_given_operands(inputs: Shapes, constants: dict[str, Any], order: str) -> None:
    assert_equal(proto("MultiHeadAttention", inputs, constants, order, num_heads=4))


@pytest.mark.parametrize("shape", [(2, 5, 32), (2, 4, 5, 8)], ids=["flat", "heads"])
@pytest.mark.parametrize("interleaved", [0, 1])
@pytest.mark.parametrize("first", [True, False])
def test_rotated_places(shape: tuple[int, ...], interleaved: int, first: bool) -> None:
    positions = np.array([3], np.int64) if first else np.array([[0, 2, 4, 6, 8], [9, 7, 5, 3, 1]], np.int64)
    constants = {"p": positions, "c": weights(12, 4), "s": weights(12, 4, seed=1)}
    assert_equal(proto("RotaryEmbedding", {"x": shape}, constants, "x p c s", interleaved=interleaved))


def test_a_part_of_each_head_is_rotated() -> None:
    constants = {"p": np.array([0], np.int64), "c": weights(12, 2), "s": weights(12, 2, seed=1)}
    attrs = {"rotary_embedding_dim": 4, "num_heads": 4}
    assert_equal(proto("RotaryEmbedding", {"x": (2, 5, 32)}, constants, "x p c s", **attrs))


@pytest.mark.parametrize("bias", [False, True])
def test_a_product_that_is_quantised_when_it_runs(bias: bool) -> None:
    narrow = np.random.default_rng(0).integers(-127, 127, (16, 8), np.int8)
    constants = {"w": narrow, "s": np.float32(0.02), "z": np.int8(3)} | ({"b": weights(8)} if bias else {})
    order = "x w s z" + (" b" if bias else "")
    assert_equal(proto("DynamicQuantizeMatMul", {"x": (3, 16)}, constants, order))


def test_a_layout_of_one_cpu_is_refused_with_advice() -> None:
    model = proto("Conv", {"x": (1, 16, 7, 7)}, {"w": weights(16, 16, 3, 3)}, "x w", domain="com.microsoft.nchwc")
    model.opset_import.append(helper.make_opsetid("com.microsoft.nchwc", 1))
    with pytest.raises(eqtune.UnsupportedModelError, match="ORT_ENABLE_EXTENDED"):
        load_model(model)
    body = helper.make_graph(list(model.graph.node), "body", [], list(model.graph.output))
    del model.graph.node[:]
    model.graph.input.append(helper.make_tensor_value_info("c", P.BOOL, ()))
    model.graph.node.append(helper.make_node("If", ["c"], ["z"], then_branch=body, else_branch=body))
    model.graph.output[0].name = "z"
    with pytest.raises(eqtune.UnsupportedModelError, match="ORT_ENABLE_EXTENDED"):
        load_model(model)


def test_what_onnx_runtime_s_optimiser_saves(tmp_path: Path) -> None:
    """A convolution with relu, a scaled product of a transposed operand, gelu: fused when the session is made."""
    nodes = [
        helper.make_node("Conv", ["x", "w", "b"], ["c"], kernel_shape=[3, 3], pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["c"], ["r"]),
        helper.make_node("Reshape", ["r", "shape"], ["rows"]),
        helper.make_node("Transpose", ["rows"], ["columns"], perm=[0, 2, 1]),
        helper.make_node("MatMul", ["rows", "columns"], ["products"]),
        helper.make_node("Mul", ["products", "scale"], ["scaled"]),
        helper.make_node("Div", ["scaled", "root"], ["inner"]),
        helper.make_node("Erf", ["inner"], ["erf"]),
        helper.make_node("Add", ["erf", "one"], ["shifted"]),
        helper.make_node("Mul", ["scaled", "shifted"], ["twice"]),
        helper.make_node("Mul", ["twice", "half"], ["y"]),
    ]
    constants = {
        **{"w": weights(6, 4, 3, 3), "b": weights(6), "shape": np.array([1, 6, 49])},
        **{"scale": np.float32(0.1), "root": np.float32(2**0.5), "one": np.float32(1), "half": np.float32(0.5)},
    }
    graph = helper.make_graph(
        nodes,
        "several",
        [helper.make_tensor_value_info("x", P.FLOAT, (1, 4, 7, 7))],
        [helper.make_tensor_value_info("y", P.FLOAT, (1, 6, 6))],
        [onnx.numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    options.optimized_model_filepath = str(tmp_path / "optimised.onnx")
    ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    saved = onnx.load(tmp_path / "optimised.onnx")
    assert {"FusedConv", "FusedMatMul", "Gelu"} <= {node.op_type for node in saved.graph.node}
    assert_equal(saved)
