"""Channels in blocks (NCHWc): the layout of a convolution whose vectors run along a block of channels.

Data (N, C, H, W) becomes (N, C/b, H, W, b) by a reshape and a permutation, weights (O, I, H, W) become
(O/b, I/b, H, W, b, b). Each rule puts blocks in front and takes them apart behind; together with `layout.py`, which
makes neighbours cancel, regions of a graph stay in blocks. By name only: `docs/graph.md` tells what blocks cost.
"""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

from ..attributes import Axis, Conv2d, Kind, Permute, Pool2d, Shape, TensorType
from .channels_last import convolves_channels_first, pools_channels_first
from .convolution import ungrouped
from .pattern import Attr, Node, Pattern, binary, concat, conv2d, permute, pool2d, reshape, tensors, weights
from .rule import Match, Rule

__all__ = ["BLOCKED_RULES"]

BLOCKS = (8, 16)
"""Channels of a block: the float32 numbers of one AVX2 and one AVX-512 vector."""

x, y, w = tensors("x y w")
(s,) = weights("s")

TO_BLOCKS, FROM_BLOCKS = Permute((0, 1, 3, 4, 2)), Permute((0, 1, 4, 2, 3))


def joins_blocks(m: Match) -> bool:
    """The reshape of x makes one dimension of the blocks and of what they hold."""
    return bool(m.r.shape == _joined(m.x.shape))


def joins_both(m: Match) -> bool:
    """Both reshapes do."""
    return joins_blocks(m) and bool(m.q.shape == _joined(m.y.shape))


def of_channels(m: Match) -> bool:
    """The concatenation is one of channels."""
    return bool(m.c.axis == 1)


def one_for_each_channel(m: Match) -> bool:
    """s varies along channels only, as a bias or a scale does, and has all of them."""
    channels = m.r.shape[1] if len(m.r.shape) == 4 else 0
    return m.s.shape in ((channels, 1, 1), (1, channels, 1, 1))


def _joined(shape: tuple[int, ...]) -> tuple[int, ...]:
    n, c, height, width, b = shape
    return n, c * b, height, width


def _whole(*places: tuple[str, int], block: int) -> Any:
    def in_whole_blocks(m: Match) -> bool:
        return all(len(shape) == 4 and shape[i] > 0 and shape[i] % block == 0 for shape, i in shapes(m))

    def shapes(m: Match) -> list[tuple[tuple[int, ...], int]]:
        return [(getattr(m, name).shape, axis) for name, axis in places]

    in_whole_blocks.__doc__ = f"Channels are a multiple of {block}."
    return in_whole_blocks


