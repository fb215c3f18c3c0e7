"""How often a kernel with given sizes runs each of its tiles."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tvm_ffi
from tvm import ir, sym, tirx

from ..search.space.expressions import substitute
from ..search.space.hardware import ONE_THREAD
from .kernel import Size
from .schedules import UsedTile

__all__ = ["runs_at"]


def runs_at(tiles: Sequence[UsedTile], sizes: Mapping[str, int], usual: int) -> list[int]:
    """How often each tile of one kernel runs, about: as if longer ones came first, and shorter ones took the rests.

    Parameters
    ----------
    tiles : sequence of UsedTile
        All of the kernel.
    sizes : mapping of str to int
        Of its symbols, by name.
    usual : int
        Of symbols that have none there.
    """
    lengths: dict[tuple[Any, Size], set[int]] = {}
    for one in tiles:
        for size, length in one.tile.extents.items():
            lengths.setdefault((_kind(one), size), set()).add(length)
    extents = {size: _value(size.extent, sizes, usual) for _, size in lengths}
    counts = []
    for one in tiles:
        count = 1
        for size, length in one.tile.extents.items():
            longer = min((other for other in lengths[_kind(one), size] if other > length), default=None)
            rest = extents[size] if longer is None else extents[size] % longer
            count *= rest // length
        counts.append(count)
    return counts


def _kind(one: UsedTile) -> Any:
    """What tiles have in common between which a size is divided: what they write, along which sizes, by how many."""
    tile = one.tile
    return tile.buffers[-tile.outputs :], frozenset(tile.extents), ONE_THREAD in one.workload["main"].attrs


def _value(extent: Any, sizes: Mapping[str, int], usual: int) -> int:
    """Of an expression of symbols."""
    symbols: list[Any] = []
    tvm_ffi.structural_walk(extent, (ir.Var, symbols.append))
    values = [(one, tirx.IntImm(str(one.ty.dtype), sizes.get(str(one.name), usual))) for one in dict.fromkeys(symbols)]
    return int(sym.Analyzer().simplify(substitute(extent, values)))
