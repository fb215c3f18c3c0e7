"""What every strategy promises, and what the default finds."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from eqtune import cost_model
from eqtune.errors import InputError
from eqtune.search import strategies
from eqtune.search.space.base import Points
from eqtune.search.space.toy import ToySpace
from eqtune.search.strategies.annealed_evolution import AnnealedEvolution, Descent
from eqtune.search.strategies.batch import BatchConfig
from eqtune.search.strategies.conformance import check_strategy
from eqtune.search.strategies.simulate import simulate

LARGE_SPACES = [name for name in strategies.names() if name != "exhaustive"]


@pytest.mark.parametrize("name", strategies.names())
def test_conforms(name: str) -> None:
    check_strategy(strategies.create(name))


@pytest.mark.parametrize("name", LARGE_SPACES)
def test_conforms_where_nothing_is_enumerated(name: str) -> None:
    strategy: Any = strategies.create(name)
    check_strategy(replace(strategy, batch=replace(strategy.batch, exhaustive_limit=0)), seed=1)


FAULTS = {
    "illegal": "not legal",
    "repeats": "twice|before",
    "too many": "asked for 0 points, got 1",
    "unseeded": "same seed",
}
"""What is said of each."""


@pytest.mark.parametrize("fault", FAULTS)
def test_conformance_finds_faults(fault: str) -> None:
    with pytest.raises(AssertionError, match=FAULTS[fault]):
        check_strategy(_Faulty(fault))


class _Faulty:
    name = "faulty"

    def __init__(self, fault: str) -> None:
        self.fault = fault

    def begin(self, space: Any, seed: int) -> Any:
        if self.fault == "unseeded":
            seed = np.random.SeedSequence().generate_state(1)[0]
        search = strategies.create("random").begin(space, seed)
        ask = search.ask
        first: list[Any] = []

        def faulty(count: int, score: Any) -> Any:
            if self.fault == "too many":
                return ask(count + 1, score)
            points = ask(count, score)
            if self.fault == "illegal" and len(points):
                points[0, 1:] = space.cardinalities[points[0, 0]]
            if self.fault == "repeats" and len(points):
                first.append(points)
                return first[0]
            return points

        search.ask = faulty  # type: ignore[method-assign]
        return search


def test_names_and_instances() -> None:
    assert strategies.create("annealed-evolution") == AnnealedEvolution()
    own = AnnealedEvolution(chains=3)
    assert strategies.create(own) is own
    assert all(strategies.create(name).name == name for name in strategies.names())
    with pytest.raises(InputError, match=r"unknown strategy 'anealing'.*annealed-evolution, annealing"):
        strategies.create("anealing")
    with pytest.raises(InputError, match="begin"):
        strategies.create(3)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", LARGE_SPACES)
def test_small_space_is_searched_completely(name: str) -> None:
    space = ToySpace(seed=3, sketches=2, knobs=3, values=6)
    run = simulate(strategies.create(name), space, space.measured_s, trials=1000, batch=64)
    assert run.best_s[-1] == space.best_s
    everything = np.indices((2, 6, 6, 6)).reshape(4, -1).T.astype(np.int16)
    assert len(run.points) == space.legal(everything).sum()


def test_exhaustive_asks_best_first_and_refuses_large_spaces() -> None:
    space = ToySpace(seed=1, knobs=4, values=6)
    points = strategies.create("exhaustive").begin(space, 0).ask(50, lambda rows: -space.measured_s(rows))
    assert space.measured_s(points[:1]) == space.best_s
    assert (np.diff(space.measured_s(points)) >= 0).all()
    with pytest.raises(InputError, match="at most 1,048,576"):
        strategies.create("exhaustive").begin(ToySpace(knobs=10), 0)


@pytest.mark.parametrize(("name", "gap"), [("annealed-evolution", 1.01), ("annealing", 1.1), ("evolution", 1.3)])
def test_first_batch_follows_the_score(name: str, gap: float) -> None:
    """With a perfect score, the first batch comes near the very best of 19 million points."""
    for seed in range(3):
        space = ToySpace(seed=seed, failures=0.0)
        asked = strategies.create(name).begin(space, seed).ask(16, lambda rows, s=space: -s.measured_s(rows))
        assert space.measured_s(asked).min() <= gap * space.best_s


def test_equal_scores_are_asked_once() -> None:
    """Points that the score cannot tell apart do not fill a batch."""
    space = ToySpace(seed=2)
    score = lambda rows: -np.abs(rows[:, 1] - 3.0) - np.abs(rows[:, 2] - 3.0)  # noqa: E731
    strategy = AnnealedEvolution(batch=BatchConfig(epsilon=0.0))
    scores = score(strategy.begin(space, 0).ask(8, score))
    assert len(set(scores)) == 8
    crowded = AnnealedEvolution(batch=BatchConfig(epsilon=0.0, distinct_scores=False))
    assert len(set(score(crowded.begin(space, 0).ask(8, score)))) < 8


def test_epsilon_is_the_random_share() -> None:
    """The score loves the first sketch only; what comes from another one is random."""
    space = ToySpace(seed=4)

    def strangers(epsilon: float) -> int:
        search = AnnealedEvolution(batch=BatchConfig(epsilon=epsilon), descent=Descent(share=0.0)).begin(space, 0)
        score = lambda rows: -100.0 * rows[:, 0] + np.random.default_rng(0).random(len(rows))  # noqa: E731
        first = search.ask(40, score)
        assert not first[:, 0].any()
        search.tell(first, space.measured_s(first))
        return int((search.ask(40, score)[:, 0] > 0).sum())

    assert strangers(0.0) == 0
    assert 5 <= strangers(0.5) <= 20


def test_descent_asks_for_neighbours_of_the_best_when_nothing_improves() -> None:
    space = ToySpace(seed=5, failures=0.0)
    score = lambda rows: -space.latency_s(rows)  # noqa: E731
    best = space.best_point[None]

    def near(share: float) -> int:
        search = AnnealedEvolution(descent=Descent(after=1, share=share, centres=1)).begin(space, 0)
        search.tell(best, np.array([space.best_s]))
        search.ask(8, score)
        asked = search.ask(16, score)
        return int((np.abs(asked - best).sum(axis=1) <= 2).sum())

    assert near(0.5) >= 8
    assert near(0.0) < 8


def test_told_points_seed_the_search() -> None:
    """With a score that says nothing, what was told is all there is to go by: records of another run help."""
    space = ToySpace(seed=6, failures=0.0)
    score = lambda rows: np.zeros(len(rows))  # noqa: E731
    warm, cold = (AnnealedEvolution().begin(space, 0) for _ in range(2))
    warm.tell(space.best_point[None], np.array([space.best_s]))
    warm.ask(1, score)
    asked = {search: space.measured_s(search.ask(32, score)).min() for search in (warm, cold)}
    assert asked[warm] < asked[cold]


def choices() -> dict[str, str]:
    """A digest of everything that each strategy asks for, by strategy and seed."""
    digests = {}
    space = ToySpace(seed=7)
    for name in LARGE_SPACES:
        for seed in (7, 8):
            model = cost_model.create("xgboost", seed=seed)
            strategy = strategies.create(name)
            run = simulate(strategy, space, space.measured_s, trials=24, batch=8, model=model, seed=seed)
            digests[f"{name} {seed}"] = hashlib.sha256(run.points.tobytes()).hexdigest()
    return digests


def test_same_seed_same_choices_in_another_process() -> None:
    here = choices()
    assert len(set(here.values())) == len(here)
    command = [sys.executable, __file__]
    there = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert json.loads(there) == here


def test_tell_refuses_shapes_that_do_not_fit() -> None:
    search = strategies.create("random").begin(ToySpace(), 0)
    points = search.ask(4, lambda rows: np.zeros(len(rows)))
    with pytest.raises(ValueError, match="4 points"):
        search.tell(points, np.ones(3))


def test_annealed_evolution_beats_random_search() -> None:
    """At equal trials, on every space tried; and the learnt model beats the analytic estimate alone on average."""
    trials, learnt, analytic = 64, [], []
    for seed in range(5):
        space = ToySpace(seed=seed)

        def best(name: str, model: str, seed: int = seed, space: ToySpace = space) -> float:
            run = simulate(
                strategies.create(name),
                space,
                space.measured_s,
                trials,
                model=cost_model.create(model, seed=seed),
                seed=seed,
            )
            return float(run.best_s[-1] / space.best_s)

        learnt.append(best("annealed-evolution", "xgboost"))
        analytic.append(best("annealed-evolution", "analytic"))
        assert learnt[-1] < best("random", "analytic")
    assert np.prod(learnt) < np.prod(analytic)
    assert np.median(learnt) < 1.1


@pytest.mark.parametrize("name", LARGE_SPACES)
def test_nothing_to_ask_for_where_nothing_is_legal(name: str) -> None:
    search = strategies.create(name).begin(_Never(), 0)
    assert not len(search.ask(8, lambda rows: np.zeros(len(rows))))


class _Never(ToySpace):
    def legal(self, points: Points) -> NDArray[np.bool_]:
        return np.zeros(len(points), dtype=np.bool_)


@pytest.mark.parametrize("name", strategies.names())
def test_a_sketch_without_knobs_is_one_point(name: str) -> None:
    search = strategies.create(name).begin(ToySpace(sketches=1, knobs=0), 0)
    assert search.ask(8, lambda rows: np.zeros(len(rows))).tolist() == [[0]]


if __name__ == "__main__":
    print(json.dumps(choices()))
