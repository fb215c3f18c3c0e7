"""The toy space is what it says: its best point is the best."""

from __future__ import annotations

import numpy as np
import pytest

from eqtune.search.space.toy import ToySpace
from eqtune.search.strategies.moves import Moves


@pytest.mark.parametrize("seed", range(5))
def test_best_point_is_legal_and_the_best(seed: int) -> None:
    space = ToySpace(seed, sketches=3, knobs=4, values=6)
    everything = Moves(space).everything()
    seconds = space.measured_s(everything)
    assert space.legal(space.best_point[None]).all()
    assert space.measured_s(space.best_point[None])[0] == space.best_s == seconds.min()
    assert (seconds == space.best_s).sum() == 1
    assert 0.0 < np.isinf(seconds).mean() < 0.05


def test_analytic_estimate_is_right_in_the_large_only() -> None:
    space = ToySpace(seed=1, knobs=4, values=6, failures=0.0)
    everything = Moves(space).everything()
    estimate, seconds = space.latency_s(everything), space.measured_s(everything)
    assert np.median(seconds[np.argsort(estimate)[:100]]) < 0.5 * np.median(seconds)
    assert estimate.argmin() != seconds.argmin()
    assert len(np.unique(space.features(everything), axis=0)) == len(everything)
