"""Run a whole model on numpy arrays: inputs, timing, comparison."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["compare", "time_runs"]

Outputs = list[NDArray[Any]]


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


def compare(outputs: Sequence[NDArray[Any]], expected: Sequence[NDArray[Any]]) -> tuple[float, float]:
    """Largest absolute difference, and largest difference relative to the largest value of that output.

    `inf` where counts, shapes or dtypes differ, or where one side is not finite and the other is.
    """
    if len(outputs) != len(expected):
        return float("inf"), float("inf")
    absolute = relative = 0.0
    for got, want in zip(outputs, expected, strict=True):
        if got.shape != want.shape or got.dtype != want.dtype:
            return float("inf"), float("inf")
        if got.size == 0:
            continue
        a, b = got.astype(np.float64), want.astype(np.float64)
        finite = np.isfinite(b)
        if not np.array_equal(finite, np.isfinite(a)) or not np.array_equal(a[~finite], b[~finite], equal_nan=True):
            return float("inf"), float("inf")
        if not finite.any():
            continue
        difference = float(np.max(np.abs(a[finite] - b[finite])))
        absolute = max(absolute, difference)
        relative = max(relative, difference / max(float(np.max(np.abs(b[finite]))), 1e-30))
    return absolute, relative
