"""Adaptive max pooling, which Relax has not: bins that may be of different lengths, and overlap."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tvm import relax
from tvm.relax import op

from ..relax_ir.tensors import extents

__all__ = ["max_of_bins"]


def max_of_bins(emit: Any, x: relax.Expr, axes: Sequence[int], sizes: Sequence[int]) -> relax.Expr:
    """The largest value of each bin [floor(i H / O), ceil((i + 1) H / O)), axis by axis.

    Parameters
    ----------
    emit : callable
        Of a block builder.
    x : relax.Expr
    axes, sizes : sequence of int
        Which axes are pooled, and how many bins each gets: O of H elements.
    """
    shape = extents(x.ty)
    for axis, size in zip(axes, sizes, strict=True):
        extent = shape[axis]
        bins = [(i * extent // size, -(-(i + 1) * extent // size)) for i in range(size)]
        parts = [emit(op.strided_slice(x, axes=[axis], begin=[begin], end=[end])) for begin, end in bins]
        x = emit(op.concat([emit(op.max(part, axis=[axis], keepdims=True)) for part in parts], axis=axis))
    return x
