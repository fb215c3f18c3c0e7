"""Pixels as one axis: a 1 x 1 convolution with channels first is a product over all pixels of an image.

Rows of 56 pixels are no multiple of a vector, so that tiles of one row waste an eighth of their lanes; all 3136 pixels
of an image are, and of 3025 only the last vector is ragged. What is planned is the contraction with its pixels merged;
the schedule merges the loops (`tiled.schedule_tiles`), since buffers keep their shapes.
"""

from __future__ import annotations

import math
from dataclasses import replace

from ..access import Access, Axis, Linear
from ..analysis import Contraction

__all__ = ["merge_axes"]


def merge_axes(contraction: Contraction, run: tuple[Axis, ...]) -> Contraction | None:
    """The contraction with neighbouring axes made one, which keeps the position of the first.

    Positions are those in the kernel, and no longer indices into the block's axes. None where the operands and the
    output do not have these axes in neighbouring dimensions, each as a whole.
    """
    merged = replace(run[0], name="_".join(axis.name for axis in run), extent=math.prod(axis.extent for axis in run))
    single = frozenset(axis.position for axis in contraction.block.axes if axis.extent == 1)
    left, right = (_merged(operand.access, run, single) for operand in (contraction.left, contraction.right))
    write = _merged(contraction.block.write, run, single)
    if left is None or right is None or write is None:
        return None

    def axes(old: tuple[Axis, ...]) -> tuple[Axis, ...]:
        return tuple(merged if axis == run[0] else axis for axis in old if axis not in run[1:])

    block = replace(
        contraction.block, axes=axes(contraction.block.axes), reads=(left, right), write=write, multiplies=(0, 1)
    )
    return replace(
        contraction,
        block=block,
        left=replace(contraction.left, access=left),
        right=replace(contraction.right, access=right),
        rows=axes(contraction.rows),
    )


def _merged(access: Access, run: tuple[Axis, ...], single: frozenset[int]) -> Access | None:
    """The access as one of a buffer with fewer dimensions; itself where it does not use the axes; None where it uses
    them in another way. `single` are axes of one iteration, such as windows of one tap: they move nothing.
    """
    if not access.axes() & {axis.position for axis in run}:
        return access
    wanted = [{axis.position: 1} for axis in run]
    for start in range(len(access.shape) - len(run) + 1):
        end = start + len(run)
        found = [_moving(index, single) for index in access.indices[start:end]]
        if found == wanted and access.shape[start + 1 : end] == tuple(axis.extent for axis in run[1:]):
            pixels = Linear(wanted[0], 0)
            return replace(
                access,
                shape=(*access.shape[:start], math.prod(access.shape[start:end]), *access.shape[end:]),
                indices=(*access.indices[:start], pixels, *access.indices[end:]),
            )
    return None


def _moving(index: Linear | None, single: frozenset[int]) -> dict[int, int] | None:
    """The coefficients of axes that have several iterations; None for an index of another kind."""
    if index is None or index.offset or index.quotients:
        return None
    return {axis: step for axis, step in index.coefficients.items() if axis not in single}
