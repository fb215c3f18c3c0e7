"""Pixels as TFLite finds and moves them: nearest ones, and blocks of an image that are images of a batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray
from tvm import relax
from tvm.relax import op

from ...relax_ir.tensors import extents

__all__ = ["batch_to_space", "nearest_pixels", "space_to_batch"]

Emit = Callable[[relax.Expr], relax.Var]


def nearest_pixels(given: int, wanted: int, align_corners: bool, half_pixel_centers: bool) -> NDArray[np.int64]:
    """Along one axis of `given` pixels, the one that each of `wanted` pixels is: [wanted], in float32 as in TFLite.

    With `align_corners`, places between two pixels are rounded, halves up; otherwise they belong to the pixel before.
    """
    between_first_and_last = align_corners and wanted > 1
    step = np.float32(given - between_first_and_last) / np.float32(wanted - between_first_and_last)
    places = (np.arange(wanted, dtype="float32") + np.float32(0.5 * half_pixel_centers)) * step
    whole = np.floor(places)
    if align_corners:  # not the floor of `places + 0.5`, which is rounded itself
        whole += places - whole >= 0.5
    return np.minimum(whole.astype("int64"), given - 1)


def space_to_batch(
    emit: Emit, x: relax.Expr, block: Sequence[int], pads: Sequence[Sequence[int]], value: float
) -> relax.Expr:
    """[n, *sizes, ...] -> [prod(block) * n, *(sizes / block), ...]: every `block`-th pixel, from each first one on.

    Before, `pads` (before and after, of each axis that has a block) of `value` are put around.
    """
    shape = extents(x.ty)
    rest = len(shape) - 1 - len(block)
    around = [0, 0, *(int(pad) for pair in pads for pad in pair), *[0, 0] * rest]
    x = emit(op.nn.pad(x, around, pad_value=value)) if any(around) else x
    batch, *sizes = extents(x.ty)[: 1 + len(block)]
    counts = [size // step for size, step in zip(sizes, block, strict=True)]
    pairs = [extent for pair in zip(counts, block, strict=True) for extent in pair]
    x = emit(op.reshape(x, [batch, *pairs, *shape[1 + len(block) :]]))
    steps = [2 * axis + 2 for axis in range(len(block))]
    order = [*steps, 0, *(axis - 1 for axis in steps), *range(2 * len(block) + 1, 2 * len(block) + 1 + rest)]
    return op.reshape(emit(op.permute_dims(x, order)), [batch * math.prod(block), *counts, *shape[1 + len(block) :]])


def batch_to_space(emit: Emit, x: relax.Expr, block: Sequence[int], crops: Sequence[Sequence[int]]) -> relax.Expr:
    """[prod(block) * n, *sizes, ...] -> [n, *(sizes * block - crops), ...]: the reverse of `space_to_batch`."""
    shape, axes = extents(x.ty), range(1, 1 + len(block))
    batch, sizes, rest = shape[0] // math.prod(block), shape[1 : 1 + len(block)], shape[1 + len(block) :]
    x = emit(op.reshape(x, [*block, batch, *sizes, *rest]))
    pairs = [axis for number in range(len(block)) for axis in (len(block) + 1 + number, number)]
    order = [len(block), *pairs, *range(2 * len(block) + 1, 2 * len(block) + 1 + len(rest))]
    whole = [size * step for size, step in zip(sizes, block, strict=True)]
    x = emit(op.reshape(emit(op.permute_dims(x, order)), [batch, *whole, *rest]))
    if not np.any(crops):
        return x
    begin = [int(before) for before, _ in crops]
    end = [extent - int(after) for extent, (_, after) in zip(whole, crops, strict=True)]
    return op.strided_slice(x, list(axes), begin, end)
