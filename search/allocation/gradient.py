"""Give the next measurements to the kernel where they should save most of the model's time.

The task scheduler of Ansor (Zheng et al., OSDI 2020, section 6), without its restriction to 64 measurements a round,
and with bounds that Ansor does not have: no kernel gets faster than its roofline, or much faster than estimated. Rounds
that take longer must promise more.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import ClassVar

from .base import OPTIMISM, TaskStatus
from .stopping import Stopping

__all__ = ["Gradient", "expected_gain_s"]


@dataclass(frozen=True)
class Gradient:
    """Ansor's gradient, by rounds.

    Attributes
    ----------
    alpha : float
        Weight of what the last rounds gained; the rest is for what may still be gained.
    beta : float
        Trust in similar kernels: a kernel is expected to come within 1 / beta of the best throughput among them.
    window : int
        The last rounds that count as recent.
    optimism : float
        As `OPTIMISM`.
    group_patience : int
        A kernel that stays below 1 / beta of its group's best throughput leaves the group after so many rounds more
        than any other member had: the group says nothing about it.
    stopping : Stopping
        When a kernel is finished.
    """

    name: ClassVar[str] = "gradient"
    alpha: float = 0.2
    beta: float = 2.0
    window: int = 3
    optimism: float = OPTIMISM
    group_patience: int = 5
    stopping: Stopping = field(default_factory=Stopping)

    def begin(self, seed: int) -> GradientAllocation:
        """Start an allocation. Nothing in it is random: `seed` is not used."""
        return GradientAllocation(self)


class GradientAllocation:
    """The allocation of `Gradient`; keeps no state but what it writes to `TaskStatus.finished`."""

    def __init__(self, config: Gradient) -> None:
        self._config = config

    def next_task(self, statuses: Sequence[TaskStatus]) -> int | None:
        """See `Allocation.next_task`.

        First every kernel of which nothing is known, that with most calls x latency first; then the one with the
        largest expected gain for each second that a round of it takes (one that has had none: as long as the others'),
        and the one with fewer rounds where two are alike.
        """
        open_tasks = self._config.stopping.open_tasks(statuses)
        if not open_tasks:
            return None
        new = [i for i in open_tasks if not statuses[i].trials and math.isnan(statuses[i].price_s)]
        if new:
            return max(new, key=lambda i: _cost_s(statuses[i]))
        known_s = [status.round_s for status in statuses if not math.isnan(status.round_s)]
        usual_s = median(known_s) if known_s else 1.0
        gains = {i: expected_gain_s(statuses, i, self._config) / _or(statuses[i].round_s, usual_s) for i in open_tasks}
        return max(open_tasks, key=lambda i: (gains[i], -len(statuses[i].history)))


def expected_gain_s(statuses: Sequence[TaskStatus], index: int, config: Gradient) -> float:
    """Seconds a run of the model that one more round of kernel `index` is expected to save.

    With g the latency after t rounds, C the FLOPs and w the window: alpha times the recent gain a round,
    (g(t - w) - g(t)) / w, plus (1 - alpha) times what optimism expects, g - max(min(g - g / t, beta C / V), bounds),
    with V the best throughput among similar kernels; times the number of calls and the weight. (Ansor's gradient,
    negated.)

    What a kernel was priced at counts as the latency after a first round. `inf` for a kernel without a working
    candidate: until one is found, nothing pays more.
    """
    status = statuses[index]
    history = status.latencies_s
    if not history or not math.isfinite(history[-1]):
        return math.inf
    now_s, rounds, window = history[-1], len(history), config.window
    recent_s = 0.0
    if rounds > window and math.isfinite(history[-1 - window]):
        recent_s = (history[-1 - window] - now_s) / window
    expected = _group_throughput(statuses, index, config) / config.beta
    may_gain_s = now_s - status.hoped_s(expected, config.optimism)
    return status.weight * status.calls * (config.alpha * recent_s + (1.0 - config.alpha) * may_gain_s)


def _group_throughput(statuses: Sequence[TaskStatus], index: int, config: Gradient) -> float:
    """The best FLOP/s among the kernels similar to `index`, itself included; 0 where it has no group, or left it."""
    status = statuses[index]
    others = [
        other
        for i, other in enumerate(statuses)
        if i != index and status.similarity and other.similarity == status.similarity and _flops_per_s(other) > 0.0
    ]
    if not others:
        return 0.0
    own = _flops_per_s(status)
    best = max(own, *(_flops_per_s(other) for other in others))
    longest = max(len(other.latencies_s) for other in others)
    if own < best / config.beta and len(status.latencies_s) > config.group_patience + longest:
        return 0.0
    return best


def _flops_per_s(status: TaskStatus) -> float:
    latencies_s = status.latencies_s
    return status.flops / latencies_s[-1] if latencies_s else 0.0


def _cost_s(status: TaskStatus) -> float:
    """Seconds a run of the model spends in the kernel; its roofline stands in for a latency that is not known yet."""
    known = [latency_s for latency_s in status.history[-1:] if math.isfinite(latency_s)]
    return status.calls * (known[0] if known else status.roofline_s)


def _or(value: float, default: float) -> float:
    return default if math.isnan(value) else value
