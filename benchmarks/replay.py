"""Candidates are measured once, whoever asks for them: so that strategies are compared on the very same figures."""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eqtune.errors import InputError
from eqtune.files import replacing
from eqtune.measure import LocalMeasurer
from eqtune.measure.base import Measurement, Measurer, Overheads
from eqtune.search.space import Hardware
from eqtune.search.space.base import Decision
from eqtune.tasks import Task
from eqtune.tune.kernel_search import decision_key

__all__ = ["RememberingMeasurer"]


class RememberingMeasurer:
    """A `Measurer` that asks a table first, and the machine only for what is not in it. A context manager.

    Parameters
    ----------
    path : Path
        The table: gzipped JSON, `{"context": ..., "hardware": ..., "kernels": {hash: {decision: seconds or null}}}`
        with null for a failure. Created by `save` when it does not exist.
    target : tvm.target.Target
    hardware : Hardware
        What spaces are built from where there is no table; else the table's, so that estimates are the same.
    measure : bool
        Whether the machine may be asked; else an unknown candidate is a failure.

    Raises
    ------
    InputError
        The machine may be asked, and the table is of another one: their latencies are not to be compared.
    """

    def __init__(self, path: Path, target: Any, hardware: Hardware, measure: bool) -> None:
        self.overheads = Overheads()
        self.asked: list[tuple[str, float]] = []
        self.unknown = 0
        self._path = path
        self._known: dict[str, dict[str, float | None]] = {}
        self.hardware = hardware
        self._context: dict[str, Any] = {}
        if path.exists():
            document = json.loads(gzip.decompress(path.read_bytes()))
            self.hardware = Hardware.from_json(document["hardware"])
            self._known, self._context = document["kernels"], document["context"]
        self._machine: Measurer | None = None
        if measure:
            self._machine = LocalMeasurer(target, self.hardware, threads=1)
            here = self._machine.describe()
            if self._context not in ({}, here):
                self.close()
                raise InputError(
                    f"{path} was measured elsewhere, {self._context}, and here is {here}; name another table"
                )
            self._context = here

    def __enter__(self) -> RememberingMeasurer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def baseline(self, tasks: Sequence[Task]) -> list[float]:
        """Unknown: nothing here depends on it."""
        return [math.inf for _ in tasks]

    def measure(self, task: Task, decisions: Sequence[Decision], best_s: float = math.inf) -> list[Measurement]:
        """What is known, or what the machine says; nothing is given up, since others may ask for it."""
        known = self._known.setdefault(task.workload_hash, {})
        unknown = [decision for decision in decisions if decision_key(decision) not in known]
        self.unknown += len(unknown)
        if unknown and self._machine is not None:
            for measurement in self._machine.measure(task, unknown):
                latency_s = measurement.latency_s
                known[decision_key(measurement.decision)] = latency_s if math.isfinite(latency_s) else None
        results = []
        for decision in decisions:
            seconds = known.get(decision_key(decision))
            self.asked.append((task.workload_hash, math.inf if seconds is None else seconds))
            if seconds is None:
                results.append(Measurement(decision, error="build_error"))
            else:
                results.append(Measurement(decision, (seconds,), trace="[[],[]]"))
        return results

    def retime(self, task: Task, decisions: Sequence[Decision]) -> list[Measurement]:
        """The same as `measure`."""
        return self.measure(task, decisions)

    def best_s(self, workload_hash: str) -> float:
        """The fastest that anyone ever found for a kernel, in seconds."""
        return min((s for s in self._known.get(workload_hash, {}).values() if s is not None), default=math.inf)

    def describe(self) -> dict[str, Any]:
        """The context of the table."""
        return self._context

    def save(self) -> None:
        """Write the table, when the machine was asked."""
        if self._machine is None:
            return
        document = {"context": self._context, "hardware": self.hardware.to_json(), "kernels": self._known}
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(self._path) as temporary:  # killed meanwhile, it has lost nothing
            temporary.write_bytes(gzip.compress(json.dumps(document).encode(), mtime=0))

    def close(self) -> None:
        """Stop the workers."""
        if self._machine is not None:
            self._machine.close()
