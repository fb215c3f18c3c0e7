"""The order of dimensions that convolutions and pooling compute in: channels second or last.

Each rule puts a permutation before and its inverse behind; the rules of `layout.py` move them through what lies
between, where they meet and cancel. So extraction chooses an order for each region, and pays for the borders.
"""

from __future__ import annotations

from dataclasses import replace

from ..attributes import Conv2d, Permute, Pool2d
from .pattern import conv2d, permute, pool2d, tensors
from .rule import Match, Rule

__all__ = ["CHANNELS_LAST_RULES"]

x, w = tensors("x w")

FIRST, LAST = "NCHW", "NHWC"
KERNELS = {FIRST: "OIHW", LAST: "HWIO"}
"""The order of a kernel's dimensions that belongs to each order of the data."""


def convolves_channels_first(m: Match) -> bool:
    """Data NCHW, kernel OIHW."""
    return bool(m.a.data_layout == m.a.out_layout == FIRST and m.a.kernel_layout == KERNELS[FIRST])


def convolves_channels_last(m: Match) -> bool:
    """Data NHWC, kernel HWIO."""
    return bool(m.a.data_layout == m.a.out_layout == LAST and m.a.kernel_layout == KERNELS[LAST])


def pools_channels_first(m: Match) -> bool:
    """Data NCHW."""
    return bool(m.a.layout == FIRST)


def pools_channels_last(m: Match) -> bool:
    """Data NHWC."""
    return bool(m.a.layout == LAST)


def _order(before: str, after: str) -> Permute:
    return Permute(tuple(before.index(letter) for letter in after))


def _convolution(name: str, old: str, new: str) -> Rule:
    def attrs(m: Match) -> Conv2d:
        return replace(m.a, data_layout=new, kernel_layout=KERNELS[new], out_layout=new)

    return Rule(
        name,
        before=conv2d(x, w, "a"),
        after=permute(
            conv2d(permute(x, _order(old, new)), permute(w, _order(KERNELS[old], KERNELS[new])), attrs),
            _order(new, old),
        ),
        when=(convolves_channels_first if old == FIRST else convolves_channels_last,),
        reason="vectors run along channels, or along pixels, whichever there are more of",
    )


def _pooling(name: str, old: str, new: str) -> Rule:
    def attrs(m: Match) -> Pool2d:
        return replace(m.a, layout=new)

    return Rule(
        name,
        before=pool2d(x, "a"),
        after=permute(pool2d(permute(x, _order(old, new)), attrs), _order(new, old)),
        when=(pools_channels_first if old == FIRST else pools_channels_last,),
        reason="keeps a region in one order",
    )


CHANNELS_LAST_RULES: tuple[Rule, ...] = (
    _convolution("convolution-channels-last", FIRST, LAST),
    _convolution("convolution-channels-first", LAST, FIRST),
    _pooling("pooling-channels-last", FIRST, LAST),
    _pooling("pooling-channels-first", LAST, FIRST),
)
