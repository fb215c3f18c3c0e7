"""Simulated annealing on the cost model's score, as in AutoTVM (Chen et al., NeurIPS 2018).

Many Markov chains move side by side, one call of the score a step. They persist: the next round goes on from where
the chains stood, with the new score and the temperature high again.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from ..space.base import DecisionSpace, Points
from .base import Score
from .batch import BatchConfig, BatchedSearch, Candidates
from .moves import Moves

__all__ = ["Annealing", "Schedule", "anneal"]


@dataclass(frozen=True)
class Schedule:
    """How chains cool down.

    Attributes
    ----------
    steps : int
        Moves of each chain.
    hot, cold : float
        First and last temperature, linear between them. Temperature 1 is the spread of the chains' scores at the start
        (half the distance of their quartiles), so that scores need no unit. In these units 0.3 finds better points
        of a toy space's score than 1 or 0.1.
    patience : int
        Stop when no chain has found a better point than it ever had for so many steps.
    """

    steps: int = 500
    hot: float = 0.3
    cold: float = 0.0
    patience: int = 50


def anneal(
    moves: Moves,
    rng: np.random.Generator,
    chains: Points,
    scores: NDArray[np.float64],
    score: Score,
    schedule: Schedule,
    seen: Candidates,
) -> tuple[Points, NDArray[np.float64]]:
    """Move the chains; add every point that was scored to `seen`.

    A move is accepted with probability min(1, exp((new - old) / temperature)) (Metropolis et al., 1953).

    Parameters
    ----------
    chains : Points
        Where the chains start, shape [chains, width].
    scores : float64 [chains]
        The scores there.
    score : Score
        Finite; higher is better.

    Returns
    -------
    chains, scores
        Where the chains end, and the scores there.
    """
    chains, scores = chains.copy(), scores.copy()
    low, high = np.percentile(scores, [25, 75])
    spread = max(float(high - low) / 2, 1e-6 * float(np.abs(scores).mean()), 1e-12)
    best, since = scores.copy(), 0
    for temperature in spread * np.linspace(schedule.hot, schedule.cold, schedule.steps):
        moved = moves.mutate(rng, chains)
        moved_scores = score(moved)
        seen.add(moved, moved_scores)
        gain = moved_scores - scores
        accepted = gain >= 0
        accepted |= rng.random(len(chains)) < np.exp(np.minimum(gain, 0.0) / (temperature + 1e-5 * spread))
        chains[accepted] = moved[accepted]
        scores[accepted] = moved_scores[accepted]
        since = 0 if (scores > best).any() else since + 1
        best = np.maximum(best, scores)
        if since >= schedule.patience:
            break
    return chains, scores


@dataclass(frozen=True)
class Annealing:
    """Simulated annealing alone, with AutoTVM's constants.

    Attributes
    ----------
    chains : int
        Markov chains.
    schedule : Schedule
        Steps and temperatures of a round.
    batch : BatchConfig
        How a batch is chosen among all points that the chains visited.
    """

    name: ClassVar[str] = "annealing"
    chains: int = 128
    schedule: Schedule = field(default_factory=Schedule)
    batch: BatchConfig = field(default_factory=BatchConfig)

    def begin(self, space: DecisionSpace, seed: int) -> BatchedSearch:
        """Start a search."""
        return _AnnealingSearch(space, seed, self)


class _AnnealingSearch(BatchedSearch):
    def __init__(self, space: DecisionSpace, seed: int, config: Annealing) -> None:
        super().__init__(space, seed, config.batch)
        self._annealing = config
        self._chains = self.moves.none()

    def propose(self, count: int, score: Score) -> tuple[Points, NDArray[np.float64]]:
        missing = self._annealing.chains - len(self._chains)
        if missing > 0:
            self._chains = np.concatenate([self._chains, self.moves.sample(self.rng, missing)])
        seen = Candidates(self.moves)
        if not len(self._chains):
            return seen.collect()
        scores = score(self._chains)
        seen.add(self._chains, scores)
        self._chains, _ = anneal(self.moves, self.rng, self._chains, scores, score, self._annealing.schedule, seen)
        return seen.collect()
