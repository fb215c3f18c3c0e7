"""How often a kernel with given sizes runs a tile."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tvm_ffi
from tvm import ir, sym, tirx

from ..search.space.expressions import substitute
from .schedules import UsedTile

__all__ = ["runs_at"]


def runs_at(used: UsedTile, sizes: Mapping[str, int], usual: int) -> int:
    """How often a tile runs, one after another, in one call of its kernel.

    Parameters
    ----------
    used : UsedTile
    sizes : mapping of str to int
        Of the kernel's symbols, by name.
    usual : int
        Of symbols that have none there.
    """
    if isinstance(used.runs, int):
        return used.runs
    symbols: list[Any] = []
    tvm_ffi.structural_walk(used.runs, (ir.Var, symbols.append))
    values = [(one, tirx.IntImm(str(one.ty.dtype), sizes.get(str(one.name), usual))) for one in dict.fromkeys(symbols)]
    return int(sym.Analyzer().simplify(substitute(used.runs, values)))
