"""The matrices of Winograd's minimal filtering F(m, r), by Toom and Cook's algorithm.

Y = A' [(G g) * (B' d)] computes m outputs of a filter g with r taps from a run d of m + r - 1 inputs, with as many
multiplications: polynomials of degree m - 1 and r - 1 are multiplied by their values at m + r - 1 points, infinity
among them, and the transposed algorithm filters. In two dimensions each is transformed by its own matrices (Winograd;
Lavin and Gray, "Fast Algorithms for Convolutional Neural Networks", CVPR 2016).

Rounding errors grow with the number of points, and depend on where they are (Barabasz et al., "Error Analysis and
Improving the Accuracy of Winograd Convolution for Deep Neural Networks", 2018). Those below had the least error of the
sets {0, p, -p, q, -q, ..., infinity} over fourteen small fractions that are exact in float32: F(4 x 4, 3 x 3) is off
by 1.7e-6 of the largest result, and by 6.9e-6 from the usual 0, 1, -1, 2, -2.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction
from functools import cache
from math import prod
from typing import NamedTuple

__all__ = ["Matrices", "Matrix", "matrices"]

Matrix = Sequence[Sequence[float]]


class Matrices(NamedTuple):
    """A' (m x size), B' (size x size) and G (size x r), where size = m + r - 1."""

    result: Matrix
    data: Matrix
    weight: Matrix


POINTS: Mapping[int, tuple[float, ...]] = {
    1: (),
    4: (1,),
    6: (3 / 4, 3 / 2),
    8: (1 / 2, 1, 2),
    10: (1 / 2, 3 / 4, 5 / 4, 2),
    12: (1 / 2, 3 / 4, 1, 3 / 2, 2),
}
"""By m + r - 1: the positive points. With them come their negatives, zero and infinity."""


@cache
def matrices(outputs: int, taps: int) -> Matrices:
    """Those of F(outputs, taps). Points are ordered 0, p, -p, q, -q, ..., infinity.

    Raises KeyError where POINTS has none for outputs + taps - 1.
    """
    size = outputs + taps - 1
    pairs = [(Fraction(point), -Fraction(point)) for point in POINTS[size]]
    points = [Fraction(0), *(point for pair in pairs for point in pair)][: size - 1]
    others = [[other for other in points if other != point] for point in points]
    scales = [
        prod((point - other for other in rest), start=Fraction(1)) for point, rest in zip(points, others, strict=True)
    ]
    result = [[*(point**i for point in points), Fraction(i == outputs - 1)] for i in range(outputs)]
    data = [*([*_expanded(rest), Fraction(0)] for rest in others), _expanded(points)]
    weight = [
        *([point**k / scale for k in range(taps)] for point, scale in zip(points, scales, strict=True)),
        [Fraction(k == taps - 1) for k in range(taps)],
    ]
    return Matrices(*(tuple(tuple(map(float, row)) for row in matrix) for matrix in (result, data, weight)))


def _expanded(roots: Sequence[Fraction]) -> list[Fraction]:
    """Coefficients of the product of all x - root, the constant one first."""
    result = [Fraction(1)]
    for root in roots:
        result = [a - root * b for a, b in zip([Fraction(0), *result], [*result, Fraction(0)], strict=True)]
    return result
