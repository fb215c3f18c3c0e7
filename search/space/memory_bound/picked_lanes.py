"""Rows whose elements lie at constant places of another row, as in resized images: loads and shuffles, no gathers.

    for j in range(32):                           t[0:16] = shuffle(x[i // 2, 0:16], [0, 0, 1, 1, ... 7, 7])
        y[i, j] = 2 * x[i // 2, j // 2]    ->     for lane in vectorized(16):
                                                      y[i, lane] = 2 * t[lane]
                                                  t[0:16] = shuffle(x[i // 2, 0:16], [8, 8, 9, 9, ... 15, 15])
                                                  for lane in vectorized(16):
                                                      y[i, 16 + lane] = 2 * t[lane]

TVM would compute each place, which takes float arithmetic, and load the elements one by one. All vectors of a row are
written out, so that what depends on the column alone, such as weights, is constant, too: LLVM folds it.

Where a condition decides what a row is, as in concatenated channels, there is one such row for each answer: nothing is
loaded that the condition forbids.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import tvm_ffi
from numpy.typing import NDArray
from tvm import ir, tirx
from tvm.ir.expr import TensorLoad

from ..expressions import binding_of, conditionals, conjuncts, evaluate, is_conditional, nodes_of, substitute, uses
from ..marks import PICKED_LANES
from ..statements import rewrite_marked_loops, stored_block

__all__ = ["pick_lanes", "picked_rows"]

Array = NDArray[Any]


def picked_rows(block: Any, lanes: int) -> bool:
    """Whether `pick_lanes` can write the block's last axis in vectors of `lanes`: no load of it needs a gather."""
    if not isinstance(block.body, tirx.BufferStore):
        return False
    column = block.iter_vars[-1].var
    extent = int(block.iter_vars[-1].dom.extent)

    def possible(value: Any) -> bool:
        choice = _choice(value, column)
        if choice is not None:
            return all(possible(row) for row in choice[1:])
        return all(
            _window(load, places[start : start + lanes], lanes) is not None
            for load, places in _picked(value, column, extent)
            for start in _starts(extent, lanes)
        )

    try:
        return possible(block.body.value)
    except ValueError:
        return False


def pick_lanes(func: Any) -> Any:
    """Rewrite the loops of a scheduled PrimFunc that are marked PICKED_LANES; the same object when there is none.

    Raises
    ------
    ValueError
        When the loop holds anything but one store, or a load whose places are no constants, or lie too far apart, or
        under a condition that differs within a row; or when the row is shorter than a vector: marks may come from
        records of others.
    """
    return rewrite_marked_loops(func, PICKED_LANES, _row)


def _row(loop: Any) -> Any:
    realize = stored_block(loop)
    if uses(realize.predicate, loop.loop_var):
        raise ValueError(f"whether places of {loop.loop_var} are written differs within a row")
    lanes, extent = int(loop.annotations[PICKED_LANES]), int(loop.extent)
    if not 0 < lanes <= extent:
        raise ValueError(f"the loop over {loop.loop_var} has {extent} places, and is marked as vectors of {lanes}")
    row = _vectors(substitute(realize.block.body, binding_of(realize)), loop.loop_var, extent, lanes)
    # Rows that threads do not share evenly: the last thread has fewer.
    return tirx.IfThenElse(realize.predicate, row, None) if conjuncts(realize.predicate) else row


def _vectors(store: Any, column: Any, extent: int, lanes: int) -> Any:
    """The row that a store writes, in vectors."""
    choice = _choice(store.value, column)
    if choice is not None:
        condition, *values = choice
        rows = [tirx.BufferStore(store.buffer, value, store.indices) for value in values]
        return tirx.IfThenElse(condition, *(_vectors(row, column, extent, lanes) for row in rows))
    places = _picked(store.value, column, extent)
    statements = [
        statement
        for start in _starts(extent, lanes)
        for statement in _vector(
            store, column, start, lanes, [(load, at[start : start + lanes]) for load, at in places]
        )
    ]
    return tirx.SeqStmt(statements) if len(statements) > 1 else statements[0]


