"""Where the next measurements go."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

__all__ = ["Allocation", "Allocator", "TaskStatus"]


@dataclass
class TaskStatus:
    """What an allocator may know of one kernel. `history[i]` is the best latency in seconds after round i."""

    name: str
    calls: int
    flops: float
    roofline_s: float
    similarity: str
    history: list[float]
    trials: int = 0
    finished: str = ""


class Allocation(Protocol):
    """A running allocation over the kernels of one model."""

    def next_task(self, statuses: Sequence[TaskStatus]) -> int | None:
        """Index of the kernel to measure next; None when every kernel is finished (`status.finished` says why)."""


class Allocator(Protocol):
    """How to share time among kernels; `name` is what users write."""

    name: str

    def begin(self, seed: int) -> Allocation:
        """Start an allocation."""
