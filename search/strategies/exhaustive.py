"""Exhaustive search: score every point of a space in every round. For small spaces, which all strategies treat so."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from eqtune.errors import InputError

from ..space.base import DecisionSpace, Points
from .base import Score
from .batch import BatchConfig, BatchedSearch
from .moves import Moves

__all__ = ["Exhaustive"]


@dataclass(frozen=True)
class Exhaustive:
    """Score everything legal, ask for the best, until nothing is left.

    Attributes
    ----------
    batch : BatchConfig
        `enumeration_limit` is the largest space that is accepted: 2^20 points take about a second a round.
    """

    name: ClassVar[str] = "exhaustive"
    batch: BatchConfig = field(
        default_factory=lambda: BatchConfig(epsilon=0.0, exhaustive_limit=2**20, enumeration_limit=2**20)
    )

    def begin(self, space: DecisionSpace, seed: int) -> BatchedSearch:
        """Start a search. Raises InputError when the space is larger than the limit."""
        size = Moves(space).size
        limit = self.batch.enumeration_limit
        if size > limit:
            raise InputError(
                f"strategy 'exhaustive' was given a space of {size:,} points; it takes at most "
                f"{limit:,}. Use another strategy, for example 'annealed-evolution'."
            )
        return _ExhaustiveSearch(space, seed, self.batch)


class _ExhaustiveSearch(BatchedSearch):
    def propose(self, count: int, score: Score) -> tuple[Points, NDArray[np.float64]]:
        return self.moves.none(), np.zeros(0)