def _choice(value: Any, column: Any) -> tuple[Any, Any, Any] | None:
    """A condition in `value` that is the same for the whole row, and the value where it holds and where not; or None.

    Conditions that load something stay where they are: others may guard them.
    """
    conditions = [call.args[0] for call in conditionals(value)]
    condition = next((c for c in conditions if not uses(c, column) and not nodes_of(c, TensorLoad)), None)
    if condition is None:
        return None

    def decided(place: int) -> Any:
        def decide(call: Any) -> Any:
            same = is_conditional(call) and tvm_ffi.structural_equal(call.args[0], condition)
            return call.args[place] if same else call

        return tvm_ffi.structural_map(value, (ir.Call, decide))

    return condition, decided(1), decided(2)


def _starts(extent: int, lanes: int) -> list[int]:
    """Where vectors begin: the last one of a ragged row overlaps the one before."""
    return [min(start, extent - lanes) for start in range(0, extent, lanes)]


def _vector(store: Any, column: Any, start: int, lanes: int, places: list[tuple[Any, Array]]) -> Iterator[tirx.Stmt]:
    """One vector of the row: what it picks, in registers, and its store."""
    dtype = str(column.ty.dtype)
    registers: list[tuple[Any, Any]] = []
    for load, at in places:
        window = _window(load, at, lanes)
        if window is None:
            raise ValueError(f"the elements of {load} lie too far apart for a shuffle")
        register = tirx.decl_buffer([lanes], str(load.ty.dtype), "picked")
        yield tirx.AllocBuffer(register)
        yield tirx.BufferStore(register, _shuffled(load, at, *window), [tirx.Ramp(0, 1, lanes)])
        registers.append((load, register))
    lane = tirx.Var("lane", column.ty)

    def picked(load: Any) -> Any:
        register = next((register for known, register in registers if known.same_as(load)), None)
        return load if register is None else tirx.BufferLoad(register, [lane])

    here = [(column, lane + tirx.IntImm(dtype, start))]
    value = substitute(tvm_ffi.structural_map(store.value, (TensorLoad, picked)), here)
    body = tirx.BufferStore(store.buffer, value, [substitute(index, here) for index in store.indices])
    yield tirx.For(lane, tirx.IntImm(dtype, 0), tirx.IntImm(dtype, lanes), tirx.ForKind.VECTORIZED, body)


def _shuffled(load: Any, places: Array, first: int, width: int, count: int) -> Any:
    """The elements of `load` at `places`, from `count` vectors of `width` in memory."""
    *outer, last = load.indices
    one = tirx.IntImm(str(last.ty.dtype), 1)
    parts = [
        tirx.BufferLoad(
            load.source, [*outer, tirx.Ramp(tirx.IntImm(str(last.ty.dtype), first + n * width), one, width)]
        )
        for n in range(count)
    ]
    enough = -(-len(places) // (count * width))  # TVM wants as many elements as are picked, if only the same again
    return tirx.Shuffle(parts * enough, [int(place) - first for place in places])


def _window(load: Any, places: Array, lanes: int) -> tuple[int, int, int] | None:
    """The vectors of a row in memory that hold all `places`: where they begin, their length, one or two; or None."""
    extent, span = int(load.source.shape[-1]), int(places.max() - places.min()) + 1
    width = min(lanes, extent)
    count = 1 if span <= width else 2
    if span > 2 * width or count * width > extent:
        return None
    return min(int(places.min()), extent - count * width), width, count


def _picked(value: Any, column: Any, extent: int) -> list[tuple[Any, Array]]:
    """The loads of `value` whose last index depends on the column, other than by its neighbour; and their places."""
    columns = np.arange(extent, dtype=str(column.ty.dtype))
    found = []
    for load in nodes_of(value, TensorLoad):
        *outer, last = load.indices
        if any(uses(index, column) for index in outer):
            raise ValueError(f"{load} reads other rows in each column")
        if uses(last, column) and not _is_run(last, column):
            try:
                found.append((load, evaluate(last, {column: columns})))
            except (KeyError, TypeError) as error:
                raise ValueError(f"{last} is no constant in each column") from error
    guarded = [load for call in conditionals(value) for load in nodes_of(call, TensorLoad)]
    if any(load.same_as(other) for load, _ in found for other in guarded):
        raise ValueError("a condition that differs within a row guards what is picked")
    return found


def _is_run(index: Any, column: Any) -> bool:
    """Whether the index is the column, plus something that does not depend on it: vectors in memory."""
    if isinstance(index, tirx.Add):
        return (_is_run(index.a, column) and not uses(index.b, column)) or (
            _is_run(index.b, column) and not uses(index.a, column)
        )
    return bool(index.same_as(column))
