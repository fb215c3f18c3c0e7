"""Toy spaces: a synthetic kernel whose best schedule is known, for tests, tutorials and users' own strategies.

`ToySpace` is a `DecisionSpace` with a `measured_s` that plays the machine. It has what makes real spaces hard: several
sketches of which one is best, interacting knobs, a constraint that the optimum touches, small ripples, candidates that
fail, and an analytic estimate that is right in the large and wrong in detail.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .base import Points

__all__ = ["ToySpace"]


class ToySpace:
    """A quadratic bowl a sketch, over knobs under a budget.

    The latency of a point of sketch s is `floor_s[s] * (1 + d A d + ripple)`, with d the distance of the indices from
    the sketch's best point in shares of the knobs' ranges, A positive definite, and the ripple a fixed pseudo-random
    number, 0 at the best point. A point is legal when the indices of the first half of its knobs sum to at most a
    budget; the best point uses the budget up.

    Parameters
    ----------
    seed : int
        Which space.
    sketches : int
        How many sketches; the first has the lowest floor.
    knobs, values : int
        Knobs of a sketch and values of a knob. Later sketches have a knob less, down to one, as in a real space.
    ripple : float
        Size of the ripple relative to the floor.
    failures : float
        Share of the points that fail when measured, never a sketch's best point.
    """

    def __init__(
        self,
        seed: int = 0,
        sketches: int = 3,
        knobs: int = 8,
        values: int = 8,
        ripple: float = 0.05,
        failures: float = 0.02,
    ) -> None:
        rng = np.random.default_rng(seed)
        self.ripple = ripple
        self.failures = failures
        self.floor_s = 1e-5 * 1.25 ** np.arange(sketches)
        self._cardinalities = np.ones((sketches, knobs), dtype=np.int64)
        for sketch in range(sketches):
            self._cardinalities[sketch, : max(1, knobs - sketch)] = values
        self._best = rng.integers(0, self._cardinalities)
        self._guess = (self._best + rng.integers(-1, 2, self._best.shape)).clip(0, self._cardinalities - 1)
        factors = rng.normal(size=(sketches, knobs, knobs)) / np.sqrt(knobs)
        self._bowl = 4.0 * factors @ factors.transpose(0, 2, 1) + 0.5 * np.eye(knobs)
        self._guessed_floor_s = self.floor_s * rng.uniform(0.8, 1.2, sketches)
        self._tiles = max(1, knobs // 2)
        self._budget = self._best[:, : self._tiles].sum(axis=1)

    @property
    def cardinalities(self) -> NDArray[np.int64]:
        """Number of values of each knob, shape [sketches, knobs]; 1 where a sketch has no such knob."""
        return self._cardinalities

    @property
    def best_point(self) -> Points:
        """The best point, shape [1 + knobs]."""
        return np.insert(self._best[0], 0, 0).astype(np.int16)

    @property
    def best_s(self) -> float:
        """What the best point takes, in seconds."""
        return float(self.floor_s[0])

    def legal(self, points: Points) -> NDArray[np.bool_]:
        """Whether the point exists and its tiles stay within the sketch's budget, shape [n]."""
        sketches = points[:, 0]
        exists = ((points[:, 1:] >= 0) & (points[:, 1:] < self._cardinalities[sketches])).all(axis=1)
        return exists & (points[:, 1 : 1 + self._tiles].sum(axis=1) <= self._budget[sketches])

    def features(self, points: Points) -> NDArray[np.float32]:
        """Sketch, indices, what is left of the budget, and log2 of the analytic estimate: float32 [n, knobs + 3]."""
        left = self._budget[points[:, 0]] - points[:, 1 : 1 + self._tiles].sum(axis=1)
        return np.column_stack([points, left, np.log2(self.latency_s(points))]).astype(np.float32)

    def latency_s(self, points: Points) -> NDArray[np.float64]:
        """The analytic estimate in seconds, shape [n]: no interactions, no ripple, floor and centre a little off."""
        sketches = points[:, 0]
        offset = self._offset(points, self._guess)
        weights = np.diagonal(self._bowl, axis1=1, axis2=2)[sketches]
        return np.asarray(self._guessed_floor_s[sketches] * (1.0 + (weights * offset**2).sum(axis=1)))

    def measured_s(self, points: Points) -> NDArray[np.float64]:
        """What the machine would say, in seconds, shape [n]; `inf` for a candidate that fails."""
        sketches = points[:, 0]
        offset = self._offset(points, self._best)
        bowl = np.einsum("ni,nij,nj->n", offset, self._bowl[sketches], offset)
        noise = self._noise(points)
        best = ~offset.any(axis=1)
        seconds = self.floor_s[sketches] * (1.0 + bowl + np.where(best, 0.0, self.ripple * noise))
        return np.where((noise < self.failures) & ~best, np.inf, seconds)

    def _offset(self, points: Points, centre: NDArray[np.int64]) -> NDArray[np.float64]:
        sketches = points[:, 0]
        return (points[:, 1:] - centre[sketches]) / np.maximum(self._cardinalities[sketches] - 1, 1)

    @staticmethod
    def _noise(points: Points) -> NDArray[np.float64]:
        """A pseudo-random number in [0, 1) that depends on the point alone, shape [n]."""
        mixed = np.zeros(len(points), dtype=np.uint64)
        for column in points.T.astype(np.uint64):
            mixed = (mixed ^ column) * np.uint64(0x9E3779B97F4A7C15)
            mixed ^= mixed >> np.uint64(29)
        return (mixed >> np.uint64(11)) / float(2**53)
