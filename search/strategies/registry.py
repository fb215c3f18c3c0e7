"""Strategies by name."""

from __future__ import annotations

from collections.abc import Callable

from ..registry import resolve
from .annealed_evolution import AnnealedEvolution
from .annealing import Annealing
from .base import Strategy
from .evolution import Evolution
from .exhaustive import Exhaustive
from .random import Random

__all__ = ["create", "names"]

_STRATEGIES: dict[str, Callable[[], Strategy]] = {
    strategy.name: strategy for strategy in (AnnealedEvolution, Annealing, Evolution, Exhaustive, Random)
}


def names() -> list[str]:
    """Names that `create` takes."""
    return sorted(_STRATEGIES)


def create(strategy: str | Strategy) -> Strategy:
    """A strategy by name or as an instance; raises InputError for anything else (`resolve`)."""
    return resolve(strategy, _STRATEGIES, "a strategy", "begin(space, seed)")