def _in_blocks(tensor: Pattern, block: int) -> Node:
    def split(m: Match) -> Shape:
        n, c, height, width = m.type(tensor).shape
        return Shape((n, c // block, block, height, width))

    return permute(reshape(tensor, split), TO_BLOCKS)


def _weights_in_blocks(block: int) -> Node:
    def split(m: Match) -> Shape:
        o, i, height, width = m.w.shape
        return Shape((o // block, block, i // block, block, height, width))

    return permute(reshape(w, split), Permute((0, 2, 4, 5, 3, 1)))


def _taken_apart(blocks: Pattern) -> Node:
    return reshape(permute(blocks, FROM_BLOCKS), lambda m: Shape(m.out[0].shape))


def _images(m: Match, block: int) -> Shape:
    """Blocks of channels as images with `block` channels last."""
    n, c, height, width = m.x.shape
    return Shape((n * c // block, height, width, block))


def _pooled_blocks(m: Match, block: int) -> Shape:
    n, c, height, width = m.out[0].shape
    return Shape((n, c // block, height, width, block))


def _channels_last(m: Match) -> Pool2d:
    return replace(m.a, layout="NHWC")


def _convolution_example(block: int) -> Any:
    def example(random: Random) -> tuple[dict[str, TensorType], dict[str, Any]]:
        groups = random.choice((1, 1, 1, 2))
        inputs, outputs = (block * random.choice((1, 2)) for _ in range(2))
        kernel = (random.randint(1, 2), random.randint(1, 3))
        padding = (random.randint(0, 1), random.randint(0, 1), 0, random.randint(0, 2))
        attrs = Conv2d((random.randint(1, 2), 1), padding, (1, random.randint(1, 2)), groups)
        size = (random.randint(3, 4), random.randint(5, 6))
        data, weight = (random.randint(1, 2), inputs, *size), (outputs, inputs // groups, *kernel)
        if random.random() < 0.2:
            attrs = Conv2d(attrs.strides, padding, attrs.dilation, 1, "NHWC", "OIHW", "NHWC")
            data, weight = (1, block, size[1], inputs), (outputs, inputs, *kernel)
        return {"x": TensorType(data), "w": TensorType(weight)}, {"a": attrs}

    return example


def _pooling_example(block: int) -> Any:
    def example(random: Random) -> tuple[dict[str, TensorType], dict[str, Any]]:
        window = (random.randint(1, 3), random.randint(1, 3))
        padding = (random.randint(0, window[0] - 1), 0, 0, random.randint(0, window[1] - 1))
        attrs = Pool2d(
            random.choice(("max", "avg")),
            window,
            (random.randint(1, 2), 1),
            padding,
            ceil_mode=random.random() < 0.2,
            count_include_pad=random.random() < 0.5,
            layout=random.choice(("NCHW", "NCHW", "NHWC")),
        )
        channels = block * random.randint(1, 2)
        size = (random.randint(3, 5), random.randint(3, 5))
        data = (1, channels, *size) if attrs.layout == "NCHW" else (1, block, size[1], channels)
        return {"x": TensorType(data)}, {"a": attrs}

    return example


def _blocks_example(random: Random) -> tuple[TensorType, Shape]:
    n, c, height, width, b = (random.randint(1, 3) for _ in range(5))
    joined = random.choice(((n, c * b, height, width),) * 3 + ((n * c, b, height, width),))
    return TensorType((n, c, height, width, b)), Shape(joined)


def _scaled_example(random: Random) -> tuple[dict[str, TensorType], dict[str, Any]]:
    blocks, joined = _blocks_example(random)
    shape = random.choice(((joined.shape[1], 1, 1), (1, joined.shape[1], 1, 1), (1, joined.shape[2], 1)))
    kind = Kind(random.choice(("add", "multiply", "subtract", "maximum")))
    return {"x": blocks, "s": TensorType(shape)}, {"r": joined, "f": kind}


def _concat_example(random: Random) -> tuple[dict[str, TensorType], dict[str, Any]]:
    blocks, joined = _blocks_example(random)
    n, _, height, width, b = blocks.shape
    other = random.randint(1, 3)
    attrs = {"r": joined, "q": Shape((n, other * b, height, width)), "c": Axis(random.choice((1, 1, 1, 2)))}
    return {"x": blocks, "y": TensorType((n, other, height, width, b))}, attrs


def _into_blocks(block: int) -> tuple[Rule, ...]:
    return (
        Rule(
            f"convolution-in-blocks-of-{block}",
            before=conv2d(x, w, "a"),
            after=_taken_apart(Node("blocked_conv2d", Attr("a"), (_in_blocks(x, block), _weights_in_blocks(block)))),
            when=(convolves_channels_first, ungrouped, _whole(("x", 1), ("w", 0), ("w", 1), block=block)),
            reason="vectors run along a block of channels, and its pixels are neighbours in memory",
            example=_convolution_example(block),
        ),
        Rule(
            f"pooling-in-blocks-of-{block}",
            before=pool2d(x, "a"),
            after=_taken_apart(
                reshape(
                    pool2d(reshape(_in_blocks(x, block), lambda m: _images(m, block)), _channels_last),
                    lambda m: _pooled_blocks(m, block),
                )
            ),
            when=(pools_channels_first, _whole(("x", 1), block=block)),
            reason="keeps a region in blocks",
            example=_pooling_example(block),
        ),
    )


_JOINED = reshape(permute(x, FROM_BLOCKS), "r")

BLOCKED_RULES: tuple[Rule, ...] = (
    *(rule for block in BLOCKS for rule in _into_blocks(block)),
    Rule(
        "binary-of-blocks-and-channels",
        before=binary(_JOINED, s, "f"),
        after=_taken_apart(binary(x, reshape(s, lambda m: Shape((m.x.shape[1], 1, 1, m.x.shape[4]))), "f")),
        when=(joins_blocks, one_for_each_channel),
        reason="keeps a region in blocks",
        example=_scaled_example,
    ),
    Rule(
        "concat-of-blocks",
        before=concat((_JOINED, reshape(permute(y, FROM_BLOCKS), "q")), "c"),
        after=_taken_apart(concat((x, y), Axis(1))),
        when=(joins_both, of_channels),
        reason="keeps a region in blocks",
        example=_concat_example,
    ),
)
