"""Run a strategy without a compiler: on a toy space, or on latencies that were measured before."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from ...cost_model import CostModel
from ...cost_model.blend import BlendedScore
from ..space.base import DecisionSpace, Points
from .base import Strategy

__all__ = ["Simulation", "simulate"]


@dataclass(frozen=True)
class Simulation:
    """What a run asked for and found.

    Attributes
    ----------
    points : Points
        Everything asked for, in order, shape [trials, width].
    latencies_s : float64 [trials]
        What each took.
    ask_s : float
        Wall-clock seconds spent choosing candidates.
    """

    points: Points
    latencies_s: NDArray[np.float64]
    ask_s: float

    @property
    def best_s(self) -> NDArray[np.float64]:
        """The best latency after each trial, shape [trials]."""
        return np.minimum.accumulate(self.latencies_s)


def simulate(
    strategy: Strategy,
    space: DecisionSpace,
    measured_s: Callable[[Points], NDArray[np.float64]],
    trials: int,
    batch: int = 16,
    model: CostModel | None = None,
    seed: int = 0,
    half_life: float = 32.0,
) -> Simulation:
    """Ask, look up, tell and retrain until `trials` candidates were tried or the space is exhausted.

    Parameters
    ----------
    measured_s : callable
        Points, shape [n, width], to seconds, shape [n]; `inf` for a failure.
    batch : int
        Candidates of a round.
    model : CostModel or None
        Retrained after every round; None leaves the analytic estimate alone.
    half_life : float
        See `BlendedScore`.
    """
    search = strategy.begin(space, seed)
    points = np.zeros((0, 1 + space.cardinalities.shape[1]), dtype=np.int16)
    latencies_s = np.zeros(0)
    ask_s = 0.0
    while len(points) < trials:
        start = perf_counter()
        asked = search.ask(min(batch, trials - len(points)), BlendedScore(space, model, len(points), half_life))
        ask_s += perf_counter() - start
        if not len(asked):
            break
        seconds = measured_s(asked)
        search.tell(asked, seconds)
        points = np.concatenate([points, asked])
        latencies_s = np.concatenate([latencies_s, seconds])
        if model is not None:
            model.fit(space.features(points), latencies_s, np.zeros(len(points), dtype=np.int64))
    return Simulation(points, latencies_s, ask_s)
