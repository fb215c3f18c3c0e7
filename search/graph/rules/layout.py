"""Permutations, reshapes and slices, with each other and with element-wise functions."""

from __future__ import annotations

from ..terms import Permute, Shape, Slice
from .rule import Match, Rule, permute, reshape, slice_, tensors, unary

__all__ = ["LAYOUT_RULES"]

(x,) = tensors("x")


def keeps_order(m: Match) -> bool:
    """The permutation is the identity."""
    return list(m.p.axes) == sorted(m.p.axes)


def keeps_shape(m: Match) -> bool:
    """The reshape, or slice, leaves the shape as it is."""
    return bool(m.out[0] == m.x)


def _composed(m: Match) -> Permute:
    return Permute(tuple(m.inner.axes[axis] for axis in m.outer.axes))


def _slice_of_slice(m: Match) -> Slice:
    begin = tuple(map(sum, zip(m.inner.begin, m.outer.begin, strict=True)))
    size = map(int.__sub__, m.outer.end, m.outer.begin)
    return Slice(begin, tuple(map(sum, zip(begin, size, strict=True))))


LAYOUT_RULES: tuple[Rule, ...] = (
    Rule(
        "permute-permute",
        before=permute(permute(x, "inner"), "outer"),
        after=permute(x, _composed),
        reason="one copy instead of two",
    ),
    Rule(
        "permute-identity",
        before=permute(x, "p"),
        after=x,
        when=(keeps_order,),
        reason="nothing to do",
    ),
    Rule(
        "reshape-reshape",
        before=reshape(reshape(x, "inner"), "outer"),
        after=reshape(x, lambda m: Shape(m.outer.shape)),
        reason="only the last shape counts",
    ),
    Rule(
        "reshape-identity",
        before=reshape(x, "s"),
        after=x,
        when=(keeps_shape,),
        reason="nothing to do",
    ),
    Rule(
        "slice-slice",
        before=slice_(slice_(x, "inner"), "outer"),
        after=slice_(x, _slice_of_slice),
        reason="one copy instead of two",
    ),
    Rule(
        "slice-identity",
        before=slice_(x, "s"),
        after=x,
        when=(keeps_shape,),
        reason="nothing to do",
    ),
    Rule(
        "unary-after-permute",
        before=unary(permute(x, "p"), "f"),
        after=permute(unary(x, "f"), "p"),
        reason="lets permutations meet",
    ),
    Rule(
        "unary-before-permute",
        before=permute(unary(x, "f"), "p"),
        after=unary(permute(x, "p"), "f"),
        reason="lets permutations meet",
    ),
)
