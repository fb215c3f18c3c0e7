"""Slices whose beginning or length is known only when the model runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tvm_ffi
from tvm import ir, relax, sym, tirx
from tvm.relax import op

from .functions import shape_of

__all__ = ["open_slice"]


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
    step : int
        Above zero.
    """
    analyzer = sym.Analyzer()
    extent = shape_of(x)[axis]
    for size in (begin, length, extent):
        _know_positive(analyzer, size)
    end = analyzer.simplify(tirx.const(0, "int64") + begin + (length - 1) * step + 1)
    begin = analyzer.simplify(tirx.const(0, "int64") + begin)
    if analyzer.can_prove(begin >= 0) and analyzer.can_prove(end <= extent):
        return emit(op.strided_slice(x, [axis], [begin], [end], [step], assume_inbound=True))
    places = emit(op.arange(begin, end, step, "int64"))
    return emit(op.take(x, places, axis=axis, mode="clip"))


def _know_positive(analyzer: sym.Analyzer, size: Any) -> None:
    """Of what a size is made: sizes of inputs, which are at least 1."""
    if isinstance(size, ir.Expr):
        symbols: list[Any] = []
        tvm_ffi.structural_walk(size, (ir.Var, symbols.append))
        for symbol in symbols:
            analyzer.bind(symbol, ir.Range(1, 2**31), allow_override=True)
