"""float32 as the sum of two bfloat16: the permission to multiply such, and operands split in numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from tvm import tirx

from ..expressions import nodes_of
from ..marks import SPLIT_IN_HALVES
from .products import TILE_ROWS

__all__ = ["HALVES_PERMITTED", "halves_permitted", "split_panels", "splits_panels"]

HALVES_PERMITTED = "eqtune.bfloat16_halves"
"""Attribute of a kernel whose products of float32 may be three of bfloat16 each."""


def halves_permitted(function: Any) -> bool:
    """Whether the attribute is set."""
    return bool(function.attrs and function.attrs.get(HALVES_PERMITTED, 0))


def splits_panels(function: Any) -> bool:
    """Whether a packing function splits what it packs: a loop is marked SPLIT_IN_HALVES."""
    return any(SPLIT_IN_HALVES in loop.annotations for loop in nodes_of(function.body, tirx.For))


def split_panels(packed: NDArray[np.float32]) -> NDArray[np.float32]:
    """Tiles of 32 rows of floats in halves, as products of bfloat16 want them.

    Parameters
    ----------
    packed : array of float32, shape [.., 32, columns]

    Returns
    -------
    array of float32, the same shape
        Its bits are 16 rows of pairs of first halves, [.., 16, columns, 2] bfloat16, then 16 of second ones.
    """
    pairs = packed.reshape(*packed.shape[:-2], TILE_ROWS, 2, packed.shape[-1])
    words = np.empty((*packed.shape[:-2], 2, TILE_ROWS, packed.shape[-1]), np.uint32)
    first = _rounded(pairs)
    rest = _rounded(pairs - first.view(np.float32))
    for part, half in enumerate((first, rest)):
        words[..., part, :, :] = (half[..., 0, :] >> 16) | half[..., 1, :]
    return words.reshape(packed.shape).view(np.float32)


def _rounded(values: NDArray[np.float32]) -> NDArray[np.uint32]:
    """The bits of the nearest bfloat16 of each, ties to even, as those of a float32."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    return (bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)
