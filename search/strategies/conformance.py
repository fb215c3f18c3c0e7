"""Does a strategy keep its promises? For ours, and for your own:

from eqtune.search.strategies.conformance import check_strategy
check_strategy(MyStrategy())
"""

from __future__ import annotations

from functools import partial

import numpy as np
from numpy.typing import NDArray

from ..space.base import DecisionSpace, Points
from ..space.toy import ToySpace
from .base import Search, Strategy

__all__ = ["check_strategy"]


def check_strategy(strategy: Strategy, seed: int = 0) -> None:
    """Run a strategy on toy spaces and compare what it does with what `base` says. Takes some seconds.

    Raises
    ------
    AssertionError
        On the first promise that is broken; the message says which.
    """
    assert isinstance(strategy.name, str), "`name` must be a string"
    tiny = ToySpace(seed, sketches=2, knobs=2, values=4, failures=0.0)
    _check_batches(strategy, ToySpace(seed, knobs=5, values=7, failures=0.2), seed, rounds=4)
    _check_exhaustion(strategy, tiny, seed)
    _check_same_seed(strategy, tiny, seed)
    _check_foreign_tells(strategy, tiny, seed)
    _check_odd_scores(strategy, tiny, seed)
    single = ToySpace(seed, sketches=1, knobs=1, values=1)
    _check_exhaustion(strategy, single, seed)


class _Watch:
    """A search on a toy space whose every batch is checked."""

    def __init__(self, strategy: Strategy, space: ToySpace, seed: int) -> None:
        self.space = space
        self.search: Search = strategy.begin(space, seed)
        self.taken: set[tuple[int, ...]] = set()

    def ask(self, count: int) -> Points:
        points = self.search.ask(count, lambda rows: -self.space.latency_s(rows))
        width = 1 + self.space.cardinalities.shape[1]
        assert isinstance(points, np.ndarray), f"ask must return an array, not {type(points)}"
        assert points.dtype == np.int16, f"ask must return int16, not {points.dtype}"
        assert points.shape == (len(points), width), (
            f"ask must return shape [n, {width}], a sketch and its knobs; it returned {points.shape}"
        )
        assert len(points) <= count, f"asked for {count} points, got {len(points)}"
        assert self.space.legal(points).all(), "ask returned a point that is not legal in the space"
        rows = {tuple(row) for row in points.tolist()}
        assert len(rows) == len(points), "ask returned a point twice in one batch"
        assert not rows & self.taken, "ask returned a point that was asked or told before"
        self.taken |= rows
        return points

    def tell(self, points: Points) -> None:
        told, latencies_s = points.copy(), self.space.measured_s(points)
        self.search.tell(told, latencies_s)
        assert np.array_equal(told, points), "tell must not change the points it is given"
        self.taken |= {tuple(row) for row in points.tolist()}


def _check_batches(strategy: Strategy, space: ToySpace, seed: int, rounds: int) -> None:
    watch = _Watch(strategy, space, seed)
    assert not len(watch.ask(0)), "asked for 0 points, got some"
    for _ in range(rounds):
        points = watch.ask(8)
        assert len(points), "ask returned nothing although much of the space was never asked for"
        watch.tell(points[::-1])


def _check_exhaustion(strategy: Strategy, space: ToySpace, seed: int) -> None:
    """All legal points may be asked for, then ask must return none."""
    legal = {tuple(row) for row in _all_points(space).tolist()}
    watch = _Watch(strategy, space, seed)
    for _ in range(2 * len(legal)):
        points = watch.ask(8)
        if not len(points):
            break
        watch.tell(points)
    assert not len(watch.ask(8)), "ask must return nothing once the space is exhausted"
    assert watch.taken, "ask returned nothing although the space has legal points"


def _check_same_seed(strategy: Strategy, space: ToySpace, seed: int) -> None:
    first, second = (_Watch(strategy, space, seed) for _ in range(2))
    for _ in range(3):
        points, again = first.ask(4), second.ask(4)
        assert np.array_equal(points, again), "the same seed and the same tells must give the same asks"
        first.tell(points)
        second.tell(again)


def _check_foreign_tells(strategy: Strategy, space: ToySpace, seed: int) -> None:
    """Points of an earlier run, some of them failed, are told before and between asks."""
    points = _all_points(space)
    watch = _Watch(strategy, space, seed)
    watch.tell(points[:5])
    failed = points[5:8]
    watch.search.tell(failed, np.full(len(failed), np.inf))
    watch.taken |= {tuple(row) for row in failed.tolist()}
    watch.ask(4)
    watch.tell(points[-3:])
    watch.ask(4)


def _check_odd_scores(strategy: Strategy, space: DecisionSpace, seed: int) -> None:
    """A score may be constant, or infinitely bad; only the order matters."""
    for value in (0.0, -np.inf, 1e6):
        asked = strategy.begin(space, seed).ask(4, partial(_constant, value))
        assert len(asked), f"ask returned nothing when every score was {value}"


def _constant(value: float, points: Points) -> NDArray[np.float64]:
    return np.full(len(points), value)


def _all_points(space: ToySpace) -> Points:
    shape: NDArray[np.int64] = space.cardinalities.max(axis=0)
    grid = np.indices((len(space.cardinalities), *shape)).reshape(1 + len(shape), -1).T.astype(np.int16)
    return grid[space.legal(grid)]
