"""Last vectors that overlap the ones before, where a row is no multiple of the vector.

    for i in range(3):                                for i in range(3):
        for j in vectorized(16):                  ->      for j in vectorized(16):
            if i * 16 + j < 35:                               y[min(i * 16, 19) + j] = f(min(i * 16, 19) + j)
                y[i * 16 + j] = f(i * 16 + j)

Elements in both are computed twice, alike. A condition inside a vector would make TVM compute lane by lane.
"""

from __future__ import annotations

import functools
from typing import Any

import tvm_ffi
from tvm import s_tir, sym, tirx

from ..expressions import conjuncts, nodes_of, uses
from ..marks import OVERLAPPING_TAIL
from ..statements import rewrite_marked_loops, with_body

__all__ = ["overlap_tails"]


def overlap_tails(func: Any) -> Any:
    """Rewrite the loops of a scheduled PrimFunc that are marked OVERLAPPING_TAIL; the same object when there is none.

    Raises
    ------
    ValueError
        When the length of the row cannot be read off the conditions inside, or what ends there is at no multiple of the
        loop: marks may come from records of others.
    """
    return rewrite_marked_loops(func, OVERLAPPING_TAIL, _overlapping)


def _overlapping(loop: Any) -> Any:
    lanes = int(loop.annotations[OVERLAPPING_TAIL])
    dtype = str(loop.loop_var.ty.dtype)
    length = _row_length(loop, lanes)

    def start(product: Any) -> Any:
        of_loop = product.a.same_as(loop.loop_var) and isinstance(product.b, tirx.IntImm) and int(product.b) == lanes
        return tirx.Min(product, tirx.IntImm(dtype, length - lanes)) if of_loop else product

    def moved(index: Any) -> Any:
        linear = sym.detect_linear_equation(index, [loop.loop_var])
        if linear and isinstance(linear[0], tirx.IntImm) and int(linear[0]) == lanes:
            return start(loop.loop_var * linear[0]) + linear[1]
        return tvm_ffi.structural_map(index, (tirx.Mul, start))

    def unconditional(realize: Any) -> Any:
        values = [moved(value) for value in realize.iter_values]
        terms = conjuncts(realize.predicate)
        others = [term for term in terms if _end(term, loop, lanes) != length]
        stays = [new for new, old in zip(values, realize.iter_values, strict=True) if new.same_as(old)]
        if len(others) < len(terms) and any(uses(value, loop.loop_var) for value in stays):
            raise ValueError(f"the loop over {loop.loop_var} is marked as tiles of {lanes} but its blocks have others")
        kept = [
            tirx.LT(moved(term.a), term.b) if isinstance(term, tirx.LT) and uses(term.a, loop.loop_var) else moved(term)
            for term in others
        ]
        return s_tir.SBlockRealize(values, functools.reduce(tirx.And, kept, tirx.IntImm("bool", 1)), realize.block)

    body = loop.body
    if length >= lanes:  # else the result, a slice of what is computed, is shorter than one tile: conditions stay
        body = tvm_ffi.structural_map(body, (s_tir.SBlockRealize, unconditional))
    return with_body(loop, body, OVERLAPPING_TAIL)


def _row_length(loop: Any, lanes: int) -> int:
    """Where the row ends: of the bounds on the loop in its last block, which writes the result, the nearest.

    A tile of a row may end beyond the row, too; blocks before may have rows of which the last one leaves out the end.
    """
    lengths: list[int] = []
    for realize in nodes_of(loop.body, s_tir.SBlockRealize):
        ends = [end for term in conjuncts(realize.predicate) if (end := _end(term, loop, lanes)) is not None]
        lengths += [min(ends)] if ends else []
    if not lengths or min(lengths) < lengths[-1]:
        raise ValueError(f"the loop over {loop.loop_var} is marked as ragged but its blocks end at {lengths}")
    return lengths[-1]


def _end(condition: Any, loop: Any, lanes: int) -> int | None:
    """Where `condition` ends the row that the loop's tiles of `lanes` are of; None where it is no such bound.

    v * 4 + w - 2 < 7, where tiles of 4 begin at v * 4: at 9. v < 2: at 8.
    """
    if not (isinstance(condition, tirx.LT) and isinstance(condition.b, tirx.IntImm)):
        return None
    linear = sym.detect_linear_equation(condition.a, [loop.loop_var])
    step = int(linear[0]) if linear and isinstance(linear[0], tirx.IntImm) else 0
    if step == lanes:
        return int(condition.b) - _constant_part(linear[1])
    if step == 1 and isinstance(linear[1], tirx.IntImm):
        return (int(condition.b) - int(linear[1])) * lanes
    return None


def _constant_part(index: Any) -> int:
    """What is added to the variables of a sum."""
    if isinstance(index, tirx.IntImm):
        return int(index)
    if isinstance(index, tirx.Add):
        return _constant_part(index.a) + _constant_part(index.b)
    if isinstance(index, tirx.Sub):
        return _constant_part(index.a) - _constant_part(index.b)
    return 0
