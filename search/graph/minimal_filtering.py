"""The matrices of Winograd's minimal filtering F(m x m, 3 x 3).

Y = A' [(G g G') * (B' d B)] A computes m * m outputs of a 3x3 filter g from a tile d of (m + 2)**2 inputs (Winograd;
Lavin and Gray, "Fast Algorithms for Convolutional Neural Networks", CVPR 2016).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

__all__ = ["MATRICES", "Matrices", "Matrix"]

Matrix = Sequence[Sequence[float]]


class Matrices(NamedTuple):
    """A' (m x size), B' (size x size) and G (size x 3), where size = m + 2."""

    result: Matrix
    data: Matrix
    weight: Matrix


MATRICES: Mapping[int, Matrices] = {
    2: Matrices(
        result=((1, 1, 1, 0), (0, 1, -1, -1)),
        data=((1, 0, -1, 0), (0, 1, 1, 0), (0, -1, 1, 0), (0, 1, 0, -1)),
        weight=((1, 0, 0), (1 / 2, 1 / 2, 1 / 2), (1 / 2, -1 / 2, 1 / 2), (0, 0, 1)),
    ),
    4: Matrices(  # from the points 0, 1, -1, 2, -2
        result=((1, 1, 1, 1, 1, 0), (0, 1, -1, 2, -2, 0), (0, 1, 1, 4, 4, 0), (0, 1, -1, 8, -8, 1)),
        data=(
            (4, 0, -5, 0, 1, 0),
            (0, -4, -4, 1, 1, 0),
            (0, 4, -4, -1, 1, 0),
            (0, -2, -1, 2, 1, 0),
            (0, 2, -1, -2, 1, 0),
            (0, 4, 0, -5, 0, 1),
        ),
        weight=(
            (1 / 4, 0, 0),
            (-1 / 6, -1 / 6, -1 / 6),
            (-1 / 6, 1 / 6, -1 / 6),
            (1 / 24, 1 / 12, 1 / 6),
            (1 / 24, -1 / 12, 1 / 6),
            (0, 0, 1),
        ),
    ),
}
"""By m."""
