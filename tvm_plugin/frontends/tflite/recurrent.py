"""TFLite's LSTM of several steps as that of ONNX: TVM's importer knows only the one without an input gate."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tflite
from tvm import relax
from tvm.relax import op

from ...errors import UnsupportedModelError
from ..recurrent import convert_recurrent

__all__ = ["sequence_lstm"]

_GATES = ((1, 5, 12), (4, 8, 15), (2, 6, 13), (3, 7, 14))
"""Which operands are weights of the input and of the state, and biases, of the gates in ONNX's order: i, o, f, c."""

_REFUSED = {"peepholes": (9, 10, 11), "a projection": (16, 17), "layer normalisation": (20, 21, 22, 23)}

_ACTIVATIONS = {tflite.ActivationFunctionType.TANH: "tanh", tflite.ActivationFunctionType.RELU: "relu"}


def sequence_lstm(bb: Any, operands: Sequence[Any], options: Any) -> relax.Expr:
    """The states of all steps, [batch, steps, hidden] or, where `options` say so, [steps, batch, hidden].

    Parameters
    ----------
    bb : relax.BlockBuilder
    operands : sequence of expression or None
        Of UNIDIRECTIONAL_SEQUENCE_LSTM, in its order; None where there is none, and for states that begin with zeros.
    options : tflite.UnidirectionalSequenceLSTMOptions

    Raises
    ------
    UnsupportedModelError
        For peepholes, projections, layer normalisation, diagonal weights, or another activation.
    """
    given = [*operands, *[None] * 4]  # older files know no layer normalisation
    refused = [name for name, places in _REFUSED.items() if any(given[place] is not None for place in places)]
    activation = _ACTIVATIONS.get(options.FusedActivationFunction())
    if activation is None:
        refused.append("another activation than tanh and relu")
    if given[6].ty.ndim != 2:
        refused.append("diagonal weights")
    if refused:
        raise UnsupportedModelError(f"UNIDIRECTIONAL_SEQUENCE_LSTM with {refused[0]} cannot be imported")
    emit = bb.emit
    gates = [[given[place] for place in places] for places in _GATES]
    if gates[0][0] is None:  # what is forgotten is replaced: 1 - sigmoid(x) = sigmoid(-x)
        gates[0] = [emit(op.negative(value)) for value in gates[2]]
    weights, recurrence, biases = (emit(op.concat(list(parts), 0)) for parts in zip(*gates, strict=True))
    biases = emit(op.concat([biases, emit(op.zeros_like(biases))], 0))
    x = given[0] if options.TimeMajor() else emit(op.permute_dims(given[0], [1, 0, 2]))
    inputs = [None if value is None else emit(op.expand_dims(value, 0)) for value in (given[18], given[19])]
    inputs = [x, *(emit(op.expand_dims(value, 0)) for value in (weights, recurrence, biases)), None, *inputs]
    attrs = {"activations": ["sigmoid", activation, activation], "cell_clip": options.CellClip()}
    every, *_ = convert_recurrent(bb, "LSTM", inputs, attrs)
    states = emit(op.squeeze(every, [2]))
    return states if options.TimeMajor() else op.permute_dims(states, [1, 0, 2])
