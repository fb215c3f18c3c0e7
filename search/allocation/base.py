"""Where the next measurements go."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

__all__ = ["Allocation", "Allocator", "TaskStatus"]


@dataclass
class TaskStatus:
    """What an allocator may know of one kernel.

    Attributes
    ----------
    name : str
        The kernel.
    calls : int
        How often one run of the model calls it.
    flops : float
        Floating-point operations of one call.
    roofline_s : float
        No schedule is faster, in seconds a call; 0 when that is not known.
    similarity : str
        Kernels with the same one are expected to reach a similar throughput; "" for one that is like no other.
    history : list of float
        `history[i]` is the best latency in seconds after round i; `inf` while nothing works.
    trials : int
        Candidates measured.
    price_s : float
        What a candidate or two took before the search, in seconds, when nobody compared their outputs; NaN where that
        is not known.
    estimate_s : float
        What an analytic model expects of the best schedule, in seconds a call; 0 when that is not known.
    finished : str
        Why the kernel needs no more measurements; "" while it does. Written by the allocator, or by the loop when
        a search has nothing left to ask.
    """

    name: str
    calls: int
    flops: float
    roofline_s: float
    similarity: str
    history: list[float]
    trials: int = 0
    price_s: float = math.nan
    estimate_s: float = 0.0
    finished: str = ""


class Allocation(Protocol):
    """A running allocation over the kernels of one model."""

    def next_task(self, statuses: Sequence[TaskStatus]) -> int | None:
        """Index of the kernel to measure next; None when every kernel is finished (`status.finished` says why)."""


class Allocator(Protocol):
    """How to share time among kernels."""

    @property
    def name(self) -> str:
        """What users write."""

    def begin(self, seed: int) -> Allocation:
        """Start an allocation."""
