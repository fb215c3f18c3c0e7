"""Strategies by name."""

from __future__ import annotations

from collections.abc import Callable

from eqtune.errors import InputError

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
    """A strategy by name, with its default constants; an instance is returned as it is.

    Raises
    ------
    InputError
        When the name is unknown (the message lists those there are), or the instance is no strategy.
    """
    if isinstance(strategy, str):
        if strategy not in _STRATEGIES:
            raise InputError(f"unknown strategy {strategy!r}; there are {', '.join(names())}")
        return _STRATEGIES[strategy]()
    if isinstance(strategy, type) or not callable(getattr(strategy, "begin", None)):
        raise InputError(
            f"a strategy is a name ({', '.join(names())}) or an object with begin(space, seed), not {strategy!r}"
        )
    return strategy
