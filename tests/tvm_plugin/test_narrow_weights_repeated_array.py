"""Arrays whose neighbours are equal are what numpy makes of them, written out, in fewer elements."""

from __future__ import annotations

import numpy as np
import pytest

from eqtune.narrow_weights.repeated_array import RepeatedArray

SHAPES = [
    ((4, 3, 1), (4, 3, 32), (4, 96), 3 * 4),  # groups of a row
    ((3, 1, 5), (3, 32, 5), (96, 5), 15),  # of a column
    ((4, 96), (4, 96), (4, 3, 32), 4 * 96),  # nothing repeats
    ((4, 1), (4, 96), (4, 3, 32), 4),
    ((4, 1), (4, 96), (2, 2, 96), 4),
    ((1, 6), (4, 6), (24,), 24),  # what repeats is outside
    ((4, 1, 3, 1), (4, 1, 3, 2), (12, 2), 12),
    ((6, 1), (6, 4), (8, 3), 24),  # no axis of the old ones
    ((1, 1), (6, 4), (3, 8), 1),
]


@pytest.mark.parametrize(("own", "whole", "new", "elements"), SHAPES, ids=str)
def test_reshaped(own: tuple[int, ...], whole: tuple[int, ...], new: tuple[int, ...], elements: int) -> None:
    array = np.arange(np.prod(own), dtype=np.float32).reshape(own)
    result = RepeatedArray.of(array, whole).reshape(new)
    assert result.array.size == elements
    np.testing.assert_array_equal(written_out(result), np.broadcast_to(array, whole).reshape(new))


def written_out(one: RepeatedArray) -> np.ndarray:
    array = one.array
    for axis, times in enumerate(one.times):
        array = array.repeat(times, axis)
    return array


def test_combined() -> None:
    groups, columns = np.arange(6.0).reshape(2, 3, 1), np.arange(12.0)
    sums = RepeatedArray.of(groups, (2, 3, 4)).reshape((2, 12)).combined(RepeatedArray.of(columns, (2, 12)), np.add)
    np.testing.assert_array_equal(written_out(sums), groups.repeat(4, 2).reshape(2, 12) + columns)
    halves = RepeatedArray.of(np.arange(2.0).reshape(2, 1), (2, 12)).combined(
        RepeatedArray.of(groups, (2, 3, 4)).reshape((2, 12)), np.multiply
    )
    assert halves.array.shape == (2, 3)
    turned = halves.transpose((1, 0))
    np.testing.assert_array_equal(written_out(turned), (np.arange(2)[:, None] * groups.repeat(4, 2).reshape(2, 12)).T)
