"""Moves stay in the space, do what they say, and cope with rare legal points."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from eqtune.search.space.base import Points, Space
from eqtune.search.space.memory_bound.stages import UntouchedSketch
from eqtune.search.space.toy import ToySpace
from eqtune.search.strategies.moves import MoveMix, Moves


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 99), st.integers(1, 4), st.integers(1, 6), st.integers(1, 9))
def test_moves_stay_legal(seed: int, sketches: int, knobs: int, values: int) -> None:
    space = ToySpace(seed, sketches, knobs, values)
    moves, rng = Moves(space), np.random.default_rng(seed)
    points = moves.sample(rng, 50)
    assert len(points)
    assert len(moves.distinct(points)) == len(points)
    for moved in (points, moves.mutate(rng, points), moves.crossover(rng, points), moves.neighbours(points)):
        assert moved.dtype == np.int16
        assert space.legal(moved).all()


def test_mutation_kinds() -> None:
    space = ToySpace(seed=0)
    rng = np.random.default_rng(0)
    points = Moves(space).sample(rng, 500)

    def difference(mix: MoveMix) -> NDArray[np.int64]:
        return Moves(space, mix).mutate(rng, points).astype(np.int64) - points

    steps = difference(MoveMix(value=0.0, exchange=0.0, sketch=0.0))
    assert (np.abs(steps).sum(axis=1) == 1).mean() > 0.95
    values = difference(MoveMix(value=1.0, exchange=0.0, sketch=0.0))
    assert ((values != 0).sum(axis=1) <= 1).all()
    assert np.abs(values).max() > 1
    exchanges = difference(MoveMix(value=0.0, exchange=1.0, sketch=0.0))
    assert (exchanges.sum(axis=1) == 0).mean() > 0.5
    switches = difference(MoveMix(value=0.0, exchange=0.0, sketch=1.0))
    assert (switches[:, 0] != 0).mean() > 0.3


def test_crossover_mixes_two_parents_of_one_sketch() -> None:
    space = ToySpace(seed=0, sketches=2, knobs=6)
    moves, rng = Moves(space), np.random.default_rng(0)
    parents = moves.distinct(moves.sample(rng, 40))[[0, 1]]
    parents[:, 0] = 0
    parents = parents[space.legal(parents)]
    children = moves.crossover(rng, np.repeat(parents, 100, axis=0))
    assert ((children[:, None] == parents[None]).any(axis=1)).all()
    assert len(moves.distinct(children)) > len(parents)


def test_neighbours_are_all_steps_and_exchanges() -> None:
    space = ToySpace(seed=0, sketches=2, knobs=3, values=5)
    moves = Moves(space)
    everything = moves.everything()
    centre = everything[len(everything) // 3]
    offset = everything.astype(np.int64) - centre
    size = np.abs(offset).sum(axis=1)
    expected = (offset[:, 0] == 0) & (
        (size == 1) | ((size == 2) & (offset.sum(axis=1) == 0) & (offset.max(axis=1) == 1))
    )
    found = {tuple(row) for row in moves.neighbours(centre[None]).tolist()}
    assert found == {tuple(row) for row in everything[expected].tolist()}


def test_sample_is_even_over_sketches() -> None:
    points = Moves(ToySpace(seed=1, sketches=3)).sample(np.random.default_rng(0), 3000)
    assert np.bincount(points[:, 0]).min() > 200


class _Rare(ToySpace):
    """Only points on a thin path from the first corner are legal: one in millions."""

    def legal(self, points: Points) -> NDArray[np.bool_]:
        knobs = points[:, 1:]
        return super().legal(points) & (points[:, 0] == 0) & (knobs.max(axis=1) - knobs.min(axis=1) <= 1)


class _Never(ToySpace):
    def legal(self, points: Points) -> NDArray[np.bool_]:
        return np.zeros(len(points), dtype=np.bool_)


def test_sample_finds_rare_legal_points_and_gives_up_when_there_are_none() -> None:
    rare = Moves(_Rare(seed=0, knobs=8, values=16))
    found = rare.sample(np.random.default_rng(0), 100)
    assert len(found) > 50
    assert rare.space.legal(found).all()
    assert not len(Moves(_Never()).sample(np.random.default_rng(0), 100))


def test_a_space_without_knobs_has_one_point() -> None:
    """A kernel that stays as it is, such as a sort: there is nothing to walk along."""
    moves = Moves(Space((UntouchedSketch(None),)))
    assert moves.sample(np.random.default_rng(0), 100).tolist() == [[0]]
    assert moves.neighbours(moves.everything()).shape == (0, 1)


@pytest.mark.parametrize("values", [1, 2])
def test_everything_counts_the_legal_points(values: int) -> None:
    space = ToySpace(seed=0, sketches=2, knobs=2, values=values)
    everything = Moves(space).everything()
    grid = np.indices((2, values, values)).reshape(3, -1).T.astype(np.int16)
    expected = grid[space.legal(grid)]
    assert 2 <= len(expected) <= Moves(space).size
    np.testing.assert_array_equal(everything, expected)
