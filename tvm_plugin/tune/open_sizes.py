"""Models with open sizes: compiled once for all of them; tuned, compared and timed at some."""

from __future__ import annotations

import logging
import math
import numbers
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..compile.executable import build_scheduled
from ..compile.huge_pages import in_huge_pages
from ..errors import InputError, MismatchError, UnsupportedModelError
from ..frontends import ImportedModel
from ..frontends.imported import KNOWN_SHAPES
from ..pipeline import EstimatedForm, cheapest_form
from ..relax_ir.kernels import is_symbolic
from ..runtime import Model, ModelRunner, first_line
from ..schedules.analytic import analytic_schedules
from ..schedules.stored import keep_tiles
from ..symbolic import TYPICAL_SIZE, typical_size, with_sizes
from ..tasks import Task, extract_tasks
from ..tasks.extract import task_of
from .accuracy import TOLERANCE, Accuracy
from .advice import fast_math_advice
from .chosen_inputs import NOTHING_CHOSEN
from .reference import Reference
from .result import Limit, TaskResult, TuneResult
from .session import Session
from .summarize import summarize
from .tiles import TunedTiles, tuned_tiles

__all__ = ["limits_of", "tuned_for_any_size", "typical_sizes"]

LOGGER = logging.getLogger(__name__)

SINGLE = "batch"
"""A size of this name is 1 unless somebody says otherwise."""


def typical_sizes(imported: ImportedModel, given: Mapping[str, int] | None) -> dict[str, int]:
    """At which sizes a model is compared and timed: those given, those of its example, or typical ones.

    Raises InputError for names that the model does not have, and for sizes that it does not allow.
    """
    if given is not None and not isinstance(given, Mapping):
        raise InputError(f'sizes are a mapping of names to whole numbers, as {{"batch": 4}}, not {given!r}')
    sizes: dict[str, int] = {}
    usual: dict[str, int] = {}
    examples = imported.examples or [None] * len(imported.inputs)
    for info, example in zip(imported.inputs, examples, strict=True):
        for place, extent in enumerate(info.shape):
            if not isinstance(extent, str) or extent not in imported.open_sizes:
                continue
            usual.setdefault(extent, typical_size(info.shape, place))
            if example is not None:
                sizes.setdefault(extent, example.shape[place])
    for name, open_size in imported.open_sizes.items():
        sizes.setdefault(name, open_size.nearest(1 if SINGLE in name.lower() else usual.get(name, TYPICAL_SIZE)))
    for name, size in (given or {}).items():
        if name not in sizes:
            known = ", ".join(sizes) or "none (shapes that are given are not open)"
            raise InputError(f"the model has no open size {name!r}; its open sizes are: {known}")
        if not isinstance(size, numbers.Integral) or isinstance(size, bool):
            raise InputError(f"the size {name} is a whole number, not {size!r}")
        imported.open_sizes[name].check(int(size))
        sizes[name] = int(size)
    return sizes


