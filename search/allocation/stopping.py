"""When a kernel is finished."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from .base import TaskStatus

__all__ = ["Stopping"]


@dataclass(frozen=True)
class Stopping:
    """Two reasons to stop: the machine cannot do better, or the search no longer does.

    Attributes
    ----------
    patience : int
        Rounds in turn without improvement.
    noise : float
        An improvement over those rounds by less than this share counts as none.
    roofline_margin : float
        A kernel within this share of its roofline is done.
    """

    patience: int = 5
    noise: float = 0.01
    roofline_margin: float = 0.05

    def reason(self, status: TaskStatus) -> str:
        """Why the kernel is finished; "" when it is not."""
        if status.finished:
            return status.finished
        history = status.history
        if history and status.roofline_s > 0 and history[-1] <= status.roofline_s * (1 + self.roofline_margin):
            return f"within {self.roofline_margin:.0%} of the roofline"
        # Negated, so that a kernel of which nothing works (inf after inf) has not improved either.
        if len(history) > self.patience and not history[-1] < history[-1 - self.patience] * (1 - self.noise):
            if math.isinf(history[-1]):
                return f"no candidate worked in {self.patience + 1} rounds"
            return f"no improvement in {self.patience} rounds"
        return ""

    def open_tasks(self, statuses: Sequence[TaskStatus]) -> list[int]:
        """Indices of the kernels that are not finished; writes the reason to `finished` of those that are."""
        for status in statuses:
            status.finished = self.reason(status)
        return [i for i, status in enumerate(statuses) if not status.finished]
