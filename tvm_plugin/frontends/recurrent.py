"""Recurrent layers as ONNX defines them, LSTM, GRU and RNN, step by step: TVM's importer does not know them.

What the inputs contribute to the gates is one product for all steps; what the state contributes, one product a step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

from tvm import ir, relax
from tvm.relax import op

from ..errors import UnsupportedModelError
from ..transform.constants import array_of

__all__ = ["RECURRENT", "recurrent"]

_ACTIVATIONS = {"sigmoid": op.sigmoid, "tanh": op.tanh, "relu": op.nn.relu}

_INPUTS = ("X", "W", "R", "B", "sequence_lens", "initial_h", "initial_c", "P")

Step = Callable[["_Cell", Any, list[Any]], list[Any]]
"""A cell, the inputs' share of its gates, [batch, gates x hidden], and the states -> the new states."""


class _Cell:
    """One direction of a layer: its weights, and what it emits into.

    Parameters
    ----------
    recurrence : expression
        [hidden, gates x hidden]: R, transposed.
    recurrence_bias : expression
        [gates x hidden]
    activations : list of callable
    """

    def __init__(self, bb: Any, recurrence: Any, recurrence_bias: Any, activations: list[Any]) -> None:
        self.bb, self.emit = bb, bb.emit
        self.recurrence, self.recurrence_bias = recurrence, recurrence_bias
        self.activations = activations

    def from_state(self, h: Any) -> Any:
        """What the state contributes to the gates."""
        return self.emit(op.add(self.emit(op.matmul(h, self.recurrence)), self.recurrence_bias))

    @cached_property
    def gru_halves(self) -> tuple[_Cell, _Cell]:
        """A GRU's weights for the two gates, and for the new state: one copy for all steps."""
        return self._of_gates(0, 2), self._of_gates(2, 3)

    def _of_gates(self, begin: int, end: int) -> _Cell:
        """The cell with the weights of these gates alone."""
        width = int(self.recurrence.ty.shape[0])
        place = [begin * width], [end * width]
        columns = self.emit(op.strided_slice(self.recurrence, [1], *place))
        bias = self.emit(op.strided_slice(self.recurrence_bias, [0], *place))
        return _Cell(self.bb, columns, bias, self.activations)

    def parts(self, gates: Any, count: int) -> list[Any]:
        """The gates one by one, [batch, hidden] each."""
        split = self.emit(op.split(gates, count, axis=-1))
        return [self.emit(relax.TupleGetItem(split, i)) for i in range(count)]


def _rnn(cell: _Cell, given: Any, states: list[Any]) -> list[Any]:
    (f,) = cell.activations
    return [cell.emit(f(cell.emit(op.add(given, cell.from_state(states[0])))))]


def _lstm(cell: _Cell, given: Any, states: list[Any]) -> list[Any]:
    f, g, h = cell.activations
    hidden, memory = states
    i, o, forget, new = cell.parts(cell.emit(op.add(given, cell.from_state(hidden))), 4)
    kept = cell.emit(op.multiply(cell.emit(f(forget)), memory))
    memory = cell.emit(op.add(kept, cell.emit(op.multiply(cell.emit(f(i)), cell.emit(g(new))))))
    return [cell.emit(op.multiply(cell.emit(f(o)), cell.emit(h(memory)))), memory]


def _gru(cell: _Cell, given: Any, states: list[Any]) -> list[Any]:
    """With `linear_before_reset`: the reset gate scales what the state contributes, not the state."""
    f, g = cell.activations
    (hidden,) = states
    z_given, r_given, new_given = cell.parts(given, 3)
    z_state, r_state, new_state = cell.parts(cell.from_state(hidden), 3)
    z = cell.emit(f(cell.emit(op.add(z_given, z_state))))
    r = cell.emit(f(cell.emit(op.add(r_given, r_state))))
    new = cell.emit(g(cell.emit(op.add(new_given, cell.emit(op.multiply(r, new_state))))))
    return [_mixed(cell, z, hidden, new)]


def _gru_reset_first(cell: _Cell, given: Any, states: list[Any]) -> list[Any]:
    f, g = cell.activations
    (hidden,) = states
    of_both, of_new = cell.gru_halves
    z_given, r_given, new_given = cell.parts(given, 3)
    z_state, r_state = cell.parts(of_both.from_state(hidden), 2)
    z = cell.emit(f(cell.emit(op.add(z_given, z_state))))
    r = cell.emit(f(cell.emit(op.add(r_given, r_state))))
    new = cell.emit(g(cell.emit(op.add(new_given, of_new.from_state(cell.emit(op.multiply(r, hidden)))))))
    return [_mixed(cell, z, hidden, new)]


