"""Recurrent layers as ONNX defines them, LSTM, GRU and RNN, as calls of "eqtune.recurrent": TVM does not know them.

What the inputs contribute to the gates is one product for all steps and directions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from tvm import ir, relax
from tvm.relax import op

from ..dtypes import HALVES
from ..errors import UnsupportedModelError
from ..recurrent import ACTIVATIONS, CELLS, LANES, Layer, in_blocks, recurrent
from ..relax_ir.constants import array_of, constant_of
from ..relax_ir.tensors import as_dtype, extents
from .imported import KNOWN_SHAPES, is_number
from .onnx.nodes import text_of

__all__ = ["RECURRENT", "convert_recurrent"]

RECURRENT = frozenset({"RNN", "GRU", "LSTM"})
"""The operators that `convert_recurrent` converts."""

_INPUTS = ("X", "W", "R", "B", "sequence_lens", "initial_h", "initial_c", "P")


def convert_recurrent(bb: Any, name: str, inputs: Sequence[Any], attrs: dict[str, Any]) -> list[Any]:
    """States of all steps [steps, batch, directions, hidden], and the last states [directions, batch, hidden].

    Not in ONNX's order of axes: there, directions come before the batch.

    Raises
    ------
    UnsupportedModelError
        For open sizes, other activations, coupled gates, or the batch as first axis.
    """
    given = dict(zip(_INPUTS, [*inputs, *[None] * len(_INPUTS)], strict=False))
    x, emit = given["X"], bb.emit
    layer, dtype = _layer(name, given, attrs), str(x.ty.dtype)
    shares, *hidden_bias = _from_inputs(emit, layer, given)
    first = [
        emit(op.zeros((layer.directions, layer.batch, layer.hidden), dtype)) if start is None else start
        for start in (given["initial_h"], given["initial_c"])[: CELLS[layer.cell].states]
    ]
    operands = [shares, _from_state(emit, layer, given["R"]), *first, *hidden_bias]
    if layer.has_peepholes:
        by_gate = emit(op.reshape(given["P"], [layer.directions, 3, layer.hidden]))
        operands.append(emit(in_blocks(by_gate, 2)))
    if dtype in HALVES:  # states are not rounded between steps
        operands = [as_dtype(emit, operand, "float32") for operand in operands]
    lengths = as_dtype(emit, given["sequence_lens"], "int64") if layer.has_lengths else None
    results = emit(recurrent(layer, *operands, *([] if lengths is None else [lengths])))
    every, *memories = [emit(relax.TupleGetItem(results, n)) for n in (0, 1)] if layer.has_memory else [results]
    if dtype in HALVES:
        every, *memories = (emit(op.astype(result, dtype)) for result in (every, *memories))
    if lengths is not None:  # as in ONNX Runtime, nothing is left of a sequence without steps
        some = emit(op.greater(emit(op.reshape(lengths, [-1, 1])), relax.const(0, "int64")))
        memories = [emit(op.where(some, memory, relax.const(0, dtype))) for memory in memories]
    ends = [_end(emit, layer, every, n, lengths) for n in range(layer.directions)]
    return [every, emit(op.stack(ends, 0)) if len(ends) > 1 else emit(op.expand_dims(ends[0], 0)), *memories]


def _layer(name: str, given: dict[str, Any], attrs: dict[str, Any]) -> Layer:
    shape = given["X"].ty.shape
    if shape is None or not all(map(is_number, shape)):
        raise UnsupportedModelError(f"{name} with an open batch or number of steps cannot be imported; {KNOWN_SHAPES}")
    steps, batch, _ = extents(given["X"].ty)
    for refused in ("layout", "input_forget"):
        if attrs.get(refused):
            raise UnsupportedModelError(f"{name} with {refused}={attrs[refused]} cannot be imported")
    cell = "GRU_LINEAR_BEFORE_RESET" if name == "GRU" and attrs.get("linear_before_reset", 0) else name
    backwards = {"forward": (False,), "reverse": (True,)}.get(text_of(attrs.get("direction", "forward")), (False, True))
    activations = _activations(name, cell, attrs, len(backwards))
    lengths, clip = not _all_are(steps, given["sequence_lens"]), max(0.0, float(attrs.get("clip", 0.0)))
    hidden, peepholes = extents(given["R"].ty)[-1], given["P"] is not None
    more = clip, peepholes, lengths, float(attrs.get("cell_clip", 0.0))
    return Layer(cell, backwards, activations, steps, batch, hidden, *more)


def _end(emit: Any, layer: Layer, every: Any, direction: int, lengths: Any) -> Any:
    """The state of a direction after the last step of each sequence, [batch, hidden]."""
    own = _part(emit, every, 2, direction, direction + 1)
    if layer.reversed[direction] or lengths is None:
        t = 0 if layer.reversed[direction] else layer.steps - 1
        return emit(op.squeeze(_part(emit, own, 0, t, t + 1), [0, 2]))
    rows = emit(op.reshape(own, [layer.steps * layer.batch, layer.hidden]))
    last = emit(op.clip(emit(op.subtract(lengths, relax.const(1, "int64"))), 0, layer.steps - 1))
    first_rows = emit(op.multiply(last, relax.const(layer.batch, "int64")))
    return emit(op.take(rows, emit(op.add(first_rows, constant_of(np.arange(layer.batch, dtype="int64")))), axis=0))


def _from_inputs(emit: Any, layer: Layer, given: dict[str, Any]) -> list[Any]:
    """What the inputs and biases contribute; and the bias that is none of it, where there is one. Of 16 bits, their
    sums are float32."""
    directions, gates, hidden = layer.directions, layer.gates, layer.hidden
    by_gate = emit(op.reshape(given["W"], [directions, gates, hidden, -1]))
    by_block = emit(op.permute_dims(emit(in_blocks(by_gate, 2)), [0, 2, 1, 3, 4]))
    rows = emit(op.reshape(by_block, [-1, by_block.ty.shape[4]]))
    dtype = str(given["X"].ty.dtype)
    is_half = dtype in HALVES
    shares = emit(op.matmul(given["X"], emit(op.permute_dims(rows)), "float32" if is_half else dtype))
    hidden_bias = []
    if given["B"] is not None:
        biases = as_dtype(emit, given["B"], "float32") if is_half else given["B"]
        both = emit(op.reshape(biases, [directions, 2, gates, hidden]))
        of_inputs, of_state = (emit(op.squeeze(_part(emit, both, 1, n, n + 1), [1])) for n in (0, 1))
        if layer.has_hidden_bias:
            last = _part(emit, of_state, 1, gates - 1, gates)
            hidden_bias = [emit(in_blocks(emit(op.squeeze(last, [1])), 1))]
            of_state = emit(op.concat([_part(emit, of_state, 1, 0, gates - 1), emit(op.zeros_like(last))], 1))
        bias = emit(op.permute_dims(emit(in_blocks(emit(op.add(of_inputs, of_state)), 2)), [0, 2, 1, 3]))
        shares = emit(op.add(shares, emit(op.reshape(bias, [-1]))))
    elif layer.has_hidden_bias:
        hidden_bias = [emit(op.zeros((directions, layer.blocks, LANES), str(shares.ty.dtype)))]
    return [shares, *hidden_bias]


def _from_state(emit: Any, layer: Layer, weights: Any) -> Any:
    """R as the operator has it."""
    directions, gates, hidden = layer.directions, layer.gates, layer.hidden
    by_gate = emit(in_blocks(emit(op.reshape(weights, [directions, gates, hidden, hidden])), 2))
    padded = emit(op.reshape(emit(in_blocks(by_gate, 4)), [directions, gates, layer.blocks, LANES, -1]))
    return emit(op.permute_dims(padded, [0, 2, 4, 1, 3]))


def _activations(name: str, cell: str, attrs: dict[str, Any], directions: int) -> tuple[tuple[str, ...], ...]:
    defaults = CELLS[cell].activations
    named = [text_of(a).lower() for a in attrs.get("activations", ())] or list(defaults) * directions
    unknown = sorted(set(named) - set(ACTIVATIONS))
    if unknown:
        raise UnsupportedModelError(f"{name} with activation {unknown[0]} cannot be imported; {list(ACTIVATIONS)} can")
    count = len(defaults)
    return tuple(tuple(named[n * count : (n + 1) * count]) for n in range(directions))


def _part(emit: Any, value: Any, axis: int, begin: int, end: int) -> Any:
    return emit(op.strided_slice(value, [axis], [begin], [end]))


def _all_are(length: int, lengths: Any) -> bool:
    """Whether the lengths of the sequences, if given, say nothing: each has all steps."""
    return lengths is None or (isinstance(lengths, ir.GenericConst) and bool((array_of(lengths) == length).all()))
