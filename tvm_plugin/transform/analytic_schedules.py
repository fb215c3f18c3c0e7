"""Schedules without measuring: what the search space's analytic model likes best."""

from __future__ import annotations

from collections.abc import Sequence

from ..search.space.generate import build_space
from ..search.space.hardware import Hardware
from ..symbolic import is_symbolic
from ..tasks import Task
from .best_schedule import BestSchedule, best_schedule

__all__ = ["analytic_schedules"]


def analytic_schedules(
    tasks: Sequence[Task],
    hardware: Hardware,
    estimated: dict[tuple[str, Hardware], BestSchedule | None] | None = None,
) -> dict[str, BestSchedule]:
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
            estimated[key] = _best(task, hardware)
        schedule = estimated[key]
        if schedule is not None:
            schedules[task.workload_hash] = schedule
    return schedules


def _best(task: Task, hardware: Hardware) -> BestSchedule | None:
    if is_symbolic(task.mod["main"]):
        return None
    try:
        space = build_space(task.mod, hardware)
    except ValueError:
        return None
    return best_schedule(space)
