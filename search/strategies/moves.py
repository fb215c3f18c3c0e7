"""Every move that a strategy can make on decision vectors, vectorised over points.

A move never leaves the space: whatever it returns is legal. Moves that break a constraint are tried again a few times
and then given up, so that the effort is bounded however rare legal points are.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..space.base import DecisionSpace, Points

__all__ = ["MoveMix", "Moves"]

Keys = NDArray[np.uint64]

_CHUNK = 1 << 15

_FEW = 64  # points that are checked at a time, at least


@dataclass(frozen=True)
class MoveMix:
    """How often `Moves.mutate` makes which move; the rest are steps. Shares in [0, 1] that sum to at most 1.

    Attributes
    ----------
    value : float
        One knob takes any other value.
    exchange : float
        One knob goes a step up and another a step down: the way along a constraint on a product of tiles, where
        every single step is illegal or worse. (FlexTensor's directions, for knobs that are not one split.)
    sketch : float
        Another sketch, with random values.
    """

    value: float = 0.3
    exchange: float = 0.2
    sketch: float = 0.05


class Moves:
    """Moves over one space.

    Parameters
    ----------
    space : DecisionSpace
        What the points belong to.
    mix : MoveMix
        Shares of the kinds of mutation.
    """

    def __init__(self, space: DecisionSpace, mix: MoveMix | None = None) -> None:
        self.space = space
        self.mix = mix or MoveMix()
        self._cardinalities = np.asarray(space.cardinalities, dtype=np.int64)
        free = self._cardinalities > 1
        self._free = free
        self._free_count = free.sum(axis=1)
        # Row s lists the columns of sketch s that can change, first.
        self._free_columns = 1 + np.argsort(~free, axis=1, kind="stable")
        # Odd random multipliers, the same in every process.
        self._multipliers = np.random.default_rng(0x5EED).integers(
            0, 2**63, size=self.width, dtype=np.uint64
        ) * np.uint64(2) + np.uint64(1)

    @property
    def width(self) -> int:
        """Columns of a point."""
        return 1 + int(self._cardinalities.shape[1])

    @property
    def size(self) -> int:
        """How many points the space has, legal or not."""
        return int(sum(int(np.prod(row.astype(object))) for row in self._cardinalities))

    def none(self) -> Points:
        """No points, shape [0, width]."""
        return np.zeros((0, self.width), dtype=np.int16)

    def keys(self, points: Points) -> Keys:
        """A 64-bit hash of each point, shape [n]. A collision (about n^2 / 2^65) only hides a candidate."""
        return points.astype(np.uint64) @ self._multipliers

    def distinct(self, points: Points) -> Points:
        """The points without repetitions, in the order of their first occurrence."""
        _, first = np.unique(self.keys(points), return_index=True)
        return points[np.sort(first)]

    def legal(self, points: Points) -> Points:
        """Those of the points that are legal."""
        return points[self.space.legal(points)] if len(points) else points

    def everything(self) -> Points:
        """All legal points, in order. About 0.3 s for a million points, legal or not: for small spaces."""
        parts = [self.none()]
        for sketch, row in enumerate(self._cardinalities):
            size = int(np.prod(row))
            for start in range(0, size, _CHUNK):
                index = np.arange(start, min(start + _CHUNK, size))
                points = np.full((len(index), self.width), sketch, dtype=np.int16)
                if len(row):
                    points[:, 1:] = np.stack(np.unravel_index(index, tuple(row)), axis=1)
                parts.append(self.legal(points))
        return np.concatenate(parts)

    def sample(self, rng: np.random.Generator, count: int, effort: int = 16) -> Points:
        """About `count` distinct legal points: every sketch alike, uniform in it.

        By rejection, of at most about `effort * count` draws. Where that finds too few, the others are found by walking
        from those, and from the corners of the space (all knobs at their least, middle or last value): neither
        uniform nor certain, but a start where legal points are rare.

        Returns
        -------
        Points
            At most `count`; fewer when legal points are rare or there are not so many.
        """
        found, draws, most = self.none(), 0, effort * max(count, _FEW)
        while len(found) < count and draws < most:
            # As many as are likely to be enough: a call of `legal` for a few costs as much as for a thousand.
            share = (len(found) + 1) / (draws + 1) if draws else 1.0
            size = min(max(int((count - len(found)) / share), _FEW), most - draws)
            found = self.distinct(np.concatenate([found, self.legal(self._draw(rng, size))]))
            draws += size
        found = self.distinct(np.concatenate([found, self._corners()]))
        for _ in range(effort):
            if not 0 < len(found) < count:
                break
            walked = self.mutate(rng, found[rng.integers(len(found), size=max(count, 64))])
            found = self.distinct(np.concatenate([found, walked]))
        return found[:count]

    def mutate(self, rng: np.random.Generator, points: Points, attempts: int = 3) -> Points:
        """Each point after one random move (`MoveMix`); unchanged where `attempts` moves were all illegal."""
        if not len(points) or self.width == 1:  # no points, or no knobs
            return points.copy()
        # All attempts at once: for a few dozen points, a call of `legal` costs as much as for a thousand.
        moved = self._move(rng, np.tile(points, (attempts, 1)))
        legal = self.space.legal(moved).reshape(attempts, len(points))
        rows = np.flatnonzero(legal.any(axis=0))
        result = points.copy()
        result[rows] = moved[legal[:, rows].argmax(axis=0) * len(points) + rows]
        return result

    def crossover(self, rng: np.random.Generator, points: Points) -> Points:
        """Each point with about half of its knobs taken from another of the points that has the same sketch.

        Unchanged where the child would be illegal or there is no mate.
        """
        if not len(points):
            return points.copy()
        # Sorted by sketch, in random order within each: the mate is the next one.
        order = np.lexsort((rng.random(len(points)), points[:, 0]))
        mates = np.empty_like(points)
        mates[order] = points[np.roll(order, -1)]
        take = rng.random(points.shape) < 0.5
        take &= (mates[:, 0] == points[:, 0])[:, None]
        children = np.where(take, mates, points)
        legal = self.space.legal(children)
        return np.where(legal[:, None], children, points)

    def neighbours(self, points: Points) -> Points:
        """All distinct legal points one step or one exchange (`MoveMix`) away from one of the points."""
        offsets = self._offsets()
        near = (points[:, None, :].astype(np.int64) + offsets[None]).reshape(-1, self.width)
        limits = self._cardinalities[near[:, 0]]
        inside = ((near[:, 1:] >= 0) & (near[:, 1:] < limits)).all(axis=1)
        return self.distinct(self.legal(near[inside].astype(np.int16)))

    def _offsets(self) -> NDArray[np.int64]:
        columns = 1 + np.flatnonzero(self._free.any(axis=0))
        steps = np.eye(self.width, dtype=np.int64)[columns]
        exchanges = (steps[:, None] - steps[None, :])[~np.eye(len(columns), dtype=bool)]
        return np.concatenate([steps, -steps, exchanges])

    def _draw(self, rng: np.random.Generator, count: int) -> Points:
        """Random points, legal or not."""
        sketches = rng.integers(len(self._cardinalities), size=count)
        points = np.empty((count, self.width), dtype=np.int16)
        points[:, 0] = sketches
        points[:, 1:] = rng.random((count, self.width - 1)) * self._cardinalities[sketches]
        return points

    def _corners(self) -> Points:
        last = self._cardinalities - 1
        parts = [np.insert(level, 0, np.arange(len(last)), axis=1) for level in (last * 0, last // 2, last)]
        return self.legal(np.concatenate(parts).astype(np.int16))

    def _move(self, rng: np.random.Generator, points: Points) -> Points:
        """Each point after one random move, legal or not."""
        count = len(points)
        rows = np.arange(count)
        sketches = points[:, 0].astype(np.int64)
        kind = rng.random(count)
        direction = np.where(rng.random(count) < 0.5, -1, 1)
        which = rng.random(count)
        choices = self._free_count[sketches]
        position = (which * choices).astype(np.int64)
        column = self._free_columns[sketches, position]
        limit = self._cardinalities[sketches, column - 1]
        index = points[rows, column].astype(np.int64)

        stepped = index + direction
        # At either end the only neighbour is inwards.
        stepped = np.where((stepped < 0) | (stepped >= limit), index - direction, stepped)
        shift = 1 + (rng.random(count) * (limit - 1)).astype(np.int64)
        other_value = (index + shift) % limit
        moved = points.copy()
        moved[rows, column] = np.where(kind < self.mix.value, other_value, stepped).clip(0, limit - 1)

        exchanged = (kind >= self.mix.value) & (kind < self.mix.value + self.mix.exchange) & (choices > 1)
        partner = (position + 1 + (rng.random(count) * (choices - 1)).astype(np.int64)) % np.maximum(choices, 1)
        partner_column = self._free_columns[sketches, partner]
        partner_limit = self._cardinalities[sketches, partner_column - 1]
        opposite = points[rows, partner_column] - (moved[rows, column] - points[rows, column])
        opposite = opposite.clip(0, partner_limit - 1)
        moved[rows[exchanged], partner_column[exchanged]] = opposite[exchanged]

        switched = (kind > 1.0 - self.mix.sketch) if len(self._cardinalities) > 1 else np.zeros(count, dtype=np.bool_)
        moved[switched] = self._draw(rng, int(switched.sum()))
        return moved
