"""Loop transformations that the sketches share; every function works on a `tvm.s_tir.Schedule`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

__all__ = ["extent_of", "fuse", "parallelize", "partition", "serial_vectors", "vectorize"]


def extent_of(schedule: Any, loop: Any) -> int:
    """Constant extent of a loop."""
    return int(schedule.get(loop).extent)


def fuse(schedule: Any, loops: Sequence[Any]) -> Any:
    """Fuse neighbouring loops; a single one stays as it is."""
    return schedule.fuse(*loops) if len(loops) > 1 else loops[0]


def partition(schedule: Any, loop: Any) -> None:
    """Have TVM split the loop where a condition on it changes, so that the bulk runs without conditions."""
    schedule.annotate(loop, "pragma_loop_partition_hint", 1)


def vectorize(schedule: Any, loop: Any, lanes: int, unroll: int = 1, axes: int = 1) -> Any:
    """Cut a loop in `unroll` vectors of `lanes`; a ragged tail runs one by one. Returns the outermost of the loops.

    The loop may be fused from several `axes`. Of the index f = i * 16 + j, TVM simplifies the parts f % 3136 // 56 and
    f % 56 so far that it no longer sees that they make up f, computes them lane by lane and gathers: relu of
    1 x 256 x 56 x 56 took 946 us instead of 67. It leaves sums of three terms alone, so that a single vector gets a
    loop around it that is not unrolled.
    """
    if lanes == 1 and unroll == 1:
        return loop
    ragged = extent_of(schedule, loop) % (lanes * unroll) != 0
    middle = unroll if unroll > 1 or ragged else serial_vectors(extent_of(schedule, loop) // lanes, axes)
    outer, body, inner = schedule.split(loop, [None, middle, lanes])
    if lanes > 1:
        schedule.vectorize(inner)
    if unroll > 1:
        schedule.unroll(body)
    if ragged:
        partition(schedule, outer)
    return outer


def serial_vectors(vectors: int, axes: int) -> int:
    """How many of a run's vectors to put in a loop around one, so that it is not gathered: see `vectorize`."""
    return next((d for d in range(2, vectors) if vectors % d == 0), 1) if axes > 1 else 1


def parallelize(schedule: Any, loops: Sequence[Any], workers: int, threads: int) -> Any:
    """Fuse the loops and share their iterations among `workers` of `threads` threads; one worker leaves them alone.

    TVM gives every thread one run of iterations, so that the loop itself is the grain.
    """
    if workers == 1 or not loops:
        return loops[0] if loops else None
    loop = fuse(schedule, loops)
    if workers < threads:
        loop, _ = schedule.split(loop, [workers, None])
    schedule.parallel(loop)
    return loop
