"""A recurrent layer as one kernel for a CPU: a loop over its steps.

A step's products, activations and new states are computed by tiles, a block of hidden units for some rows of the
batch, in registers. Threads are started once. They share the tiles, and wait for each other after each step, because
each tile needs the states of all units; or two of them have a direction each, and need not wait.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

from tvm import relax, te, tirx
from tvm.script.ir_builder import tirx as T

from ..machine import thread_count, vector_registers
from ..relax_ir.te_kernels import extern_kernel
from ..search.space.memory_bound.math_forms import math_form
from .layer import LANES, Layer

__all__ = ["fits_loop", "recurrent_loop"]

FEWEST_STEPS = 2
"""One step is a product like any other, and its schedule is searched for."""

LEAST_FLOPS = 70_000
"""Of a step for more than one thread, which wait for each other after it: about a microsecond. Of the whole layer for
two threads with a direction each, which are started only."""

CHAINS = 8
"""Sums that a core adds to in turn, or its multiply-adds wait for each other."""

_VECTOR_BYTES, _REGISTERS = 64, 32
"""Where no target says otherwise."""


def fits_loop(call: relax.Call) -> bool:
    """Whether `recurrent_loop` can compute a call of the operator."""
    return str(call.args[0].ty.dtype) == "float32" and Layer.of(call).steps >= FEWEST_STEPS


def recurrent_loop(layer: Layer, target: Any = None) -> Callable[..., Any]:
    """What makes the tensor expression of a layer from placeholders of the operator's arguments.

    Parameters
    ----------
    layer : Layer
    target : tvm.target.Target, optional
        Whose registers and threads are used.
    """

    def compute(*arguments: te.Tensor) -> Any:
        every = [layer.steps, layer.batch, layer.directions, layer.hidden]
        last = [layer.directions, layer.batch, layer.hidden]
        outputs = [(shape, "float32") for shape in ([every, last] if layer.has_memory else [every])]
        return extern_kernel(layer.cell.lower(), _Loop(layer, target).write, list(arguments), outputs)

    return compute


class _Loop:
    """Writes the kernel. Buffers are flat; states are those of two steps in turn, [2, directions, batch, units]."""

    def __init__(self, layer: Layer, target: Any) -> None:
        self.layer = layer
        self.units = layer.blocks * LANES
        self.state_size = layer.directions * layer.batch * self.units
        vector_bytes, registers = (_VECTOR_BYTES, _REGISTERS) if target is None else vector_registers(target)
        vectors = layer.gates * max(1, LANES * 4 // vector_bytes)
        # Half of the registers for sums: of three quarters, LLVM spills some (8 rows of a GRU 0.7 times as fast as 4).
        self.row_tiles = -(-layer.batch // max(1, registers // 2 // vectors))
        self.rows = -(-layer.batch // self.row_tiles)
        self.tiles = layer.blocks * self.row_tiles
        flops = 2 * layer.directions * layer.batch * layer.gates * self.units**2
        threads = 1 if target is None else thread_count(target)
        alone = layer.directions == 2 == min(threads, 2) and flops * layer.steps >= LEAST_FLOPS
        shared = threads > 1 and self.tiles > 1 and flops >= LEAST_FLOPS
        self.threads_have_directions = alone and (threads == 2 or not shared)
        self.threads_share_tiles = shared and not self.threads_have_directions

    def write(self, *buffers: Any) -> None:
        """The kernel, from flat buffers of the operator's arguments and results."""
        layer = self.layer
        states = 1 + int(layer.has_memory)
        self.shares, self.recurrence, *rest = buffers
        first, self.every = rest[:states], rest[-states]
        more = rest[states:-states]
        self.hidden_bias: Any = more.pop(0) if layer.has_hidden_bias else None
        self.peepholes: Any = more.pop(0) if layer.has_peepholes else None
        self.lengths: Any = more.pop(0) if layer.has_lengths else None
        self.states = [_buffer(2 * self.state_size) for _ in first]
        if layer.cell == "GRU":  # what its second phase needs of the first
            self.reset_states, self.updates = (_buffer(self.state_size) for _ in range(2))
        for state, given in zip(self.states, first, strict=True):
            self._begin(state, given)
        if self.threads_have_directions:
            with T.parallel(_int(0), _int(2)) as thread:
                for direction in range(2):
                    with T.If(thread == direction), T.Then():
                        self._steps([direction])
        elif self.threads_share_tiles:
            with T.attr(_int(0), "pragma_parallel_launch_point", 1):
                self._steps(range(layer.directions))
        else:
            self._steps(range(layer.directions))
        if layer.has_memory:
            self._copy_last(rest[-1])

    def _steps(self, directions: Sequence[int]) -> None:
        tiles = T.parallel if self.threads_share_tiles else T.serial
        with T.serial(_int(0), _int(self.layer.steps)) as step:
            for phase in _PHASES[self.layer.cell]:
                with self._all_wait():
                    for direction in directions:
                        with tiles(_int(0), _int(self.tiles)) as tile:
                            phase(_Tile(self, direction, step, tile))

    def _all_wait(self) -> Any:
        """For all threads at the end of what it encloses."""
        barrier = "pragma_parallel_barrier_when_finish"
        return T.attr(_int(0), barrier, 1) if self.threads_share_tiles else nullcontext()

    def _begin(self, state: Any, given: Any) -> None:
        rows = self.layer.directions * self.layer.batch
        with T.serial(_int(0), _int(rows)) as row:
            with T.serial(_int(0), _int(self.layer.hidden)) as unit:
                state[row * self.units + unit] = given[row * self.layer.hidden + unit]
            with T.serial(_int(0), _int(self.units - self.layer.hidden)) as unit:
                state[row * self.units + self.layer.hidden + unit] = tirx.const(0.0, "float32")

    def _copy_last(self, memory: Any) -> None:
        begin = self.layer.steps % 2 * self.state_size
        rows, hidden = self.layer.directions * self.layer.batch, self.layer.hidden
        with T.serial(_int(0), _int(rows)) as row, T.serial(_int(0), _int(hidden)) as unit:
            memory[row * hidden + unit] = self.states[1][begin + row * self.units + unit]


