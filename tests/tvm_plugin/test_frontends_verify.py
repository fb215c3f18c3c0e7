"""The comparison of an imported model with its origin."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from eqtune.errors import MismatchError
from eqtune.frontends import load_model, verify_import
from eqtune.frontends.verify import compare

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
