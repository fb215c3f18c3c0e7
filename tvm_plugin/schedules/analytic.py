"""Schedules without measuring: what the search space's analytic model likes best."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tvm import ir

from ..machine import describe_machine
from ..relax_ir.functions import constant_bytes
from ..relax_ir.kernels import is_symbolic
from ..search.space.generate import build_space
from ..search.space.hardware import Hardware, with_weights
from ..tasks import Task
from .best import BestSchedule, best_schedule

__all__ = ["analytic_schedules", "machine_running"]


def machine_running(mod: ir.IRModule, target: Any) -> Hardware:
    """What is known of a target without measuring, and of where it has the weights of a module, which are constants."""
    return with_weights(describe_machine(target, measure=False), constant_bytes(mod))


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
