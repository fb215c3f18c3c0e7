"""Reductions and softmax, with permutations, products, scales and each other."""

from __future__ import annotations

from dataclasses import replace
from math import prod

from ..attributes import Axis, Permute, Reduce
from .pattern import add, full, matmul, multiply, permute, reduce, softmax, tensors
from .rule import Match, Rule
from .shapes import keeps_range, keeps_sums_before_scale_small, same_shape

__all__ = ["REDUCTION_RULES"]

x, y = tensors("x y")
c = full("c")


def sums(m: Match) -> bool:
    """A sum or a mean."""
    return bool(m.r.kind in ("sum", "mean"))


def same_kind(m: Match) -> bool:
    """Both reductions are of the same kind."""
    return bool(m.inner.kind == m.outer.kind)


def keeps_or_drops(m: Match) -> bool:
    """Both reductions keep the reduced dimensions, or both drop them."""
    return bool(m.inner.keepdims == m.outer.keepdims)


def keeps_means_small(m: Match) -> bool:
    """A mean of means sums fewer elements at once than one of all: GPUs sum float16 as such, which ends at 65504."""
    return bool(m.outer.kind != "mean" or m.x.dtype != "float16")


def reduces_nothing(m: Match) -> bool:
    """All reduced dimensions are 1 and stay."""
    return bool(m.out[0] == m.x)


def one_number(m: Match) -> bool:
    """The factor is a single number that adds no dimensions."""
    return bool(prod(m.c.shape) == 1 and len(m.c.shape) <= min(len(m.x.shape), len(m.out[0].shape)))


def reduces_rows(m: Match) -> bool:
    """Only rows of the product are reduced, and they stay, as one."""
    rank = len(m.type(_PRODUCT).shape)
    return bool(m.r.axes == (rank - 2,) and m.r.keepdims and len(m.x.shape) == rank)


_PRODUCT = matmul(x, y)


def _axes_before(m: Match) -> tuple[int, ...]:
    return tuple(sorted(m.p.axes[axis] for axis in m.r.axes))


def _reduce_before(m: Match) -> Reduce:
    return replace(m.r, axes=_axes_before(m))


def _permute_rest(m: Match) -> Permute:
    """What the permutation does to the dimensions that are left."""
    if m.r.keepdims:
        return Permute(m.p.axes)
    left = [axis for i, axis in enumerate(m.p.axes) if i not in m.r.axes]
    return Permute(tuple(sorted(left).index(axis) for axis in left))


def _both_reductions(m: Match) -> Reduce:
    if m.inner.keepdims:
        return replace(m.outer, axes=tuple(sorted({*m.inner.axes, *m.outer.axes})))
    left = [axis for axis in range(len(m.x.shape)) if axis not in m.inner.axes]
    return replace(m.outer, axes=tuple(sorted((*m.inner.axes, *(left[axis] for axis in m.outer.axes)))))


def _axis_before(m: Match) -> Axis:
    return Axis(m.p.axes[m.a.axis])


_MEET = "lets copies meet and cancel"
_FEWER = "fewer elements are computed"

REDUCTION_RULES: tuple[Rule, ...] = (
    Rule(
        "reduce-of-permute",
        before=reduce(permute(x, "p"), "r"),
        after=permute(reduce(x, _reduce_before), _permute_rest),
        reason="what is permuted is smaller, or the permutation disappears",
    ),
    Rule(
        "reduce-of-reduce",
        before=reduce(reduce(x, "inner"), "outer"),
        after=reduce(x, _both_reductions),
        when=(same_kind, keeps_or_drops),
        worth=(keeps_means_small,),
        reason="one pass instead of two",
    ),
    Rule("reduce-identity", reduce(x, "r"), x, "nothing to do", when=(reduces_nothing,)),
    Rule(
        "sum-of-reductions",
        before=add(reduce(x, "r"), reduce(y, "r")),
        after=reduce(add(x, y), "r"),
        when=(sums, same_shape),
        worth=(keeps_range,),
        reason="one pass instead of two",
    ),
    Rule(
        "reduce-of-scaled",
        before=reduce(multiply(x, c), "r"),
        after=multiply(reduce(x, "r"), c),
        when=(sums, one_number),
        worth=(keeps_sums_before_scale_small,),
        reason=_FEWER,
    ),
    Rule(
        "reduce-of-matmul-rows",
        before=reduce(_PRODUCT, "r"),
        after=matmul(reduce(x, "r"), y),
        when=(sums, reduces_rows),
        worth=(keeps_range,),
        reason="a product of one row",
    ),
    Rule("softmax-of-permute", softmax(permute(x, "p"), "a"), permute(softmax(x, _axis_before), "p"), _MEET),
    Rule(
        "permute-of-softmax",
        before=permute(softmax(x, "a"), "p"),
        after=softmax(permute(x, "p"), lambda m: Axis(m.p.axes.index(m.a.axis))),
        reason=_MEET,
    ),
)
