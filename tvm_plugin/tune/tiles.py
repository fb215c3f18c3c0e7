"""The search over schedules of tiles, which kernels with symbolic sizes are made of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ..search.space import Space
from ..search.space.base import Decision
from ..search.space.hardware import ONE_THREAD
from ..symbolic import UsedTile, is_symbolic, runs_at, sharing
from ..tasks import Task, extract_tasks
from ..tasks.extract import task_of
from ..transform.pipeline import TYPICAL_SIZE, EstimatedForm
from .loop import Variant
from .result import TaskResult, schedules_of
from .session import Session

__all__ = ["TunedTiles", "tuned_tiles"]

LATER_SHARE = 0.4
"""Of the search's budget, what is kept for tiles that read weights as the first tile of their kernel packs them."""


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

    def of_kernel(self, name: str, sizes: Mapping[str, int], threads: int) -> list[TaskResult]:
        """The tiles that a kernel with symbolic sizes runs; none where some were not measured."""
        used: Sequence[UsedTile] = self.form.tiled.tiles.get(name, ())
        run = [tile.workload_hash for tile, calls in zip(used, _calls(used, sizes, threads), strict=True) if calls]
        known = [self.results[key] for key in run if key in self.results and self.results[key].trials]
        return known if len(known) == len(run) else []


def tuned_tiles(session: Session, form: EstimatedForm, sizes: Mapping[str, int]) -> TunedTiles:
    """Measure the tiles that run at these sizes, and kernels whose sizes are known, while the session's budget lasts.

    First the tiles that decide how a kernel's weights are packed, then those that read them so. Goes on from what
    earlier runs measured.
    """
    tuned, budget = TunedTiles(form, {}), session.budget
    reserve_s, left_s, left = budget.reserve_s, budget.seconds_left, budget.trials_left
    for shares in (False, True):
        tasks, spaces = _tasks(session, tuned, sizes, shares)
        share = 0.0 if shares else LATER_SHARE
        budget.reserve_s = reserve_s + share * (left_s or 0.0)
        budget.reserve_trials = int(share * (left or 0))
        if not tuned.interrupted and (budget.allows() or any(session.has_measured(task) for task in tasks)) and tasks:
            session.baselines.choose(sum(task.operations for task in tasks), budget)
            calls = {task.workload_hash: task.calls for task in tasks}
            loop = session.search(tasks, [Variant("tiles", calls)], spaces=spaces)
            found = session.accept(loop.kernels, look=not loop.interrupted)
            tuned = _with_results(tuned, found, loop.interrupted)
    return tuned


def _with_results(tuned: TunedTiles, found: Sequence[TaskResult], interrupted: bool) -> TunedTiles:
    decisions = {one.workload_hash: Decision.from_json(one.decision) for one in found if one.decision is not None}
    form = replace(
        tuned.form,
        schedules={**tuned.form.schedules, **schedules_of(found)},
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
    with session.target:
        tiles = tuned.form.tiled.tiles
    for kernel in kernels:
        used: Sequence[UsedTile] = tiles.get(kernel.functions[0], ())
        for tile, of_one in zip(used, _calls(used, sizes, session.hardware.threads), strict=True):
            key = tile.workload_hash
            if not of_one or (tile.shares is not None) is not shares or key in tuned.results:
                continue
            calls = max(1, round(kernel.calls * of_one))
            if key in tasks:
                tasks[key] = replace(tasks[key], calls=tasks[key].calls + calls)
                continue
            task = task_of(f"{kernel.name}, tile of {_lengths(tile)}", tile.workload["main"], calls)
            if tile.shares is not None:
                try:
                    spaces[key] = sharing(session.space(task), tile.shares)
                except ValueError:  # the machine as it was measured has other schedules than as it is described
                    continue
            tasks[key] = task
    return list(tasks.values()), spaces


def _calls(used: Sequence[UsedTile], sizes: Mapping[str, int], threads: int) -> list[float]:
    """How often a kernel runs each tile, one after another: threads run those that each computes alone side by side."""
    runs = zip(used, runs_at(used, sizes, TYPICAL_SIZE), strict=True)
    return [count / threads if ONE_THREAD in tile.workload["main"].attrs else count for tile, count in runs]


def _lengths(tile: UsedTile) -> str:
    return " x ".join(str(length) for length in tile.tile.extents.values())
