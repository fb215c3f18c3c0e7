"""Random search: legal points, every sketch alike. The baseline that every other strategy must beat."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from ..space.base import DecisionSpace, Points
from .base import Score
from .batch import BatchConfig, BatchedSearch

__all__ = ["Random"]


@dataclass(frozen=True)
class Random:
    """Ask for random legal points; the score is not looked at."""

    name: ClassVar[str] = "random"
    batch: BatchConfig = field(default_factory=lambda: BatchConfig(epsilon=1.0, distinct_scores=False))

    def begin(self, space: DecisionSpace, seed: int) -> BatchedSearch:
        """Start a search."""
        return _RandomSearch(space, seed, self.batch)


class _RandomSearch(BatchedSearch):
    def ask(self, count: int, score: Score) -> Points:
        return super().ask(count, lambda points: np.zeros(len(points)))

    def propose(self, count: int, score: Score) -> tuple[Points, NDArray[np.float64]]:
        points = self.moves.sample(self.rng, 2 * count + len(self.archive))
        return points, np.zeros(len(points))
