"""The search over one kernel's schedules, as the tuning loop drives it."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import InputError
from ..measure.base import Measurement
from ..records import Record
from ..records.record import notes_of
from ..search.allocation.base import TaskStatus
from ..search.space import Space
from ..search.space.base import Decision, Points
from ..search.space.features import with_compiled
from ..search.strategies.base import Score, Search
from ..tasks.task import Task

__all__ = ["BATCH", "KernelSearch", "decision_key"]

BATCH = 16
"""Candidates a round: enough to share compile time, few enough for the cost model to learn between them."""


@dataclass
class KernelSearch:
    """One kernel: its space, what was measured, and what an allocator may know.

    Attributes
    ----------
    task : Task
    space : Space
    search : Search
        The strategy's search over `space`.
    status : TaskStatus
        `status.history` holds the best latency after each round.
    baseline_s : float
        Seconds of one call of the untuned kernel; NaN while unknown.
    failed : int
        Candidates that failed, in all runs.
    measurements : dict
        `decision_key` to the fastest measurement of that decision, failures left out.
    suggestions : Points
        Legal points that the first batch begins with, shape [n, 1 + knobs].
    unreferenced : bool
        Whether its candidates cannot be compared, because the untuned kernel fails.
    favourite : Decision or None
        The candidate that was fastest when the kernel was priced: measured before all others, and compared.
    """

    task: Task
    space: Space
    search: Search
    status: TaskStatus
    baseline_s: float = math.nan
    failed: int = 0
    measurements: dict[str, Measurement] = field(default_factory=dict)
    suggestions: Points | None = None
    unreferenced: bool = False
    favourite: Decision | None = None
    _measured: set[str] = field(default_factory=set)
    _latencies: list[NDArray[np.float64]] = field(default_factory=list)
    _features: list[NDArray[np.float32]] = field(default_factory=list)

    @property
    def unreached(self) -> bool:
        """Whether nobody has tried a candidate of it yet, in this run or an earlier one, though it can be tried."""
        return not self.status.trials and not self.unreferenced

    @property
    def best(self) -> Measurement | None:
        """The fastest candidate so far."""
        return min(self.measurements.values(), key=lambda m: m.latency_s, default=None)

    @property
    def best_s(self) -> float:
        """Its latency in seconds; `inf` before any candidate worked."""
        best = self.best
        return math.inf if best is None else best.latency_s

    def finalists(self, count: int) -> list[Measurement]:
        """The `count` fastest candidates, fastest first: they are timed again before one is believed."""
        return sorted(self.measurements.values(), key=lambda m: m.latency_s)[:count]

    def ask(self, count: int, score: Score) -> list[Decision]:
        """The next candidates to measure, the favourite and suggestions first; empty when the space is exhausted.

        None is measured twice: a strategy of the user's that only repeats itself has exhausted the space. Raises
        InputError for what it asks for that the space does not have.

        Suggestions take at most half of the first batch: what was best elsewhere can be bad here (16 rows of a tile
        share a set of the first-level cache where they are 12288 bytes apart, and not where it is 3072).
        """
        first = [self.favourite] if self.favourite is not None and self.unreached else []
        if self.suggestions is not None:
            first += [self.space.decision(point) for point in self.suggestions[: count // 2]]
            first = first[:1] + [decision for decision in first[1:] if decision != self.favourite]
            self.suggestions = None
        asked = _points_in(self.space, self.search.ask(count - len(first), score), count - len(first))
        own = {decision_key(decision): decision for decision in map(self.space.decision, asked)}
        taken = self._measured.union(map(decision_key, first))
        return first + [decision for key, decision in own.items() if key not in taken]

    def tell(self, measurements: Sequence[Measurement]) -> None:
        """Take the results of a round in."""
        points, latencies, notes = [], [], []
        for measurement in measurements:
            key = decision_key(measurement.decision)
            self._measured.add(key)
            if measurement.error:
                self.failed += 1
            else:
                known = self.measurements.get(key)
                if known is None or measurement.latency_s < known.latency_s:
                    self.measurements[key] = measurement
            point = self.space.point(measurement.decision)
            if point is not None:
                points.append(point)
                latencies.append(measurement.latency_s)
                notes.append(measurement.notes)
        self.status.trials += len(measurements)
        if points:
            self._add(np.stack(points), np.asarray(latencies), notes)
        if measurements:
            self.status.history.append(self.best_s)

    def resume(self, records: Sequence[Record], within: bool = False) -> None:
        """Take in what earlier runs measured on this kernel in this context, round by round, roughly.

        With `within`, only candidates that the space has: others may not be used.
        """
        known = []
        for record in records:
            if record.decision:
                decision = Decision.from_json(json.loads(record.decision))
                if within and self.space.point(decision) is None:
                    continue
                outcome = record.latencies_s, record.error, record.detail, record.trace
                known.append(Measurement(decision, *outcome, notes=notes_of(record)))
        for start in range(0, len(known), BATCH):
            self.tell(known[start : start + BATCH])

    def training_data(self) -> tuple[NDArray[np.float32], NDArray[np.float64]]:
        """Features [n, features] and latencies in seconds [n] of everything measured on this kernel."""
        if not self._features:
            return np.zeros((0, 0), dtype=np.float32), np.zeros(0)
        return np.concatenate(self._features), np.concatenate(self._latencies)

    def _add(self, points: Points, latencies_s: NDArray[np.float64], notes: Sequence[Mapping[str, float]]) -> None:
        self.search.tell(points, latencies_s)
        self._latencies.append(latencies_s)
        self._features.append(with_compiled(self.space.features(points), notes))


def _points_in(space: Space, asked: Any, most: int) -> Points:
    """What a strategy asks for, which may be the user's own. Raises InputError unless these are legal points."""
    points, limits = np.asarray(asked), space.cardinalities
    if points.shape[:1] == (0,):
        return points
    width = 1 + limits.shape[1]
    shaped = points.dtype.kind in "iu" and points.ndim == 2 and points.shape[1] == width and len(points) <= most
    if not (
        shaped
        and ((points >= 0) & (points[:, :1] < len(limits))).all()
        and (points[:, 1:] < limits[points[:, 0]]).all()
        and space.legal(points).all()
    ):
        got = f"{points.dtype} of shape {points.shape}" if points.ndim else repr(asked)
        raise InputError(
            f"the strategy's ask must return at most {most} legal points, integers of shape [n, {width}], not {got}; "
            "eqtune.search.strategies.conformance.check_strategy tests one in seconds"
        )
    return points


def decision_key(decision: Decision) -> str:
    """The decision as canonical JSON text."""
    return json.dumps(decision.to_json(), sort_keys=True)
