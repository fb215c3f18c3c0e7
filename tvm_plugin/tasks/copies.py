"""Blocks that copy a tensor into a part of another one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tvm import ir, s_tir, tirx

from ..search.space.statements import looped, point

__all__ = ["copy_block"]


def copy_block(
    source: Any, target: Any, shape: Sequence[Any], place: Callable[[list[Any]], list[Any]], name: str
) -> Any:
    """Loops over a block that copies a buffer.

    Parameters
    ----------
    source, target : Buffer
    shape : sequence of int or tvm.ir.Expr
        Of `source`.
    place : callable
        Takes the indices of an element in `source`, returns those in `target`.
    name : str
        Of the block.
    """
    zero = tirx.IntImm("int64", 0)
    lengths = [tirx.IntImm("int64", extent) if isinstance(extent, int) else extent for extent in shape]
    ranges = [ir.Range.from_min_extent(zero, length) for length in lengths]
    axes = [tirx.IterVar(r, tirx.Var(f"v_ax{i}", "int64"), tirx.IterVar.DataPar) for i, r in enumerate(ranges)]
    inside = [iteration.var for iteration in axes]
    outside = place(inside)
    body: Any = tirx.BufferStore(target, tirx.BufferLoad(source, inside), outside)
    block = s_tir.SBlock(axes, [point(source, inside)], [point(target, outside)], name, body)
    loops = [tirx.Var(f"ax{i}", "int64") for i in range(len(shape))]
    return looped(loops, lengths, s_tir.SBlockRealize(loops, True, block))
