"""A fixed random score."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

__all__ = ["RandomModel"]


class RandomModel:
    """Scores that depend on a candidate's features and the seed, and mean nothing. For ablation and tests.

    Parameters
    ----------
    seed : int
        Which scores.
    """

    name: ClassVar[str] = "random"

    def __init__(self, seed: int = 0) -> None:
        self._seed = seed

    @property
    def trained(self) -> bool:
        """Always True."""
        return True

    def fit(self, features: NDArray[np.float32], latencies_s: NDArray[np.float64], tasks: NDArray[np.int64]) -> None:
        """Learn nothing."""

    def predict(self, features: NDArray[np.float32]) -> NDArray[np.float64]:
        """Uniform in [0, 1), shape [n]; equal for equal features."""
        bits = np.ascontiguousarray(features, dtype=np.float32).view(np.uint32).astype(np.uint64)
        mixed = np.full(len(bits), self._seed % 2**63, dtype=np.uint64)
        for column in bits.T:
            mixed = (mixed ^ column) * np.uint64(0x9E3779B97F4A7C15)
            mixed ^= mixed >> np.uint64(31)
        return (mixed >> np.uint64(11)) / float(2**53)
