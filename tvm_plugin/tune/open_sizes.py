"""Models with open sizes: compiled once for all of them, compared and timed at some. Kernels are not measured."""

from __future__ import annotations

import math
import numbers
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace

from ..errors import InputError, MismatchError, UnsupportedModelError
from ..frontends import ImportedModel
from ..frontends.imported import KNOWN_SHAPES
from ..runtime import Model, ModelRunner, first_line
from ..symbolic import is_symbolic, with_sizes
from ..tasks import Task, extract_tasks
from ..tasks.extract import task_of
from ..transform.analytic_schedules import analytic_schedules
from ..transform.apply_tuned import build_scheduled
from ..transform.huge_pages import in_huge_pages
from ..transform.pipeline import TYPICAL_SIZE, EstimatedForm, cheapest_form
from .accuracy import TOLERANCE, Accuracy
from .reference import Reference
from .result import Limit, TaskResult, TuneResult, check_size
from .session import Session
from .summarize import summarize

__all__ = ["tuned_for_any_size", "typical_sizes"]

SINGLE = "batch"
"""A size of this name is 1 unless somebody says otherwise."""


def typical_sizes(imported: ImportedModel, given: Mapping[str, int] | None) -> dict[str, int]:
    """At which sizes a model is compared and timed: those given, those of its example, or 16.

    Raises InputError for names that the model does not have, and for sizes that it does not allow.
    """
    if given is not None and not isinstance(given, Mapping):
        raise InputError(f'sizes are a mapping of names to whole numbers, as {{"batch": 4}}, not {given!r}')
    sizes: dict[str, int] = {}
    examples = imported.examples or [None] * len(imported.inputs)
    for info, example in zip(imported.inputs, examples, strict=True):
        for place, extent in enumerate(info.shape):
            if isinstance(extent, str) and example is not None and extent in imported.open_sizes:
                sizes.setdefault(extent, example.shape[place])
    for name, (least, most) in imported.open_sizes.items():
        usual = 1 if SINGLE in name.lower() else TYPICAL_SIZE
        sizes.setdefault(name, max(least, usual if most is None else min(usual, most)))
    for name, size in (given or {}).items():
        if name not in sizes:
            known = ", ".join(sizes) or "none (shapes that are given are not open)"
            raise InputError(f"the model has no open size {name!r}; its open sizes are: {known}")
        if not isinstance(size, numbers.Integral) or isinstance(size, bool):
            raise InputError(f"the size {name} is a whole number, not {size!r}")
        check_size(name, size, *imported.open_sizes[name])
        sizes[name] = int(size)
    return sizes


def tuned_for_any_size(
    session: Session,
    imported: ImportedModel,
    sizes: Mapping[str, int],
    graph: bool,
    verify: bool,
    started_s: float,
    command: str,
) -> TuneResult:
    """The model compiled for any size, compared at `sizes` and others, timed at `sizes`.

    The baseline is the model for these sizes alone, with plain schedules. Arguments are as those of `tune_model`, or as
    `estimated_result` has them.

    Raises
    ------
    InputError
        The model does not run at these sizes.
    UnsupportedModelError
        It cannot be compiled for any size.
    MismatchError
        As `tune_model` does.
    """
    at = _text(sizes)
    session.progress.say(f"sizes are open: tuned for any, by estimate; compared and timed at {at}")
    reference = _reference(session, imported, sizes)
    accuracy = Accuracy(session, reference, verify, TOLERANCE)
    if verify:
        try:
            _ = reference.outputs
        except Exception as error:
            raise InputError(
                f"the model does not run at {at} ({first_line(error)}); say where it does: sizes={{NAME: 8}}, or "
                "--size NAME=8"
            ) from error
    try:
        with session.target:
            form = cheapest_form(imported.mod, session.target, {}, graph, sizes=sizes)
            mod = in_huge_pages(form.scheduled(session.target))
        executable = build_scheduled(mod, session.target)
    except Exception as error:  # of TVM, which was not made for it
        raise UnsupportedModelError(
            f"{imported.name} cannot be compiled for any size ({first_line(error)}): {KNOWN_SHAPES}"
        ) from error
    session.rest()
    run: Model = session.models.load(executable)
    absolute, relative = accuracy.errors(run) if verify else (math.nan, math.nan)
    _refuse(relative, accuracy, at) if verify else None
    for others in _others(imported, sizes) if verify else ():
        absolute, relative = _with_others(session, imported, others, run, (absolute, relative))
    latency_s, baseline_s = session.models.time_s([run, reference.run], reference.inputs, session.timing_s)
    tasks = _estimates(session, form, sizes, baseline_s)
    summary = summarize(
        session,
        imported.name,
        tasks,
        wall_s=time.monotonic() - started_s,
        baseline_s=baseline_s,
        plain_baseline=reference.plain,
        tuned_s=latency_s,
        max_abs_error=absolute,
        max_rel_error=relative,
        tolerance=accuracy.tolerance if verify else None,
        graph={"form": form.name, "sizes": at},
        command=command,
    )
    session.work.write_json("summary.json", summary.to_json())
    return TuneResult(
        mod=mod,
        latency_s=latency_s,
        baseline_latency_s=baseline_s,
        tasks=tasks,
        graph=None,
        max_abs_error=absolute,
        max_rel_error=relative,
        interrupted=False,
        summary=summary,
        _target=session.target,
        _executable=executable,
        _run=run if isinstance(run, ModelRunner) else None,
        _limits=_limits(imported),
    )


