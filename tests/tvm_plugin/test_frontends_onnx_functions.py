"""Operators that ONNX itself writes as functions of others, and attention, which is one of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from eqtune.errors import UnsupportedModelError
from eqtune.frontends import load_model, verify_import

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
helper = onnx.helper
FLOAT, INT64 = onnx.TensorProto.FLOAT, onnx.TensorProto.INT64

HEADS = (1, 4, 6, 8)
PAIR = (1, 2, 6, 8)


def model(
    name: str,
    inputs: dict[str, tuple[int, ...]],
    rank: int,
    constants: dict[str, Any] | None = None,
    opset: int = 23,
    names: tuple[str, ...] = (),
    outputs: tuple[str, ...] = ("y",),
    **attributes: Any,
) -> Any:
    """One node, whose output "y" has so many axes; inputs are of float32, but "labels"."""
    constants = constants or {}
    node = helper.make_node(name, list(names or (*inputs, *constants)), list(outputs), **attributes)
    graph = helper.make_graph(
        [node],
        "function",
        [helper.make_tensor_value_info(n, INT64 if n == "labels" else FLOAT, shape) for n, shape in inputs.items()],
        [helper.make_tensor_value_info(n, FLOAT, [None] * rank) for n in outputs],
        [onnx.numpy_helper.from_array(np.asarray(value), n) for n, value in constants.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)


@pytest.mark.parametrize(
    "proto",
    [
        model("Celu", {"x": (2, 3)}, 2, alpha=0.5),
        model("Swish", {"x": (2, 3)}, 2, opset=24, alpha=2.0),
        model("SoftmaxCrossEntropyLoss", {"x": (3, 5), "labels": (3,)}, 0),
        model("NegativeLogLikelihoodLoss", {"x": (3, 5), "labels": (3,)}, 1, reduction="none"),
    ],
    ids=lambda proto: proto.graph.node[0].op_type,
)
def test_functions_are_what_they_stand_for(proto: Any) -> None:
    assert verify_import(load_model(proto)) < 1e-6


TABLES = {"cosines": np.cos(np.arange(36.0)).reshape(9, 4), "sines": np.sin(np.arange(36.0)).reshape(9, 4)}
TABLES = {name: table.astype("float32") for name, table in TABLES.items()}
HALF_TABLES = {name: table[None, :6, :2] for name, table in TABLES.items()}


@pytest.mark.parametrize(
    "proto",
    [
        model("RotaryEmbedding", {"x": HEADS, "cosines": (1, 6, 4), "sines": (1, 6, 4)}, 4),
        model("RotaryEmbedding", {"x": HEADS}, 4, TABLES | {"positions": [[8, 1, 2, 3, 0, 5]]}),
        model("RotaryEmbedding", {"x": HEADS}, 4, HALF_TABLES, interleaved=1, rotary_embedding_dim=4),
        model("RotaryEmbedding", {"x": (1, 6, 32)}, 3, {n: t[None, :6] for n, t in TABLES.items()}, num_heads=4),
    ],
    ids=["computed", "positions", "part", "flat"],
)
def test_rotated_places(proto: Any) -> None:
    assert verify_import(load_model(proto)) < 1e-6


def test_windows_are_constants() -> None:
    proto = model("HannWindow", {}, 1, {"length": np.int64(8)})
    proto.graph.input.append(helper.make_tensor_value_info("x", FLOAT, (2, 8)))
    proto.graph.node[0].output[0] = "window"
    proto.graph.node.append(helper.make_node("Mul", ["x", "window"], ["y"]))
    del proto.graph.output[:]
    proto.graph.output.append(helper.make_tensor_value_info("y", FLOAT, (2, 8)))
    assert verify_import(load_model(proto)) < 1e-6


@pytest.mark.parametrize(
    "proto",
    [
        model("Attention", {"q": HEADS, "k": HEADS, "v": HEADS}, 4),
        model("Attention", {"q": HEADS, "k": PAIR, "v": PAIR}, 4, is_causal=1, scale=0.25),
        model("Attention", {n: (2, 6, 32) for n in "qkv"}, 3, q_num_heads=4, kv_num_heads=4),
        model("Attention", {"q": (2, 6, 32), "k": (2, 9, 16), "v": (2, 9, 16)}, 3, q_num_heads=4, kv_num_heads=2),
        model("Attention", {"q": HEADS, "k": HEADS, "v": HEADS, "mask": (6, 6)}, 4),
        model("Attention", {n: HEADS for n in "qkv"}, 4, {"mask": np.tri(6, dtype=bool)}),
        model("Attention", {n: HEADS for n in "qkv"}, 4, softcap=2.0),
        model(
            "Attention",
            {"q": HEADS, "k": HEADS, "v": HEADS, "old_k": (1, 4, 3, 8), "old_v": (1, 4, 3, 8)},
            4,
            names=("q", "k", "v", "", "old_k", "old_v"),
            outputs=("y", "new_k", "new_v"),
        ),
    ],
    ids=["plain", "causal-shared", "flat", "flat-shared", "numbers", "booleans", "soft-cap", "cache"],
)
def test_attention(proto: Any) -> None:
    assert verify_import(load_model(proto)) < 1e-5


@pytest.mark.parametrize(
    ("attributes", "names", "message"),
    [
        ({"softcap": 2.0}, ("q", "k", "v"), "softcap"),
        ({"is_causal": 1}, ("q", "k", "v", "", "old_k", "old_v"), "is_causal with a cache"),
    ],
)
def test_attention_that_cannot_be_written_as_others_is_refused(attributes: Any, names: Any, message: str) -> None:
    """ONNX needs the types of operands for that, which it does not know of another domain's operators."""
    inputs = {name: (1, 4, 3, 8) if "old" in name else HEADS for name in ("x", *names[1:]) if name}
    outputs = ("y", "new_k", "new_v")[: 3 if "old_k" in names else 1]
    proto = model("Attention", inputs, 4, names=names, outputs=outputs, **attributes)
    proto.graph.node.insert(0, helper.make_node("QuickGelu", ["x"], ["q"], domain="com.microsoft"))
    proto.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    with pytest.raises(UnsupportedModelError, match=f"^Attention with {message}"):
        load_model(proto)
