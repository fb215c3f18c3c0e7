"""Weights of 8 bits or fewer as words of 32 bits that hold the codes of one column's next places."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from ..arrays import Array, aligned_empty, copy_into

__all__ = ["WORD_BITS", "NarrowWeights", "narrow_weights"]

WORD_BITS = 32

BITS = (2, 4, 8)
"""Of a code: words hold whole ones."""

LARGEST_GROUP = 64
"""Places whose products are summed before their scale; fewer cost the scale's instructions more often."""

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
    scales, zeros : arrays of float32, shape [runs, columns] or [runs, 1]
        One for each run of places; runs divide places.

    Returns
    -------
    NarrowWeights, or None
        None where codes span more than 256 numbers, or runs are short.
    """
    places, columns = codes.shape
    if codes.size == 0:
        return None
    coding = _coding(int(codes.min()), int(codes.max()))
    if coding is None:
        return None
    bits, least = coding
    group = _group(math.gcd(places // len(scales), places // len(zeros)), WORD_BITS // bits)
    if group is None:
        return None

    with np.errstate(all="ignore"):  # scales may be anything
        factors = scales * np.float32(2**bits)

    def by_column(array: Array) -> Array:
        """[columns, groups]"""
        every = np.repeat(array.astype(np.float32), places // group // len(array), 0)
        return _filled(np.ascontiguousarray(np.broadcast_to(every, (places // group, columns)).T))

    offsets = np.asarray(1.0 + (zeros - least) / 2**bits, np.float32)
    is_one_number = bool((offsets == offsets.flat[0]).all())
    return NarrowWeights(
        words=_filled(_words(codes, least, bits)),
        scales=by_column(factors),
        offsets=float(offsets.flat[0]) if is_one_number else by_column(offsets),
        bits=bits,
        columns=columns,
    )


def _coding(low: int, high: int) -> tuple[int, int] | None:
    """How many bits hold the numbers from `low` to `high`, and which number is all zeros.

    That is 0, or the least one of so many bits with a sign, where possible: layers shall have the same offset.
    """
    for bits in BITS:
        least = next((one for one in (0, -(2 ** (bits - 1)), low) if one <= low and high < one + 2**bits), None)
        if least is not None:
            return bits, least
    return None


def _group(run: int, codes: int) -> int | None:
    """The most places, in whole words, that runs of places are cut in; None where it is too few."""
    sizes = range(min(LARGEST_GROUP, run), LEAST_GROUP - 1, -1)
    return next((size for size in sizes if run % size == 0 and size % codes == 0), None)


def _words(codes: Array, least: int, bits: int) -> Array:
    """The codes above the least one, [columns, places / codes of a word]."""
    turned = aligned_empty(codes.shape[::-1], np.uint8)
    copy_into(turned, codes.T if codes.dtype.itemsize == 1 else codes.T.astype(np.uint8))
    turned -= np.uint8(least % 256)  # modulo 256, as the conversion of negative numbers is
    while bits < 8:
        turned = turned[:, ::2] | turned[:, 1::2] << np.uint8(bits)
        bits *= 2
    return turned.view("<u4").astype(np.uint32, copy=False)


def _filled(array: Array) -> Array:
    missing = -len(array) % COLUMNS
    return np.pad(array, [(0, missing), (0, 0)]) if missing else array
