"""From a finished session to what the report shows."""

from __future__ import annotations

import json
import math
import os
import shlex
from collections.abc import Mapping, Sequence
from importlib import metadata
from typing import Any

from ..machine import target_json
from ..report.summary import KernelRow, RunSummary, with_records
from .result import TaskResult
from .session import Session, Settings

__all__ = ["command_line", "summarize"]


def summarize(
    session: Session,
    model: str,
    tasks: Sequence[TaskResult],
    *,
    wall_s: float,
    baseline_s: float | None = None,
    plain_baseline: bool = False,
    tuned_s: float | None = None,
    max_abs_error: float = math.nan,
    max_rel_error: float = math.nan,
    tolerance: float | None = None,
    graph: dict[str, object] | None = None,
    command: str = "",
    interrupted: bool = False,
) -> RunSummary:
    """All that the table and the page show. Latencies in seconds; errors are NaN when nothing was checked."""
    overheads = session.measurer.overheads
    summary = RunSummary(
        model=model,
        context=session.context,
        kernels=tuple(
            KernelRow(
                name=task.name,
                workload_hash=task.workload_hash,
                calls=task.calls,
                flops=task.flops,
                bytes_moved=task.bytes_moved,
                baseline_s=task.baseline_latency_s,
                tuned_s=task.latency_s,
                trials=task.trials,
                failed=task.failed,
                sketch="" if task.decision is None else str(task.decision["sketch"]),
                price_s=task.price_s,
                measured=task.measured,
            )
            for task in tasks
        ),
        baseline_s=baseline_s,
        plain_baseline=plain_baseline,
        tuned_s=tuned_s,
        max_abs_error=None if math.isnan(max_abs_error) else max_abs_error,
        max_rel_error=None if math.isnan(max_rel_error) else max_rel_error,
        tolerance=tolerance,
        machine=session.hardware.to_json(),
        versions={name: _version(name) for name in ("eqtune", "apache-tvm", "apache-tvm-ffi", "xgboost-cpu", "numpy")},
        overheads_s={
            "search": overheads.search_s,
            "build": overheads.build_s,
            "run": overheads.run_s,
            "cost model": overheads.model_s,
        },
        wall_s=wall_s,
        spent_trials=session.budget.spent_trials,
        graph=graph or {},
        command=command,
        seed=session.settings.seed,
        interrupted=interrupted,
    )
    return with_records(summary, session.work.database.all(context=session.context, traces=False))


def command_line(
    model: object,
    settings: Settings,
    graph: object,
    fast_math: bool = False,
    verify: bool = True,
    shapes: Mapping[str, Sequence[int]] | None = None,
    params: object = None,
    function: str | None = None,
    sizes: Mapping[str, int] | None = None,
) -> str:
    """The `eqtune tune` command that does this again; "" where the command line cannot say it."""
    parts = (graph, settings.measure, settings.strategy, settings.cost_model, settings.allocator)
    if not isinstance(model, (str, os.PathLike)) or params is not None:
        return ""
    if not all(isinstance(part, str) for part in parts):
        return ""
    usual = Settings()
    options = {
        "--function": function,
        "--target": _target_option(settings.target),
        "--measure": None if settings.measure == usual.measure else settings.measure,
        "--graph": None if graph == "saturate" else graph,
        "--work-dir": str(settings.work_dir),
        "--trials": settings.trials,
        "--budget": settings.time_budget_s,
        "--threads": settings.threads,
        "--strategy": None if settings.strategy == usual.strategy else settings.strategy,
        "--cost-model": None if settings.cost_model == usual.cost_model else settings.cost_model,
        "--allocator": None if settings.allocator == usual.allocator else settings.allocator,
        "--seed": settings.seed,
    }
    words = ["eqtune", "tune", os.fspath(model)]
    for name, extents in (shapes or {}).items():
        words += ["--shape", f"{name}={','.join(map(str, extents))}"]
    for name, size in (sizes or {}).items():
        words += ["--size", f"{name}={size}"]
    for name, value in options.items():
        if value is not None:
            words += [name, str(value)]
    flags = {"--fast-math": fast_math, "--no-verify": not verify}
    return shlex.join([*words, *(flag for flag, given in flags.items() if given)])


def _target_option(target: Any) -> str | None:
    """A tag as it is, anything else as JSON."""
    if target is None or isinstance(target, str):
        return target
    return json.dumps(target) if isinstance(target, dict) else target_json(target)


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"
