"""Operators that ONNX itself writes as functions of others, and attention, which is one of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tvm

from eqtune.errors import UnsupportedModelError
from eqtune.frontends import load_model, verify_import
from eqtune.frontends.verify import compare
from eqtune.runtime import ModelRunner

onnx = pytest.importorskip("onnx")

pytestmark = pytest.mark.unoptimised
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


def cached(constants: dict[str, Any], **attributes: Any) -> Any:
    """Attention of six queries to nine keys, of which a cache has three, with a mask among the constants or none."""
    return model(
        "Attention",
        {"q": HEADS, "k": HEADS, "v": HEADS, "old_k": (1, 4, 3, 8), "old_v": (1, 4, 3, 8)},
        4,
        constants,
        names=("q", "k", "v", "".join(constants), "old_k", "old_v"),
        outputs=("y", "new_k", "new_v"),
        **attributes,
    )


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
        cached({}, is_causal=1),
        cached({"mask": np.arange(54).reshape(6, 9) % 3 > 0}, is_causal=1),
        cached({"mask": np.linspace(-2, 2, 54, dtype="float32").reshape(6, 9)}, is_causal=1),
        *(
            model(
                "Attention",
                {"q": (2, 4, 2, 8), "k": (2, 4, 6, 8), "v": (2, 4, 6, 8)},
                4,
                {"mask": np.arange(12).reshape(2, 6) % 5 < 3, "lengths": np.array([5, 1])},
                opset=24,
                names=("q", "k", "v", "mask", "", "", "lengths"),
                is_causal=causal,
            )
            for causal in (0, 1)
        ),
        model("Attention", {n: HEADS for n in "qkv"}, 4, {"mask": np.tri(6, k=-1, dtype=bool)}),
        model("Attention", {n: HEADS for n in "qkv"}, 4, {"mask": np.tri(6, dtype=bool)[:, ::-1]}, is_causal=1),
    ],
    ids=lambda proto: f"{len(proto.graph.node[0].input)}",
)
def test_attention(proto: Any) -> None:
    """Where no key is left for a query, the result is zero, as ONNX Runtime's."""
    assert verify_import(load_model(proto)) < 1e-5


def test_attention_to_a_cache_of_any_length() -> None:
    proto = cached({}, is_causal=1)
    for value in proto.graph.input:
        value.type.tensor_type.shape.dim[2].dim_param = "old" if value.name.startswith("old") else "new"
    imported = load_model(proto, any_size=True)
    draw = np.random.default_rng(0).standard_normal
    arrays = [draw((1, 4, size, 8)).astype("float32") for size in (2, 2, 2, 5, 5)]
    assert imported.reference is not None
    results = ModelRunner(tvm.compile(imported.mod, "llvm"))(*arrays)
    assert compare(results, imported.reference(*arrays))[1] < 1e-5


@pytest.mark.parametrize("places", [5, 1])
def test_a_mask_of_fewer_places_is_refused(places: int) -> None:
    """From version 24 on, it is padded, also one of a single place."""
    proto = model("Attention", {n: HEADS for n in "qkv"}, 4, {"mask": np.ones((6, places), bool)}, opset=24)
    with pytest.raises(UnsupportedModelError, match=f"Attention to 6 keys with a mask of {places}"):
        load_model(proto)


def test_capped_attention_of_what_onnx_does_not_know() -> None:
    """It cannot be written as others: ONNX does not know the types of operands from another domain."""
    proto = model("Attention", {name: HEADS for name in "xkv"}, 4, names=("q", "k", "v"), softcap=2.0)
    proto.graph.node.insert(0, helper.make_node("QuickGelu", ["x"], ["q"], domain="com.microsoft"))
    proto.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    assert verify_import(load_model(proto)) < 1e-6
