"""LSTM, GRU and RNN of ONNX compute what ONNX Runtime does."""

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
helper, P = onnx.helper, onnx.TensorProto

STEPS, BATCH, WIDTH, HIDDEN = 5, 2, 6, 4
GATES = {"RNN": 1, "GRU": 3, "LSTM": 4}


def proto(
    kind: str,
    direction: str = "forward",
    bias: bool = True,
    start: bool = False,
    lengths: tuple[int, ...] | None = None,
    peepholes: bool = False,
    **attributes: Any,
) -> Any:
    """A layer with all its outputs; lengths of sequences that are () are an input."""
    rng = np.random.default_rng(0)
    directions = 2 if direction == "bidirectional" else 1
    rows = GATES[kind] * HIDDEN
    states = ["initial_h", "initial_c"][: 2 if kind == "LSTM" else 1]
    tensors = {
        "W": rng.standard_normal((directions, rows, WIDTH)),
        "R": rng.standard_normal((directions, rows, HIDDEN)),
        **({"B": rng.standard_normal((directions, 2 * rows))} if bias else {}),
        **{name: rng.standard_normal((directions, BATCH, HIDDEN)) for name in states if start},
        **({"P": rng.standard_normal((directions, 3 * HIDDEN))} if peepholes else {}),
    }
    initializers = [onnx.numpy_helper.from_array(value.astype(np.float32), name) for name, value in tensors.items()]
    if lengths:
        initializers.append(onnx.numpy_helper.from_array(np.array(lengths, np.int32), "sequence_lens"))
    names = ["x", "W", "R", "B" if bias else "", "" if lengths is None else "sequence_lens"]
    names += [*(states if start else [""] * len(states)), "P"][: len(states) + peepholes]
    outputs = {"y": [STEPS, directions, BATCH, HIDDEN]}
    outputs |= {f"last{i}": [directions, BATCH, HIDDEN] for i in range(len(states))}
    node = helper.make_node(kind, names, list(outputs), hidden_size=HIDDEN, direction=direction, **attributes)
    values = [helper.make_tensor_value_info(name, P.FLOAT, shape) for name, shape in outputs.items()]
    inputs = [helper.make_tensor_value_info("x", P.FLOAT, [STEPS, BATCH, WIDTH])]
    if lengths == ():
        inputs.append(helper.make_tensor_value_info("sequence_lens", P.INT32, [BATCH]))
    graph = helper.make_graph([node], kind.lower(), inputs, values, initializers)
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
        ("GRU", {"lengths": (2, STEPS - 1), "direction": "bidirectional", "start": True}),
        ("GRU", {"clip": 0.3, "linear_before_reset": 1, "lengths": (3, 1), "direction": "reverse"}),
        ("LSTM", {"lengths": (3, STEPS), "direction": "bidirectional", "start": True}),
        ("LSTM", {"clip": 0.5, "peepholes": True, "direction": "bidirectional", "start": True}),
        ("LSTM", {"peepholes": True, "bias": False, "lengths": (0, 4), "start": True}),
        ("RNN", {"clip": 0.5, "lengths": (4, 2), "direction": "bidirectional", "start": True}),
        ("RNN", {"direction": "reverse", "start": True}),
        ("RNN", {"direction": "bidirectional", "activations": ["Relu", "Tanh"]}),
    ],
)
def test_every_output_agrees(kind: str, options: dict[str, Any]) -> None:
    imported = load_model(proto(kind, **options))
    assert verify_import(imported) < 1e-5


@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
def test_lengths_may_be_an_input(kind: str) -> None:
    imported = load_model(proto(kind, lengths=(), direction="bidirectional", start=True))
    assert imported.inputs[1].high == STEPS + 1
    run = ModelRunner(tvm.compile(imported.mod, "llvm"))
    x, _ = imported.random_inputs()
    for lengths in ((STEPS, 1), (2, 4), (0, 3)):
        given = (x, np.array(lengths, np.int32))
        assert compare(run(*given), imported.reference(*given))[1] < 1e-5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"input_forget": 1}, "input_forget=1"),
        ({"layout": 1}, "layout=1"),
        ({"activations": ["HardSigmoid", "Tanh", "Tanh"]}, "hardsigmoid"),
    ],
)
def test_what_is_refused_is_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=f"^LSTM .*{message}"):
        load_model(proto("LSTM", **options))
