"""The search over schedules of tiles, which kernels with symbolic sizes are made of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ..pipeline import EstimatedForm
from ..relax_ir.kernels import is_symbolic
from ..search.space import Space
from ..search.space.base import Decision
from ..search.space.hardware import ONE_THREAD
from ..symbolic import TYPICAL_SIZE, UsedTile, sharing
from ..tasks import Task, extract_tasks
from ..tasks.extract import task_of
from .loop import Variant
from .result import TaskResult, schedules_of
from .session import Session

__all__ = ["TunedTiles", "tuned_tiles"]


@dataclass(frozen=True)
class TunedTiles:
    """What the search found.

    Attributes
    ----------
    form : EstimatedForm
        With the measured schedules.
    results : mapping of str to TaskResult
        By workload hash, of tiles, and of kernels without symbolic sizes.
    interrupted : bool
        After Ctrl-C.
    """

    form: EstimatedForm
    results: Mapping[str, TaskResult]
    interrupted: bool = False

    @property
    def measured(self) -> bool:
        """Whether there is anything that was not known by estimate."""
        return any(one.trials for one in self.results.values())

    def of_kernel(self, name: str, sizes: Mapping[str, int]) -> list[TaskResult]:
        """The tiles that a kernel with symbolic sizes runs; none where some were not measured."""
        run = [tile.workload_hash for tile, _ in _run(self.form, name, sizes)]
        known = [self.results[key] for key in run if key in self.results and self.results[key].trials]
        return known if len(known) == len(run) else []


def tuned_tiles(session: Session, form: EstimatedForm, sizes: Mapping[str, int]) -> TunedTiles:
    """Measure the tiles that run at these sizes, and kernels whose sizes are known, while the session's budget lasts.

    First the tiles that decide how a kernel's weights are packed, then those that read them so, each with the share of
    the budget that is theirs of the work. Goes on from what earlier runs measured.
    """
    tuned, budget = TunedTiles(form, {}), session.budget
    first, later = (_tasks(session, tuned, sizes, shares) for shares in (False, True))
    tasks = [*first[0], *later[0]]
    if not tasks:
        return tuned
    session.identify(Variant("tiles", {task.workload_hash: task.calls for task in tasks}))
    share = _work(later[0]) / max(1.0, _work(tasks))
    reserve_s = budget.reserve_s
    budget.reserve_s += share * max(0.0, budget.seconds_left or 0.0)
    budget.reserve_trials = int(share * (budget.trials_left or 0))
    tuned = _searched(session, tuned, *first)
    budget.reserve_s, budget.reserve_trials = reserve_s, 0
    if tuned.form is not form:  # which weights are packed how was decided
        later = _tasks(session, tuned, sizes, shares=True)
    return _searched(session, tuned, *later)


def _work(tasks: Sequence[Task]) -> float:
    return sum(task.calls * (task.operations + task.bytes_moved) for task in tasks)


def _searched(session: Session, tuned: TunedTiles, tasks: Sequence[Task], spaces: Mapping[str, Space]) -> TunedTiles:
    """One of both searches, if there is anything to measure, or was in an earlier run."""
    may_go_on = session.budget.allows() or any(session.has_measured(task) for task in tasks)
    if tuned.interrupted or not tasks or not may_go_on:
        return tuned
    session.baselines.choose(sum(task.operations for task in tasks), session.budget)
    calls = {task.workload_hash: task.calls for task in tasks}
    loop = session.search(tasks, [Variant("tiles", calls)], spaces=spaces)
    return _with_results(tuned, session.accept(loop.kernels, look=not loop.interrupted), loop.interrupted)


def _with_results(tuned: TunedTiles, found: Sequence[TaskResult], interrupted: bool) -> TunedTiles:
    """What was not measured, which may have a plain schedule, keeps that by estimate."""
    measured = [one for one in found if one.trials]
    decisions = {one.workload_hash: Decision.from_json(one.decision) for one in measured if one.decision is not None}
    form = replace(
        tuned.form,
        schedules={**tuned.form.schedules, **schedules_of(measured)},
        decisions={**tuned.form.decisions, **decisions},
    )
    return TunedTiles(form, {**tuned.results, **{one.workload_hash: one for one in found}}, interrupted)


def _tasks(
    session: Session, tuned: TunedTiles, sizes: Mapping[str, int], shares: bool
) -> tuple[list[Task], dict[str, Space]]:
    """Tiles that share the weights of another one, in spaces of schedules that pack weights so; or all others."""
    kernels = extract_tasks(tuned.form.kernels)
    tasks = {} if shares else {one.workload_hash: one for one in kernels if not is_symbolic(one.mod["main"])}
    spaces: dict[str, Space] = {}
    for kernel in kernels:
        for tile, runs in _run(tuned.form, kernel.functions[0], sizes):
            key, calls = tile.workload_hash, kernel.calls * runs
            if (tile.shares is not None) is not shares or key in tuned.results:
                continue
            if key in tasks:
                tasks[key] = replace(tasks[key], calls=tasks[key].calls + calls)
                continue
            task = task_of(f"{kernel.name}, {_what(tile)}", tile.workload["main"], calls)
            if tile.shares is not None:
                try:
                    spaces[key] = sharing(session.space(task), tile.shares)
                except ValueError:  # the machine as it was measured has other schedules than as it is described
                    continue
            tasks[key] = task
    return list(tasks.values()), spaces


def _run(form: EstimatedForm, name: str, sizes: Mapping[str, int]) -> list[tuple[UsedTile, int]]:
    """The tiles that a kernel runs at these sizes, and how often."""
    used = [(tile, tile.runs_at(sizes, TYPICAL_SIZE)) for tile in form.tiled.tiles.get(name, ())]
    return [(tile, count) for tile, count in used if count]


def _what(used: UsedTile) -> str:
    """A tile's lengths, and whether all threads compute it together: for people."""
    lengths = " x ".join(str(length) for length in used.tile.extents.values()) or "all"
    return f"{used.tile.name} of {lengths}" + ("" if ONE_THREAD in used.workload["main"].attrs else " by all")
