"""Arithmetic on shapes and attributes that several tables need."""

from __future__ import annotations

from collections.abc import Callable

from ..attributes import Axis, Pad, Permute, Slice
from .pattern import Pattern, Var, slice_
from .rule import Match

__all__ = [
    "aligned_box",
    "axis_of",
    "block",
    "box",
    "broadcasts_to",
    "columns_only",
    "inverse",
    "keeps_range",
    "keeps_sums_after_scale_small",
    "keeps_sums_before_scale_small",
    "numbered",
    "padding_around",
    "pads_space_only",
    "same_shape",
    "transposition",
]

Extents = tuple[int, ...]


def box(shape: Extents, axis: int, begin: int, end: int) -> Slice:
    """begin <= index < end along one axis, everything along the others."""
    first, last = [0] * len(shape), list(shape)
    first[axis], last[axis] = begin, end
    return Slice(tuple(first), tuple(last))


def block(merged: Pattern, index: int, axis: Callable[[Match], int] | int) -> Pattern:
    """The part of a merged result that belongs to root `index` of the rule, counted from 0.

    Roots follow each other along an axis, which is a number (negative: from the end) or a function of the match.
    """

    def part(m: Match) -> Slice:
        where = (axis(m) if callable(axis) else axis) % len(m.out[index].shape)
        begin = sum(out.shape[where] for out in m.out[:index])
        shape = m.out[index].shape
        return box(shape, where, begin, begin + shape[where])

    return slice_(merged, part)


def numbered(var: Var, count: int) -> tuple[Var, ...]:
    """x1, ..., xn."""
    return tuple(Var(f"{var.name}{i}", var.weight) for i in range(1, count + 1))


def axis_of(name: str, from_the_end: int) -> Callable[[Match], Axis]:
    """An axis of a variable, 1 for the last."""
    return lambda m: Axis(len(getattr(m, name).shape) - from_the_end)


def broadcasts_to(shape: Extents, target: Extents) -> bool:
    """Whether broadcasting `shape` with `target` gives `target`."""
    aligned = zip(shape[::-1], target[::-1], strict=False)
    return len(shape) <= len(target) and all(extent in (1, size) for extent, size in aligned)


def aligned_box(cut: Slice, shape: Extents) -> Slice:
    """What a slice of a broadcast result cuts out of an operand of this shape: all of it where the operand repeats."""
    skipped = len(cut.begin) - len(shape)
    cuts = list(zip(cut.begin[skipped:], cut.end[skipped:], shape, strict=True))
    return Slice(
        tuple(0 if size == 1 else begin for begin, _, size in cuts),
        tuple(1 if size == 1 else end for _, end, size in cuts),
    )


def columns_only(shape: Extents) -> bool:
    """Whether all extents but the last are 1."""
    return all(extent == 1 for extent in shape[:-1])


def same_shape(m: Match) -> bool:
    """x and y have the same shape."""
    return bool(m.x.shape == m.y.shape)


def keeps_sums_before_scale_small(m: Match) -> bool:
    """The factor c can wait until x was summed: unscaled, sums in float16 are no larger.

    float16 ends at 65504: queries are scaled before their product with the keys, lest scores overflow.
    """
    return bool(m.x.dtype != "float16" or abs(m.c.value) >= 1)


def keeps_sums_after_scale_small(m: Match) -> bool:
    """The factor c can be applied before x is summed: scaled, sums in float16 are no larger."""
    return bool(m.x.dtype != "float16" or abs(m.c.value) <= 1)


def keeps_range(m: Match) -> bool:
    """Products of weights, reciprocals, and sums and products in another order are numbers as good as those before: in
    float16 they may be 0 or infinite.
    """
    return bool(m.x.dtype != "float16")


def pads_space_only(pad: Pad, layout: str) -> bool:
    """Whether nothing but rows and columns of images is padded."""
    return all(letter in "HW" or not pad.before[i] + pad.after[i] for i, letter in enumerate(layout))


def padding_around(padding: tuple[int, int, int, int], pad: Pad, layout: str) -> tuple[int, int, int, int]:
    """Padding (top, left, bottom, right) together with what `pad` adds to rows and columns."""
    rows, columns = layout.index("H"), layout.index("W")
    outside = (pad.before[rows], pad.before[columns], pad.after[rows], pad.after[columns])
    top, left, bottom, right = map(sum, zip(padding, outside, strict=True))
    return top, left, bottom, right


def inverse(permutation: Permute) -> Permute:
    """Puts the dimensions back."""
    return Permute(tuple(permutation.axes.index(axis) for axis in range(len(permutation.axes))))


def transposition(rank: int) -> Permute:
    """Exchanges the last two dimensions."""
    return Permute((*range(rank - 2), rank - 1, rank - 2))
