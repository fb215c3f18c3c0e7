"""Slices whose beginning or length is known only when the model runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tvm_ffi
from tvm import ir, relax, sym, tirx
from tvm.relax import op

from ..relax_ir.tensors import shape_of

__all__ = ["CHOSEN", "from_begin", "of_positive_sizes", "open_slice", "within"]


CHOSEN = "chosen"
"""What names of sizes begin with that a model computes of its data: they may be zero."""


def of_positive_sizes(*values: Any) -> sym.Analyzer:
    """An analyzer that knows what these are made of to be at least 1, as sizes of inputs are, or 0 (`CHOSEN`)."""
    analyzer = sym.Analyzer()
    symbols: list[Any] = []
    for value in values:
        if isinstance(value, ir.Expr):
            tvm_ffi.structural_walk(value, (ir.Var, symbols.append))
    for symbol in symbols:
        least = 0 if str(symbol.name).startswith(CHOSEN) else 1
        analyzer.bind(symbol, ir.Range(least, 2**31), allow_override=True)
    return analyzer


def from_begin(place: Any, extent: Any) -> Any:
    """A place of an axis, counted from its beginning: negative ones count from its end."""
    if isinstance(place, int):
        return extent + place if place < 0 else place
    analyzer = of_positive_sizes(place, extent)
    if analyzer.can_prove(place >= 0):
        return place
    if analyzer.can_prove(place < 0):
        return analyzer.simplify(place + extent)
    return tirx.Select(place < 0, place + extent, place)


def within(place: Any, extent: Any) -> Any:
    """The place, or the nearest one between the beginning of an axis and its end."""
    if isinstance(place, int) and isinstance(extent, int):
        return max(0, min(place, extent))
    analyzer = of_positive_sizes(place, extent)
    zero = tirx.IntImm("int64", 0)
    place, extent = (zero + value for value in (place, extent))
    low = place if analyzer.can_prove(place >= 0) else tirx.max(place, zero)
    return analyzer.simplify(low if analyzer.can_prove(low <= extent) else tirx.min(low, extent))


def open_slice(
    emit: Callable[[Any], Any], x: relax.Expr, axis: int, begin: Any, length: Any, step: int = 1
) -> relax.Expr:
    """`length` elements of an axis, each `step` behind the one before.

    Where it is not certain that all are there (x[:n] of a table with 512 places), the nearest stands for those that are
    not: an operator of slices would read whatever memory lies there.

    Parameters
    ----------
    emit : callable
        Of a block builder.
    x : relax.Expr
    axis : int
    begin, length : int or tvm.ir.Expr
        The length is not negative.
    step : int
        Above zero.
    """
    extent = shape_of(x)[axis]
    analyzer, zero = of_positive_sizes(begin, length, extent), tirx.IntImm("int64", 0)
    end = analyzer.simplify(zero + begin + (length - 1) * step + 1)
    begin = analyzer.simplify(zero + begin)
    if analyzer.can_prove(begin >= 0) and analyzer.can_prove(end <= extent):
        return emit(op.strided_slice(x, [axis], [begin], [end], [step], assume_inbound=True))
    places = emit(op.arange(begin, end, step, "int64"))
    return emit(op.take(x, places, axis=axis, mode="clip"))
