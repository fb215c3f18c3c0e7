"""Measure without a machine: answer from what was recorded."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..errors import InputError
from ..records.record import Record, notes_of
from ..search.space.base import Decision
from ..tasks.task import Task
from .base import Measurement, Overheads

__all__ = ["ReplayMeasurer"]

UNKNOWN = "not among the records"


class ReplayMeasurer:
    """A `Measurer` that looks candidates up in records: for tests, and to compare strategies on the same figures.

    Where a candidate was recorded several times, the fastest record counts. A candidate that was not recorded fails
    with the kind "build_error" and the detail "not among the records".

    Parameters
    ----------
    records : iterable of Record
        Of one context. Records without a decision are skipped.
    baselines_s : mapping of str to float, optional
        Seconds of the untuned kernels by workload hash; by default twice the slowest that ran of each.

    Raises
    ------
    InputError
        When the records are of several contexts: their figures cannot be compared.
    """

    def __init__(self, records: Iterable[Record], baselines_s: Mapping[str, float] | None = None) -> None:
        self.overheads = Overheads()
        self._known: dict[tuple[str, str], Record] = {}
        self._contexts = set()
        self._baselines_s = dict(baselines_s or {})
        slowest_s: dict[str, float] = {}
        for record in records:
            self._contexts.add(record.context)
            if not record.decision:
                continue
            key = record.workload_hash, _canonical(Decision.from_json(json.loads(record.decision)))
            if key not in self._known or record.latency_s < self._known[key].latency_s:
                self._known[key] = record
            slowest_s[record.workload_hash] = max(slowest_s.get(record.workload_hash, 0.0), *record.latencies_s, 0.0)
        if len(self._contexts) > 1:
            raise InputError(
                f"records of {len(self._contexts)} contexts cannot be replayed together; choose one of "
                f"{sorted((c.device, c.threads, c.tvm_version) for c in self._contexts)}"
            )
        for workload_hash, seconds in slowest_s.items():
            if seconds:
                self._baselines_s.setdefault(workload_hash, 2 * seconds)

    def baseline(self, tasks: Sequence[Task]) -> list[float]:
        """Seconds of the untuned kernels; `inf` where there is nothing to go by."""
        return [self._baselines_s.get(task.workload_hash, math.inf) for task in tasks]

    def measure(self, task: Task, decisions: Sequence[Decision], best_s: float = math.inf) -> list[Measurement]:
        """What was recorded, in order."""
        return [self._recall(task, decision) for decision in decisions]

    def retime(self, task: Task, decisions: Sequence[Decision]) -> list[Measurement]:
        """The same as `measure`."""
        return self.measure(task, decisions)

    def close(self) -> None:
        """Nothing to stop."""

    def describe(self) -> dict[str, Any]:
        """The context of the records."""
        for context in self._contexts:
            return {
                "device": context.device,
                "target": context.target,
                "threads": context.threads,
                "tvm_version": context.tvm_version,
            }
        return {"device": "", "target": "", "threads": 0, "tvm_version": ""}

    def _recall(self, task: Task, decision: Decision) -> Measurement:
        record = self._known.get((task.workload_hash, _canonical(decision)))
        if record is None:
            return Measurement(decision, error="build_error", detail=UNKNOWN)
        return Measurement(
            decision, record.latencies_s, record.error, record.detail, record.trace, notes=notes_of(record)
        )


def _canonical(decision: Decision) -> str:
    return json.dumps(decision.to_json(), sort_keys=True)
