"""Steps of schedules that the sketches share; every function works on a `tvm.s_tir.Schedule`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tvm import tirx

from .expressions import is_reduced
from .marks import PARTITION

__all__ = [
    "STACK_BYTES",
    "block_extents",
    "extent_of",
    "fuse",
    "index_map",
    "parallelize",
    "partition",
    "serial_vectors",
    "spatial_and_reduced",
    "vectorize",
]

STACK_BYTES = 1024
"""TVM puts smaller buffers of the scope "global" on the stack, where LLVM can keep them in registers; others cost an
allocation in each call, unless `contraction.stack_sums` moves them."""


def extent_of(schedule: Any, loop: Any) -> int:
    """The extent of a loop. Raises ValueError when it depends on other loops."""
    extent = schedule.get(loop).extent
    if not isinstance(extent, tirx.IntImm):
        raise ValueError(f"the extent {extent} of a loop is not constant")
    return int(extent)


def block_extents(schedule: Any, name: str) -> list[int]:
    """Extents of the axes of the block of that name."""
    return [int(axis.dom.extent) for axis in schedule.get(schedule.get_sblock(name)).iter_vars]


def spatial_and_reduced(schedule: Any, block: Any, loops: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Loops of a block, one for each of its axes in their order: the spatial ones, and those over what it reduces.

    `compute_at` leaves a block such loops behind those around it.
    """
    kinds = list(zip(loops, map(is_reduced, schedule.get(block).iter_vars), strict=True))
    return [loop for loop, reduced in kinds if not reduced], [loop for loop, reduced in kinds if reduced]


def index_map(schedule: Any, block: Any, function: Callable[..., list[Any]], rank: int) -> Any:
    """The function of `rank` indices as TVM wants it, in the index type that the kernel uses."""
    index_dtype = str(schedule.get(block).iter_vars[0].var.ty.dtype)
    return tirx.IndexMap.from_func(function, ndim=rank, index_dtype=index_dtype)


def fuse(schedule: Any, loops: Sequence[Any]) -> Any:
    """Fuse neighbouring loops; a single one stays as it is."""
    return schedule.fuse(*loops) if len(loops) > 1 else loops[0]


def partition(schedule: Any, loop: Any) -> None:
    """Have TVM split the loop where a condition on it changes, so that the bulk runs without conditions."""
    schedule.annotate(loop, PARTITION, 1)


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
