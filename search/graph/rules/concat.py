"""Concatenation, slices and padding, with each other, with permutations and with element-wise functions."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from random import Random
from typing import Any

from ..attributes import Axis, Kind, Pad, Slice, TensorType
from .pattern import Pattern, Var, binary, concat, pad, permute, slice_, tensors, unary
from .rule import Match, Rule
from .shapes import aligned_box, inverse, numbered, same_shape

__all__ = ["CONCAT_LAWS", "CONCAT_RULES"]

x, y, z, u = tensors("x y z u")

MOST_PARTS = 4
"""Rules over the parts of a concatenation are made for 2 to this many."""


def within_first(m: Match) -> bool:
    """The slice lies within x."""
    return bool(m.s.end[m.c.axis] <= m.x.shape[m.c.axis])


def within_second(m: Match) -> bool:
    """The slice lies within y."""
    return bool(m.s.begin[m.c.axis] >= m.x.shape[m.c.axis])


def leaves_axis_whole(m: Match) -> bool:
    """The slice does not cut the axis of the concatenation."""
    axis = m.c.axis
    return bool(m.s.begin[axis] == 0 and m.s.end[axis] == m.x.shape[axis] + m.y.shape[axis])


def other_axis(m: Match) -> bool:
    """The concatenations are along two different axes, and all parts have the sizes of a grid."""
    inner, outer = m.inner.axis, m.outer.axis
    return bool(inner != outer and m.x.shape[inner] == m.z.shape[inner] and m.y.shape[inner] == m.u.shape[inner])


def same_axis(m: Match) -> bool:
    """Both concatenations are along the same axis."""
    return bool(m.inner.axis == m.outer.axis)


def cuts_nothing(m: Match) -> bool:
    """The slice takes all of x."""
    return bool(m.out[0] == m.x)


def pads_nothing(m: Match) -> bool:
    """The padding is empty."""
    return not any((*m.p.before, *m.p.after))


def cuts_within(m: Match) -> bool:
    """The slice takes nothing of the padding."""
    bounds = zip(m.s.begin, m.s.end, m.p.before, m.x.shape, strict=True)
    return all(begin >= pad and end <= pad + size for begin, end, pad, size in bounds)


def whole_is_same(m: Match) -> bool:
    """x and y, and z and u, are alike along the axis, so that the functions can be applied to each pair."""
    shapes = [m.x.shape, m.y.shape, m.z.shape, m.u.shape]
    return shapes[0] == shapes[2] and shapes[1] == shapes[3]


def _shifted(m: Match) -> Slice:
    """The slice as one of y."""
    begin, end, axis = list(m.s.begin), list(m.s.end), m.c.axis
    begin[axis] -= m.x.shape[axis]
    end[axis] -= m.x.shape[axis]
    return Slice(tuple(begin), tuple(end))


def _part_of(name: str) -> Callable[[Match], Slice]:
    def part(m: Match) -> Slice:
        end = list(m.s.end)
        end[m.c.axis] = getattr(m, name).shape[m.c.axis]
        return Slice(m.s.begin, tuple(end))

    return part


def _slice_of_slice(m: Match) -> Slice:
    begin = tuple(map(sum, zip(m.inner.begin, m.outer.begin, strict=True)))
    size = map(int.__sub__, m.outer.end, m.outer.begin)
    return Slice(begin, tuple(map(sum, zip(begin, size, strict=True))))


def _aligned(name: str) -> Callable[[Match], Slice]:
    return lambda m: aligned_box(m.s, getattr(m, name).shape)


def _permuted_axis(m: Match) -> Axis:
    return Axis(m.p.axes.index(m.c.axis))


def _original_axis(m: Match) -> Axis:
    return Axis(m.p.axes[m.c.axis])


def _pad_of_pad(m: Match) -> Pad:
    inner, outer = m.inner, m.outer
    before = tuple(map(sum, zip(inner.before, outer.before, strict=True)))
    return Pad(before, tuple(map(sum, zip(inner.after, outer.after, strict=True))))


def _slice_inside(m: Match) -> Slice:
    begin = tuple(b - p for b, p in zip(m.s.begin, m.p.before, strict=True))
    return Slice(begin, tuple(e - p for e, p in zip(m.s.end, m.p.before, strict=True)))


def _pad_after(m: Match) -> Pad:
    return Pad(tuple(m.q.before[axis] for axis in m.p.axes), tuple(m.q.after[axis] for axis in m.p.axes))


def _pad_before(m: Match) -> Pad:
    axes = inverse(m.q).axes
    return Pad(tuple(m.p.before[i] for i in axes), tuple(m.p.after[i] for i in axes))


def concat_of_slices(count: int) -> Rule:
    """concat of neighbouring slices of x -> one slice of x."""
    cuts = [f"s{i}" for i in range(1, count + 1)]

    def neighbours(m: Match) -> bool:
        """Each slice ends where the next begins along the axis, and they agree elsewhere."""
        axis, boxes = m.c.axis, [getattr(m, cut) for cut in cuts]
        return all(
            s.end[axis] == t.begin[axis]
            and all((s.begin[i], s.end[i]) == (t.begin[i], t.end[i]) for i in range(len(s.begin)) if i != axis)
            for s, t in pairwise(boxes)
        )

    def union(m: Match) -> Slice:
        return Slice(getattr(m, cuts[0]).begin, getattr(m, cuts[-1]).end)

    def example(random: Random) -> tuple[dict[str, TensorType], dict[str, Any]]:
        shape = [random.randint(1, 4) for _ in range(random.randint(1, 3))]
        axis = random.randrange(len(shape))
        begin = [random.randrange(extent) for extent in shape]
        end = [random.randint(first + 1, extent) for first, extent in zip(begin, shape, strict=True)]
        bounds = [random.randint(0, 1)]
        for _ in cuts:
            bounds.append(bounds[-1] + random.randint(1, 3))
        shape[axis] = bounds[-1] + random.randint(0, 1)
        attrs: dict[str, Any] = {"c": Axis(axis)}
        for cut, first, last in zip(cuts, bounds, bounds[1:], strict=False):
            begin[axis], end[axis] = first, last
            attrs[cut] = Slice(tuple(begin), tuple(end))
        return {"x": TensorType(tuple(shape))}, attrs

    return Rule(
        f"concat-of-slices-{count}",
        before=concat([slice_(x, cut) for cut in cuts], "c"),
        after=slice_(x, union),
        when=(neighbours,),
        example=example,
        reason="what was cut apart needs no copy to be whole again",
        source="TASO",
    )


def concat_of_unary(count: int) -> Rule:
    """concat(f(x1), ..., f(xn)) -> f(concat(x1, ..., xn))."""
    parts = numbered(x, count)
    return Rule(
        f"concat-of-unary-{count}",
        before=concat([unary(part, "f") for part in parts], "c"),
        after=unary(concat(parts, "c"), "f"),
        reason="one kernel instead of several",
        source="TASO",
    )


def concat_of_binary(count: int) -> Rule:
    """concat(f(x1, u1), ..., f(xn, un)) -> f(concat(x1, ..., xn), concat(u1, ..., un))."""
    left, right = numbered(x, count), numbered(u, count)
    terms = [binary(a, b, "f") for a, b in zip(left, right, strict=True)]

    def operands_join(m: Match) -> bool:
        """On either side, operands differ along the axis alone, and repeat nowhere along it.

        Lengths may add up though one repeats, where another is empty.
        """
        axis = m.c.axis - len(m.out[0].shape)
        lengths = [m.type(term).shape[axis] for term in terms]
        for parts in (left, right):
            shapes = [getattr(m, part.name).shape for part in parts]
            if min(map(len, shapes)) < -axis or [shape[axis] for shape in shapes] != lengths:
                return False
            if len({(shape[:axis], shape[axis:][1:]) for shape in shapes}) > 1:
                return False
        return True

    def example(random: Random) -> tuple[dict[str, TensorType], dict[str, Any]]:
        shape = [random.randint(1, 3) for _ in range(random.randint(1, 3))]
        axis = random.randrange(len(shape))
        types = {}
        for pair in zip(left, right, strict=True):
            size = random.randint(0, 2)
            for part in pair:
                shape[axis] = random.choice((size, 1))
                types[part.name] = TensorType(tuple(shape))
        return types, {"c": Axis(axis), "f": Kind("add")}

    return Rule(
        f"concat-of-binary-{count}",
        before=concat(terms, "c"),
        after=binary(concat(left, _axis_in(left)), concat(right, _axis_in(right)), "f"),
        when=(operands_join,),
        example=example,
        reason="lets what was computed side by side merge",
        source="TASO",
    )


def _axis_in(parts: tuple[Var, ...]) -> Callable[[Match], Axis]:
    return lambda m: Axis(m.c.axis - len(m.out[0].shape) + len(getattr(m, parts[0].name).shape))


def _flattened(left: tuple[Pattern, ...], middle: tuple[Pattern, ...], right: tuple[Pattern, ...], name: str) -> Rule:
    return Rule(
        name,
        before=concat((*left, concat(middle, "inner"), *right), "outer"),
        after=concat((*left, *middle, *right), "outer"),
        when=(same_axis,),
        reason="one copy instead of two",
        source="TASO",
    )


_COUNTS = range(2, MOST_PARTS + 1)
_ONE = "one kernel instead of several"
_MEET = "lets copies meet and cancel"
_CUT = "what is not needed is not copied"
_TIDY = "nothing to do"

CONCAT_RULES: tuple[Rule, ...] = (
    *(concat_of_slices(count) for count in _COUNTS),
    *(concat_of_unary(count) for count in _COUNTS),
    *(concat_of_binary(count) for count in _COUNTS),
    Rule("slice-slice", slice_(slice_(x, "inner"), "outer"), slice_(x, _slice_of_slice), "one copy instead of two"),
    Rule("slice-identity", slice_(x, "s"), x, _TIDY, when=(cuts_nothing,)),
    Rule("pad-identity", pad(x, "p"), x, _TIDY, when=(pads_nothing,)),
    Rule("pad-pad", pad(pad(x, "inner"), "outer"), pad(x, _pad_of_pad), "one copy instead of two"),
    Rule("slice-of-pad", slice_(pad(x, "p"), "s"), slice_(x, _slice_inside), _CUT, when=(cuts_within,)),
    Rule("slice-of-first", slice_(concat((x, y), "c"), "s"), slice_(x, "s"), _CUT, when=(within_first,), source="TASO"),
    Rule(
        "slice-of-second",
        slice_(concat((x, y), "c"), "s"),
        slice_(y, _shifted),
        _CUT,
        when=(within_second,),
        source="TASO",
    ),
    Rule("unary-of-slice", unary(slice_(x, "s"), "f"), slice_(unary(x, "f"), "s"), "fuses with what computes x"),
    Rule(
        "binary-of-slices",
        before=binary(slice_(x, "s"), slice_(y, "s"), "f"),
        after=slice_(binary(x, y, "f"), "s"),
        when=(same_shape,),
        reason=_ONE,
    ),
    Rule(
        "concat-of-permutes",
        before=concat((permute(x, "p"), permute(y, "p")), "c"),
        after=permute(concat((x, y), _original_axis), "p"),
        reason="one copy instead of several",
        source="TASO",
    ),
    _flattened((), (x, y), (z,), "concat-flatten-first"),
    _flattened((x,), (y, z), (), "concat-flatten-last"),
    _flattened((), (x, y), (z, u), "concat-flatten-first-of-three"),
    _flattened((x,), (y, z), (u,), "concat-flatten-second-of-three"),
    _flattened((x, y), (z, u), (), "concat-flatten-third-of-three"),
)
"""Rules that join what was cut, and apply functions to the whole."""

_LAW = "needed to prove other equalities, or where only a part is used"

CONCAT_LAWS: tuple[Rule, ...] = (
    Rule("unary-of-concat", unary(concat((x, y), "c"), "f"), concat((unary(x, "f"), unary(y, "f")), "c"), _LAW),
    Rule(
        "binary-of-concats",
        before=binary(concat((x, y), "c"), concat((z, u), "c"), "f"),
        after=concat((binary(x, z, "f"), binary(y, u, "f")), "c"),
        when=(whole_is_same,),
        reason=_LAW,
        source="TASO",
    ),
    Rule("slice-of-unary", slice_(unary(x, "f"), "s"), unary(slice_(x, "s"), "f"), _LAW),
    Rule(
        "slice-of-binary",
        before=slice_(binary(x, y, "f"), "s"),
        after=binary(slice_(x, _aligned("x")), slice_(y, _aligned("y")), "f"),
        reason=_LAW,
    ),
    Rule(
        "slice-of-concat",
        before=slice_(concat((x, y), "c"), "s"),
        after=concat((slice_(x, _part_of("x")), slice_(y, _part_of("y"))), "c"),
        when=(leaves_axis_whole,),
        reason=_LAW,
    ),
    Rule(
        "concat-nest-first",
        before=concat((x, y, z), "c"),
        after=concat((concat((x, y), "c"), z), "c"),
        reason=_LAW,
        source="TASO",
    ),
    Rule(
        "concat-nest-last",
        before=concat((x, y, z), "c"),
        after=concat((x, concat((y, z), "c")), "c"),
        reason=_LAW,
        source="TASO",
    ),
    Rule(
        "concat-exchange",
        before=concat((concat((x, y), "inner"), concat((z, u), "inner")), "outer"),
        after=concat((concat((x, z), "outer"), concat((y, u), "outer")), "inner"),
        when=(other_axis,),
        reason=_LAW,
        source="TASO",
    ),
    Rule(
        "permute-of-concat",
        before=permute(concat((x, y), "c"), "p"),
        after=concat((permute(x, "p"), permute(y, "p")), _permuted_axis),
        reason=_LAW,
        source="TASO",
    ),
    Rule("permute-of-pad", permute(pad(x, "q"), "p"), pad(permute(x, "p"), _pad_after), _MEET),
    Rule("pad-of-permute", pad(permute(x, "q"), "p"), permute(pad(x, _pad_before), "q"), _MEET),
)
"""Rules that take apart what the others join."""
