"""Best-so-far curves, computed apart from drawing them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

__all__ = ["Curve", "best_so_far", "convergence"]

Curve = tuple[tuple[int, float], ...]
"""Points (trials, seconds), both monotonic. Only changes are kept, and the last trial: a step curve."""


def best_so_far(latencies_s: Sequence[float]) -> Curve:
    """Best latency after each trial, from the latencies in the order of measuring (`inf` for a failure).

    >>> best_so_far([3.0, float("inf"), 2.0, 2.5])
    ((1, 3.0), (3, 2.0), (4, 2.0))
    """
    points: list[tuple[int, float]] = []
    best = math.inf
    for trial, latency_s in enumerate(latencies_s, start=1):
        if latency_s < best:
            best = latency_s
            points.append((trial, best))
    return _until(points, len(latencies_s))


def convergence(
    trials: Sequence[tuple[str, float]], calls: Mapping[str, int], baselines_s: Mapping[str, float]
) -> Curve:
    """Time of all kernels of a model together, after each trial.

    Parameters
    ----------
    trials : sequence of (str, float)
        Workload hash and latency in seconds, in the order of measuring; `inf` for a failure.
    calls : mapping of str to int
        Workload hash to calls in one run of the model.
    baselines_s : mapping of str to float
        Workload hash to seconds (mostly untuned): what a kernel costs until something faster was measured.

    Returns
    -------
    Curve
        Begins with trial 0, nothing measured yet. Empty without kernels: the untuned model was kept.
    """
    if not calls:
        return ()
    best = dict(baselines_s)
    total = sum(calls[workload] * best[workload] for workload in calls)
    points = [(0, total)]
    for trial, (workload, latency_s) in enumerate(trials, start=1):
        if workload in calls and latency_s < best[workload]:
            best[workload] = latency_s
            # Summed anew: subtracting differences would leave rounding errors in a small rest.
            total = sum(calls[workload] * best[workload] for workload in calls)
            points.append((trial, total))
    return _until(points, len(trials))


def _until(points: Sequence[tuple[int, float]], last: int) -> Curve:
    if points and points[-1][0] < last:
        return (*points, (last, points[-1][1]))
    return tuple(points)
