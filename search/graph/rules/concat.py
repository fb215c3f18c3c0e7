"""Concatenation and slices, with each other and with element-wise functions."""

from __future__ import annotations

from collections.abc import Callable

from ..terms import Axis, Slice
from .rule import Match, Pattern, Rule, binary, concat, slice_, tensors, unary

__all__ = ["CONCAT_RULES"]

x, y, z, u, v = tensors("x y z u v")


def neighbours(m: Match) -> bool:
    """The slices lie side by side along the axis of the concatenation, and agree elsewhere."""
    axis = m.c.axis
    return bool(m.s.end[axis] == m.t.begin[axis]) and all(
        m.s.begin[i] == m.t.begin[i] and m.s.end[i] == m.t.end[i] for i in range(len(m.s.begin)) if i != axis
    )


def same_split(m: Match) -> bool:
    """Operands that are concatenated agree with each other, as do their results, along the axis."""
    axis = m.c.axis - len(m.out[0].shape)
    return all(
        -axis <= len(side.shape) and side.shape[axis] == result.shape[axis]
        for side, result in ((m.x, m.type(_LEFT)), (m.u, m.type(_LEFT)), (m.y, m.type(_RIGHT)), (m.v, m.type(_RIGHT)))
    )


def _axis_from_the_end(part: str) -> Callable[[Match], Axis]:
    return lambda m: Axis(m.c.axis - len(m.out[0].shape) + len(getattr(m, part).shape))


def _union(m: Match) -> Slice:
    return Slice(m.s.begin, m.t.end)


def sliced_alike(m: Match) -> bool:
    """Both operands have the result's shape, so that one slice cuts both."""
    return bool(m.x.shape == m.y.shape)


_LEFT, _RIGHT = binary(x, u, "f"), binary(y, v, "f")


def unary_of_concat(count: int) -> tuple[Rule, Rule]:
    """f(concat(x1, ..., xn)) <-> concat(f(x1), ..., f(xn))."""
    parts = tensors(" ".join(f"x{i}" for i in range(1, count + 1)))
    inside: tuple[Pattern, ...] = tuple(unary(part, "f") for part in parts)
    outer, inner = unary(concat(parts, "c"), "f"), concat(inside, "c")
    return (
        Rule(f"unary-of-concat-{count}", outer, inner, reason="lets concatenations meet", source="TASO"),
        Rule(f"concat-of-unary-{count}", inner, outer, reason="one kernel instead of several", source="TASO"),
    )


CONCAT_RULES: tuple[Rule, ...] = (
    Rule(
        "concat-of-slices",
        before=concat((slice_(x, "s"), slice_(x, "t")), "c"),
        after=slice_(x, _union),
        when=(neighbours,),
        reason="what was cut apart needs no copy to be whole again",
        source="TASO",
    ),
    Rule(
        "unary-of-slice",
        before=unary(slice_(x, "s"), "f"),
        after=slice_(unary(x, "f"), "s"),
        reason="the function fuses with what computes x",
    ),
    Rule(
        "slice-of-unary",
        before=slice_(unary(x, "f"), "s"),
        after=unary(slice_(x, "s"), "f"),
        reason="the function is computed for what is needed",
    ),
    Rule(
        "binary-of-slices",
        before=binary(slice_(x, "s"), slice_(y, "s"), "f"),
        after=slice_(binary(x, y, "f"), "s"),
        when=(sliced_alike,),
        reason="one kernel instead of several",
    ),
    Rule(
        "concat-of-binary",
        before=concat((_LEFT, _RIGHT), "c"),
        after=binary(
            concat((x, y), _axis_from_the_end("x")),
            concat((u, v), _axis_from_the_end("u")),
            "f",
        ),
        when=(same_split,),
        reason="lets what was computed side by side merge",
        source="TASO",
    ),
    *unary_of_concat(2),
)
