"""One score out of two: the analytic estimate that every space brings, and what was learnt.

Before anything is measured the analytic estimate ranks alone. As measurements of the kernel itself come in, the
learnt model takes over: its weight is `1 - 2 ** (-n / half_life)` after n measurements, and 1 from 0.95 on (AutoTVM
fades a transferred model so).
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from .base import CostModel

__all__ = ["BlendedScore", "Featured"]


class Featured(Protocol):
    """What a score needs of a search space."""

    def features(self, points: NDArray[np.int16]) -> NDArray[np.float32]:
        """Features for the cost model, shape [n, features]."""

    def latency_s(self, points: NDArray[np.int16]) -> NDArray[np.float64]:
        """Analytic estimate in seconds, shape [n]."""


class BlendedScore:
    """The score that a strategy is given for one batch: make a new one after every `fit`.

    Both parts are brought to one scale (zero mean and unit spread over the first points that are scored, a
    strategy's population) and averaged by weight. The scale then stays, so that scores of different calls compare.

    Parameters
    ----------
    space : Featured
        The kernel's space.
    model : CostModel or None
        What was learnt; None, or a model that is not trained, leaves the analytic estimate alone.
    measured : int
        Measurements of this kernel that the model has seen; none: the analytic estimate ranks alone.
    half_life : float
        After so many measurements both parts weigh the same; 0 leaves the model alone once it is trained.
    """

    def __init__(self, space: Featured, model: CostModel | None, measured: int, half_life: float = 32.0) -> None:
        self._space = space
        self._model = model if model is not None and model.trained else None
        self._learnt_weight = 1.0
        if self._model is not None:
            weight = 1.0 - 2.0 ** (-measured / half_life) if half_life > 0 else 1.0
            self._learnt_weight = 1.0 if weight > 0.95 else weight
            if not weight:
                self._model = None  # it would be asked for thousands of points, and not be heard
        self._scales: list[tuple[float, float]] = []

    def __call__(self, points: NDArray[np.int16]) -> NDArray[np.float64]:
        """Scores, shape [n]: higher is faster; -inf where the estimate, while it counts, is not finite."""
        if self._model is None:
            return self._analytic(points)
        learnt = self._model.predict(self._space.features(points))
        if self._learnt_weight == 1.0:
            return learnt
        analytic = self._analytic(points)
        if not self._scales:
            self._scales = [_scale(analytic), _scale(learnt)]
        (mean, spread), (learnt_mean, learnt_spread) = self._scales
        learnt = self._learnt_weight * (learnt - learnt_mean) / learnt_spread
        return learnt + (1.0 - self._learnt_weight) * (analytic - mean) / spread

    def _analytic(self, points: NDArray[np.int16]) -> NDArray[np.float64]:
        latency_s = self._space.latency_s(points)
        usable = np.isfinite(latency_s) & (latency_s > 0.0)
        return np.where(usable, -np.log(np.where(usable, latency_s, 1.0)), -np.inf)


def _scale(scores: NDArray[np.float64]) -> tuple[float, float]:
    """Mean and spread of the finite scores; (0, 1) where they are all alike."""
    finite = scores[np.isfinite(scores)]
    if not len(finite) or not finite.std() > 0.0:
        return 0.0, 1.0
    return float(finite.mean()), float(finite.std())
