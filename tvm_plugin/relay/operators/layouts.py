"""Layouts by name: NCHW, HWIO, and packed ones such as NCHW16c and OIHW4i16o.

A capital letter is an axis. A number and a small letter are blocks of that many along the axis of the same letter:
channel 35 of NCHW16c is element 3 of block 2.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from tvm.relax import op

from ..builder import Builder

__all__ = ["change_layout", "plain_layout"]

_AXIS = re.compile(r"(\d*)([A-Za-z])")


class _Axis(NamedTuple):
    letter: str
    block: int
    """How many elements a block has; 0 for the axis itself."""


def _axes(layout: str) -> list[_Axis]:
    axes = [_Axis(letter, int(size or 0)) for size, letter in _AXIS.findall(layout)]
    letters = [axis.letter for axis in axes if not axis.block]
    blocked = {axis.letter.upper() for axis in axes if axis.block}
    spelled = "".join(f"{axis.block or ''}{axis.letter}" for axis in axes)
    if spelled != layout or len(set(letters)) != len(letters) or not "".join(letters).isupper():
        raise ValueError(f"{layout!r} is no layout, as in NCHW or NCHW16c")
    if any(axis.block and axis.letter.isupper() for axis in axes) or not blocked <= set(letters):
        raise ValueError(f"{layout!r} has blocks of an axis that it does not have")
    return axes


def plain_layout(layout: str) -> str:
    """The axes alone: NCHW of NCHW16c."""
    return "".join(axis.letter for axis in _axes(layout) if not axis.block)


def change_layout(b: Builder, value: Any, source: str, target: str) -> Any:
    """The same tensor in another layout.

    Raises
    ------
    ValueError
        The layouts have different axes, do not suit the tensor, or blocks do not divide an extent.
    """
    if source == target:
        return value
    if sorted(plain_layout(source)) != sorted(plain_layout(target)):
        raise ValueError(f"from {source} to {target}; only layouts of the same axes can be converted")
    if b.rank(value) != len(_axes(source)):
        raise ValueError(f"a tensor of shape {tuple(b.shape(value))} in the layout {source}")
    return _split_blocks(b, _merge_blocks(b, value, source, plain_layout(target)), target)


def _merge_blocks(b: Builder, value: Any, source: str, plain: str) -> Any:
    """From any layout to one without blocks."""
    axes = _axes(source)
    parts = [[position for position, axis in enumerate(axes) if axis.letter.upper() == letter] for letter in plain]
    extents = b.shape(value)
    value = _transpose(b, value, [position for group in parts for position in group])
    if len(axes) == len(plain):
        return value
    return b.emit(op.reshape(value, [math.prod(extents[position] for position in group) for group in parts]))


def _split_blocks(b: Builder, value: Any, target: str) -> Any:
    """To any layout, from the one without its blocks."""
    axes, extents = _axes(target), b.shape(value)
    plain = plain_layout(target)
    if len(axes) == len(plain):
        return value
    shape: list[int] = []
    found: dict[_Axis, int] = {}
    for letter, extent in zip(plain, extents, strict=True):
        blocks = [axis for axis in axes if axis.letter == letter.lower()]
        size = math.prod(axis.block for axis in blocks)
        if extent % size:
            raise ValueError(f"blocks of {size} along {letter}, which has {extent} elements")
        for axis, part in [(_Axis(letter, 0), extent // size), *((axis, axis.block) for axis in blocks)]:
            found[axis] = len(shape)
            shape.append(part)
    return _transpose(b, b.emit(op.reshape(value, shape)), [found[axis] for axis in axes])


def _transpose(b: Builder, value: Any, order: Sequence[int]) -> Any:
    return value if list(order) == sorted(order) else b.emit(op.permute_dims(value, list(order)))
