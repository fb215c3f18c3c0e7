"""Columns that only the compiler knows: kept where it told, expected where it did not."""

from __future__ import annotations

import numpy as np
import pytest

from eqtune.cost_model import LateColumns, create
from eqtune.cost_model.metrics import spearman
from eqtune.cost_model.random import RandomModel

LATE = 3


def candidates(count: int, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Features without the late column, the late column, and latencies that follow it."""
    rng = np.random.default_rng(seed)
    early = rng.uniform(size=(count, 4)).astype(np.float32)
    early[:, LATE] = np.nan
    late = (early[:, 0] * 100 + 50 * (early[:, 1] > 0.5)).astype(np.float32)
    return early, late, np.asarray(1.0 + late, dtype=np.float64)


def test_what_was_told_stays_and_the_rest_is_what_others_let_expect() -> None:
    features, late, latencies_s = candidates(200, 0)
    features[:100, LATE] = late[:100]
    model = LateColumns(create("xgboost"), [LATE])
    np.testing.assert_array_equal(model.fill(features), features)  # nothing is known yet
    model.fit(features, latencies_s, np.zeros(200, dtype=np.int64))
    filled = model.fill(features)
    np.testing.assert_array_equal(filled[:100], features[:100])
    assert np.abs(filled[100:, LATE] - late[100:]).mean() < 10
    assert np.isnan(features[100:, LATE]).all()  # the caller's table is not written to


def test_candidates_are_ranked_before_and_after_they_were_compiled() -> None:
    features, late, latencies_s = candidates(200, 1)
    features[:, LATE] = late
    model = LateColumns(create("xgboost"), [LATE])
    model.fit(features, latencies_s, np.zeros(200, dtype=np.int64))
    assert model.trained
    new, new_late, new_latencies_s = candidates(100, 2)
    assert spearman(model.predict(new), new_latencies_s) > 0.9
    new[:, LATE] = new_late
    assert spearman(model.predict(new), new_latencies_s) > 0.9


@pytest.mark.parametrize("value", [np.nan, 7.0])
def test_a_column_that_tells_nothing_changes_nothing(value: float) -> None:
    features, _, latencies_s = candidates(50, 3)
    features[:, LATE] = value
    inner = RandomModel(0)
    model = LateColumns(inner, [LATE])
    model.fit(features, latencies_s, np.zeros(50, dtype=np.int64))
    features[0, LATE] = np.nan
    np.testing.assert_array_equal(model.fill(features), features)
    np.testing.assert_array_equal(model.predict(features), inner.predict(features))
    assert model.name == "random"
