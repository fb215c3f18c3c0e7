"""A recurrent layer step by step, in operators that TVM has: for GPUs, and for what the loop does not know.

What the states contribute to the gates is one product a step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm import ir, relax
from tvm.relax import op
from tvm.relax.expr_functor import PyExprMutator, mutator

from ..relax_ir.functions import map_functions, operator
from .layer import LANES, OPERATOR, Layer

__all__ = ["step_by_step", "with_steps_written_out"]

_ACTIVATIONS = {"sigmoid": op.sigmoid, "tanh": op.tanh, "relu": op.nn.relu}

Step = Callable[["_Direction", Any, list[Any]], list[Any]]
"""A direction, the inputs' share of its gates, [batch, gates x units], and the states -> the new states."""


def with_steps_written_out(mod: ir.IRModule, where: Callable[[relax.Call], bool]) -> ir.IRModule:
    """Replace the calls of the operator for which `where` holds."""
    return map_functions(mod, lambda function: _Rewriter(where).visit_expr(function))


@mutator
class _Rewriter(PyExprMutator):
    def __init__(self, where: Callable[[relax.Call], bool]) -> None:
        super().__init__()
        self._where = where

    def visit_call_(self, call: relax.Call) -> Any:
        call = self.visit_expr_post_order(call)
        wanted = operator(call) == OPERATOR and self._where(call)
        return step_by_step(self.builder_, call) if wanted else call


def step_by_step(builder: relax.BlockBuilder, call: relax.Call) -> Any:
    """What a call of the operator computes, emitted into the block that is being built."""
    layer, emit = Layer.of(call), builder.emit
    outputs: list[Any] = []
    memories: list[Any] = []
    for number, backwards in enumerate(layer.reversed):
        direction = _Direction(builder, call, layer, number)
        states = direction.first_states
        own: dict[int, Any] = {}
        for t in reversed(range(layer.steps)) if backwards else range(layer.steps):
            new = _STEPS[layer.cell](direction, direction.share(t), states)
            own[t] = direction.within(t, new[0], None)
            states = [direction.within(t, *pair) for pair in zip(new, states, strict=True)]
        # Steps first: not a stack of two for each step.
        outputs.append(direction.cut(emit(op.stack([own[t] for t in range(layer.steps)], 0))))
        memories += [direction.cut(memory) for memory in states[1:]]
    every = emit(op.stack(outputs, 2) if layer.directions == 2 else op.expand_dims(outputs[0], 2))
    return relax.Tuple([every, emit(op.stack(memories, 0))]) if memories else every


class _Direction:
    """One direction of a layer, its weights by gate: units are filled up to whole blocks.

    Attributes
    ----------
    recurrence : expression
        [units, gates x units]
    hidden_bias : expression or None
        [units]
    peepholes : list of expression
        For the gates i, o and f, [1, units] each; none where the layer has none.
    first_states : list of expression
        [batch, units] each.
    """

    def __init__(self, builder: relax.BlockBuilder, call: relax.Call, layer: Layer, number: int) -> None:
        self.emit, self._layer, self._number = builder.emit, layer, number
        self._units = layer.blocks * LANES
        self.activations = [_ACTIVATIONS[name] for name in layer.activations[number]]
        shares, recurrence, *rest = call.args
        split = (layer.steps, layer.batch, layer.directions, layer.blocks, layer.gates, LANES)
        own_shares = self._own(self.emit(op.reshape(shares, split)), 2)
        self._shares = self._joined(self.emit(op.permute_dims(own_shares, [0, 1, 3, 2, 4])), 2)
        self.recurrence = self._joined(self.emit(op.permute_dims(self._own(recurrence, 0), [1, 2, 0, 3])), 1)
        self._lengths = self.emit(op.reshape(rest.pop(), [layer.batch, 1])) if layer.has_lengths else None
        looks = self._joined(self._own(rest.pop(), 0), 1) if layer.has_peepholes else None
        self.peepholes = [] if looks is None else self.parts(looks, 3, 0)
        bias = self._own(rest.pop(), 0) if layer.has_hidden_bias else None
        self.hidden_bias = None if bias is None else self._joined(bias, 0)
        padding = [0, 0, 0, self._units - layer.hidden]
        self.first_states = [self.emit(op.nn.pad(self._own(state, 0), padding)) for state in rest]

    def share(self, t: int) -> Any:
        """What the inputs contribute to the gates of a step, [batch, gates x units]."""
        return self._taken(self._shares, 0, t)

    def cut(self, value: Any) -> Any:
        """Without the units that fill up the last block; they are the last axis."""
        return self.emit(op.strided_slice(value, [-1], [0], [self._layer.hidden]))

    def from_state(self, h: Any, begin: int, end: int) -> Any:
        """What the state contributes to some of the gates."""
        weights = self.recurrence
        if (begin, end) != (0, self._layer.gates):
            weights = self.emit(op.strided_slice(weights, [1], [begin * self._units], [end * self._units]))
        return self.emit(op.matmul(h, weights))

    def parts(self, gates: Any, count: int, axis: int = -1) -> list[Any]:
        """The gates one by one, [batch, units] each."""
        split = self.emit(op.split(gates, count, axis=axis))
        return [self.emit(relax.TupleGetItem(split, i)) for i in range(count)]

    def look(self, number: int, gate: Any, memory: Any) -> Any:
        """A gate with what it sees of the memory."""
        if not self.peepholes:
            return gate
        return self.emit(op.add(gate, self.emit(op.multiply(self.peepholes[number], memory))))

    def clip(self, gate: Any) -> Any:
        """What is put into an activation, within bounds if the layer has some."""
        return self._bounded(gate, self._layer.clip)

    def clip_memory(self, memory: Any) -> Any:
        """The memory, within bounds if the layer has some for it."""
        return self._bounded(memory, self._layer.cell_clip)

    def _bounded(self, value: Any, most: float) -> Any:
        return self.emit(op.clip(value, -most, most)) if most else value

    def within(self, t: int, new: Any, behind: Any) -> Any:
        """What is new as long as sequences last, and what there is behind them; zeros where that is None."""
        if self._lengths is None:
            return new
        lasts = self.emit(op.less(relax.const(t, "int64"), self._lengths))
        rest = relax.const(0, str(new.ty.dtype)) if behind is None else behind
        return self.emit(op.where(lasts, new, rest))

    def _own(self, value: Any, axis: int) -> Any:
        """What this direction has of a value with an axis of directions."""
        return self._taken(value, axis, self._number)

    def _taken(self, value: Any, axis: int, place: int) -> Any:
        sliced = self.emit(op.strided_slice(value, [axis], [place], [place + 1]))
        return self.emit(op.squeeze(sliced, [axis]))

    def _joined(self, value: Any, kept: int) -> Any:
        """With all axes after the first ones as one."""
        return self.emit(op.reshape(value, [*value.ty.shape.values[:kept], -1]))


