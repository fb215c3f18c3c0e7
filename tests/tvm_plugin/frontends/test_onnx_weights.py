"""ONNX models that are too large for protobuf, which these take small ones for."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from eqtune.frontends import load_model, verify_import

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")
helper = onnx.helper
FLOAT = onnx.TensorProto.FLOAT

WEIGHT = np.random.default_rng(0).standard_normal((64, 80)).astype("float32")


@pytest.fixture(autouse=True)
def serialized(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of what ONNX Runtime was given; more than the weight has is refused, as protobuf does beyond 2 GB."""
    sizes: list[int] = []
    session = onnxruntime.InferenceSession

    def small(model: bytes, *arguments: Any, **options: Any) -> Any:
        sizes.append(len(model))
        assert len(model) < WEIGHT.nbytes
        return session(model, *arguments, **options)

    monkeypatch.setattr(onnxruntime, "InferenceSession", small)
    monkeypatch.setattr("eqtune.frontends.onnx.weights.LARGE_BYTES", 1)
    for module in ("model", "loops"):
        monkeypatch.setattr(f"eqtune.frontends.onnx.{module}.MOST_SERIALIZED", 0)
    return sizes


def model(nodes: list[Any], functions: tuple[Any, ...] = (), opset: int = 18, more: tuple[Any, ...] = ()) -> Any:
    weight = onnx.numpy_helper.from_array(WEIGHT, "w")
    ends = [helper.make_tensor_value_info("x", FLOAT, [3, 64]), helper.make_tensor_value_info("y", FLOAT, [3, 80])]
    graph = helper.make_graph(nodes, "large", ends[:1], ends[1:], [weight, *more])
    opsets = [helper.make_opsetid("", opset)] + [helper.make_opsetid(f.domain, 1) for f in functions]
    return helper.make_model(graph, opset_imports=opsets, ir_version=8, functions=list(functions))


PRODUCT = helper.make_node("MatMul", ["x", "w"], ["p"])
DOUBLE = helper.make_function(
    "local", "Double", ["a"], ["b"], [helper.make_node("Add", ["a", "a"], ["b"])], [helper.make_opsetid("", 18)]
)
SHAPE = onnx.numpy_helper.from_array(np.array([3, 1], "int64"), "shape")

MODELS = {
    "as it is": model([helper.make_node("MatMul", ["x", "w"], ["y"])]),
    "local functions": model([PRODUCT, helper.make_node("Double", ["p"], ["y"], domain="local")], (DOUBLE,)),
    "functions of ONNX": model([PRODUCT, helper.make_node("Celu", ["p"], ["y"], alpha=0.5)]),
    "folded": model(
        [PRODUCT, helper.make_node("ConstantOfShape", ["shape"], ["c"]), helper.make_node("Add", ["p", "c"], ["y"])],
        more=(SHAPE,),
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_weights_are_not_serialized(name: str, serialized: list[int]) -> None:
    imported = load_model(MODELS[name])
    assert verify_import(imported) < 1e-5
    assert serialized


def test_a_given_model_stays_as_it_is() -> None:
    given = MODELS["local functions"]
    before = given.SerializeToString(deterministic=True)
    load_model(given)
    assert given.SerializeToString(deterministic=True) == before


def test_from_256_mib_on_weights_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    from eqtune.frontends.onnx import weights as onnx_weights

    monkeypatch.setattr(onnx_weights, "LARGE_BYTES", 1 << 28)
    light, weights = onnx_weights.without_weights(MODELS["as it is"])
    assert light is MODELS["as it is"]
    assert not weights
