"""Convolutions: merging those that share an input."""

from __future__ import annotations

from dataclasses import replace

from ..terms import Axis, Conv2d, Pad, Slice
from .rule import Attr, Group, Match, Pattern, Rule, concat, conv2d, pad, slice_, tensors, weights

__all__ = ["CONVOLUTION_RULES"]

(x,) = tensors("x")
(w,) = weights("w")


def ungrouped(m: Match) -> bool:
    """The convolution has one group."""
    return bool(m.a.groups == 1)


def pointwise(m: Match) -> bool:
    """The kernel is 1x1 and nothing is padded."""
    sizes = dict(zip(m.a.kernel_layout, m.w.shape, strict=True))
    return sizes["H"] == sizes["W"] == 1 and not any(m.a.padding)


def _ring_of_zeros(m: Match) -> Pad:
    ring = tuple(int(letter in "HW") for letter in m.a.kernel_layout)
    return Pad(ring, ring)


def _padded_by_one(m: Match) -> Conv2d:
    return replace(m.a, padding=(1, 1, 1, 1), dilation=(1, 1))


def _output_axis(m: Match) -> Axis:
    return Axis(m.a.kernel_layout.index("O"))


def _channels(index: int, count: int) -> Pattern:
    """The channels of a merged convolution that belong to weight `index`, 1 to count."""

    def box(m: Match) -> Slice:
        axis = m.a.out_layout.index("C")
        begin = sum(out.shape[axis] for out in m.out[: index - 1])
        shape = m.out[index - 1].shape
        first, last = [0] * len(shape), list(shape)
        first[axis], last[axis] = begin, begin + shape[axis]
        return Slice(tuple(first), tuple(last))

    parts = weights(" ".join(f"w{i}" for i in range(1, count + 1)))
    return slice_(conv2d(x, concat(parts, _output_axis), "a"), box)


def merge_shared_input(count: int) -> Rule:
    """conv(x, w1), ..., conv(x, wn) -> the channel blocks of conv(x, concat(w1, ..., wn))."""
    parts = weights(" ".join(f"w{i}" for i in range(1, count + 1)))
    return Rule(
        f"merge-conv2d-shared-input-{count}",
        before=tuple(conv2d(x, part, "a") for part in parts),
        after=tuple(_channels(i, count) for i in range(1, count + 1)),
        when=(ungrouped,),
        reason="one convolution reads x once and fills the machine better",
        source="TASO; Tensat's multi-pattern rule, for any number of convolutions at once",
    )


CONVOLUTION_RULES: tuple[Rule | Group, ...] = (
    Rule(
        "enlarge-pointwise-kernel",
        before=conv2d(x, w, "a"),
        after=conv2d(x, pad(w, _ring_of_zeros), _padded_by_one),
        when=(ungrouped, pointwise),
        reason="lets a 1x1 convolution merge with a 3x3 one",
        source="TASO",
    ),
    Group(
        "merge-conv2d-shared-input",
        member=conv2d(x, w, Attr("a")),
        shared=("x", "a"),
        make=merge_shared_input,
        reason="one convolution reads x once and fills the machine better",
        source="TASO",
    ),
)
