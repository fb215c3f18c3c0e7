"""What the tuning loop expects of a cost model."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

__all__ = ["CostModel"]


class CostModel(Protocol):
    """Learns to rank candidates of all kernels of a run together."""

    @property
    def name(self) -> str:
        """What users write."""

    def fit(self, features: NDArray[np.float32], latencies_s: NDArray[np.float64], tasks: NDArray[np.int64]) -> None:
        """Retrain on everything measured.

        Parameters
        ----------
        features : float32 [n, features]
        latencies_s : float64 [n], `inf` for a candidate that failed
        tasks : int64 [n], which kernel each row belongs to; labels are relative to the kernel's best
        """

    def predict(self, features: NDArray[np.float32]) -> NDArray[np.float64]:
        """Scores, shape [n]: higher is faster. Comparable within one kernel only."""

    @property
    def trained(self) -> bool:
        """Whether `fit` has seen enough to be asked."""
