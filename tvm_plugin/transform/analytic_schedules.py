"""Schedules without measuring: what the search space's analytic model likes best."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tvm import ir

from ..search.space.generate import build_space
from ..search.space.hardware import Hardware
from ..symbolic import is_symbolic
from ..tasks import Task
from .best_schedule import BestSchedule, best_schedule

__all__ = ["AnalyticSchedule", "analytic_schedules"]


@dataclass(frozen=True, eq=False)
class AnalyticSchedule:
    """A schedule that was not measured: called with the workload, it gives the scheduled one.

    Attributes
    ----------
    best : BestSchedule
        Of the workload's space. It schedules when it is called: of most forms of a model, only the time is asked for.
    """

    best: BestSchedule

    @property
    def latency_s(self) -> float:
        """Estimated seconds of one call."""
        return self.best.latency_s

    def __call__(self, _mod: ir.IRModule) -> Any:
        """The scheduled workload, a `tvm.s_tir.Schedule`; None where the space's best points do not apply."""
        return None if self.best.scheduled is None else self.best.scheduled[0]


def analytic_schedules(
    tasks: Sequence[Task],
    hardware: Hardware,
    seed: int = 0,
    estimated: dict[tuple[str, Hardware], AnalyticSchedule | None] | None = None,
) -> dict[str, AnalyticSchedule]:
    """The best schedule of each kernel by the analytic estimate, by workload hash.

    The first batch of a tuning run starts from the same points. A kernel that has no space (a symbolic shape) is left
    out. What is in `estimated` is not looked for again, and what is found is added: forms of a model share most of
    their kernels.
    """
    estimated = {} if estimated is None else estimated
    schedules = {}
    for task in tasks:
        key = task.workload_hash, hardware
        if key not in estimated:
            estimated[key] = _best(task, hardware, seed)
        schedule = estimated[key]
        if schedule is not None:
            schedules[task.workload_hash] = schedule
    return schedules


def _best(task: Task, hardware: Hardware, seed: int) -> AnalyticSchedule | None:
    if is_symbolic(task.mod["main"]):
        return None
    try:
        space = build_space(task.mod, hardware)
    except ValueError:
        return None
    best = best_schedule(space, seed)
    return None if best is None else AnalyticSchedule(best)