def tuned_for_any_size(
    session: Session,
    imported: ImportedModel,
    sizes: Mapping[str, int],
    graph: bool,
    fast_math: bool,
    verify: bool,
    started_s: float,
    command: str,
) -> TuneResult:
    """The model compiled for any size, with the tiles tuned that run at `sizes`; compared there and at others.

    Tiles are measured if there is time, after the model was compiled with schedules by estimate: it stays so unless it
    is faster then. The baseline is the model for these sizes alone, with plain schedules. Arguments are as those of
    `tune_model`, or as `estimated_result` has them.

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
    session.progress.say(f"sizes are open: tuned for any, at {at}, and compared there and at others")
    session.expect(imported.mod)
    reference = _reference(session, imported, sizes)
    accuracies = _accuracies(session, imported, sizes, reference) if verify else {}
    built_s = time.monotonic()
    if verify and reference.choice == NOTHING_CHOSEN:
        session.progress.say(NOTHING_CHOSEN)
    form, built = _by_estimate(session, imported, graph, fast_math, sizes)
    verdict = _advice(imported, sizes, form, session) if graph and not fast_math else ""
    if fast_math:
        verdict = "used" if form.lossy else "not faster"
    try:
        errors = _checked(built, accuracies)
    except MismatchError as error:
        if not form.lossy:
            raise
        verdict, built_s = f"refused: {error}", time.monotonic()
        form, built = _by_estimate(session, imported, graph, False, sizes)
        errors = _checked(built, accuracies)
    session.keep_back(time.monotonic() - built_s + session.timing_s, len(form.kernels.functions))
    tuned = tuned_tiles(session, form, sizes)
    if not tuned.results and not tuned.interrupted and not session.budget.allows():
        session.progress.say(
            f"no kernel is measured: compiling for any size took until {session.budget.elapsed_s:.0f} s, all of the "
            "budget; each has the schedules that the estimate likes best"
        )
    session.rest()
    measured = _measured(session, tuned, accuracies)
    runs: list[Model] = [reference.run, built.run]
    baseline_s, *latencies_s = session.models.time_s(
        runs if measured is None else [*runs, measured[0].run], reference.inputs, session.timing_s
    )
    latency_s = min(latencies_s)
    LOGGER.info("by estimate, and with measured tiles: %s s", latencies_s)
    keeps_measured = measured is not None and latencies_s[1] == latency_s
    keep_tiles(session.work.database, tuned.results, keeps_measured)
    if measured is not None and keeps_measured:
        built, errors = measured
    else:
        tuned = TunedTiles(form, {}, tuned.interrupted)
        if measured is not None:
            session.progress.say(
                f"{latencies_s[1]:.3g} s with measured tiles, {latency_s:.3g} s by estimate, which is kept"
            )
    if session.run_key:
        session.save_spent()
    tasks = _kernels(session, tuned, sizes, baseline_s)
    summary = summarize(
        session,
        imported.name,
        tasks,
        wall_s=time.monotonic() - started_s,
        baseline_s=baseline_s,
        plain_baseline=reference.plain,
        tuned_s=latency_s,
        max_abs_error=errors[0],
        max_rel_error=errors[1],
        tolerance=accuracies[at].tolerance if verify else None,
        graph={
            "form": form.name,
            "sizes": at,
            **({"fast math": verdict} if verdict else {}),
            **({"choice": reference.choice} if verify and reference.choice else {}),
        },
        command=command,
        interrupted=tuned.interrupted,
    )
    session.work.write_json("summary.json", summary.to_json())
    return TuneResult(
        mod=built.mod,
        latency_s=latency_s,
        baseline_latency_s=baseline_s,
        tasks=tasks,
        graph=None,
        max_abs_error=errors[0],
        max_rel_error=errors[1],
        interrupted=tuned.interrupted,
        summary=summary,
        _target=session.target,
        _executable=built.executable,
        _run=built.run if isinstance(built.run, ModelRunner) else None,
        _limits=limits_of(imported),
    )


def _advice(imported: ImportedModel, sizes: Mapping[str, int], form: EstimatedForm, session: Session) -> str:
    """Of the model at these sizes; see `fast_math_advice`."""
    operations = sum(task.calls * _at(task, sizes).operations for task in extract_tasks(form.kernels))
    return fast_math_advice(imported.at(sizes).mod, operations, session.hardware)


def _by_estimate(
    session: Session, imported: ImportedModel, graph: bool, fast_math: bool, sizes: Mapping[str, int]
) -> tuple[EstimatedForm, _Built]:
    """The form that is said to be fastest at these sizes, compiled. Raises UnsupportedModelError."""
    try:
        with session.target:
            form = cheapest_form(imported.mod, session.target, {}, graph, fast_math, sizes)
        return form, _built(session, form)
    except Exception as error:  # of TVM, which was not made for it
        raise UnsupportedModelError(
            f"{imported.name} cannot be compiled for any size ({first_line(error)}): {KNOWN_SHAPES}"
        ) from error


@dataclass(frozen=True)
class _Built:
    """The model for any size, compiled."""

    mod: Any
    executable: Any
    run: Model


def _built(session: Session, form: EstimatedForm) -> _Built:
    with session.target:
        mod = in_huge_pages(form.scheduled())
    executable = build_scheduled(mod, session.target)
    return _Built(mod, executable, session.models.load(executable))


def _measured(
    session: Session, tuned: TunedTiles, accuracies: Mapping[str, Accuracy]
) -> tuple[_Built, tuple[float, float]] | None:
    """The model with what was measured, and its errors; None where nothing was, or the model is wrong with it."""
    if not tuned.measured:
        return None
    try:
        built = _built(session, tuned.form)
        return built, _checked(built, accuracies)
    except Exception as error:  # noqa: BLE001 - of TVM, or a mismatch: there is the model by estimate
        LOGGER.warning("measured tiles are left out: %s", first_line(error))
        return None


def _accuracies(
    session: Session, imported: ImportedModel, sizes: Mapping[str, int], reference: Reference
) -> dict[str, Accuracy]:
    """What outputs have to be at these sizes, and at others where the model runs, by what the sizes are.

    Raises InputError where it does not run at these.
    """
    at = _text(sizes)
    try:
        _ = reference.outputs
    except Exception as error:
        raise InputError(
            f"the model does not run at {at} ({first_line(error)}); say where it does: sizes={{NAME: 8}}, or "
            "--size NAME=8"
        ) from error
    accuracies = {at: Accuracy(session, reference, True, TOLERANCE)}
    for others in _others(imported, sizes):
        try:
            reference = _reference(session, imported, others)
            _ = reference.outputs
        except Exception as error:  # noqa: BLE001 - of any framework: more places than the model knows, say
            session.progress.say(
                f"not compared at {_text(others)}, where the model itself does not run: {first_line(error)}"
            )
            continue
        accuracies[_text(others)] = Accuracy(session, reference, True, TOLERANCE)
    return accuracies


def _checked(built: _Built, accuracies: Mapping[str, Accuracy]) -> tuple[float, float]:
    """The largest absolute and relative error at any of these sizes; NaN without any.

    Raises MismatchError where it is too large.
    """
    largest = math.nan, math.nan
    for at, accuracy in accuracies.items():
        absolute, relative = accuracy.errors(built.run)
        if not relative <= accuracy.tolerance:
            raise MismatchError(
                f"at {at}, the tuned model's outputs differ from the reference by {relative:.2e} relative, where "
                f"{accuracy.tolerance:.0e} is allowed; nothing is returned. {accuracy.excuse()}"
            )
        largest = max(absolute, largest[0]), max(relative, largest[1])
    return largest


def limits_of(imported: ImportedModel) -> tuple[Limit, ...]:
    """What the sizes of inputs have to be."""
    return tuple(
        Limit(place, dimension, imported.open_sizes[str(extent)])
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
    """The next of each size, and twice as much: as far as the model allows. First, where some are equal, the next ones
    that are not, so that a size in the place of another one shows."""
    known, may_be = [dict(sizes)], imported.open_sizes
    apart: dict[str, int] = {}
    for name, size in sizes.items():
        larger = [may_be[name].nearest(size + more * may_be[name].step) for more in range(1, len(sizes) + 1)]
        apart[name] = next((one for one in larger if one not in apart.values()), larger[0])
    following, twice = (
        {name: may_be[name].nearest(size * factor + steps * may_be[name].step) for name, size in sizes.items()}
        for factor, steps in ((1, 1), (2, 0))
    )
    for others in (apart, following, twice):
        if others not in known:
            known.append(others)
            yield others


def _kernels(session: Session, tuned: TunedTiles, sizes: Mapping[str, int], baseline_s: float) -> list[TaskResult]:
    """The kernels as they are at these sizes, and what they are estimated to take; where they were measured, the tiles
    that they run."""
    tasks = [_at(task, sizes) for task in extract_tasks(tuned.form.kernels)]
    schedules = analytic_schedules(tasks, session.hardware)
    baseline_s_per_operation = baseline_s / max(1.0, sum(task.calls * task.operations for task in tasks))
    results: dict[str, TaskResult] = {}
    for task in tasks:
        alone = tuned.results.get(task.workload_hash)  # its sizes are known
        measured = tuned.of_kernel(task.functions[0], sizes) if alone is None else [alone]
        if measured and all(one.trials for one in measured):
            results |= {one.workload_hash: one for one in measured}
            continue
        roofline_s = session.hardware.least_latency_s(task.flops, task.bytes_moved, task.weight_bytes)
        known = schedules.get(task.workload_hash)
        latency_s = roofline_s if known is None else known.latency_s
        results[task.workload_hash] = TaskResult(
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
    return list(results.values())


def _at(task: Task, sizes: Mapping[str, int]) -> Task:
    if not is_symbolic(task.mod["main"]):
        return task
    known = task_of(task.name, with_sizes(task.mod, TYPICAL_SIZE, sizes)["main"], task.calls)
    return replace(known, functions=task.functions)
