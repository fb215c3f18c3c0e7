"""The comparison of an imported model with its origin."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from eqtune.errors import MismatchError
from eqtune.frontends import load_model, verify_import
from eqtune.frontends.verify import compare, is_settled, undecided

ONES = np.ones((2, 2), np.float32)


@pytest.fixture(scope="module")
def imported():
    model = load_model("zoo:nasrnn")
    return dataclasses.replace(model, reference=lambda *inputs: [inputs[0] + inputs[1]])


def test_a_wrong_import_is_refused_with_the_difference(imported):
    with pytest.raises(MismatchError, match=r"nasrnn computes something else than zoo.*relative"):
        verify_import(imported)


def test_the_callers_run_is_used(imported):
    assert verify_import(imported, lambda *inputs: [inputs[0] + inputs[1]]) == 0
    slightly_off = verify_import(imported, lambda *inputs: [(inputs[0] + inputs[1]) * np.float32(1 + 1e-5)])
    assert 0 < slightly_off < 1e-4
    with pytest.raises(MismatchError):
        verify_import(imported, lambda *inputs: [(inputs[0] + inputs[1]) * np.float32(1 + 1e-5)], tolerance=1e-7)


def test_without_a_reference_there_is_nothing_to_compare():
    assert verify_import(load_model("zoo:nasrnn"), run=None) == 0


@pytest.mark.parametrize(
    ("outputs", "expected", "difference"),
    [
        ([ONES], [ONES], (0.0, 0.0)),
        ([2 * ONES], [4 * ONES], (2.0, 0.5)),
        ([ONES], [0 * ONES], (1.0, 1.0)),
        ([ONES], [ONES, ONES], (math.inf, math.inf)),
        ([ONES], [ONES[0]], (math.inf, math.inf)),
        ([ONES], [ONES.astype(np.float64)], (math.inf, math.inf)),
        ([ONES * np.nan], [ONES], (math.inf, math.inf)),
        ([ONES], [ONES * np.nan], (math.inf, math.inf)),
        ([ONES * np.inf], [ONES * np.inf], (0.0, 0.0)),
        ([ONES * np.inf], [ONES * -np.inf], (math.inf, math.inf)),
        ([ONES[:0]], [ONES[:0]], (0.0, 0.0)),
    ],
)
def test_compare(outputs, expected, difference):
    assert compare(outputs, expected) == difference


def ordered(x):
    """The places of the values in order, and what is found there in another table."""
    places = np.argsort(-x, kind="stable")
    return [places, np.arange(x.size, dtype=np.float32)[places] ** 2, x.sum(keepdims=True)]


def test_an_output_of_subnormal_numbers_counts_as_zeros():
    """Code that flushes them is as right as code that does not."""
    subnormal = np.float32([2e-40, -1e-41])
    assert compare([np.zeros_like(subnormal)], [subnormal])[1] < 1e-30
    assert compare([np.float32([0.5, 0.0])], [subnormal])[1] == 0.5
    assert compare([np.zeros(2, "float16")], [np.float16([6e-6, 0.0])])[1] == 1.0


def test_places_that_a_tie_decides_are_not_compared():
    x = np.linspace(1, 2, 100, dtype=np.float32)
    x[40] = np.nextafter(x[41], np.float32(0))
    expected = ordered(x)
    swapped = x.copy()
    swapped[[40, 41]] = x[[41, 40]]
    got = ordered(swapped)
    assert compare(got, expected)[1] > 1e-3
    ties = undecided(ordered, [x], expected, 1e-4)
    assert [int(places.sum()) for places in ties] == [2, 2, 0]
    assert compare(got, expected, ties)[1] < 1e-6
    wrong = [got[0], got[1] + np.where(got[0] == 7, 100, 0), got[2]]
    assert compare(wrong, expected, ties)[1] > 1e-3


def test_an_output_that_is_all_ties_is_compared():
    x = np.ones(100, np.float32)
    ties = undecided(ordered, [x], ordered(x), 1e-4)
    assert not any(places.any() for places in ties)


def test_an_output_without_elements_is_settled():
    inputs, expected = [np.ones((3, 3), "float32")], [np.zeros((0, 3), "float32")]
    assert undecided(lambda x: [x[:0]], inputs, expected, 1e-4)[0].shape == (0, 3)
    assert is_settled(lambda x: [x[:0]], inputs, expected, 1e-4)