def _mixed(cell: _Cell, z: Any, old: Any, new: Any) -> Any:
    """z * old + (1 - z) * new, with one multiplication less."""
    return cell.emit(op.add(new, cell.emit(op.multiply(z, cell.emit(op.subtract(old, new))))))


_CELLS: dict[str, tuple[Step, int, int, tuple[str, ...]]] = {
    "RNN": (_rnn, 1, 1, ("tanh",)),
    "GRU": (_gru, 3, 1, ("sigmoid", "tanh")),
    "LSTM": (_lstm, 4, 2, ("sigmoid", "tanh", "tanh")),
}
"""By operator: one step, gates, states, and default activations."""

RECURRENT = frozenset(_CELLS)
"""The operators that `recurrent` converts."""


def recurrent(bb: Any, name: str, inputs: Sequence[Any], attrs: dict[str, Any]) -> relax.Tuple:
    """Y [steps, directions, batch, hidden], and the last states [directions, batch, hidden].

    Raises
    ------
    UnsupportedModelError
        For sequences of fewer steps than X has, peepholes, clipping, other activations, or the batch as first axis.
    """
    step, gates, states, defaults = _CELLS[name]
    if name == "GRU" and not attrs.get("linear_before_reset", 0):
        step = _gru_reset_first
    given = dict(zip(_INPUTS, [*inputs, *[None] * len(_INPUTS)], strict=False))
    x = given["X"]
    length, batch, _ = (int(extent) for extent in x.ty.shape)
    if _all_are(length, given["sequence_lens"]):
        given["sequence_lens"] = None
    for refused in ("sequence_lens", "P"):
        if given[refused] is not None:
            raise UnsupportedModelError(f"{name} with {refused} cannot be imported; leave that input out")
    for refused in ("clip", "layout", "input_forget"):
        if attrs.get(refused):
            raise UnsupportedModelError(f"{name} with {refused}={attrs[refused]} cannot be imported")
    direction = _text(attrs.get("direction", "forward"))
    directions = 2 if direction == "bidirectional" else 1
    activations = [_text(a).lower() for a in attrs.get("activations", ())] or list(defaults) * directions
    unknown = sorted(set(activations) - _ACTIVATIONS.keys())
    if unknown:
        raise UnsupportedModelError(f"{name} with activation {unknown[0]} cannot be imported; {list(_ACTIVATIONS)} can")

    emit = bb.emit

    def one(value: Any, number: int) -> Any:
        """What a direction has of a value whose first axis is directions."""
        sliced = emit(op.strided_slice(value, [0], [number], [number + 1]))
        return emit(op.squeeze(sliced, [0]))

    hidden, dtype = int(given["R"].ty.shape[-1]), str(x.ty.dtype)
    outputs: list[list[Any]] = []
    last: list[list[Any]] = [[] for _ in range(states)]
    for number in range(directions):
        weight = emit(op.permute_dims(one(given["W"], number)))
        recurrence = emit(op.permute_dims(one(given["R"], number)))
        if given["B"] is None:
            biases = [op.zeros((gates * hidden,), dtype)] * 2
        else:
            both = one(given["B"], number)
            biases = [op.strided_slice(both, [0], [begin], [begin + gates * hidden]) for begin in (0, gates * hidden)]
        input_bias, recurrence_bias = map(emit, biases)
        named = activations[number * len(defaults) : (number + 1) * len(defaults)]
        cell = _Cell(bb, recurrence, recurrence_bias, [_ACTIVATIONS[a] for a in named])
        shares = emit(op.add(emit(op.matmul(x, weight)), input_bias))
        state = [
            emit(op.zeros((batch, hidden), dtype)) if start is None else one(start, number)
            for start in (given["initial_h"], given["initial_c"])[:states]
        ]
        backwards = direction == "reverse" or number == 1
        own_outputs = []
        for t in reversed(range(length)) if backwards else range(length):
            state = step(cell, one(shares, t), state)
            own_outputs.append(state[0])
        outputs.append(own_outputs[::-1] if backwards else own_outputs)
        for values, value in zip(last, state, strict=True):
            values.append(value)
    own = [emit(op.stack(values, 0)) for values in outputs]  # steps first: not a stack of one or two for each step
    every = emit(op.stack(own, 1) if directions == 2 else op.expand_dims(own[0], 1))  # a stack of one is a copy
    return relax.Tuple([every, *(emit(op.stack(values, 0)) for values in last)])


def _all_are(length: int, lengths: Any) -> bool:
    """Whether the lengths of the sequences say nothing: each has all steps."""
    return isinstance(lengths, ir.GenericConst) and bool((array_of(lengths) == length).all())


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
