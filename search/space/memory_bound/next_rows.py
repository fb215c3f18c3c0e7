"""Asks for the rows after these while these are computed.

No prefetcher goes on beyond a page, and what needs a row first, its sums or its maximum, waits for each of its lines.
A schedule marks the loop over the vectors of a row NEXT_ROWS:

    for k in range(48): (marked)                   for k in range(48):
        y[i, 16 * k : ] = x[i, 16 * k : ] ...  ->      fetch(x[i + 1, 16 * k])
                                                       y[i, 16 * k : ] = x[i, 16 * k : ] ...

One thread of Zen 5: softmax of 1024 x 1024, whose rows come from the last-level cache, 153 -> 129 us. Asking for lines
of the output as well would make it 123 (in C).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tvm import ir
from tvm.ir.expr import TensorLoad

from ..contraction.prefetch import Operand, vectorised_operands, with_fetches
from ..expressions import nodes_of, uses
from ..marks import NEXT_ROWS
from ..statements import rewrite_marked_loops, with_body

__all__ = ["fetch_next_rows"]


def fetch_next_rows(func: Any) -> Any:
    """Rewrite the loops of a scheduled PrimFunc that are marked NEXT_ROWS; the same object when there is none.

    What is fetched are vectors of arguments that are others in each row, at places that can be told without reading
    what the row after the last one would have.
    """

    def fetching(loop: Any) -> Any:
        steps = int(loop.annotations[NEXT_ROWS])
        fetches = [fetch for operand in _rows(loop, func.params) for fetch in operand.ahead(loop, steps)]
        return with_body(loop, with_fetches(fetches, loop.body), NEXT_ROWS)

    return rewrite_marked_loops(func, NEXT_ROWS, fetching)


def _rows(loop: Any, arguments: Any) -> list[Operand]:
    """Each argument that the loop reads by vectors, at a place that depends on what is around it."""
    found: list[Operand] = []
    for operand in vectorised_operands(loop):
        is_argument = any(operand.source.same_as(argument) for argument in arguments)
        is_known = any(operand.source.same_as(other.source) for other in found)
        if not is_argument or is_known or _is_looked_up(operand.index, loop):
            continue
        if _depends_on_others(operand.index, [loop, *operand.inside]):
            found.append(operand)
    return found


def _is_looked_up(index: Sequence[Any], loop: Any) -> bool:
    """Whether the place is read itself, in each step of the loop another: in a table of what bytes become."""
    loads = [load for part in index for load in nodes_of(part, TensorLoad)]
    return any(uses(load, loop.loop_var) for load in loads)


def _depends_on_others(index: Sequence[Any], loops: Sequence[Any]) -> bool:
    used = [variable for part in index for variable in nodes_of(part, ir.Var)]
    return not all(any(variable.same_as(loop.loop_var) for loop in loops) for variable in used)
