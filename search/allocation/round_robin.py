"""The plain allocation: every kernel in turn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from .base import TaskStatus
from .stopping import Stopping

__all__ = ["RoundRobin"]


@dataclass(frozen=True)
class RoundRobin:
    """The kernel with the fewest trials, the first of several.

    Attributes
    ----------
    stopping : Stopping
        When a kernel is finished.
    """

    name: ClassVar[str] = "round-robin"
    stopping: Stopping = field(default_factory=Stopping)

    def begin(self, seed: int) -> RoundRobinAllocation:
        """Start an allocation. Nothing in it is random: `seed` is not used."""
        return RoundRobinAllocation(self.stopping)


class RoundRobinAllocation:
    """The allocation of `RoundRobin`; keeps no state but what it writes to `TaskStatus.finished`."""

    def __init__(self, stopping: Stopping) -> None:
        self._stopping = stopping

    def next_task(self, statuses: Sequence[TaskStatus]) -> int | None:
        """See `Allocation.next_task`."""
        open_tasks = self._stopping.open_tasks(statuses)
        return min(open_tasks, key=lambda i: statuses[i].trials, default=None)