def _limits(imported: ImportedModel) -> tuple[Limit, ...]:
    """What the sizes of inputs have to be."""
    return tuple(
        Limit(place, dimension, str(extent), *imported.open_sizes[str(extent)])
        for place, info in enumerate(imported.inputs)
        for dimension, extent in enumerate(info.shape)
        if extent in imported.open_sizes
    )


def _text(sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{name}={size}" for name, size in sizes.items())


def _reference(session: Session, imported: ImportedModel, sizes: Mapping[str, int]) -> Reference:
    """The model at these sizes, with plain schedules."""
    seed, key = session.settings.seed, session.context_key
    return Reference(imported.at(sizes), session.target, session.work, seed, key, session.models, plain=True)


def _others(imported: ImportedModel, sizes: Mapping[str, int]) -> Iterator[dict[str, int]]:
    """One more of each size, and twice as much: as far as the model allows."""
    for factor, more in ((1, 1), (2, 0)):
        limits = {name: imported.open_sizes[name][1] or math.inf for name in sizes}
        others = {name: int(min(size * factor + more, limits[name])) for name, size in sizes.items()}
        if others != sizes:
            yield others


def _with_others(
    session: Session, imported: ImportedModel, sizes: Mapping[str, int], run: Model, known: tuple[float, float]
) -> tuple[float, float]:
    """The largest errors so far, and with these sizes, should the model run with them."""
    at = _text(sizes)
    try:
        reference = _reference(session, imported, sizes)
        _ = reference.outputs
    except Exception as error:  # noqa: BLE001 - of any framework: more places than the model knows, say
        session.progress.say(f"not compared at {at}, where the model itself does not run: {first_line(error)}")
        return known
    accuracy = Accuracy(session, reference, verify=True)
    found = accuracy.errors(run)
    _refuse(found[1], accuracy, at)
    return max(known[0], found[0]), max(known[1], found[1])


def _refuse(relative: float, accuracy: Accuracy, at: str) -> None:
    if not relative <= accuracy.tolerance:
        raise MismatchError(
            f"at {at}, the tuned model's outputs differ from the reference by {relative:.2e} relative, where "
            f"{accuracy.tolerance:.0e} is allowed; nothing is returned. {accuracy.excuse()}"
        )


def _estimates(session: Session, form: EstimatedForm, sizes: Mapping[str, int], baseline_s: float) -> list[TaskResult]:
    """The kernels as they are at these sizes, and what they are estimated to take."""
    tasks = [_at(task, sizes) for task in extract_tasks(form.kernels)]
    schedules = analytic_schedules(tasks, session.hardware)
    baseline_s_per_operation = baseline_s / max(1.0, sum(task.calls * task.operations for task in tasks))
    results = []
    for task in tasks:
        roofline_s = session.hardware.least_latency_s(task.flops, task.bytes_moved, task.weight_bytes)
        known = schedules.get(task.workload_hash)
        latency_s = roofline_s if known is None else known.latency_s
        results.append(
            TaskResult(
                name=task.name,
                workload_hash=task.workload_hash,
                calls=task.calls,
                flops=task.operations,
                bytes_moved=task.bytes_moved,
                baseline_latency_s=max(latency_s, baseline_s_per_operation * task.operations),
                latency_s=latency_s,
                trials=0,
                failed=0,
                trace="",
                measured=False,
            )
        )
    return results


def _at(task: Task, sizes: Mapping[str, int]) -> Task:
    if not is_symbolic(task.mod["main"]):
        return task
    known = task_of(task.name, with_sizes(task.mod, TYPICAL_SIZE, sizes)["main"], task.calls)
    return replace(known, functions=task.functions)
