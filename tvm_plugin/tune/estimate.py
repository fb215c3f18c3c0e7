"""The result of tuning without a device: chosen schedules, and estimates that say what they are."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ..schedules.apply import schedule_kernels
from .forms import Forms
from .loop import TuningLoop
from .result import TaskResult, TuneResult, schedules_of
from .session import Session
from .summarize import summarize

__all__ = ["estimated_result"]


def estimated_result(
    session: Session,
    model: str,
    forms: Forms,
    loop: TuningLoop,
    results: Sequence[TaskResult],
    graph: Any,
    started_s: float,
    command: str,
) -> TuneResult:
    """The form with the least sum of estimates, scheduled. Nothing is built, run or compared.

    `started_s` is when tuning began, of `time.monotonic`; `command` is what does this again.
    """
    variant = min(loop.variants, key=lambda candidate: candidate.latency_s(loop.best_s))
    (form,) = [form for form in forms.forms if form.name == variant.name]
    calls = form.calls
    tasks = [replace(task, calls=calls[task.workload_hash]) for task in results if task.workload_hash in calls]
    missing = [task.name for task in tasks if not task.tuned]
    if missing:
        session.progress.say(f"no schedule was found for {len(missing)} kernels: {', '.join(missing[:5])}")
    latency_s = sum(task.calls * task.latency_s for task in tasks)
    session.save_spent()
    summary = summarize(
        session,
        model,
        tasks,
        wall_s=time.monotonic() - started_s,
        tuned_s=latency_s,
        graph={"form": form.name},
        command=command,
        interrupted=loop.interrupted,
    )
    session.work.write_json("summary.json", summary.to_json())
    with session.target:
        mod = schedule_kernels(form.mod, schedules_of(tasks))
    return TuneResult(
        mod=mod,
        latency_s=latency_s,
        baseline_latency_s=math.nan,
        tasks=tasks,
        graph=graph,
        max_abs_error=math.nan,
        max_rel_error=math.nan,
        interrupted=loop.interrupted,
        summary=summary,
    )
