"""Other forms of one convolution: larger kernels, other groups, matrix products, padding of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import prod
from random import Random
from typing import Any

from ..attributes import Axis, Conv2d, Pad, Shape, Slice, TensorType
from .channels_last import convolves_channels_first, convolves_channels_last
from .convolution import data_axis, joins_channels, kernel_axis, out_axis, same_kernels, ungrouped
from .pattern import Pattern, concat, conv2d, matmul, pad, reshape, slice_, tensors
from .rule import Match, Rule
from .shapes import box, padding_around, pads_space_only, same_shape

__all__ = ["KERNEL_LAWS", "KERNEL_RULES"]

x, y = tensors("x y")
w, v = tensors("w v")


def both_ungrouped(m: Match) -> bool:
    """Both convolutions have one group."""
    return bool(m.a.groups == m.b.groups == 1)


def pointwise(m: Match) -> bool:
    """The kernel is 1x1."""
    return _window_of_w(m) == (1, 1)


def flat(m: Match) -> bool:
    """The kernel is 1x3 or 3x1."""
    return sorted(_window_of_w(m)) == [1, 3]


def pads_space(m: Match) -> bool:
    """Only rows and columns are padded."""
    return pads_space_only(m.p, m.a.data_layout)


def even_groups(m: Match) -> bool:
    """The number of groups is even, and the kernel is stored in the usual order."""
    return bool(m.a.groups % 2 == 0 and m.a.kernel_layout == "OIHW")


def groups_in_pairs(m: Match) -> bool:
    """The number of groups is even."""
    return bool(m.a.groups % 2 == 0)


def reads_pixels(m: Match) -> bool:
    """The convolution is a product of a matrix with each pixel: 1x1, stride 1, not padded, one group."""
    return pointwise(m) and bool(m.a.strides == (1, 1) and not any(m.a.padding) and m.a.groups == 1)


def then_pointwise(m: Match) -> bool:
    """The second convolution is 1x1, with stride 1 and no padding, and both kernels are stored in the usual order."""
    outer = m.b.strides == (1, 1) and not any(m.b.padding) and _window(m.b, m.v.shape) == (1, 1)
    return bool(outer and m.a.kernel_layout == m.b.kernel_layout == "OIHW" and m.a.out_layout == m.b.data_layout)


def product_of_pixels(m: Match) -> bool:
    """x is an image whose rows and columns became one dimension, w a matrix, and the result an image again."""
    image, flat_image, result = m.x.shape, m.r.shape, m.q.shape
    return bool(
        len(image) == len(result) == 4
        and len(m.w.shape) == 2
        and flat_image == (image[0], image[1], image[2] * image[3])
        and result == (image[0], m.w.shape[0], image[2], image[3])
    )


def _window(a: Conv2d, kernel: tuple[int, ...]) -> tuple[int, int]:
    return kernel[a.kernel_layout.index("H")], kernel[a.kernel_layout.index("W")]


def _window_of_w(m: Match) -> tuple[int, int]:
    return _window(m.a, m.w.shape)


def _ring(m: Match) -> tuple[int, int]:
    height, width = _window_of_w(m)
    return (3 - height) // 2, (3 - width) // 2


def _ring_of_zeros(m: Match) -> Pad:
    ring = dict(zip("HW", _ring(m), strict=True))
    widths = tuple(ring.get(letter, 0) for letter in m.a.kernel_layout)
    return Pad(widths, widths)


def _enlarged(m: Match) -> Conv2d:
    """The attributes with which a kernel that became 3x3 does the same. A single tap has no dilation."""
    rows, columns = (step if size > 1 else 1 for step, size in zip(m.a.dilation, _window_of_w(m), strict=True))
    (above, left), (top, before, bottom, after) = _ring(m), m.a.padding
    above, left = above * rows, left * columns
    padding = (top + above, before + left, bottom + above, after + left)
    return replace(m.a, padding=padding, dilation=(rows, columns))


def _twice_the_groups(m: Match) -> Conv2d:
    return replace(m.a, groups=2 * m.a.groups)


def _half_the_groups(m: Match) -> Conv2d:
    return replace(m.a, groups=m.a.groups // 2)


def _half(shape: Callable[[Match], tuple[int, ...]], letter: str, second: bool) -> Callable[[Match], Slice]:
    """The first or second half along the channels of x ("C") or the outputs of w ("O")."""

    def part(m: Match) -> Slice:
        layout = m.a.data_layout if letter == "C" else m.a.kernel_layout
        extents, axis = shape(m), layout.index(letter)
        half = extents[axis] // 2
        return box(extents, axis, half if second else 0, extents[axis] if second else half)

    return part


def _pairs(m: Match) -> Shape:
    """w (OIHW) as (groups / 2, 2, outputs of a group, inputs of a group, H * W)."""
    outputs, inputs, height, width = m.w.shape
    return Shape((m.a.groups // 2, 2, outputs // m.a.groups, inputs, height * width))


def _member(second: bool) -> Callable[[Match], Slice]:
    return lambda m: box(_pairs(m).shape, 1, int(second), int(second) + 1)


def _beside(second: bool) -> Callable[[Match], Pad]:
    """Zeros for the inputs of the other group."""

    def widths(m: Match) -> Pad:
        mine, none = (0, 0, 0, m.w.shape[1], 0), (0,) * 5
        return Pad(mine if second else none, none if second else mine)

    return widths


def _merged_kernel(m: Match) -> Shape:
    outputs, inputs, height, width = m.w.shape
    return Shape((outputs, 2 * inputs, height, width))


def _joined_padding(m: Match) -> Conv2d:
    return replace(m.a, padding=padding_around(m.a.padding, m.p, m.a.data_layout))


def _matrix(m: Match) -> Shape:
    """A 1x1 kernel as a matrix."""
    return Shape(tuple(n for n, letter in zip(m.w.shape, m.a.kernel_layout, strict=True) if letter in "IO"))


def _pixels(m: Match) -> Shape:
    """Rows and columns of x as one dimension."""
    batch, channels, height, width = m.x.shape
    return Shape((batch, channels, height * width))


def _rows_of_matrix(m: Match) -> Shape:
    return Shape((m.w.shape[0], prod(m.w.shape[1:])))


def _second_matrix(m: Match) -> Shape:
    return Shape((m.v.shape[0], m.v.shape[1]))


def _composed_kernel(m: Match) -> Shape:
    return Shape((m.v.shape[0], *m.w.shape[1:]))


def _pixels_example(random: Random) -> tuple[dict[str, TensorType], dict[str, Any]]:
    batch, inputs, height, width, outputs = (random.randint(1, 4) for _ in range(5))
    attrs = {"r": Shape((batch, inputs, height * width)), "q": Shape((batch, outputs, height, width))}
    return {"w": TensorType((outputs, inputs)), "x": TensorType((batch, inputs, height, width))}, attrs


_CONVOLUTION = conv2d(x, w, "a")
_PAIRS = reshape(w, _pairs)
_ENLARGED = conv2d(x, pad(w, _ring_of_zeros), _enlarged)

KERNEL_RULES: tuple[Rule, ...] = (
    Rule(
        "enlarge-pointwise-kernel",
        before=_CONVOLUTION,
        after=_ENLARGED,
        worth=(ungrouped, pointwise),
        reason="lets a 1x1 convolution merge with a 3x3 one",
        source="TASO",
    ),
    Rule(
        "convolution-of-padded",
        before=conv2d(pad(x, "p"), w, "a"),
        after=conv2d(x, w, _joined_padding),
        when=(pads_space,),
        reason="the convolution pads by itself",
    ),
    Rule(
        "merge-groups",
        before=_CONVOLUTION,
        after=conv2d(
            x,
            reshape(
                concat(
                    (
                        pad(slice_(_PAIRS, _member(False)), _beside(False)),
                        pad(slice_(_PAIRS, _member(True)), _beside(True)),
                    ),
                    Axis(1),
                ),
                _merged_kernel,
            ),
            _half_the_groups,
        ),
        when=(even_groups,),
        reason="few channels a group use few lanes; multiplying by zeros may be faster",
        source="TASO",
    ),
    Rule(
        "pointwise-after-convolution",
        before=conv2d(_CONVOLUTION, v, "b"),
        after=conv2d(
            x,
            reshape(matmul(reshape(v, _second_matrix), reshape(w, _rows_of_matrix)), _composed_kernel),
            lambda m: replace(m.a, out_layout=m.b.out_layout),
        ),
        when=(both_ungrouped, then_pointwise),
        reason="a product of weights is computed ahead of time",
    ),
    Rule(
        "pointwise-as-matmul-channels-first",
        before=_CONVOLUTION,
        after=reshape(matmul(reshape(w, _matrix), reshape(x, _pixels)), lambda m: Shape(m.out[0].shape)),
        when=(reads_pixels, convolves_channels_first),
        reason="a matrix product has more schedules",
    ),
    Rule(
        "pointwise-as-matmul-channels-last",
        before=_CONVOLUTION,
        after=matmul(x, reshape(w, _matrix)),
        when=(reads_pixels, convolves_channels_last),
        reason="a matrix product has more schedules",
    ),
)
"""Rules that pay in models as people write them."""


def _halves(second: bool) -> Pattern:
    return conv2d(
        slice_(x, _half(lambda m: m.x.shape, "C", second)),
        slice_(w, _half(lambda m: m.w.shape, "O", second)),
        _half_the_groups,
    )


KERNEL_LAWS: tuple[Rule, ...] = (
    Rule(
        "enlarge-flat-kernel",
        before=_CONVOLUTION,
        after=_ENLARGED,
        worth=(ungrouped, flat),
        reason="lets a 1x3 or 3x1 convolution merge with a 3x3 one, or with each other",
    ),
    Rule(
        "concat-of-convolutions-as-groups",
        before=concat((_CONVOLUTION, conv2d(y, v, "a")), "c"),
        after=conv2d(concat((x, y), data_axis("C")), concat((w, v), kernel_axis("O")), _twice_the_groups),
        when=(joins_channels, same_kernels, same_shape),
        reason="one grouped convolution instead of two",
        source="TASO",
    ),
    Rule(
        "split-groups",
        before=_CONVOLUTION,
        after=concat((_halves(False), _halves(True)), out_axis("C")),
        when=(groups_in_pairs,),
        reason="a group by itself may merge with something else",
    ),
    Rule(
        "matmul-as-pointwise-convolution",
        before=reshape(matmul(w, reshape(x, "r")), "q"),
        after=conv2d(x, reshape(w, lambda m: Shape((*m.w.shape, 1, 1))), Conv2d()),
        when=(product_of_pixels,),
        example=_pixels_example,
        reason="a convolution fuses with what follows, and merges with others",
    ),
)
"""The opposite directions, and larger kernels that cost more."""
