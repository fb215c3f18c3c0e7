"""Ask and tell: how a strategy and the tuning loop talk.

A `Strategy` is a configuration; `begin` starts a `Search` over one kernel's space. The loop asks for a batch of
points, measures them somewhere, and tells the latencies. A search knows nothing of processes, clocks or files.

The order of calls is free: tells may come late, in pieces, or for points that were never asked for (records of an
earlier run). `conformance.check_strategy` checks everything that is said here on toy spaces.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ..space.base import DecisionSpace, Points

__all__ = ["Score", "Search", "Strategy"]

Score = Callable[[Points], NDArray[np.float64]]
"""Points, shape [n, knobs + 1], to scores, shape [n]: higher is better, only the order matters."""


class Search(Protocol):
    """One kernel's search."""

    def ask(self, count: int, score: Score) -> Points:
        """At most `count` distinct legal points that were neither asked nor told before, best first.

        Fewer, or none, when the space is exhausted.
        """

    def tell(self, points: Points, latencies_s: NDArray[np.float64]) -> None:
        """What was measured; `inf` for a candidate that failed. Points that were never asked for are welcome."""


class Strategy(Protocol):
    """How to search."""

    @property
    def name(self) -> str:
        """What users write."""

    def begin(self, space: DecisionSpace, seed: int) -> Search:
        """Start a search. The same seed and the same tells give the same asks, in another process too."""
