"""Loops: how many tiles of which length cover a size that is known only when the kernel runs, and where they begin."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tvm import tirx

__all__ = ["covered", "shared"]


def covered(
    begin: Any,
    extent: Any,
    lengths: Sequence[int],
    twice: bool,
    tile: Callable[[int, Any, Any], Any],
    name: str,
    usual: Any = None,
) -> Any:
    """A statement with loops over tiles, the longest ones first.

    Parameters
    ----------
    begin, extent : tvm.ir.Expr
        What has to be covered.
    lengths : sequence of int
        Of tiles, each a multiple of the next; the last is 1, or places may be computed twice, and are as many at least.
    twice : bool
        Whether places may be computed twice. A rest that is most of a tile then is a whole one that begins earlier, and
        any rest one of the last length.
    tile : callable
        What one tile of a length does, from where it begins, and how often it runs. Asked for the longest one first.
    name : str
        Of what is covered, for the names of variables.
    usual : tvm.ir.Expr, optional
        The extent in terms of the kernel's symbols alone, about, for saying how often tiles run.
    """
    loops = []
    runs_left = _number(1)
    for place, length in enumerate(lengths):
        usual_count, usual_ends = _count(extent if usual is None else usual, lengths, place, twice)
        count, ends = _count(extent, lengths, place, twice)
        index = tirx.Var(f"{name}_tile{length}", "int64")
        start = extent - _rest(extent, lengths, place) + index * length
        if ends is not None:
            start = tirx.min(start, extent - length)
        kept, at = _kept(begin + start, f"{name}_at{length}")
        body = tirx.SeqStmt([*kept, tile(length, at, runs_left * usual_count)])
        counted, times = _kept(count, f"{name}_count{length}")
        loop = tirx.For(index, _number(0), times, tirx.ForKind.SERIAL, body)
        loops.append((tirx.SeqStmt([*counted, loop]), ends))
        if usual_ends is not None:
            runs_left = runs_left * tirx.Select(usual_ends, _number(0), _number(1))
    statement, _ = loops.pop()
    for loop, ends in reversed(loops):
        shorter = statement if ends is None else tirx.IfThenElse(tirx.Not(ends), statement, None)
        statement = tirx.SeqStmt([loop, shorter])
    return statement


def _rest(extent: Any, lengths: Sequence[int], place: int) -> Any:
    """What longer tiles leave, in terms of the extent alone: TVM would write one's rest into the next one's, and so
    on."""
    return extent % _number(lengths[place - 1]) if place else extent


def _count(extent: Any, lengths: Sequence[int], place: int, twice: bool) -> tuple[Any, Any]:
    """How many tiles of a length there are, and whether the last one of them is the end; None where it never is."""
    length = lengths[place]
    count = tirx.floordiv(_rest(extent, lengths, place), _number(length))
    if not twice or length == 1:
        return count, None
    most = _most(length) if place + 1 < len(lengths) else 0
    ends = tirx.And(extent % _number(length) > most, extent >= length)
    return count + tirx.Select(ends, _number(1), _number(0)), ends


def _most(length: int) -> int:
    """Up to how many places shorter tiles take less time than one of this length.

    Tiles of less than 8 rows wait for their weights nearly as long as one of 8 does: 36 rows are 32 and 4, 18 are 16
    and 2, 26 are 32.
    """
    return length * 3 // 4 if length > 16 else length // 2


def shared(extent: Any, threads: int, least: int, part: Callable[[Any, Any, Any], Any], name: str) -> Any:
    """A statement in which threads compute a part each, next to each other, of at least so many places.

    Parameters
    ----------
    extent : tvm.ir.Expr
        What has to be covered.
    threads : int
    least : int
        Of a part, but for the last one.
    part : callable
        What covers a part, of a beginning, an extent, and the extent of the first part.
    name : str
        Of what is covered, for the names of variables.
    """
    thread, begin, own = (tirx.Var(f"{name}_{what}", "int64") for what in ("thread", "begin", "own"))
    # Divided by constants only: TVM computes quotients earlier than where they are known not to be by zero.
    share = tirx.max(tirx.floordiv(extent + (threads - 1), _number(threads)), _number(least))
    rest = tirx.max(tirx.min(share, extent - thread * share), _number(0))
    body = tirx.SeqStmt(
        [tirx.Bind(begin, thread * share), tirx.Bind(own, rest), part(begin, own, tirx.min(share, extent))]
    )
    return tirx.For(thread, _number(0), _number(threads), tirx.ForKind.PARALLEL, body)


def _kept(value: Any, name: str) -> tuple[list[Any], Any]:
    """Statements that keep a number in memory, and a variable that is read from there.

    LLVM makes a register of it. TVM, which writes what a variable is made of into each index and simplifies all of
    that again in each pass, does not look into memory: kernels compile in half the time, to the same instructions.
    """
    memory = tirx.decl_buffer((1,), "int64", f"{name}_kept")
    variable = tirx.Var(name, "int64")
    zero = _number(0)
    stored = tirx.BufferStore(memory, value, [zero])
    return [tirx.AllocBuffer(memory), stored, tirx.Bind(variable, tirx.BufferLoad(memory, [zero]))], variable


def _number(value: int) -> Any:
    return tirx.IntImm("int64", value)
