"""Conditions that TVM loses while it lowers."""

from __future__ import annotations

from typing import Any

from tvm import s_tir, tirx

from ..statements import rewritten

__all__ = ["keep_guards"]


def keep_guards(func: Any) -> Any:
    """Make the conditions of reductions into memory conjunctions; the same object when there is nothing to do.

    Where a reduction runs across threads, TVM (`LowerCrossThreadReduction`) guards the store of the sum with those
    clauses of the block's condition that hold for any step. It looks for clauses in conjunctions only: a condition of
    a single clause is dropped, and the threads beyond a ragged edge write behind the output.

        where(i < 6)  ->  where(i < 6 and i < 6)

    A constant for the second clause would keep TVM from seeing the reduction at all.
    """

    def conjunction(realize: Any) -> Any:
        condition, block = realize.predicate, realize.block
        sums_in_memory = block.init is not None and str(block.writes[0].source.scope()) == "global"
        if not sums_in_memory or isinstance(condition, (tirx.And, tirx.IntImm)):
            return realize
        return s_tir.SBlockRealize(realize.iter_values, tirx.And(condition, condition), block)

    return rewritten(func, (s_tir.SBlockRealize, conjunction))
