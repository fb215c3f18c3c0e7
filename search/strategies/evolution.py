"""Evolution of decision vectors on the cost model's score, with Ansor's constants (Zheng et al., OSDI 2020)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from ..space.base import DecisionSpace, Points
from .archive import Archive
from .base import Score
from .batch import BatchConfig, BatchedSearch, Candidates
from .moves import Moves

__all__ = ["Breeding", "Evolution", "breed", "seed_population", "survivors"]


@dataclass(frozen=True)
class Breeding:
    """How a population is seeded and bred.

    Attributes
    ----------
    population : int
        Points of a generation; at most a quarter of the space.
    generations : int
        Generations of a round.
    crossover, mutation : float
        Share of the children that are crossed, and that are mutated (Ansor: 0.85); some are both.
    tournament : int
        A parent is the best of so many drawn at random: selection that needs only the order of the scores.
    measured : float
        Share of the first generation that descends from the best measured points (Ansor: 0.2).
    fresh : int
        Least number of random points in the first generation (Ansor: 50).
    """

    population: int = 2048
    generations: int = 4
    crossover: float = 0.3
    mutation: float = 0.85
    tournament: int = 8
    measured: float = 0.2
    fresh: int = 50


def seed_population(
    moves: Moves, rng: np.random.Generator, archive: Archive, previous: Points, breeding: Breeding
) -> Points:
    """The first generation of a round.

    The best measured points and mutants of them, what survived the previous round, and random points.

    Parameters
    ----------
    previous : Points
        Survivors of the previous round, best first; none in the first.

    Returns
    -------
    Points
        Distinct and legal, at most `breeding.population`; empty when no legal point can be found.
    """
    size = max(1, min(breeding.population, moves.size // 4))
    share = int(breeding.measured * size)
    elite = archive.best(share)
    if len(elite):
        # Better points have more descendants: a parent is drawn with the square of a uniform number.
        parents = (rng.random(share) ** 2 * len(elite)).astype(np.int64)
        elite = moves.distinct(np.concatenate([elite, moves.mutate(rng, elite[parents])]))[:share]
    kept = previous[: max(0, size - len(elite) - breeding.fresh)]
    fresh = moves.sample(rng, size - len(elite) - len(kept))
    return moves.distinct(np.concatenate([elite, kept, fresh]))


def breed(
    moves: Moves,
    rng: np.random.Generator,
    population: Points,
    scores: NDArray[np.float64],
    count: int,
    breeding: Breeding,
) -> Points:
    """`count` legal children of the population, shape [count, width]; some equal a parent."""
    order = np.argsort(-scores, kind="stable")
    winners = rng.integers(len(population), size=(count, breeding.tournament)).min(axis=1)
    children = population[order[winners]]
    crossed = rng.random(count) < breeding.crossover
    children[crossed] = moves.crossover(rng, children[crossed])
    mutated = rng.random(count) < breeding.mutation
    children[mutated] = moves.mutate(rng, children[mutated])
    return children


def survivors(
    moves: Moves, points: Points, scores: NDArray[np.float64], count: int
) -> tuple[Points, NDArray[np.float64]]:
    """The `count` best distinct points, best first, and their scores."""
    order = np.argsort(-scores, kind="stable")
    _, first = np.unique(moves.keys(points[order]), return_index=True)
    chosen = order[np.sort(first)[:count]]
    return points[chosen], scores[chosen]


@dataclass(frozen=True)
class Evolution:
    """Evolution alone.

    Attributes
    ----------
    breeding : Breeding
        Seeding and breeding of the population.
    batch : BatchConfig
        How a batch is chosen among all points that were scored.
    """

    name: ClassVar[str] = "evolution"
    breeding: Breeding = field(default_factory=Breeding)
    batch: BatchConfig = field(default_factory=BatchConfig)

    def begin(self, space: DecisionSpace, seed: int) -> BatchedSearch:
        """Start a search."""
        return _EvolutionSearch(space, seed, self)


class _EvolutionSearch(BatchedSearch):
    def __init__(self, space: DecisionSpace, seed: int, config: Evolution) -> None:
        super().__init__(space, seed, config.batch)
        self._breeding = config.breeding
        self._previous = self.moves.none()

    def propose(self, count: int, score: Score) -> tuple[Points, NDArray[np.float64]]:
        population = seed_population(self.moves, self.rng, self.archive, self._previous, self._breeding)
        seen = Candidates(self.moves)
        if not len(population):
            return seen.collect()
        scores = score(population)
        seen.add(population, scores)
        size = len(population)
        for _ in range(self._breeding.generations):
            children = breed(self.moves, self.rng, population, scores, size, self._breeding)
            children_scores = score(children)
            seen.add(children, children_scores)
            population, scores = survivors(
                self.moves,
                np.concatenate([population, children]),
                np.concatenate([scores, children_scores]),
                size,
            )
        self._previous = population
        return seen.collect()
