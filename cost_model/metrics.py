"""How well scores rank, for reports and benchmarks."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray
from scipy.stats import rankdata

__all__ = ["spearman"]


def spearman(scores: NDArray[np.float64], latencies_s: NDArray[np.float64]) -> float:
    """Rank correlation of scores (higher is faster) with speed, in [-1, 1]; ties share their mean rank.

    Parameters
    ----------
    scores : float64 [n]
    latencies_s : float64 [n]
        `inf` for a candidate that failed: those are the slowest, all alike.

    Returns
    -------
    float
        1 when the order is right; NaN with fewer than two rows, or where all scores or all latencies are equal.
    """
    if len(scores) < 2:
        return math.nan
    left = rankdata(scores)
    right = rankdata(-np.asarray(latencies_s, dtype=np.float64))
    left, right = left - left.mean(), right - right.mean()
    norm = math.sqrt(float((left**2).sum() * (right**2).sum()))
    return float((left * right).sum() / norm) if norm > 0 else math.nan
