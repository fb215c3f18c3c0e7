"""The schedule of a space that the analytic model likes best."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from tvm import ir

from ..search import strategies
from ..search.space.base import Decision, Space
from ..search.space.lowering import lowerable_schedule

__all__ = ["BestSchedule", "best_schedule"]

_CANDIDATES = 4
"""How many points are tried for a kernel, should the first ones not apply."""


@dataclass(frozen=True, eq=False)
class BestSchedule:
    """What the analytic model likes best of a space: called with the workload, it gives the scheduled one.

    Nothing is scheduled before that: of most forms of a model, only the time is asked for.

    Attributes
    ----------
    space : Space
    decisions : sequence of Decision
        The best one first; the others are tried where those before them do not apply.
    latency_s : float
        Estimated seconds of one call with the first one.
    """

    space: Space
    decisions: Sequence[Decision]
    latency_s: float

    @cached_property
    def scheduled(self) -> tuple[Any, Decision] | None:
        """The first `tvm.s_tir.Schedule` that TVM can lower, and what it decides; None where there is none."""
        for decision in self.decisions:
            schedule = lowerable_schedule(self.space, decision)
            if schedule is not None:
                return schedule, decision
        return None

    def __call__(self, _mod: ir.IRModule) -> Any:
        """The scheduled workload, a `tvm.s_tir.Schedule`; None where none of the decisions applies."""
        return None if self.scheduled is None else self.scheduled[0]


def best_schedule(space: Space) -> BestSchedule | None:
    """None where the space has no legal point. The first batch of a tuning run starts from the same points."""
    search = strategies.create("annealed-evolution").begin(space, seed=0)
    points = search.ask(_CANDIDATES, lambda points: -space.latency_s(points))
    if not len(points):
        return None
    return BestSchedule(space, [space.decision(point) for point in points], float(space.latency_s(points[:1])[0]))