def _rnn(cell: _Direction, given: Any, states: list[Any]) -> list[Any]:
    (f,) = cell.activations
    return [cell.emit(f(cell.clip(cell.emit(op.add(given, cell.from_state(states[0], 0, 1))))))]


def _lstm(cell: _Direction, given: Any, states: list[Any]) -> list[Any]:
    f, g, h = cell.activations
    hidden, memory = states
    i, o, forget, new = cell.parts(cell.emit(op.add(given, cell.from_state(hidden, 0, 4))), 4)
    # In this order: records know kernels by it.
    kept = cell.emit(op.multiply(cell.emit(f(cell.clip(cell.look(2, forget, memory)))), memory))
    i = cell.emit(f(cell.clip(cell.look(0, i, memory))))
    memory = cell.clip_memory(cell.emit(op.add(kept, cell.emit(op.multiply(i, cell.emit(g(cell.clip(new))))))))
    o = cell.emit(f(cell.clip(cell.look(1, o, memory))))
    return [cell.emit(op.multiply(o, cell.emit(h(memory)))), memory]


def _gru_linear_before_reset(cell: _Direction, given: Any, states: list[Any]) -> list[Any]:
    f, g = cell.activations
    (hidden,) = states
    z_given, r_given, new_given = cell.parts(given, 3)
    z_state, r_state, new_state = cell.parts(cell.from_state(hidden, 0, 3), 3)
    z = cell.emit(f(cell.clip(cell.emit(op.add(z_given, z_state)))))
    r = cell.emit(f(cell.clip(cell.emit(op.add(r_given, r_state)))))
    scaled = cell.emit(op.multiply(r, cell.emit(op.add(new_state, cell.hidden_bias))))
    return [_mixed(cell, z, hidden, cell.emit(g(cell.clip(cell.emit(op.add(new_given, scaled))))))]


def _gru(cell: _Direction, given: Any, states: list[Any]) -> list[Any]:
    f, g = cell.activations
    (hidden,) = states
    z_given, r_given, new_given = cell.parts(given, 3)
    z_state, r_state = cell.parts(cell.from_state(hidden, 0, 2), 2)
    z = cell.emit(f(cell.clip(cell.emit(op.add(z_given, z_state)))))
    r = cell.emit(f(cell.clip(cell.emit(op.add(r_given, r_state)))))
    new_state = cell.from_state(cell.emit(op.multiply(r, hidden)), 2, 3)
    return [_mixed(cell, z, hidden, cell.emit(g(cell.clip(cell.emit(op.add(new_given, new_state))))))]


def _mixed(cell: _Direction, z: Any, old: Any, new: Any) -> Any:
    """z * old + (1 - z) * new, with one multiplication less."""
    return cell.emit(op.add(new, cell.emit(op.multiply(z, cell.emit(op.subtract(old, new))))))


_STEPS: dict[str, Step] = {
    "RNN": _rnn,
    "GRU": _gru,
    "GRU_LINEAR_BEFORE_RESET": _gru_linear_before_reset,
    "LSTM": _lstm,
}
