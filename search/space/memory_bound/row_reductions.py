"""The reductions of a row, which is in the cache: in vectors, then over the lanes of the last one."""

from __future__ import annotations

from typing import Any

from ..marks import LANE_TREE
from ..nest import extent_of, fuse, spatial_and_reduced

__all__ = ["finish_reduction", "fitting", "sum_as_written", "vector_sums"]


def fitting(vectors: int, lanes: int, length: int) -> int:
    """The most vectors, no more than given, that cut the length evenly."""
    while vectors > 1 and length % (vectors * lanes):
        vectors //= 2
    return vectors


def vector_sums(schedule: Any, block: Any, k: Any, dimensions: int, lanes: int, width: int) -> list[Any]:
    """Cut a reduction into `width` separate ones, then those into `lanes`; the blocks with a result for each lane.

    The cuts are even: `compute_at` loses the bounds check of a ragged one.
    """
    _, inner = schedule.split(k, [None, width])
    factored = [schedule.rfactor(inner, dimensions)]
    if width > lanes:
        _, inner = schedule.split(schedule.get_loops(block)[-1], [None, lanes])
        factored.append(schedule.rfactor(inner, dimensions))
    return factored


def sum_as_written(schedule: Any, block: Any, source: Any, depth: int, lanes: int) -> None:
    """Add each vector of `source` to the sums in lanes while it is in a register: no pass of its own over the row."""
    loops = schedule.get_loops(source)
    schedule.reverse_compute_at(block, loops[-2], preserve_unit_loops=True)
    own = schedule.get_loops(block)[len(loops) - 1 :]
    schedule.vectorize(next(loop for loop in own if extent_of(schedule, loop) == lanes))
    zero = schedule.decompose_reduction(block, loops[depth])
    *rows, wide = [loop for loop in schedule.get_loops(zero)[depth:] if extent_of(schedule, loop) > 1]
    for loop in rows:
        schedule.unroll(loop)
    schedule.vectorize(wide)


def finish_reduction(schedule: Any, block: Any, depth: int, lanes: int, short: bool, vector: bool) -> None:
    """Order the loops of a reduction inside a row: reduced ones outside, rows and vectors unrolled inside."""
    loops = schedule.get_loops(block)[depth:]
    if len(loops) != len(schedule.get(block).iter_vars):
        return
    spatial, reduced = spatial_and_reduced(schedule, block, loops)
    narrow = [loop for loop in spatial if extent_of(schedule, loop) == 1]
    rows = [loop for loop in spatial if extent_of(schedule, loop) > 1]
    if vector:  # rfactor puts the loop over lanes first
        wide = rows.pop(0)
        schedule.reorder(*reduced, *narrow, *rows, wide)
        outer, inner = schedule.split(wide, [None, lanes])
        for loop in (*rows, outer):
            schedule.unroll(loop)
        schedule.vectorize(inner)
    elif spatial:
        schedule.reorder(*narrow, *rows, *reduced)
        for loop in rows:
            schedule.unroll(loop)
        reduced = [fuse(schedule, reduced)] if short else reduced
        if lanes > 1 and (extent_of(schedule, reduced[-1]) == lanes or short):
            schedule.annotate(reduced[-1], LANE_TREE, lanes)
    schedule.decompose_reduction(block, reduced[0])
