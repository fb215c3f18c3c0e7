"""Where the maxima of a pooling lie, which TVM has no operator for."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes
import numpy as np
from tvm import relax
from tvm.relax import op

from ..dtypes import is_floating, numpy_dtype
from ..transform.constants import constant_of
from ..transform.functions import shape_of

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
    """Of [..., height, width] the places of the maxima, int64 [..., *size]: of several the first one.

    Places count along the rows of an image without its padding, of which there is so much `before`. All but `x` have
    two numbers, down and across.
    """
    shape, dtype = shape_of(x), str(x.ty.dtype)
    rank = len(shape)
    if not is_floating(dtype):  # no integer is below all that an image may have
        x = emit(op.astype(x, "float32" if dtype in ("int8", "uint8") else "float64"))
    else:  # nor is -inf; TVM finds what is above the lowest number
        lowest = ml_dtypes.finfo(numpy_dtype(dtype)).min
        above = constant_of(np.nextafter(lowest, np.zeros((), lowest.dtype)))
        x = emit(op.where(emit(op.equal(x, relax.const(-math.inf, dtype))), above, x))
    reach = [(o - 1) * s + 1 for o, s in zip(size, strides, strict=True)]
    after = [
        max(0, d * (k - 1) + r - extent - p)
        for d, k, r, extent, p in zip(dilation, window, reach, shape[-2:], before, strict=True)
    ]
    around = [0] * (2 * (rank - 2)) + [before[0], after[0], before[1], after[1]]
    padded = emit(op.nn.pad(x, around, pad_value=-math.inf))
    taps = []
    for row in range(window[0]):
        for column in range(window[1]):
            begin = [row * dilation[0], column * dilation[1]]
            end = [b + r for b, r in zip(begin, reach, strict=True)]
            taps.append(emit(op.strided_slice(padded, [rank - 2, rank - 1], begin, end, strides)))
    tap = emit(op.argmax(emit(op.stack(taps, 0)), axis=0))
    row = emit(op.floor_divide(tap, relax.const(window[1], "int64")))
    column = emit(op.subtract(tap, emit(op.multiply(row, relax.const(window[1], "int64")))))
    # Of the first tap of each window, and what each further one adds.
    first = [np.arange(o) * s - p for o, s, p in zip(size, strides, before, strict=True)]
    places = relax.const(first[0][:, None] * shape[-1] + first[1], "int64")
    for distance, steps in ((dilation[0] * shape[-1], row), (dilation[1], column)):
        places = emit(op.add(places, emit(op.multiply(steps, relax.const(distance, "int64")))))
    return places
