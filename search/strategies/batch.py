"""From scored candidates to a batch: what all strategies share.

`BatchedSearch` keeps the promises of the ask/tell protocol once for all: distinct, legal, never asked or told before,
the same for the same seed. A strategy adds `propose`: candidates with scores. Three rules make a batch of those:

- *epsilon*: a share of the batch is random, so that the cost model sees what it would not choose (AutoTVM and Ansor:
  5 %). The first batch has none, unless nothing else is left: before there are measurements the analytic score is all
  there is, and it is better than chance.
- *one a score*: of candidates whose scores are equal only one is taken while others are left. They differ in knobs that
  the cost model finds meaningless, or cannot see: one of them tells as much as all. (Stronger rules, one or a few
  in every box of neighbouring values, found worse points on the toy spaces.)
- *small spaces are enumerated*: with at most `exhaustive_limit` legal points, everything is scored in every round and
  nothing is missed. Scoring 20,000 points of a matmul at once takes less time than the 160 small calls of a search
  among them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from ..space.base import DecisionSpace, Points
from .archive import Archive
from .base import Score
from .moves import MoveMix, Moves

__all__ = ["BatchConfig", "BatchedSearch", "Candidates"]

_WORST = -1e30


@dataclass(frozen=True)
class BatchConfig:
    """What every strategy of this package can be told.

    Attributes
    ----------
    epsilon : float
        Share of a batch that is random once something was measured, in whole candidates.
    exhaustive_limit : int
        Spaces of at most so many legal points are enumerated; 0 is for none.
    enumeration_limit : int
        Larger spaces are not even looked through for their legal points.
    distinct_scores : bool
        Whether candidates with equal scores give way to others.
    mix : MoveMix
        Which mutations are how frequent.
    """

    epsilon: float = 0.05
    exhaustive_limit: int = 40_000
    enumeration_limit: int = 500_000
    distinct_scores: bool = True
    mix: MoveMix = field(default_factory=MoveMix)


class Candidates:
    """Points with scores that grow while a search runs."""

    def __init__(self, moves: Moves) -> None:
        self._moves = moves
        self._points: list[Points] = [moves.none()]
        self._scores: list[NDArray[np.float64]] = [np.zeros(0)]

    def add(self, points: Points, scores: NDArray[np.float64]) -> None:
        """Add points, shape [n, width], with scores, shape [n]."""
        self._points.append(points.copy())
        self._scores.append(scores.copy())

    def collect(self) -> tuple[Points, NDArray[np.float64]]:
        """All distinct points, with their scores."""
        points, scores = np.concatenate(self._points), np.concatenate(self._scores)
        _, first = np.unique(self._moves.keys(points), return_index=True)
        return points[first], scores[first]


class BatchedSearch(ABC):
    """A `Search` that proposes candidates and lets the rules above choose among them.

    Parameters
    ----------
    space : DecisionSpace
        Where to search.
    seed : int
        Decides every random choice.
    config : BatchConfig
        The rules' constants.
    """

    def __init__(self, space: DecisionSpace, seed: int, config: BatchConfig) -> None:
        self.moves = Moves(space, config.mix)
        self.archive = Archive(self.moves)
        self.rng = np.random.default_rng(seed)
        self._config = config

    @abstractmethod
    def propose(self, count: int, score: Score) -> tuple[Points, NDArray[np.float64]]:
        """Legal points, shape [n, width], and their scores, shape [n]; any order, taken ones allowed.

        `count` is how many the batch will hold. `score` gives finite numbers. Not called for enumerated spaces.
        """

    def reserve(self, count: int, score: Score) -> Points:
        """Untaken points that come first in a batch of `count`, whatever the others score; none by default."""
        return self.moves.none()

    def ask(self, count: int, score: Score) -> Points:
        """See `Search.ask`."""
        if count <= 0:
            return self.moves.none()
        self.archive.begin_round()
        finite = _finite(score)
        if self._everything is None:
            points, scores = self.propose(count, finite)
        else:
            points = self.archive.free(self._everything)
            scores = finite(points) if len(points) else np.zeros(0)
        batch = self._choose(self.reserve(count, finite), points, scores, count)
        self.archive.take(batch)
        return batch

    def tell(self, points: Points, latencies_s: NDArray[np.float64]) -> None:
        """See `Search.tell`. Raises ValueError when the shapes do not fit each other or the space."""
        points = np.asarray(points, dtype=np.int16).reshape(-1, self.moves.width)
        latencies_s = np.asarray(latencies_s, dtype=np.float64)
        if latencies_s.shape != (len(points),):
            raise ValueError(f"{len(points)} points were told with latencies of shape {latencies_s.shape}")
        self.archive.tell(points, np.where(np.isnan(latencies_s), np.inf, latencies_s))

    def _choose(self, reserved: Points, points: Points, scores: NDArray[np.float64], count: int) -> Points:
        """A batch of at most `count` untaken points: the reserved ones, then the best, then random ones."""
        # Shuffled first, so that equal scores are in no order.
        order = self.rng.permutation(len(points))
        order = order[np.argsort(-scores[order], kind="stable")]
        if self._config.distinct_scores:
            repeated = np.zeros(len(order), dtype=np.bool_)
            repeated[1:] = scores[order[1:]] == scores[order[:-1]]
            order = np.concatenate([order[~repeated], order[repeated]])
        ranked = self.archive.free(points[order])
        greedy = count - (round(self._config.epsilon * count) if len(self.archive) else 0)
        chosen = self.moves.distinct(np.concatenate([reserved, ranked]))[:greedy]
        if len(chosen) < count:
            chosen = np.concatenate([chosen, self._fresh(2 * count + len(self.archive)), ranked])
        return self.moves.distinct(chosen)[:count]

    @cached_property
    def _everything(self) -> Points | None:
        """All legal points of a small space, None for a large one."""
        if not self._config.exhaustive_limit or self.moves.size > self._config.enumeration_limit:
            return None
        points = self.moves.everything()
        return points if len(points) <= self._config.exhaustive_limit else None

    def _fresh(self, count: int) -> Points:
        """Random untaken points, at most `count`."""
        if self._everything is not None:
            return self.rng.permutation(self.archive.free(self._everything))[:count]
        return self.archive.free(self.moves.sample(self.rng, count))


def _finite(score: Score) -> Score:
    """The score with NaN and minus infinity as a very bad number, so that differences exist."""

    def finite(points: Points) -> NDArray[np.float64]:
        scores = np.asarray(score(points), dtype=np.float64)
        if scores.shape != (len(points),):
            raise ValueError(f"the score of {len(points)} points must have shape [{len(points)}], not {scores.shape}")
        return np.nan_to_num(scores, nan=_WORST, posinf=-_WORST, neginf=_WORST)

    return finite