class _Tile:
    """A step's work for a block of hidden units and some rows of the batch.

    The last rows' tile begins earlier where rows do not divide the batch: it computes some states twice.
    """

    def __init__(self, loop: _Loop, direction: int, step: Any, tile: Any) -> None:
        layer = loop.layer
        self.loop, self.layer, self.direction = loop, layer, direction
        self.block = tile // loop.row_tiles
        self.first_row = tirx.min(tile % loop.row_tiles * loop.rows, layer.batch - loop.rows)
        self.time = layer.steps - 1 - step if layer.reversed[direction] else step
        self.now, self.next = step % 2 * loop.state_size, (step + 1) % 2 * loop.state_size
        self.activations = [_ACTIVATIONS[name] for name in layer.activations[direction]]
        self.rows = range(loop.rows)

    def sums(self, source: Any, begin: Any, gates: range, starts: Callable[[int, int, Any], Any]) -> list[list[Any]]:
        """For each row, `starts(row, gate, lane)` + state @ weights of some gates: vectors.

        `source` has the states, from `begin` on.
        """
        loop, layer = self.loop, self.layer
        # Several partial sums where there are few sums.
        chains = next(n for n in (1, 2, 4, 8) if n * len(gates) * loop.rows >= CHAINS or n == CHAINS)
        parts = [[[_buffer(LANES) for _ in range(chains)] for _ in gates] for _ in self.rows]
        each = [(row, place, gate) for row in self.rows for place, gate in enumerate(gates)]
        with _lanes() as lane:
            for row, place, gate in each:
                first, *others = parts[row][place]
                first[lane] = starts(row, gate, lane)
                for other in others:
                    other[lane] = tirx.const(0.0, "float32")
        panel = (self.direction * layer.blocks + self.block) * (loop.units * layer.gates * LANES)
        with T.serial(_int(0), _int(loop.units // chains)) as some, _lanes() as lane:
            for chain in range(chains):
                k = some * chains + chain
                for row, place, gate in each:
                    state = source[begin + self._row(row) * loop.units + k]
                    weight = loop.recurrence[panel + (k * layer.gates + gate) * LANES + lane]
                    part = parts[row][place][chain]
                    part[lane] = part[lane] + state * weight
        with _lanes() as lane:
            for row, place, _ in each:
                first, *others = parts[row][place]
                for other in others:
                    first[lane] = first[lane] + other[lane]
        return [[total for total, *_ in own] for own in parts]

    def share(self, row: int, gate: int, lane: Any) -> Any:
        """What the inputs contribute."""
        layer = self.layer
        at = (self.time * layer.batch + self.first_row + row) * layer.directions + self.direction
        return self.loop.shares[((at * layer.blocks + self.block) * layer.gates + gate) * LANES + lane]

    def hidden_bias(self, lane: Any) -> Any:
        return self.loop.hidden_bias[(self.direction * self.layer.blocks + self.block) * LANES + lane]

    def look(self, row: int, lane: Any, begin: Any, gates: dict[int, Any]) -> None:
        """Add to gates, by number, what they see of the memory of one of the two steps, which begins there."""
        if self.layer.has_peepholes:
            memory = self.loop.states[1][begin + self.place(row, lane)]
            for number, gate in gates.items():
                at = ((self.direction * 3 + number) * self.layer.blocks + self.block) * LANES + lane
                gate[lane] = gate[lane] + self.loop.peepholes[at] * memory

    def clip(self, lane: Any, *gates: Any) -> None:
        """Keep what is put into activations within bounds, if the layer has some."""
        for gate in gates if self.layer.clip else ():
            gate[lane] = _bounded(gate[lane], self.layer.clip)

    def within(self, row: int, new: Any, behind: Any) -> Any:
        """What is new as long as the sequence of a row lasts, and what there is behind it."""
        if not self.layer.has_lengths:
            return new
        return tirx.Select(self.time < self.loop.lengths[self.first_row + row], new, behind)

    def place(self, row: int, lane: Any) -> Any:
        """Of a unit of this tile in a step's states."""
        return self._row(row) * self.loop.units + self.block * LANES + lane

    def put(self, row: int, new: Any) -> None:
        """The new state of the tile's units, to the states and to the result."""
        loop, layer = self.loop, self.layer
        first = self.block * LANES
        at = (self.time * layer.batch + self.first_row + row) * layer.directions + self.direction
        with _lanes() as lane:
            at_hidden = self.place(row, lane)
            loop.states[0][self.next + at_hidden] = self.within(row, new[lane], loop.states[0][self.now + at_hidden])
        with (
            _lanes() if layer.hidden % LANES == 0 else T.serial(_int(0), tirx.min(LANES, layer.hidden - first)) as lane
        ):
            zero = tirx.const(0.0, "float32")
            loop.every[at * layer.hidden + first + lane] = self.within(row, new[lane], zero)

    def _row(self, row: int) -> Any:
        return self.direction * self.layer.batch + self.first_row + row


def _bounded(value: Any, most: float) -> Any:
    return tirx.max(tirx.min(value, tirx.const(most, "float32")), tirx.const(-most, "float32"))


# Below, the sums of a row become its activations and new states in place, vector by vector. Each value is stored before
# it is used: TVM simplifies what is nested with all that it depends on put in.


def _rnn(tile: _Tile) -> None:
    (f,) = tile.activations
    sums = tile.sums(tile.loop.states[0], tile.now, range(1), tile.share)
    for row in tile.rows:
        (new,) = sums[row]
        with _lanes() as lane:
            tile.clip(lane, new)
            new[lane] = f(new[lane])
        tile.put(row, new)


def _lstm(tile: _Tile) -> None:
    f, g, h = tile.activations
    hidden, memory = tile.loop.states
    sums = tile.sums(hidden, tile.now, range(4), tile.share)
    for row in tile.rows:
        i, o, forget, new = sums[row]
        early = (i, forget) if tile.layer.has_peepholes else (i, o, forget)
        with _lanes() as lane:
            now, then = (begin + tile.place(row, lane) for begin in (tile.now, tile.next))
            tile.look(row, lane, tile.now, {0: i, 2: forget})
            tile.clip(lane, *early, new)
            for gate in early:
                gate[lane] = f(gate[lane])
            new[lane] = g(new[lane])
            new[lane] = forget[lane] * memory[now] + i[lane] * new[lane]
            if tile.layer.cell_clip:
                new[lane] = _bounded(new[lane], tile.layer.cell_clip)
            memory[then] = tile.within(row, new[lane], memory[now])
            if tile.layer.has_peepholes:  # of what is new
                tile.look(row, lane, tile.next, {1: o})
                tile.clip(lane, o)
                o[lane] = f(o[lane])
            new[lane] = h(new[lane])
            new[lane] = o[lane] * new[lane]
        tile.put(row, new)


def _gru_linear_before_reset(tile: _Tile) -> None:
    f, g = tile.activations
    (hidden,) = tile.loop.states

    def starts(row: int, gate: int, lane: Any) -> Any:
        return tile.hidden_bias(lane) if gate == 2 else tile.share(row, gate, lane)

    sums = tile.sums(hidden, tile.now, range(3), starts)
    for row in tile.rows:
        z, r, new = sums[row]
        with _lanes() as lane:
            tile.clip(lane, z, r)
            z[lane] = f(z[lane])
            r[lane] = f(r[lane])
            new[lane] = tile.share(row, 2, lane) + r[lane] * new[lane]
            tile.clip(lane, new)
            new[lane] = g(new[lane])
            new[lane] = new[lane] + z[lane] * (hidden[tile.now + tile.place(row, lane)] - new[lane])
        tile.put(row, new)


def _gru_gates(tile: _Tile) -> None:
    """Of a GRU that resets the state before its product: all of it must be there first."""
    f, _ = tile.activations
    (hidden,) = tile.loop.states
    sums = tile.sums(hidden, tile.now, range(2), tile.share)
    for row in tile.rows:
        z, r = sums[row]
        with _lanes() as lane:
            at = tile.place(row, lane)
            tile.clip(lane, z, r)
            z[lane] = f(z[lane])
            tile.loop.updates[at] = z[lane]
            r[lane] = f(r[lane])
            tile.loop.reset_states[at] = r[lane] * hidden[tile.now + at]


def _gru_state(tile: _Tile) -> None:
    _, g = tile.activations
    (hidden,) = tile.loop.states
    sums = tile.sums(tile.loop.reset_states, 0, range(2, 3), tile.share)
    for row in tile.rows:
        (new,) = sums[row]
        with _lanes() as lane:
            at = tile.place(row, lane)
            tile.clip(lane, new)
            new[lane] = g(new[lane])
            new[lane] = new[lane] + tile.loop.updates[at] * (hidden[tile.now + at] - new[lane])
        tile.put(row, new)


_PHASES: dict[str, Sequence[Callable[[_Tile], None]]] = {
    "RNN": (_rnn,),
    "GRU": (_gru_gates, _gru_state),
    "GRU_LINEAR_BEFORE_RESET": (_gru_linear_before_reset,),
    "LSTM": (_lstm,),
}
"""What a step computes of each tile before the next thing needs all tiles."""


def _vectorizing(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda x: math_form(function(x))


_ACTIVATIONS: dict[str, Callable[[Any], Any]] = {
    "sigmoid": _vectorizing(tirx.sigmoid),
    "tanh": _vectorizing(tirx.tanh),
    "relu": lambda x: tirx.max(x, tirx.const(0.0, "float32")),
}


def _int(value: int) -> Any:
    return tirx.IntImm("int64", value)


def _buffer(elements: int) -> Any:
    """Of float32; TVM keeps those of a few vectors on the stack, and LLVM in registers."""
    return T.buffer_proxy(T.alloc_buffer((elements,), "float32"))


def _lanes() -> Any:
    """A loop over a vector."""
    return T.vectorized(_int(0), _int(LANES))
