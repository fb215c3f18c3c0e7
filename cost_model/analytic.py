"""No cost model at all: the analytic estimate of the search space stays alone."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

__all__ = ["AnalyticModel"]


class AnalyticModel:
    """A model that is never trained, so that `BlendedScore` keeps to the analytic estimate. For ablation and tests."""

    name: ClassVar[str] = "analytic"

    @property
    def trained(self) -> bool:
        """Always False."""
        return False

    def fit(self, features: NDArray[np.float32], latencies_s: NDArray[np.float64], tasks: NDArray[np.int64]) -> None:
        """Learn nothing."""

    def predict(self, features: NDArray[np.float32]) -> NDArray[np.float64]:
        """Equal scores, shape [n]."""
        return np.zeros(len(features))
