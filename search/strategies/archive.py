"""What a search has asked and been told."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..space.base import Points
from .moves import Moves

__all__ = ["Archive"]

_NOISE = 0.01  # an improvement of the best latency by less than this share counts as none


class Archive:
    """The points of one search: which are taken, what was measured, and how long nothing improved.

    Parameters
    ----------
    moves : Moves
        Moves over the search's space.
    """

    def __init__(self, moves: Moves) -> None:
        self._moves = moves
        self._taken = np.zeros(0, dtype=np.uint64)
        self._points = moves.none()
        self._latencies_s = np.zeros(0)
        self._believed_s = np.inf
        self.stalled = 0

    def __len__(self) -> int:
        """How many measurements were told, failures included."""
        return len(self._points)

    @property
    def best_s(self) -> float:
        """The least latency told, in seconds; `inf` before there is one."""
        return float(self._latencies_s.min(initial=np.inf))

    def best(self, count: int) -> Points:
        """The `count` fastest points told, distinct, fastest first; failures never."""
        finite = np.flatnonzero(np.isfinite(self._latencies_s))
        order = finite[np.argsort(self._latencies_s[finite], kind="stable")]
        return self._moves.distinct(self._points[order])[:count]

    def free(self, points: Points) -> Points:
        """Those of the points that were neither asked nor told."""
        return points[~np.isin(self._moves.keys(points), self._taken)]

    def take(self, points: Points) -> None:
        """Remember that the points were asked."""
        self._taken = np.union1d(self._taken, self._moves.keys(points))

    def tell(self, points: Points, latencies_s: NDArray[np.float64]) -> None:
        """Keep measurements; see `Search.tell`."""
        self.take(points)
        self._points = np.concatenate([self._points, points])
        self._latencies_s = np.concatenate([self._latencies_s, latencies_s])

    def begin_round(self) -> None:
        """Count in `stalled` for how many rounds in turn the best latency has not improved."""
        if not len(self):
            return
        if self.best_s < self._believed_s * (1.0 - _NOISE):
            self._believed_s = self.best_s
            self.stalled = 0
        else:
            self.stalled += 1
