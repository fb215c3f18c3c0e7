"""A recurrent layer as one operator of Relax, "eqtune.recurrent", registered with TVM when this module is imported.

TVM has none; written out, a layer of 300 steps is 1800 operators, and each of its steps two kernels and two starts of
all threads. What the inputs contribute to the gates is no part of it: that is one product for all steps.

The hidden units come in blocks of `LANES`, the last one filled up with zeros, so that each block reads one run of
memory: units by block, gates within a block.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tvm import ir, relax
from tvm.target import Target

from ..gpu_machine import is_gpu
from ..operators import register_operator
from ..relax_ir.constants import is_static_tensor
from ..relax_ir.tensors import extents

__all__ = ["ACTIVATIONS", "CELLS", "LANES", "OPERATOR", "Cell", "Layer", "in_blocks", "recurrent"]

OPERATOR = "eqtune.recurrent"

ACTIVATIONS = ("sigmoid", "tanh", "relu")
"""That cells may have."""

LANES = 16
"""Hidden units of a block: a vector of AVX-512, or several of a narrower machine."""


@dataclass(frozen=True)
class Cell:
    """What one step computes, in ONNX's terms.

    Attributes
    ----------
    gates : int
        In ONNX's order: i, o, f, c of an LSTM, z, r, h of a GRU.
    states : int
        2 for an LSTM, whose second one is its memory (ONNX's C).
    activations : tuple of str
        The defaults.
    """

    gates: int
    states: int
    activations: tuple[str, ...]


CELLS = {
    "RNN": Cell(1, 1, ("tanh",)),
    "GRU": Cell(3, 1, ("sigmoid", "tanh")),
    "GRU_LINEAR_BEFORE_RESET": Cell(3, 1, ("sigmoid", "tanh")),
    "LSTM": Cell(4, 2, ("sigmoid", "tanh", "tanh")),
}
"""By name. A GRU's reset gate scales the state, or, linear before reset (PyTorch's), what the state contributes."""


@dataclass(frozen=True)
class Layer:
    """One layer in one or two directions.

    Attributes
    ----------
    cell : str
        A key of `CELLS`.
    reversed : tuple of bool
        For each direction, whether its first step is the last of the sequence.
    activations : tuple of tuple of str
        For each direction: of `ACTIVATIONS`, as many as the cell has.
    steps, batch, hidden : int
    clip : float
        How large the arguments of activations of gates may be, of either sign; 0 leaves them.
    has_peepholes : bool
        Whether the gates of an LSTM see its memory.
    has_lengths : bool
        Whether sequences have lengths: behind them, states stay, and results are zero.
    cell_clip : float
        How large the memory of an LSTM may be, of either sign; 0 leaves it.
    """

    cell: str
    reversed: tuple[bool, ...]
    activations: tuple[tuple[str, ...], ...]
    steps: int
    batch: int
    hidden: int
    clip: float = 0.0
    has_peepholes: bool = False
    has_lengths: bool = False
    cell_clip: float = 0.0

    @classmethod
    def of(cls, call: relax.Call) -> Layer:
        """What a call of the operator computes."""
        steps, batch, _ = extents(call.args[0].ty)
        attrs = call.attrs
        activations = tuple(tuple(str(name) for name in names) for names in attrs["activations"])
        backwards = tuple(bool(one) for one in attrs["reversed"])
        more = (float(attrs.get("clip", 0.0)), bool(attrs.get("peepholes", 0)), bool(attrs.get("lengths", 0)))
        sizes = steps, batch, int(attrs["hidden"])
        return cls(str(attrs["cell"]), backwards, activations, *sizes, *more, float(attrs.get("cell_clip", 0.0)))

    @property
    def gates(self) -> int:
        """Of its cell."""
        return CELLS[self.cell].gates

    @property
    def directions(self) -> int:
        """One or two."""
        return len(self.reversed)

    @property
    def blocks(self) -> int:
        """Of hidden units."""
        return -(-self.hidden // LANES)

    @property
    def has_memory(self) -> bool:
        """Whether there is a second state."""
        return CELLS[self.cell].states == 2

    @property
    def has_hidden_bias(self) -> bool:
        """Whether one of the biases is added before a gate scales the sum."""
        return self.cell == "GRU_LINEAR_BEFORE_RESET"


def in_blocks(value: Any, axis: int) -> Any:
    """Split an axis of hidden units in [blocks, LANES], filled up with zeros."""
    shape = extents(value.ty)
    missing = -shape[axis] % LANES
    if missing:
        padding = [0] * (2 * len(shape))
        padding[2 * axis + 1] = missing
        value = relax.op.nn.pad(value, padding)
    parts = [(shape[axis] + missing) // LANES, LANES]
    return relax.op.reshape(value, [*shape[:axis], *parts, *shape[axis + 1 :]])


def recurrent(layer: Layer, shares: Any, recurrence: Any, *rest: Any) -> relax.Call:
    """A call of the operator.

    Parameters
    ----------
    layer : Layer
    shares : expression
        What the inputs and the biases contribute, [steps, batch, directions x blocks x gates x LANES].
    recurrence : expression
        Weights of the state, [directions, blocks, blocks x LANES of the state, gates, LANES].
    rest : expression
        The states at first, [directions, batch, hidden] each: one, or two for an LSTM. For "GRU_LINEAR_BEFORE_RESET",
        then [directions, blocks, LANES]: added to what the state contributes to the last gate. Then peepholes, if there
        are, weights of the memory for the gates i, o and f, [directions, 3, blocks, LANES]; and lengths, [batch] of
        int64.

    Returns
    -------
    relax.Call
        Of the states of all steps, [steps, batch, directions, hidden]; of those and the last memory, [directions,
        batch, hidden], for an LSTM.
    """
    more = {
        "clip": layer.clip,
        "peepholes": int(layer.has_peepholes),
        "lengths": int(layer.has_lengths),
        "cell_clip": layer.cell_clip,
    }
    attrs = ir.make_node(
        "ir.DictAttrs",
        cell=layer.cell,
        reversed=[int(one) for one in layer.reversed],
        activations=[list(names) for names in layer.activations],
        hidden=layer.hidden,
        **{name: value for name, value in more.items() if value},
    )
    return relax.Call(ir.Op.get(OPERATOR), [shares, recurrence, *rest], attrs=attrs)


def _infer_type(call: relax.Call, _builder: relax.BlockBuilder) -> Any:
    if not all(is_static_tensor(argument.ty) for argument in call.args):
        raise ValueError(f"{OPERATOR} needs tensors of known shapes")
    layer, dtype = Layer.of(call), call.args[0].ty.dtype
    every = relax.TensorType([layer.steps, layer.batch, layer.directions, layer.hidden], dtype)
    if not layer.has_memory:
        return every
    return relax.TupleType([every, relax.TensorType([layer.directions, layer.batch, layer.hidden], dtype)])


def _legalize(builder: relax.BlockBuilder, call: relax.Call) -> Any:
    from .loop import fits_loop, recurrent_loop
    from .steps import step_by_step

    target = Target.current(allow_none=True)
    if (target is not None and is_gpu(target)) or not fits_loop(call):
        return step_by_step(builder, call)
    layer = Layer.of(call)
    return builder.call_te(recurrent_loop(layer, target), *call.args, primfunc_name_hint=layer.cell.lower())


register_operator(OPERATOR, "All steps of a recurrent layer.", _infer_type, _legalize)
