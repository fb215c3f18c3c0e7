"""Where the maxima of a pooling lie, which TVM has no operator for."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes
import numpy as np
from tvm import relax
from tvm.relax import op

from ..dtypes import is_floating, numpy_dtype
from ..relax_ir.constants import constant_of
from ..relax_ir.tensors import shape_of

__all__ = ["places_of_maxima"]


def places_of_maxima(
    emit: Callable[[Any], Any],
    x: relax.Expr,
    size: Sequence[int],
    window: Sequence[int],
    strides: Sequence[int],
    before: Sequence[int],
    dilation: Sequence[int],
) -> relax.Expr:
    """Of [..., *extents] the places of the maxima, int64 [..., *size]: of several the first one.

    Places count along the rows of an image without its padding, of which there is so much `before`. All but `x` have a
    number for each axis of an image: two, down and across, or three.
    """
    shape, dtype, count = shape_of(x), str(x.ty.dtype), len(window)
    if not is_floating(dtype):  # no integer is below all that an image may have
        x = emit(op.astype(x, "float32" if dtype in ("int8", "uint8") else "float64"))
    else:  # nor is -inf; TVM finds what is above the lowest number
        lowest = ml_dtypes.finfo(numpy_dtype(dtype)).min
        above = constant_of(np.nextafter(lowest, np.zeros((), lowest.dtype)))
        x = emit(op.where(emit(op.equal(x, relax.const(-math.inf, dtype))), above, x))
    outer, extents = len(shape) - count, shape[-count:]
    axes = list(range(outer, len(shape)))
    reach = [(o - 1) * s + 1 for o, s in zip(size, strides, strict=True)]
    after = [
        max(0, d * (k - 1) + r - extent - p)
        for d, k, r, extent, p in zip(dilation, window, reach, extents, before, strict=True)
    ]
    around = [0] * (2 * outer) + [amount for both in zip(before, after, strict=True) for amount in both]
    padded = emit(op.nn.pad(x, around, pad_value=-math.inf))
    taps = []
    for steps in itertools.product(*map(range, window)):
        begin = [step * d for step, d in zip(steps, dilation, strict=True)]
        end = [b + r for b, r in zip(begin, reach, strict=True)]
        taps.append(emit(op.strided_slice(padded, axes, begin, end, strides)))
    tap = emit(op.argmax(emit(op.stack(taps, 0)), axis=0))
    # Of the first tap of each window, and what each further one along an axis adds.
    distances = [math.prod(extents[axis + 1 :]) for axis in range(count)]
    first = np.ix_(*(np.arange(o) * s - p for o, s, p in zip(size, strides, before, strict=True)))
    places = relax.const(sum(at * distance for at, distance in zip(first, distances, strict=True)), "int64")
    for axis, distance in enumerate(distances):
        step = tap
        if axis < count - 1:
            behind = relax.const(math.prod(window[axis + 1 :]), "int64")
            step = emit(op.floor_divide(tap, behind))
            tap = emit(op.subtract(tap, emit(op.multiply(step, behind))))
        places = emit(op.add(places, emit(op.multiply(step, relax.const(distance * dilation[axis], "int64")))))
    return places
