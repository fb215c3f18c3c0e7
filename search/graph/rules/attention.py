"""Attention: which biases softmax forgets, and those of projections that were merged."""

from __future__ import annotations

from itertools import pairwise
from random import Random
from typing import Any

from ..attributes import Axis, Shape, TensorType
from .pattern import Pattern, add, broadcast, concat, matmul, reshape, slice_, softmax, tensors, weights
from .rule import Group, Match, Rule
from .shapes import box, broadcasts_to, numbered

__all__ = ["ATTENTION_RULES"]

x, z = tensors("x z")
(w,) = weights("w")


def constant_along_axis(m: Match) -> bool:
    """w is one number for all that softmax compares, and broadcasts to x."""
    place = m.a.axis - len(m.x.shape)
    inside = -place <= len(m.w.shape)
    return broadcasts_to(m.w.shape, m.x.shape) and (not inside or m.w.shape[place] == 1)


def compares_columns(m: Match) -> bool:
    """Softmax compares columns, and w adds the same to each column of the product."""
    return bool(m.a.axis == len(m.out[0].shape) - 1 and m.w.shape[-1:] == (1,) and broadcasts_to(m.w.shape, m.x.shape))


def bias_of_slices(count: int) -> Rule:
    """x[s1] + w1, ..., x[sn] + wn -> the same slices of x + concat(w1, ..., wn), where the slices are all of x."""
    parts = numbered(w, count)
    cuts = [f"s{i}" for i in range(1, count + 1)]

    def side_by_side(m: Match) -> bool:
        """The slices follow each other along one axis, from the first to the last element, and cut no other."""
        boxes, axis = [getattr(m, cut) for cut in cuts], _axis(m)
        return bool(
            m.x.shape
            and boxes[0].begin[axis] == 0
            and boxes[-1].end[axis] == m.x.shape[axis]
            and all(s.end[axis] == t.begin[axis] for s, t in pairwise(boxes))
            and all((s.begin[i], s.end[i]) == (0, size) for s in boxes for i, size in enumerate(m.x.shape) if i != axis)
        )

    def biases_along_axis(m: Match) -> bool:
        """Each weight varies along that axis only, and adds no dimensions."""
        axis = _axis(m) - len(m.x.shape)
        shapes = [getattr(m, part.name).shape for part in parts]
        return all(
            broadcasts_to(shape, out.shape)
            and all(extent == 1 for i, extent in enumerate(shape) if i - len(shape) != axis)
            for shape, out in zip(shapes, m.out, strict=True)
        )

    def row(index: int) -> Pattern:
        flat = reshape(parts[index], lambda m: Shape((getattr(m, parts[index].name).elements,)))
        return broadcast(flat, lambda m: Shape((m.out[index].shape[_axis(m)],)))

    def along_axis(m: Match) -> Shape:
        axis = _axis(m)
        return Shape((m.x.shape[axis], *(1,) * (len(m.x.shape) - axis - 1)))

    def example(random: Random) -> tuple[dict[str, TensorType], dict[str, Any]]:
        rank = random.randint(1, 3)
        axis = random.randrange(rank)
        sizes = [random.randint(1, 3) for _ in cuts]
        shape = [sum(sizes) if i == axis else random.randint(1, 3) for i in range(rank)]
        types, attrs, begin = {"x": TensorType(tuple(shape))}, {}, 0
        for part, cut, size in zip(parts, cuts, sizes, strict=True):
            attrs[cut] = box(tuple(shape), axis, begin, begin + size)
            begin += size
            types[part.name] = TensorType((random.choice((1, size)), *(1,) * (rank - axis - 1)))
        return types, attrs

    whole = add(x, reshape(concat([row(i) for i in range(count)], Axis(0)), along_axis))
    return Rule(
        f"bias-of-slices-{count}",
        before=tuple(add(slice_(x, cut), part) for part, cut in zip(parts, cuts, strict=True)),
        after=tuple(slice_(whole, cut) for cut in cuts),
        when=(side_by_side, biases_along_axis),
        example=example,
        reason=_ONE_BIAS,
    )


def _axis(m: Match) -> int:
    """The axis that the first slice cuts."""
    cut = [i for i, size in enumerate(m.x.shape) if m.s1.end[i] - m.s1.begin[i] != size]
    return cut[0] if cut else 0


_ONE_BIAS = "a bias added to the whole fuses with the product that computes it"

ATTENTION_RULES: tuple[Rule | Group, ...] = (
    Rule(
        "softmax-of-shifted",
        before=softmax(add(x, w), "a"),
        after=softmax(x, "a"),
        when=(constant_along_axis,),
        reason="softmax compares; a bias of all that it compares changes nothing (a mask, which swamps x, is none)",
    ),
    Rule(
        "softmax-of-scores-with-shifted-keys",
        before=softmax(matmul(z, add(x, w)), "a"),
        after=softmax(matmul(z, x), "a"),
        when=(compares_columns,),
        reason="a bias of the keys adds the same to every score of a query",
    ),
    Group(
        "bias-of-slices",
        member=add(slice_(x, "s"), w),
        shared=("x",),
        make=bias_of_slices,
        reason=_ONE_BIAS,
        order=lambda attrs: attrs["s"].begin,
    ),
)
