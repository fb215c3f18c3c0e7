"""LSTM, GRU and RNN of PyTorch, in any number of layers, as those of ONNX: TVM's importer knows single layers only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch.fx
from tvm.relax import op

from ...errors import UnsupportedModelError
from ..recurrent import convert_recurrent
from .nodes import arguments

__all__ = ["RECURRENT_CONVERTERS", "projects_states"]

_GATES = {"LSTM": (0, 3, 1, 2), "GRU": (1, 0, 2), "RNN": (0,)}
"""Where PyTorch has the gates that ONNX expects in order."""

_NAMES = ("input", "hx", "params", "has_biases", "num_layers", "dropout", "train", "bidirectional", "batch_first")

_LSTM_MODE = 2
"""What oneDNN calls an LSTM."""


def projects_states(node: torch.fx.Node) -> bool:
    """Whether a node is an LSTM with `proj_size`, which PyTorch decomposes into steps."""
    if getattr(node.target, "__name__", "") != "lstm.input":
        return False
    hidden, cell = node.args[1]
    return hidden.meta["val"].shape[-1] != cell.meta["val"].shape[-1]


def _converter(kind: str, **attributes: Any) -> Callable[[Any, Any], tuple[Any, ...]]:
    def convert(node: Any, importer: Any) -> tuple[Any, ...]:
        given = dict(zip(_NAMES, node.args, strict=False)) | node.kwargs
        emit = importer.block_builder.emit

        def value(argument: Any) -> Any:
            return importer.env[argument] if isinstance(argument, torch.fx.Node) else argument

        x = value(given["input"])
        states = given["hx"] if isinstance(given["hx"], Sequence) else [given["hx"]]
        states = [value(state) for state in states]
        params = [value(param) for param in given["params"]]
        directions = 2 if given["bidirectional"] else 1
        count = (4 if given["has_biases"] else 2) * directions
        if given["batch_first"]:
            x = emit(op.permute_dims(x, [1, 0, 2]))
        last: list[list[Any]] = [[] for _ in states]
        for layer in range(given["num_layers"]):
            own = params[layer * count : (layer + 1) * count]
            begin, end = layer * directions, (layer + 1) * directions
            start = [emit(op.strided_slice(state, [0], [begin], [end])) for state in states]
            weights = _weights(emit, kind, own, directions)
            direction = "bidirectional" if directions == 2 else "forward"
            inputs = [x, *weights, None, *start]
            attrs = {"direction": direction, **attributes}
            every, *ends = convert_recurrent(importer.block_builder, kind, inputs, attrs)
            for values, state in zip(last, ends, strict=True):
                values.append(state)
            x = emit(op.reshape(every, [*every.ty.shape.values[:2], -1]))
        if given["batch_first"]:
            x = emit(op.permute_dims(x, [1, 0, 2]))
        return (x, *(emit(op.concat(values, 0)) for values in last))

    return convert


def _one_direction(node: Any, importer: Any) -> tuple[Any, ...]:
    """One layer of an LSTM in one direction, as PyTorch decomposes all layers on a CPU."""
    names = ("input", "weight0", "weight1", "weight2", "weight3", "hx", "cx", "reverse", "batch_sizes", "mode")
    values = arguments(node, importer, (*names, "hidden_size", "num_layers", "has_biases"), ())
    x, *params, hidden, cell, backwards, _, mode, _, _, has_biases = values
    if mode != _LSTM_MODE:
        raise UnsupportedModelError(f"{node.name} is a recurrent layer that is no LSTM, in the form of oneDNN")
    emit = importer.block_builder.emit
    weights = _weights(emit, "LSTM", params if has_biases else params[:2], 1)
    attrs = {"direction": "reverse" if backwards else "forward"}
    every, *ends = convert_recurrent(importer.block_builder, "LSTM", [x, *weights, None, hidden, cell], attrs)
    return (emit(op.reshape(every, [*every.ty.shape.values[:2], -1])), *ends, None)


def _weights(emit: Any, kind: str, params: list[Any], directions: int) -> list[Any]:
    """W, R and B (None without biases) of one layer as ONNX has them."""
    order = _GATES[kind]

    def ordered(param: Any) -> Any:
        if len(order) == 1:
            return param
        rows = int(param.ty.shape[0]) // len(order)
        return emit(
            op.concat(
                [emit(op.strided_slice(param, [0], [gate * rows], [(gate + 1) * rows])) for gate in order], axis=0
            )
        )

    each = len(params) // directions
    own = [[ordered(param) for param in params[n * each : (n + 1) * each]] for n in range(directions)]
    stacked = [emit(op.stack([one[place] for one in own], 0)) for place in range(2)]
    if each == 2:
        return [*stacked, None]
    return [*stacked, emit(op.stack([emit(op.concat(one[2:], axis=0)) for one in own], 0))]


RECURRENT_CONVERTERS: dict[str, Callable[[Any, Any], Any]] = {
    "lstm.input": _converter("LSTM"),
    "mkldnn_rnn_layer.default": _one_direction,
    "gru.input": _converter("GRU", linear_before_reset=1),
    "rnn_tanh.input": _converter("RNN"),
    "rnn_relu.input": _converter("RNN", activations=["relu", "relu"]),
}
