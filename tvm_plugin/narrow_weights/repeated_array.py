"""Large arrays whose neighbours are equal, such as scales that hold for groups of weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from ..arrays import Array

__all__ = ["RepeatedArray"]


@dataclass(frozen=True)
class RepeatedArray:
    """`array` with each element repeated along each axis: at i of an axis is what `array` has at i // times.

    Attributes
    ----------
    array : array
    times : tuple of int
        For each axis.
    """

    array: Array
    times: tuple[int, ...]

    @classmethod
    def of(cls, array: Array, shape: Sequence[int]) -> RepeatedArray:
        """The array broadcast to a shape."""
        array = array.reshape([1] * (len(shape) - array.ndim) + list(array.shape))
        return cls(array, tuple(whole // extent for whole, extent in zip(shape, array.shape, strict=True)))

    def transpose(self, axes: Sequence[int]) -> RepeatedArray:
        """With its axes in another order."""
        return RepeatedArray(self.array.transpose(axes), tuple(self.times[axis] for axis in axes))

    def combined(self, other: RepeatedArray, function: Callable[[Array, Array], Array]) -> RepeatedArray:
        """`function`, element by element, of this and another one of the same shape."""
        times = tuple(map(math.gcd, self.times, other.times))
        with np.errstate(all="ignore"):
            return RepeatedArray(function(self._repeated(times), other._repeated(times)), times)

    def reshape(self, shape: Sequence[int]) -> RepeatedArray:
        """In another shape, of as many elements: written out where the repeats are no longer those of whole axes."""
        # Of a place, the digits that tell it, last one first: how many there are, and whether they only repeat.
        digits = [
            digit
            for n, t in zip(reversed(self.array.shape), reversed(self.times), strict=True)
            for digit in ((t, True), (n, False))
            if digit[0] > 1
        ]
        kept, times = list[int](), list[int]()
        for extent in reversed(shape):
            count, repeats = 1, 1
            while count * repeats < extent:
                size, only_repeats = digits.pop(0)
                part = math.gcd(size, extent // (count * repeats))
                if part < size:
                    digits.insert(0, (size // part, only_repeats))
                # What repeats outside of what does not, or a part that does not come out even, has no such form.
                if (only_repeats and count > 1) or (part == 1 < size):
                    return RepeatedArray(self._repeated([1] * len(self.times)).reshape(shape), (1,) * len(shape))
                count, repeats = (count, repeats * part) if only_repeats else (count * part, repeats)
            kept.insert(0, count)
            times.insert(0, repeats)
        return RepeatedArray(self.array.reshape(kept), tuple(times))

    def _repeated(self, times: Sequence[int]) -> Array:
        """The array for fewer repeats of each element, which divide those there are."""
        array = self.array
        for axis, (now, then) in enumerate(zip(self.times, times, strict=True)):
            array = array.repeat(now // then, axis) if now > then else array
        return array
