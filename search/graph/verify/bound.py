"""How likely it is that two different terms look equal modulo a prime, from their degrees."""

from __future__ import annotations

from dataclasses import dataclass
from math import log2, prod

from ..attributes import Conv2d
from ..terms import TermGraph
from .field import SMALL_EXPONENTS

__all__ = ["survival_log2"]


@dataclass(frozen=True)
class _Degree:
    """Degrees of numerator and denominator of the rational function that an element is."""

    top: int
    bottom: int = 0

    def plus(self, other: _Degree) -> _Degree:
        if not self.bottom and not other.bottom:
            return _Degree(max(self.top, other.top))
        return _Degree(max(self.top + other.bottom, other.top + self.bottom), self.bottom + other.bottom)

    def times(self, other: _Degree) -> _Degree:
        return _Degree(self.top + other.top, self.bottom + other.bottom)

    def summed(self, count: int) -> _Degree:
        """Of a sum of `count` of these."""
        return self if not self.bottom else _Degree(self.top + (count - 1) * self.bottom, count * self.bottom)


_FRESH = _Degree(1)


def survival_log2(before: TermGraph, after: TermGraph, prime: int) -> float:
    """Base-2 logarithm of a bound on the probability that one trial takes an unequal pair of graphs for equal.

    Choose one element of one output in which they differ as rational functions of the leaves and of the values of
    random functions. It looks equal when the difference vanishes at a random point: at most degree / prime (Schwartz
    and Zippel); or when two arguments of a random function that differ, or two values of it, coincide: at most
    degree / prime for each pair of arguments. A value is taken modulo the prime, so that it is uniform up to 2**-33.
    """
    left, left_degree, left_count = _degrees(before)
    right, right_degree, right_count = _degrees(after)
    difference = max(
        max(a.top + b.bottom, b.top + a.bottom) + a.bottom + b.bottom for a, b in zip(left, right, strict=True)
    )
    arguments = left_count + right_count
    coincidences = arguments * (arguments - 1) / 2 * (2 * max(left_degree, right_degree) + 1)
    return min(0.0, log2(difference + 1 + coincidences) - log2(prime))


def _degrees(graph: TermGraph) -> tuple[list[_Degree], int, int]:
    """Degrees of the outputs; the highest of a random function's arguments, and how many arguments there are."""
    degrees: dict[int, _Degree] = {}
    highest, count = 0, 0

    def random(index: int, arguments: list[_Degree], elements: int) -> _Degree:
        nonlocal highest, count
        highest = max(highest, *(d.top + d.bottom for d in arguments))
        count += elements
        return _FRESH

    for index in graph.live():
        term, size = graph.terms[index], graph.types[index].elements
        degree = [degrees[argument] for argument in term.args]
        types = [graph.types[argument] for argument in term.args]
        kind = getattr(term.attrs, "name", getattr(term.attrs, "kind", ""))
        result = _Degree(0)
        for d in degree:  # what moves data, or adds and subtracts
            result = (
                result.plus(d) if term.op == "binary" else _Degree(max(result.top, d.top), max(result.bottom, d.bottom))
            )
        if term.op == "leaf":
            result = _Degree(1)
        elif term.op == "matmul":
            result = degree[0].times(degree[1]).summed(types[0].shape[-1])
        elif isinstance(term.attrs, Conv2d):
            result = degree[0].times(degree[1]).summed(prod(types[1].shape))
        elif kind == "square":
            result = degree[0].times(degree[0])
        elif kind == "multiply":
            result = degree[0].times(degree[1])
        elif kind == "divide":
            result = degree[0].times(_Degree(degree[1].bottom, degree[1].top))
        elif kind == "power":
            raised = _Degree(SMALL_EXPONENTS * degree[0].top, SMALL_EXPONENTS * degree[0].bottom)
            random(index, degree, size)
            result = raised.plus(_FRESH)
        elif kind == "silu":
            result = degree[0].times(random(index, degree, size))
        elif kind == "rsqrt":
            random(index, degree, size)
            result = _Degree(0, 1)
        elif term.op == "softmax":
            extent = types[0].shape[term.attrs.axis]
            random(index, [degree[0].plus(degree[0].summed(extent))], size)
            result = _Degree(1, 1)
        elif term.op in ("reduce", "pool2d") and kind in ("sum", "mean", "avg"):
            result = degree[0].summed(
                types[0].elements // max(1, size) if term.op == "reduce" else prod(term.attrs.pool_size)
            )
        elif term.op in ("reduce", "pool2d"):
            random(index, degree, types[0].elements + size)
            result = _FRESH
        elif (term.op == "unary" and kind != "negative") or kind in ("maximum", "minimum"):
            random(index, degree, size * (1 + len(degree)))
            result = _FRESH
        degrees[index] = result
    return [degrees[output] for output in graph.outputs], highest, count
