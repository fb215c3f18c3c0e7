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

from ..transform.constants import constant_of
from ..transform.functions import extents

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
    """[..., height, width] -> [..., *sizes].

    Parameters
    ----------
    emit : callable
        Of a block builder.
    x : relax.Expr
    sizes : sequence of int
        Height and width of the result.
    steps : sequence of float
        Pixels of `x` from one of the result to the next, down and across.
    weigh : callable
        `linear`, or what `cubic` returns.
    reach : int
        Beyond this distance, weights are zero: 1 or 2.
    repeat_edges : bool
        Pixels beside the image count, and are like the nearest one.
    antialias : bool
        Where steps are longer than a pixel, weights reach as much further.
    first : sequence of float, optional
        Where the first pixel of the result has its middle, down and across, in pixels of `x`; unless given, half a step
        from the edge.
    """
    height, width = extents(x.ty)[-2:]
    dtype = str(x.ty.dtype)
    middles = [step / 2 for step in steps] if first is None else first
    down, across = (
        _weights(extent, size, step, middle, weigh, reach, repeat_edges, antialias).astype(dtype)
        for extent, size, step, middle in zip((height, width), sizes, steps, middles, strict=True)
    )
    if width != sizes[1] or steps[1] != 1:
        x = emit(op.matmul(x, constant_of(np.ascontiguousarray(across.T)), out_dtype=dtype))
    if height != sizes[0] or steps[0] != 1:
        x = emit(op.matmul(constant_of(down), x, out_dtype=dtype))
    return x


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
