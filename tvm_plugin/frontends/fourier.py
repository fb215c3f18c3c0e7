"""How a discrete Fourier transform is cut into products with matrices of sines and cosines."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from ..errors import UnsupportedModelError

__all__ = ["LONGEST_PRODUCT", "factors", "waves"]

LONGEST_PRODUCT = 2048
"""Points of a transform by one product, which reads a matrix of as many rows: longer ones need factors."""


def factors(length: int) -> tuple[int, int] | None:
    """a and b of `length` = a * b, where two transforms (Cooley and Tukey) take less time than one product.

    Element n1 * b + n2 is transformed along n1, turned by n2 * k1 / length, and transformed along n2; result
    k2 * a + k1 comes out.

    Raises
    ------
    UnsupportedModelError
        The transform is longer than `LONGEST_PRODUCT`, and has no factors that help.
    """
    first = max(factor for factor in range(1, math.isqrt(length) + 1) if length % factor == 0)
    second = length // first
    # Small products and passes over memory take longer than a few more multiplications.
    if 10 * (first + second) < length:
        return first, second
    if length > LONGEST_PRODUCT:
        raise UnsupportedModelError(
            f"a Fourier transform of {length} points cannot be imported: of lengths that have no factors, "
            f"{LONGEST_PRODUCT} are the most"
        )
    return None


def waves(length: int, rows: int, columns: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Cosines and sines of row * column / length of a turn, each [rows, columns]."""
    places = np.arange(rows)[:, None] * np.arange(columns) % length  # exact, unlike large angles
    angles = places * (2 * math.pi / length)
    return np.cos(angles), np.sin(angles)
