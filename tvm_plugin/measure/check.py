"""Does a candidate compute what the untuned kernel computes?"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["ONE_OFF", "mismatch", "relative_tolerance"]

ONE_OFF = 0.01
"""Share of the integers that may be the next one, where they are rounded sums of floats. About one in 10,000 is, when
terms are added in another order."""

_BLOCK = 1 << 16
"""Elements that are compared at once."""

_FACTOR = {"float64": 64.0, "float32": 64.0}
_FACTOR_SMALL = 4.0
_EPSILON = {
    "float64": 2.0**-52,
    "float32": 2.0**-23,
    "float16": 2.0**-10,
    "tfloat32": 2.0**-10,
    "bfloat16": 2.0**-7,
    "bfloat16x2": 2.0**-15,
}


def relative_tolerance(dtype: str, reduction: int) -> float:
    """Largest accepted error of an element, relative to the larger of its size and the root mean square of all.

    A sum of K terms of random sign, added in any order, is wrong by about eps * sqrt(K) of its typical size. 64 times
    that leaves room for Winograd's transforms, which amplify rounding, and for approximated exp and erf; a wrong
    index or a missing tail is wrong by 1 / sqrt(K) and more. Types of 16 bits and fewer get 4 times: more would let
    real faults through. Integers must be equal.

    Parameters
    ----------
    dtype : str
        The least precise floating-point type of the kernel's inputs and outputs, or of its products' factors
        ("tfloat32"; "bfloat16x2" for sums of two).
    reduction : int
        Terms of the longest sum, K.
    """
    if not dtype.startswith(("float", "bfloat", "tfloat")):
        return 0.0
    epsilon = _EPSILON.get(dtype, 2.0**-3)
    return min(0.5, _FACTOR.get(dtype, _FACTOR_SMALL) * epsilon * math.sqrt(max(1, reduction)))


def mismatch(got: NDArray[Any], reference: NDArray[Any], tolerance: float, one_off: float = 0.0) -> str:
    """ "" where `got` is right, else what is wrong, in a line. NaN and infinity must be where the reference has them.

    Parameters
    ----------
    got, reference : ndarray
        One output, any shape.
    tolerance : float
        From `relative_tolerance`; 0 asks for equality.
    one_off : float
        Share of the integers that may differ by one.
    """
    if got.shape != reference.shape:
        return f"shape {got.shape}, expected {reference.shape}"
    if got.dtype.kind in "iub":
        wrong = got != reference
        if not wrong.any():
            return ""
        if wrong.mean() <= one_off and _differ_by_one(got[wrong], reference[wrong]):
            return ""
        return f"{int(wrong.sum())} of {got.size} elements differ, first at {_first(wrong)}"
    squares, count = 0.0, 0
    for _, expected in _blocks(got, reference):
        finite = expected[np.isfinite(expected)]
        with np.errstate(over="ignore"):
            squares += float(np.sum(np.square(finite, dtype=np.float64)))
        count += finite.size
    typical = math.sqrt(squares / max(1, count))
    if typical == math.inf:  # which would permit everything: of squares beyond float64, the largest make the mean
        typical = float(np.max(np.abs(reference), where=np.isfinite(reference), initial=0.0)) / math.sqrt(count)
    wrong_count, error = 0, 0.0
    for actual, expected in _blocks(got, reference):
        finite = np.isfinite(expected)
        if not finite.all():
            odd = ~finite
            if not np.array_equal(actual[odd], expected[odd], equal_nan=True):
                return "NaN or infinity where the reference has something else"
            expected, actual = expected[finite], actual[finite]
        off = np.abs(actual - expected)
        # The comparison is this way round so that NaN in `actual` counts as wrong.
        right = off <= tolerance * np.maximum(np.abs(expected), typical)
        if not right.all():
            wrong_count += int(right.size - right.sum())
            error = max(error, float(np.nan_to_num(off[~right], nan=np.inf).max()))
    if not wrong_count:
        return ""
    return (
        f"{wrong_count} of {count} elements are wrong, by up to {error:.3g} where a typical value is "
        f"{typical:.3g} (relative tolerance {tolerance:.1e})"
    )


def _differ_by_one(got: NDArray[Any], reference: NDArray[Any]) -> bool:
    """Whether all integers do. Not by wrapping around: an output that nobody wrote holds the largest, 0 is no next."""
    kind = np.uint64 if got.dtype == np.uint64 else np.int64
    high, low = np.maximum(got, reference).astype(kind), np.minimum(got, reference).astype(kind)
    return bool((high - low == 1).all())


def _blocks(got: NDArray[Any], reference: NDArray[Any]) -> Iterator[tuple[NDArray[Any], NDArray[Any]]]:
    """Both in pieces that stay in a core's cache: a large output took a second, a candidate on a GPU milliseconds."""
    actual, expected = got.reshape(-1), reference.reshape(-1)
    for start in range(0, expected.size, _BLOCK):
        yield actual[start : start + _BLOCK], expected[start : start + _BLOCK]


def _first(wrong: NDArray[np.bool_]) -> tuple[int, ...]:
    return tuple(int(i) for i in np.unravel_index(int(np.argmax(wrong)), wrong.shape))
