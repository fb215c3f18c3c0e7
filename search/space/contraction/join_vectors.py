"""Full vectors and a narrower rest where a tile's columns are no multiple of a vector: 24 as 16 and 8, not as 3 x 8.

    for v in unrolled(3): (marked: 16)        for lane in vectorized(16):
        for lane in vectorized(8):       ->       sums[lane] += a * b[lane]
            sums[v * 8 + lane] += ...         for lane in vectorized(8):
                                                  sums[16 + lane] += a * b[16 + lane]

A schedule's loops have one width. Where a narrow multiply-add takes as long as a full one, 24 columns a group take
a third less so, and 120 nearly half (RegNet).
"""

from __future__ import annotations

from typing import Any

from tvm import s_tir, tirx

from ..expressions import substitute
from ..marks import JOIN_VECTORS
from ..statements import rewrite_marked_loops

__all__ = ["join_vectors", "joined_vectors"]


def join_vectors(func: Any) -> Any:
    """Rewrite the loops of a scheduled PrimFunc that are marked JOIN_VECTORS; the same object where there are none.

    Raises ValueError for a marked loop that is not around a vectorised one, and for vectors of an odd size: marks may
    come from records of others.
    """
    result = rewrite_marked_loops(func, JOIN_VECTORS, _joined)
    # Blocks that are there twice must not share variables.
    return func if result.same_as(func) else s_tir.renew_defs(result)


def _joined(loop: Any) -> Any:
    inner = loop.body
    if not isinstance(inner, tirx.For) or inner.kind != tirx.ForKind.VECTORIZED:
        raise ValueError(f"the loop over {loop.loop_var} is to join vectors, but has none")
    lanes = int(loop.annotations[JOIN_VECTORS])
    if lanes < 1 or lanes.bit_count() > 1:
        raise ValueError(f"vectors of {lanes} elements are to be joined; a power of two is possible")
    vectors = joined_vectors(int(loop.extent) * int(inner.extent), lanes)
    return tirx.SeqStmt([_vector(loop, inner, start, width) for start, width in vectors])


def joined_vectors(columns: int, lanes: int) -> list[tuple[int, int]]:
    """Start and width of each vector: full ones, then powers of two."""
    found, start, width = [], 0, lanes
    while start < columns:
        while start + width > columns:
            width //= 2
        found.append((start, width))
        start += width
    return found


def _vector(loop: Any, inner: Any, start: int, width: int) -> Any:
    """One vector of the body, whose index is `loop * extent of inner + inner`."""
    dtype = str(inner.loop_var.ty.dtype)
    lane = tirx.Var("lane", dtype)
    first = tirx.IntImm(str(loop.loop_var.ty.dtype), 0)
    body = substitute(inner.body, [(loop.loop_var, first), (inner.loop_var, lane + start)])
    return tirx.For(lane, tirx.IntImm(dtype, 0), tirx.IntImm(dtype, width), tirx.ForKind.VECTORIZED, body)
