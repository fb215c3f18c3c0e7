"""Recurrent layers as ONNX defines them, LSTM, GRU and RNN, as calls of "eqtune.recurrent": TVM does not know them.

What the inputs contribute to the gates is one product for all steps and directions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tvm import ir, relax
from tvm.relax import op

from ..errors import UnsupportedModelError
from ..recurrent import CELLS, LANES, Layer, in_blocks, recurrent
from ..transform.constants import array_of
from ..transform.functions import extents

__all__ = ["RECURRENT", "convert_recurrent"]

RECURRENT = frozenset({"RNN", "GRU", "LSTM"})
"""The operators that `convert_recurrent` converts."""

_ACTIVATIONS = ("sigmoid", "tanh", "relu")

_INPUTS = ("X", "W", "R", "B", "sequence_lens", "initial_h", "initial_c", "P")


def convert_recurrent(bb: Any, name: str, inputs: Sequence[Any], attrs: dict[str, Any]) -> list[Any]:
    """States of all steps [steps, batch, directions, hidden], and the last states [directions, batch, hidden].

    Not in ONNX's order of axes: there, directions come before the batch.

    Raises
    ------
    UnsupportedModelError
        For sequences of fewer steps than X has, peepholes, clipping, other activations, or the batch as first axis.
    """
    given = dict(zip(_INPUTS, [*inputs, *[None] * len(_INPUTS)], strict=False))
    x, weights = given["X"], given["W"]
    steps, batch, _ = extents(x.ty)
    if _all_are(steps, given["sequence_lens"]):
        given["sequence_lens"] = None
    for refused in ("sequence_lens", "P"):
        if given[refused] is not None:
            raise UnsupportedModelError(f"{name} with {refused} cannot be imported; leave that input out")
    for refused in ("clip", "layout", "input_forget"):
        if attrs.get(refused):
            raise UnsupportedModelError(f"{name} with {refused}={attrs[refused]} cannot be imported")
    cell = "GRU_LINEAR_BEFORE_RESET" if name == "GRU" and attrs.get("linear_before_reset", 0) else name
    backwards = {"forward": (False,), "reverse": (True,)}.get(_text(attrs.get("direction", "forward")), (False, True))
    layer = Layer(
        cell, backwards, _activations(name, cell, attrs, len(backwards)), steps, batch, extents(given["R"].ty)[-1]
    )

    emit = bb.emit
    directions, gates, hidden = layer.directions, layer.gates, layer.hidden
    by_gate = emit(op.reshape(weights, [directions, gates, hidden, -1]))
    by_block = emit(op.permute_dims(emit(in_blocks(by_gate, 2)), [0, 2, 1, 3, 4]))
    rows = emit(op.reshape(by_block, [-1, by_block.ty.shape[4]]))
    shares = emit(op.matmul(x, emit(op.permute_dims(rows))))
    hidden_bias = None
    if given["B"] is not None:
        both = emit(op.reshape(given["B"], [directions, 2, gates, hidden]))
        of_inputs, of_state = (emit(op.squeeze(_part(emit, both, 1, n, n + 1), [1])) for n in (0, 1))
        if layer.has_hidden_bias:
            last = _part(emit, of_state, 1, gates - 1, gates)
            hidden_bias = emit(in_blocks(emit(op.squeeze(last, [1])), 1))
            of_state = emit(op.concat([_part(emit, of_state, 1, 0, gates - 1), emit(op.zeros_like(last))], 1))
        bias = emit(op.permute_dims(emit(in_blocks(emit(op.add(of_inputs, of_state)), 2)), [0, 2, 1, 3]))
        shares = emit(op.add(shares, emit(op.reshape(bias, [-1]))))
    elif layer.has_hidden_bias:
        hidden_bias = emit(op.zeros((directions, layer.blocks, LANES), str(x.ty.dtype)))
    by_gate = emit(in_blocks(emit(op.reshape(given["R"], [directions, gates, hidden, hidden])), 2))
    padded = emit(op.reshape(emit(in_blocks(by_gate, 4)), [directions, gates, layer.blocks, LANES, -1]))
    recurrence = emit(op.permute_dims(padded, [0, 2, 4, 1, 3]))
    first = [
        emit(op.zeros((directions, batch, hidden), str(x.ty.dtype))) if start is None else start
        for start in (given["initial_h"], given["initial_c"])[: CELLS[cell].states]
    ]
    every = emit(recurrent(layer, shares, recurrence, first, hidden_bias))
    memories = []
    if layer.has_memory:
        every, memory = (emit(relax.TupleGetItem(every, n)) for n in (0, 1))
        memories = [memory]
    ends = [
        emit(op.squeeze(_part(emit, _part(emit, every, 2, n, n + 1), 0, t, t + 1), [0, 2]))
        for n, t in enumerate(0 if one else steps - 1 for one in backwards)
    ]
    return [every, emit(op.stack(ends, 0)) if directions > 1 else emit(op.expand_dims(ends[0], 0)), *memories]


def _activations(name: str, cell: str, attrs: dict[str, Any], directions: int) -> tuple[tuple[str, ...], ...]:
    defaults = CELLS[cell].activations
    named = [_text(a).lower() for a in attrs.get("activations", ())] or list(defaults) * directions
    unknown = sorted(set(named) - set(_ACTIVATIONS))
    if unknown:
        raise UnsupportedModelError(f"{name} with activation {unknown[0]} cannot be imported; {list(_ACTIVATIONS)} can")
    count = len(defaults)
    return tuple(tuple(named[n * count : (n + 1) * count]) for n in range(directions))


def _part(emit: Any, value: Any, axis: int, begin: int, end: int) -> Any:
    return emit(op.strided_slice(value, [axis], [begin], [end]))


def _all_are(length: int, lengths: Any) -> bool:
    """Whether the lengths of the sequences say nothing: each has all steps."""
    return isinstance(lengths, ir.GenericConst) and bool((array_of(lengths) == length).all())


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
