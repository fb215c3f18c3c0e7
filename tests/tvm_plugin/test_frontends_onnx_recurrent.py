"""LSTM, GRU and RNN of ONNX compute what ONNX Runtime does."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from eqtune.errors import UnsupportedModelError
from eqtune.frontends import load_model, verify_import

onnx = pytest.importorskip("onnx")

pytestmark = pytest.mark.unoptimised
pytest.importorskip("onnxruntime")
helper, P = onnx.helper, onnx.TensorProto

STEPS, BATCH, WIDTH, HIDDEN = 5, 2, 6, 4
GATES = {"RNN": 1, "GRU": 3, "LSTM": 4}


def proto(
    kind: str,
    direction: str = "forward",
    bias: bool = True,
    start: bool = False,
    lengths: tuple[int, int] | None = None,
    **attributes: Any,
) -> Any:
    """A layer with all its outputs."""
    rng = np.random.default_rng(0)
    directions = 2 if direction == "bidirectional" else 1
    rows = GATES[kind] * HIDDEN
    states = ["initial_h", "initial_c"][: 2 if kind == "LSTM" else 1]
    tensors = {
        "W": rng.standard_normal((directions, rows, WIDTH)),
        "R": rng.standard_normal((directions, rows, HIDDEN)),
        **({"B": rng.standard_normal((directions, 2 * rows))} if bias else {}),
        **{name: rng.standard_normal((directions, BATCH, HIDDEN)) for name in states if start},
    }
    initializers = [onnx.numpy_helper.from_array(value.astype(np.float32), name) for name, value in tensors.items()]
    if lengths:
        initializers.append(onnx.numpy_helper.from_array(np.array(lengths, np.int32), "sequence_lens"))
    names = ["x", "W", "R", "B" if bias else "", "sequence_lens" if lengths else "", *(states if start else [])]
    outputs = {"y": [STEPS, directions, BATCH, HIDDEN]}
    outputs |= {f"last{i}": [directions, BATCH, HIDDEN] for i in range(len(states))}
    node = helper.make_node(kind, names, list(outputs), hidden_size=HIDDEN, direction=direction, **attributes)
    values = [helper.make_tensor_value_info(name, P.FLOAT, shape) for name, shape in outputs.items()]
    x = helper.make_tensor_value_info("x", P.FLOAT, [STEPS, BATCH, WIDTH])
    graph = helper.make_graph([node], kind.lower(), [x], values, initializers)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("LSTM", {}),
        ("LSTM", {"direction": "bidirectional", "start": True}),
        ("LSTM", {"direction": "reverse", "bias": False}),
        ("GRU", {"linear_before_reset": 1}),
        ("GRU", {"direction": "bidirectional", "start": True}),
        ("GRU", {"bias": False}),
        ("GRU", {"lengths": (STEPS, STEPS)}),
        ("RNN", {"direction": "reverse", "start": True}),
        ("RNN", {"direction": "bidirectional", "activations": ["Relu", "Tanh"]}),
    ],
)
def test_every_output_agrees(kind: str, options: dict[str, Any]) -> None:
    imported = load_model(proto(kind, **options))
    assert verify_import(imported) < 1e-5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lengths": (STEPS, 3)}, "sequence_lens"),
        ({"clip": 1.0}, "clip"),
        ({"activations": ["HardSigmoid", "Tanh", "Tanh"]}, "hardsigmoid"),
    ],
)
def test_what_is_refused_is_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=f"^LSTM .*{message}"):
        load_model(proto("LSTM", **options))
