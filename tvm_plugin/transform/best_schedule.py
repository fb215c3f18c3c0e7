"""The schedule of a space that the analytic model likes best."""

from __future__ import annotations

from typing import Any

from ..search import strategies
from ..search.space.base import Decision, Space
from ..search.space.lowering import lowerable_schedule

__all__ = ["best_schedule"]

_CANDIDATES = 4
"""How many points are tried for a kernel, should the first ones not apply."""


def best_schedule(space: Space, seed: int = 0) -> tuple[Any, Decision, float] | None:
    """A `tvm.s_tir.Schedule`, what it decides, and its estimated seconds; None where the best points do not apply.

    The first batch of a tuning run starts from the same points.
    """
    search = strategies.create("annealed-evolution").begin(space, seed)
    for point in search.ask(_CANDIDATES, lambda points: -space.latency_s(points)):
        decision = space.decision(point)
        schedule = lowerable_schedule(space, decision)
        if schedule is not None:
            return schedule, decision, float(space.latency_s(point[None])[0])
    return None
