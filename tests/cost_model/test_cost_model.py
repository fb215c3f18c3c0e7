"""Models by name, blending with the analytic estimate, and how ranking is judged."""

from __future__ import annotations

import math
import subprocess
import sys

import numpy as np
import pytest

from eqtune import cost_model
from eqtune.cost_model import BlendedScore
from eqtune.cost_model.analytic import AnalyticModel
from eqtune.cost_model.metrics import spearman
from eqtune.cost_model.random import RandomModel
from eqtune.errors import InputError
from eqtune.search.space.toy import ToySpace
from eqtune.search.strategies.moves import Moves


def test_names_and_instances() -> None:
    own = RandomModel(5)
    assert cost_model.create(own) is own
    assert all(cost_model.create(name).name == name for name in cost_model.names())
    with pytest.raises(InputError, match="unknown cost model 'xgb'; there are analytic, random, xgboost"):
        cost_model.create("xgb")
    with pytest.raises(InputError, match="fit, predict and trained"):
        cost_model.create(RandomModel)  # type: ignore[arg-type]


def test_seed_reaches_the_model() -> None:
    features = np.arange(30, dtype=np.float32).reshape(10, 3)
    first, again, other = (cost_model.create("random", seed=seed).predict(features) for seed in (1, 1, 2))
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)
    assert len(set(first)) == 10


def test_importing_the_package_is_cheap() -> None:
    code = "import sys, eqtune.cost_model; print([m for m in ('xgboost', 'scipy', 'tvm') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_analytic_score_is_alone_before_training_and_fades_after() -> None:
    space = ToySpace(seed=0)
    points = Moves(space).sample(np.random.default_rng(0), 500)
    analytic, model = -space.latency_s(points), RandomModel()
    learnt = model.predict(space.features(points))

    def alike(measured: int, half_life: float = 32.0) -> tuple[float, float]:
        score = BlendedScore(space, model, measured, half_life)(points)
        return spearman(score, -analytic), spearman(score, -learnt)

    for untrained in (None, AnalyticModel()):
        assert np.array_equal(np.argsort(BlendedScore(space, untrained, 999)(points)), np.argsort(analytic))
    assert alike(0)[0] == pytest.approx(1.0)
    fading = [alike(measured)[0] for measured in (0, 16, 64, 256)]
    assert fading == sorted(fading, reverse=True)
    assert abs(np.subtract(*alike(32))) < 0.15
    assert alike(1000)[1] > 0.999
    assert alike(1, half_life=0.0)[1] == pytest.approx(1.0)


def test_scores_of_different_calls_compare() -> None:
    space = ToySpace(seed=0)
    points = Moves(space).sample(np.random.default_rng(0), 500)
    score = BlendedScore(space, RandomModel(), measured=32)
    together = score(points)
    assert np.allclose(score(points[:7]), together[:7])


def test_spearman() -> None:
    latencies_s = np.array([1.0, 2.0, 3.0, np.inf])
    assert spearman(-latencies_s, latencies_s) == pytest.approx(1.0)
    assert spearman(latencies_s, latencies_s) == pytest.approx(-1.0)
    assert spearman(np.array([4.0, 4.0, 1.0, 1.0]), latencies_s) == pytest.approx(0.894427, abs=1e-6)
    assert math.isnan(spearman(np.zeros(4), latencies_s))
    assert math.isnan(spearman(np.zeros(1), latencies_s[:1]))
