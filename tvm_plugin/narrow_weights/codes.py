"""Weights of 8 bits or fewer as words of 32 bits that hold the codes of one column's next places."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..transform.constants import Array

__all__ = ["NarrowWeights", "narrow_weights"]

WORD_BITS = 32

BITS = (2, 4, 8)
"""Of a code: words hold whole ones."""

LARGEST_GROUP = 64
"""Places whose products are summed before their scale: more would lose accuracy, as ones are summed with them, and
fewer cost the scale's instructions more often."""

LEAST_GROUP = 16
"""With smaller groups than this, floats are as fast."""

COLUMNS = 16
"""Columns come in multiples of it: whole vectors on every machine. Missing ones have zeros for scales."""


@dataclass(frozen=True)
class NarrowWeights:
    """W[column, place] = scales[column, g] * (1 + code / 2^bits - offsets[column, g]), g being the place's group.

    Attributes
    ----------
    words : array of uint32, shape [columns, places * bits / 32]
        The first place has the lowest bits.
    scales : array of float32, shape [columns, groups]
    offsets : array of float32, shape [columns, groups], or float
        A number where all are equal.
    bits : int
    columns : int
        How many there are; the arrays may have up to 15 more, which are zero.
    """

    words: Array
    scales: Array
    offsets: Array | float
    bits: int
    columns: int


def narrow_weights(codes: Array, scales: Array, zeros: Array) -> NarrowWeights | None:
    """Store W = scales * (codes - zeros).

    Parameters
    ----------
    codes : array of integers, shape [places, columns]
    scales, zeros : arrays of float32, shapes that broadcast to [places, columns]

    Returns
    -------
    NarrowWeights, or None
        None where codes span more than 256 numbers, or scales or zeros change between too few places.
    """
    places, columns = codes.shape
    if codes.size == 0:
        return None
    least = int(codes.min())
    span = int(codes.max()) - least
    bits = next((bits for bits in BITS if span < 2**bits), None)
    if bits is None:
        return None
    group = _group(places, WORD_BITS // bits, scales, zeros)
    if group is None:
        return None
    shifted = np.ascontiguousarray((codes.T.astype(np.int32) - least).astype(np.uint32))
    words = np.zeros((columns, places * bits // WORD_BITS), np.uint32)
    for position in range(WORD_BITS // bits):
        words |= shifted[:, position :: WORD_BITS // bits] << np.uint32(position * bits)

    def by_column(array: Array) -> Array:
        return np.broadcast_to(_of_groups(array, group), (places // group, columns)).T.astype(np.float32)

    offsets = np.asarray(1.0 + (zeros - least) / 2**bits, np.float32)
    return NarrowWeights(
        words=_filled(words),
        scales=_filled(by_column(scales * np.float32(2**bits))),
        offsets=float(offsets.flat[0]) if (offsets == offsets.flat[0]).all() else _filled(by_column(offsets)),
        bits=bits,
        columns=columns,
    )


def _filled(array: Array) -> Array:
    missing = -len(array) % COLUMNS
    return np.pad(array, [(0, missing), (0, 0)]) if missing else array


def _group(places: int, codes: int, scales: Array, zeros: Array) -> int | None:
    """The largest group of places, in whole words, with one scale and one zero for each column; None without one."""
    for group in range(min(LARGEST_GROUP, places), LEAST_GROUP - 1, -1):
        if places % group == 0 and group % codes == 0 and all(_is_of_groups(a, places, group) for a in (scales, zeros)):
            return group
    return None


def _is_of_groups(array: Array, places: int, group: int) -> bool:
    if array.ndim < 2 or array.shape[0] == 1:
        return True
    parts = array.reshape(places // group, group, -1)
    return bool((parts == parts[:, :1]).all())


def _of_groups(array: Array, group: int) -> Array:
    """One row for each group."""
    return array if array.ndim < 2 or array.shape[0] == 1 else array[::group]
