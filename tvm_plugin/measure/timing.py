"""How often a kernel is run to know its latency. Pure: the clock is a function that the caller brings."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["BASELINE", "COLD", "LONG", "QUICK", "Effort", "Evaluate", "time_kernel"]

Evaluate = Callable[[int, int], list[float]]
"""(number, repeat) -> seconds of one call, one entry a repeat: one warm-up call, then `repeat` times `number` calls."""

COLD_FACTOR, COLD_S = 4.0, 5e-3
"""The first call of a kernel pays for page faults, cold caches and sleeping threads, milliseconds on a busy machine: it
is given up only when it takes this many times as long as the best, and so many seconds more."""

WARM_FACTOR = 1.5
"""A warm call this much slower than the best is not noise: it is given up."""

WORTH_GIVING_UP_S = 1e-3
"""Kernels whose warm calls are faster are repeated in any case: giving up saves nothing."""

SEVERAL_LOOKS_S = 5e-3
"""A faster kernel may have met an interrupt or another process: it gets several warm calls before it is given up."""


@dataclass(frozen=True)
class Effort:
    """How hard to time.

    Attributes
    ----------
    min_repeat_s : float
        A repeat calls the kernel as often as fills this time: shorter ones are at the mercy of the clock and of
        interrupts.
    budget_s : float
        Repeats go on to about this time in all...
    min_repeats, max_repeats : int
        ... within these limits.
    once_from_s : float
        A kernel as slow as this is not repeated: its noise is small beside it.
    """

    min_repeat_s: float
    budget_s: float
    min_repeats: int
    max_repeats: int
    once_from_s: float


QUICK = Effort(min_repeat_s=1.5e-3, budget_s=8e-3, min_repeats=3, max_repeats=6, once_from_s=0.05)
"""For candidates: the minimum repeats within 2 % on a quiet machine, in 10 to 40 ms; slower kernels twice."""

COLD = Effort(min_repeat_s=1.5e-3, budget_s=12e-3, min_repeats=3, max_repeats=8, once_from_s=0.05)
"""For candidates whose calls find their weights in no near cache: neighbours use the far ones, too. With half of it,
six rounds of the same six candidates differed by up to 30 %, so by 12 at most (Xeon, 100 MB of weights)."""

LONG = Effort(min_repeat_s=5e-3, budget_s=20e-3, min_repeats=2, max_repeats=4, once_from_s=0.25)
"""For one round of re-timing."""

BASELINE = Effort(min_repeat_s=1.5e-3, budget_s=8e-3, min_repeats=3, max_repeats=6, once_from_s=0.02)
"""For untuned kernels, which may take seconds..."""

SLOW_BASELINE_S = 0.05
"""... but not for those whose first call takes as long: it is their latency, on the one core that they use..."""

SLOW_PLAIN_BASELINE_S = 1.0
"""... which plain schedules share with whatever runs beside them."""

ONCE = Effort(min_repeat_s=0.0, budget_s=0.0, min_repeats=1, max_repeats=1, once_from_s=0.0)
"""The first call alone."""


def time_kernel(
    evaluate: Evaluate, first_s: float, effort: Effort = QUICK, best_s: float = math.inf
) -> tuple[tuple[float, ...], bool]:
    """Time a kernel that has been called once.

    Parameters
    ----------
    evaluate : callable
        Runs and times the kernel.
    first_s : float
        Seconds of the first, cold call.
    effort : Effort
        How hard.
    best_s : float
        The best latency known; what is clearly slower (`COLD_FACTOR`, `WARM_FACTOR`) is not repeated.

    Returns
    -------
    latencies_s : tuple of float
        Seconds of one call, an entry a repeat.
    given_up : bool
        Whether the repeats were spared because `best_s` is out of reach.
    """
    if first_s > COLD_S + COLD_FACTOR * best_s:
        return (first_s,), True
    if first_s >= 4 * effort.once_from_s:
        return (first_s,), False
    looks = effort.min_repeats if first_s < SEVERAL_LOOKS_S else 1
    warm = tuple(evaluate(1, looks))
    warm_s = max(min(warm), 1e-8)
    if warm_s >= WORTH_GIVING_UP_S and warm_s > WARM_FACTOR * best_s:
        return warm, True
    if warm_s >= effort.once_from_s:
        return warm, False
    number = math.ceil(effort.min_repeat_s / warm_s)
    repeat = min(effort.max_repeats, max(effort.min_repeats, int(effort.budget_s / (number * warm_s))))
    if number > 1:
        return tuple(evaluate(number, repeat)), False
    more = evaluate(1, repeat - looks) if repeat > looks else []
    return (*warm, *more), False
