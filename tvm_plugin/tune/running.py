"""Time whole models side by side."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

__all__ = ["time_runs"]


def time_runs(runs: Sequence[Callable[[], Any]], budget_s: float = 1.0, at_least: int = 3) -> list[float]:
    """Seconds of one run of each, the minimum of several, taken in turn so that drift hits all alike.

    Parameters
    ----------
    runs : sequence of callables
    budget_s : float
        Seconds to spend on all together, about.
    at_least : int
        Runs of each after one to warm up, however long they take.
    """
    best = [float("inf")] * len(runs)
    for run in runs:
        run()
    started = time.monotonic()
    rounds = 0
    while rounds < at_least or (time.monotonic() - started < budget_s and rounds < 100):
        for index, run in enumerate(runs):
            before = time.perf_counter()
            run()
            best[index] = min(best[index], time.perf_counter() - before)
        rounds += 1
    return best
