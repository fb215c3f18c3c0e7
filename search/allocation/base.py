"""Where the next measurements go."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

__all__ = ["OPTIMISM", "Allocation", "Allocator", "TaskStatus"]

OPTIMISM = 0.8
"""No kernel is expected to take less than this share of its analytic estimate, unless it does already: the estimate is
then off. (For 180 kernels of Inception-v3 the best schedule took 0.95 times the estimate, median.)"""


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
        Operations of one call, those of integers included.
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
    round_s : float
        Seconds that its last round took; NaN before one, and where the budget is not one of time.
    weight : float
        What a second saved in the kernel is worth, 0 to 1: less where only a slower form of the model needs it.
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
    round_s: float = math.nan
    weight: float = 1.0
    finished: str = ""

    @property
    def latencies_s(self) -> list[float]:
        """The best latency in seconds after each round; what the kernel was priced at counts as a first round."""
        return self.history if math.isnan(self.price_s) else [self.price_s, *self.history]

    def hoped_s(self, throughput: float = 0.0, optimism: float = OPTIMISM) -> float:
        """What another round may bring the latency to, in seconds: a t-th of it less after t rounds.

        Or what similar kernels promise, where `throughput`, in FLOP/s, is expected. No less than the roofline and the
        share `optimism` of the estimate, no more than now; as much as now where the kernel is finished; the roofline
        before a first round, and `inf` while nothing works.
        """
        rounds = self.latencies_s
        if not rounds:
            return self.roofline_s
        if not math.isfinite(rounds[-1]):
            return math.inf
        now_s = rounds[-1]
        if self.finished:
            return now_s
        hoped_s = now_s - now_s / len(rounds)
        if throughput > 0.0:
            hoped_s = min(hoped_s, self.flops / throughput)
        estimate_s = optimism * self.estimate_s
        return min(now_s, max(hoped_s, self.roofline_s, estimate_s if estimate_s <= now_s else 0.0))


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
