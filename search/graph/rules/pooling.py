"""Pooling: with convolutions, padding, element-wise functions, concatenation, and pooling again."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from math import prod
from random import Random
from typing import Any

from ..attributes import Conv2d, Full, Pad, Pool2d, Reduce, TensorType
from .pattern import add, concat, conv2d, full, multiply, pad, pool2d, reduce, relu, tensors, weights
from .rule import Match, Rule, both_ways
from .shapes import (
    keeps_range,
    keeps_sums_after_scale_small,
    keeps_sums_before_scale_small,
    padding_around,
    pads_space_only,
    same_shape,
)

__all__ = ["POOLING_LAWS", "POOLING_RULES"]

x, y = tensors("x y")
(w,) = weights("w")
c = full("c")


def takes_the_largest(m: Match) -> bool:
    """Maximum pooling."""
    return bool(m.a.kind == "max")


def no_empty_window(m: Match) -> bool:
    """Every window has an element that is not padding."""
    return _every_window_sees(m.a, m.x, m.out[0])


def averages(m: Match) -> bool:
    """Average pooling."""
    return bool(m.a.kind == "avg")


def weight_is_pointwise(m: Match) -> bool:
    """The convolution is a product of a matrix with each pixel, in the layout of the pooling."""
    kernel = dict(zip(m.b.kernel_layout, m.w.shape, strict=True))
    plain = m.b.strides == (1, 1) and not any(m.b.padding) and kernel["H"] == kernel["W"] == 1
    return bool(plain and m.b.data_layout == m.b.out_layout == m.a.layout)


def divides_by_window(m: Match) -> bool:
    """Every window has the same number of elements: nothing is padded, or what is padded counts; none is rounded up."""
    return bool((m.a.count_include_pad or not any(m.a.padding)) and not m.a.ceil_mode)


def sees_everything(m: Match) -> bool:
    """One window covers all rows and columns, and nothing else."""
    extents = dict(zip(m.a.layout, m.x.shape, strict=True))
    window = tuple(d * (k - 1) + 1 for d, k in zip(m.a.dilation, m.a.pool_size, strict=True))
    return bool(window == m.a.pool_size == (extents["H"], extents["W"]) and not any(m.a.padding))


def one_by_one(m: Match) -> bool:
    """A window is one element, every one is taken, and nothing is padded."""
    return bool(m.a.pool_size == m.a.strides == (1, 1) and not any(m.a.padding))


def inner_slides_by_one(m: Match) -> bool:
    """Both take the largest, of neighbouring elements; the first one keeps every window, and none is rounded up."""
    return bool(
        m.a.kind == m.b.kind == "max"
        and m.a.strides == m.a.dilation == m.b.dilation == (1, 1)
        and not m.b.ceil_mode
        and not m.a.ceil_mode
        and m.a.layout == m.b.layout
    )


def outer_sees_inner(m: Match) -> bool:
    """Every window of the second pooling has an element that is not its padding."""
    return _every_window_sees(m.b, m.type(_POOLED), m.out[0])


def pads_space(m: Match) -> bool:
    """Only rows and columns are padded."""
    return pads_space_only(m.p, m.a.layout)


def zeros_count_as_padding(m: Match) -> bool:
    """Average pooling that counts its padding, without windows that are rounded up."""
    return bool(m.a.kind == "avg" and m.a.count_include_pad and not m.a.ceil_mode)


def zeros_are_no_larger(m: Match) -> bool:
    """Maximum pooling: where nothing is negative, zeros in a window that has elements change nothing."""
    return bool(m.a.kind == "max" and _every_window_sees(_joined_padding(m), m.x, m.out[0]))


def joins_batch_or_channels(m: Match) -> bool:
    """The concatenation is along the batch or the channels."""
    return bool(m.a.layout[m.c.axis] in "NC") if m.c.axis < 4 else False


def alike_but_for_axis(m: Match) -> bool:
    """The inputs can be concatenated along the axis."""
    return all(a == b for i, (a, b) in enumerate(zip(m.x.shape, m.y.shape, strict=True)) if i != m.c.axis)


def depthwise_average(m: Match) -> bool:
    """Each channel is convolved by itself with equal weights that sum to 1, and is not dilated."""
    kernel = dict(zip(m.b.kernel_layout, m.c.shape, strict=True))
    share = Fraction(m.c.value).limit_denominator(1 << 14)
    return bool(
        m.b.data_layout == m.b.out_layout
        and kernel["I"] == 1
        and kernel["O"] == m.b.groups
        and share * kernel["H"] * kernel["W"] == 1
    )


def _every_window_sees(a: Pool2d, data: TensorType, result: TensorType) -> bool:
    """Whether each window has an element of the data: one that is dilated may step over all of it."""
    extents, windows = (dict(zip(a.layout, ty.shape, strict=True)) for ty in (data, result))
    return all(
        any(0 <= window * stride + tap * dilation - before < extents[axis] for tap in range(size))
        for axis, size, stride, before, dilation in zip(
            "HW", a.pool_size, a.strides, a.padding[:2], a.dilation, strict=True
        )
        for window in range(windows[axis])
    )


def _joined_padding(m: Match) -> Pool2d:
    return replace(m.a, padding=padding_around(m.a.padding, m.p, m.a.layout))


def _fused(m: Match) -> Pool2d:
    top, left, bottom, right = map(sum, zip(m.a.padding, m.b.padding, strict=True))
    height, width = (k + n - 1 for k, n in zip(m.a.pool_size, m.b.pool_size, strict=True))
    return replace(m.b, pool_size=(height, width), padding=(top, left, bottom, right))


def _space(m: Match) -> Reduce:
    kind = {"avg": "mean", "max": "max"}[m.a.kind]
    return Reduce(kind, tuple(i for i, letter in enumerate(m.a.layout) if letter in "HW"), keepdims=True)


def _share(m: Match) -> Full:
    channels = m.x.shape[m.a.layout.index("C")]
    return Full((channels, 1, *m.a.pool_size), 1 / prod(m.a.pool_size), m.x.dtype)


def _depthwise(m: Match) -> Conv2d:
    channels = m.x.shape[m.a.layout.index("C")]
    return Conv2d(m.a.strides, m.a.padding, m.a.dilation, channels, m.a.layout, "OIHW", m.a.layout)


def _average(m: Match) -> Pool2d:
    kernel = dict(zip(m.b.kernel_layout, m.c.shape, strict=True))
    window = (kernel["H"], kernel["W"])
    return Pool2d("avg", window, m.b.strides, m.b.padding, m.b.dilation, False, True, m.b.data_layout)


def _depthwise_example(random: Random) -> tuple[dict[str, TensorType], dict[str, Any]]:
    channels, height, width = random.randint(1, 3), random.randint(1, 3), random.randint(1, 3)
    layout = random.choice(("NCHW", "NHWC"))
    extents = {"N": random.randint(1, 2), "C": channels, "H": random.randint(5, 7), "W": random.randint(5, 7)}
    top, left, bottom, right = (random.randint(0, 2) for _ in range(4))
    strides, dilation = (random.randint(1, 2), 1), (1, random.randint(1, 2))
    conv = Conv2d(strides, (top, left, bottom, right), dilation, channels, layout, "OIHW", layout)
    share = Full((channels, 1, height, width), 1 / (height * width))
    return {"x": TensorType(tuple(extents[letter] for letter in layout))}, {"b": conv, "c": share}


def _whole_image_example(random: Random) -> tuple[dict[str, TensorType], dict[str, Any]]:
    height, width = random.randint(1, 4), random.randint(1, 4)
    layout = random.choice(("NCHW", "NHWC"))
    extents = {"N": random.randint(1, 2), "C": random.randint(1, 3), "H": height, "W": width}
    pool = Pool2d(random.choice(("avg", "max")), (height, width), (random.randint(1, 2), 1), layout=layout)
    return {"x": TensorType(tuple(extents[letter] for letter in layout))}, {"a": pool}


def _small_image_example(random: Random) -> tuple[dict[str, TensorType], dict[str, Any]]:
    """Dilated windows that reach beyond the image, and step over it."""
    layout = random.choice(("NCHW", "NHWC"))
    extents = {letter: random.randint(1, 2) for letter in "NCHW"}
    size = random.randint(1, 3), random.randint(2, 3)
    top, left, bottom, right = (random.choice((n - 1, random.randint(0, n))) for n in size * 2)
    dilation = (random.randint(1, 3), random.randint(2, 3))
    outside = {"H": random.randint(0, top), "W": random.randint(0, left)}
    padding = (top - outside["H"], left - outside["W"], bottom, right)
    pool = Pool2d("max", size, (random.randint(1, 2), 1), padding, dilation, random.random() < 0.3, layout=layout)
    pads = Pad(tuple(outside.get(letter, 0) for letter in layout), (0,) * 4)
    return {"x": TensorType(tuple(extents[letter] for letter in layout))}, {"a": pool, "p": pads}


_POOLED = pool2d(x, "a")
_FEWER = "the function is computed for fewer elements"

POOLING_RULES: tuple[Rule, ...] = (
    Rule("pool-of-ones", _POOLED, x, "nothing to do", when=(one_by_one,)),
    Rule(
        "max-pool-of-max-pool",
        before=pool2d(_POOLED, "b"),
        after=pool2d(x, _fused),
        when=(inner_slides_by_one, outer_sees_inner),
        reason="one pass over the image instead of two",
    ),
    *both_ways(
        "relu-after-max-pool",
        pool2d(relu(x), "a"),
        "relu-before-max-pool",
        relu(_POOLED),
        when=(takes_the_largest, no_empty_window),
        example=_small_image_example,
        reason=_FEWER,
    ),
    *both_ways(
        "pointwise-after-average",
        pool2d(conv2d(x, w, "b"), "a"),
        "pointwise-before-average",
        conv2d(_POOLED, w, "b"),
        when=(averages, weight_is_pointwise),
        reason="the convolution has fewer pixels after pooling, and more siblings to merge with before",
    ),
    Rule(
        "sum-of-averages",
        before=add(_POOLED, pool2d(y, "a")),
        after=pool2d(add(x, y), "a"),
        when=(averages, same_shape),
        worth=(keeps_range,),
        reason="one pass instead of two",
    ),
    Rule(
        "average-of-padded",
        before=pool2d(pad(x, "p"), "a"),
        after=pool2d(x, _joined_padding),
        when=(pads_space, zeros_count_as_padding),
        reason="pooling pads by itself",
    ),
    Rule(
        "max-pool-of-padded",
        before=pool2d(pad(relu(x), "p"), "a"),
        after=pool2d(relu(x), _joined_padding),
        when=(pads_space, zeros_are_no_larger),
        example=_small_image_example,
        reason="pooling pads by itself",
    ),
    Rule(
        "pool-of-everything",
        before=_POOLED,
        after=reduce(x, _space),
        when=(sees_everything,),
        example=_whole_image_example,
        reason="a reduction has simpler schedules, and moves through products",
    ),
)
"""Rules that pay in models as people write them."""

_LAW = "needed to prove other equalities"

POOLING_LAWS: tuple[Rule, ...] = (
    Rule(
        "average-as-convolution",
        before=_POOLED,
        after=conv2d(x, full(_share), _depthwise),
        when=(averages, divides_by_window),
        reason="merges with other convolutions",
        source="TASO",
    ),
    Rule(
        "convolution-as-average",
        before=conv2d(x, c, "b"),
        after=pool2d(x, _average),
        when=(depthwise_average,),
        example=_depthwise_example,
        reason="an average needs no weights",
        source="TASO",
    ),
    Rule(
        "average-of-sum",
        before=pool2d(add(x, y), "a"),
        after=add(_POOLED, pool2d(y, "a")),
        when=(averages, same_shape),
        reason=_LAW,
    ),
    Rule(
        "average-of-scaled",
        before=pool2d(multiply(x, c), "a"),
        after=multiply(_POOLED, c),
        when=(averages,),
        worth=(keeps_sums_before_scale_small,),
        reason=_LAW,
    ),
    Rule(
        "scale-of-average",
        before=multiply(_POOLED, c),
        after=pool2d(multiply(x, c), "a"),
        when=(averages,),
        worth=(keeps_sums_after_scale_small,),
        reason=_LAW,
    ),
    Rule(
        "concat-of-pools",
        before=concat((_POOLED, pool2d(y, "a")), "c"),
        after=pool2d(concat((x, y), "c"), "a"),
        when=(joins_batch_or_channels, alike_but_for_axis),
        reason="one kernel instead of two",
        source="TASO",
    ),
    Rule(
        "pool-of-concat",
        before=pool2d(concat((x, y), "c"), "a"),
        after=concat((_POOLED, pool2d(y, "a")), "c"),
        when=(joins_batch_or_channels,),
        reason=_LAW,
        source="TASO",
    ),
)
"""The opposite directions, and averages as convolutions."""
