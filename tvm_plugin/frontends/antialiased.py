"""Images resized as products with the weights of each row and column: without aliases, or by steps of any length.

TVM samples points, whose distance is the quotient of the sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tvm import relax
from tvm.relax import op

from ..relax_ir.constants import constant_of
from ..relax_ir.tensors import extents

__all__ = ["cubic", "linear", "resized"]

Array = NDArray[np.float64]


def linear(distance: Array) -> Array:
    """Weight of a pixel at a distance, in pixels of the smaller image."""
    return np.maximum(0.0, 1.0 - np.abs(distance))


def cubic(sharpness: float) -> Callable[[Array], Array]:
    """Keys' weights, as `linear`; `sharpness` is their slope at distance one, -0.5 or -0.75."""

    def weigh(distance: Array) -> Array:
        t = np.abs(distance)
        near = ((sharpness + 2) * t - (sharpness + 3)) * t * t + 1
        far = sharpness * (((t - 5) * t + 8) * t - 4)
        return np.where(t < 1, near, np.where(t < 2, far, 0.0))

    return weigh


def resized(
    emit: Any,
    x: relax.Expr,
    sizes: Sequence[int],
    steps: Sequence[float],
    weigh: Callable[[Array], Array],
    reach: int,
    repeat_edges: bool = False,
    antialias: bool = True,
    first: Sequence[float] | None = None,
) -> relax.Expr:
    """[..., height, width] -> [..., *sizes]; of any number of axes, the last ones.

    Parameters
    ----------
    emit : callable
        Of a block builder.
    x : relax.Expr
    sizes : sequence of int
        Of the result: height and width, or of more axes.
    steps : sequence of float
        Pixels of `x` from one of the result to the next, along each axis.
    weigh : callable
        `linear`, or what `cubic` returns.
    reach : int
        Beyond this distance, weights are zero: 1 or 2.
    repeat_edges : bool
        Pixels beside the image count, and are like the nearest one.
    antialias : bool
        Where steps are longer than a pixel, weights reach as much further.
    first : sequence of float, optional
        Where the first pixel of the result has its middle along each axis, in pixels of `x`; unless given, half a step
        from the edge.
    """
    dtype = str(x.ty.dtype)
    middles = [step / 2 for step in steps] if first is None else first
    rank = len(extents(x.ty))
    for axis, size, step, middle in reversed(
        list(zip(range(rank - len(sizes), rank), sizes, steps, middles, strict=True))
    ):
        extent = extents(x.ty)[axis]
        if size != extent or step != 1:
            weights = _weights(extent, size, step, middle, weigh, reach, repeat_edges, antialias)
            x = _weighed(emit, x, axis, weights.astype(dtype))
    return x


def _weighed(emit: Any, x: relax.Expr, axis: int, weights: Array) -> relax.Expr:
    """With products of `weights`, [size, extent], along an axis."""
    dtype, (*before, _), after = str(x.ty.dtype), extents(x.ty)[: axis + 1], extents(x.ty)[axis + 1 :]
    if not after:
        return emit(op.matmul(x, constant_of(np.ascontiguousarray(weights.T)), out_dtype=dtype))
    rows = x if len(after) == 1 else emit(op.reshape(x, [*before, weights.shape[1], -1]))
    product = emit(op.matmul(constant_of(weights), rows, out_dtype=dtype))
    return product if len(after) == 1 else emit(op.reshape(product, [*before, weights.shape[0], *after]))


def _weights(
    extent: int,
    size: int,
    step: float,
    middle: float,
    weigh: Callable[[Array], Array],
    reach: int,
    repeat_edges: bool,
    antialias: bool,
) -> Array:
    """[size, extent], each row with the sum one; `middle` is that of the first."""
    stretch = max(step, 1.0) if antialias else 1.0
    centers = (step * np.arange(size) + middle)[:, None]
    first, end = (np.floor(centers + sign * reach * stretch + 0.5) for sign in (-1, 1))
    beside = int(np.ceil(reach * stretch)) + 1
    pixels = np.arange(-beside, extent + beside)
    weights = np.where((pixels >= first) & (pixels < end), weigh((pixels + 0.5 - centers) / stretch), 0.0)
    inside = weights[:, beside:-beside]
    if repeat_edges:
        inside[:, 0] += weights[:, :beside].sum(1)
        inside[:, -1] += weights[:, -beside:].sum(1)
    return np.asarray(inside / inside.sum(axis=1, keepdims=True))
