"""What kernels cost before they are tuned: from the records, else measured on the spot, else estimated."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import numpy as np

from ..measure.base import Measurer
from ..records import Context, RecordDatabase
from ..search.space.base import Decision, Space
from ..search.strategies.moves import Moves
from ..tasks.task import Task

__all__ = ["KernelPrices", "Pricer", "defaults"]

LOGGER = logging.getLogger(__name__)

SAMPLES = 512
"""Random candidates of which the analytic estimate picks the defaults."""

CANDIDATES = 3
"""Defaults that are measured for a price: the estimate's first choice is now and then twice as slow as its third."""


CHUNK = 8
"""Kernels that are priced together: enough to keep all cores compiling, few enough to stop in time..."""

FIRST_CHUNK = 2
"""... and how many where time is short and nobody knows yet how long one takes."""


@runtime_checkable
class Pricer(Protocol):
    """A measurer that can time candidates without a reference to compare them with."""

    def price(self, candidates: Sequence[tuple[Task, Sequence[Decision]]]) -> list[float]:
        """Seconds of the fastest candidate of each task; `inf` where none ran. Outputs are not compared."""


def defaults(space: Space, count: int = CANDIDATES, seed: int = 0) -> tuple[list[Decision], float]:
    """The candidates that the analytic estimate likes best, and the estimate of the first in seconds.

    `inf` and no candidate for a space without a legal point.
    """
    points = np.unique(Moves(space).sample(np.random.default_rng(seed), SAMPLES), axis=0)
    if not len(points):
        return [], float("inf")
    estimates = space.latency_s(points)
    order = np.argsort(estimates, kind="stable")[:count]
    return [space.decision(points[i]) for i in order], float(estimates[order[0]])


@dataclass
class KernelPrices:
    """Seconds of one call of a kernel, from the best source there is.

    1. the fastest record of the kernel on this device, for this target, threads and version of TVM;
    2. measured: the best of the default candidates, tens of ms each; kept in the database beside the records;
    3. the analytic estimate, once `budget_s` seconds are over, or where `measurer` cannot price. It is scaled by how
       far the estimates of measured kernels are off, so that prices of both kinds may be added up.

    Attributes
    ----------
    database, context, context_key :
        Where records and prices are kept, and of which context.
    space : callable
        Task to search space.
    measurer : Measurer or None
    budget_s : float
        Seconds from now on in which kernels are measured; what the caller does meanwhile counts.
    measure_s : float
        Seconds that were.
    measured, known, estimated : int
        How many kernels each source has priced.
    """

    database: RecordDatabase
    context: Context
    context_key: str
    space: Callable[[Task], Space]
    measurer: Measurer | None = None
    budget_s: float = float("inf")
    measure_s: float = 0.0
    measured: int = 0
    known: int = 0
    estimated: int = 0
    _prices_s: dict[str, float] = field(default_factory=dict)
    _estimated: dict[str, tuple[list[Decision], float]] = field(default_factory=dict)
    _errors: dict[str, float] = field(default_factory=dict)
    _kernel_s: float = 0.0
    _started: float = field(default_factory=time.monotonic)

    def __call__(self, tasks: Sequence[Task]) -> list[float]:
        """Seconds of one call of each kernel, measuring all that are unknown in one go."""
        unknown = {t.workload_hash: t for t in tasks if t.workload_hash not in self._prices_s}
        for workload in list(unknown):
            price_s = self._recorded_s(workload)
            if price_s is not None:
                self._prices_s[workload] = price_s
                self.known += 1
                del unknown[workload]
        estimated = self._measure(list(unknown.values()))
        self.estimated += len(estimated)
        return [self.guess_s(task) for task in tasks]

    def guess_s(self, task: Task) -> float:
        """Seconds of one call of a kernel by what is known already: nothing is measured."""
        workload = task.workload_hash
        price_s = self._prices_s.get(workload)
        if price_s is None:
            price_s = self._recorded_s(workload)
        return self._estimate(task)[1] * self._error if price_s is None else price_s

    def defaults(self, task: Task) -> Sequence[Decision]:
        """The candidates of a kernel that the analytic estimate likes best."""
        return self._estimate(task)[0]

    def is_measured(self, task: Task) -> bool:
        """Whether the kernel's price is a measured one."""
        return task.workload_hash in self._prices_s or self._recorded_s(task.workload_hash) is not None

    @property
    def _error(self) -> float:
        """How many times as long as estimated a kernel takes: the median of those that were measured."""
        return float(np.median(list(self._errors.values()))) if self._errors else 1.0

    @property
    def _seconds_left(self) -> float:
        return self.budget_s - (time.monotonic() - self._started)

    def _recorded_s(self, workload: str) -> float | None:
        best = self.database.best(workload, self.context)
        if best is not None:
            return best.latency_s
        price = self.database.get_json(self._key(workload))
        return None if price is None else float(price["latency_s"])

    def _estimate(self, task: Task) -> tuple[list[Decision], float]:
        if task.workload_hash not in self._estimated:
            self._estimated[task.workload_hash] = defaults(self.space(task))
        return self._estimated[task.workload_hash]

    def _measure(self, tasks: Sequence[Task]) -> list[Task]:
        """Measure what there is time for; returns the kernels without a price."""
        unpriced: list[Task] = []
        # What runs longest is worth its price first.
        order = sorted(tasks, key=lambda task: -self._estimate(task)[1])
        while order and isinstance(self.measurer, Pricer):
            count = self._chunk()
            if not count:
                break
            chosen, order = order[:count], order[count:]
            started = time.monotonic()
            prices = self.measurer.price([(task, self._estimate(task)[0]) for task in chosen])
            self._kernel_s = (time.monotonic() - started) / len(chosen)
            self.measure_s += time.monotonic() - started
            for task, price_s in zip(chosen, prices, strict=True):
                if math.isfinite(price_s):
                    self._learn(task, price_s)
                else:
                    unpriced.append(task)
        return unpriced + order

    def _chunk(self) -> int:
        """How many kernels to measure next; 0 when time is over."""
        left_s = self._seconds_left
        if left_s == math.inf:
            return CHUNK
        if left_s <= 0:
            return 0
        return min(CHUNK, int(left_s / self._kernel_s)) if self._kernel_s else FIRST_CHUNK

    def _learn(self, task: Task, price_s: float) -> None:
        estimate_s = self._estimate(task)[1]
        LOGGER.debug("price of %s: %.3g s, estimated %.3g s", task.name, price_s, estimate_s)
        self.database.put_json(self._key(task.workload_hash), {"latency_s": price_s})
        self._prices_s[task.workload_hash] = price_s
        self.measured += 1
        if estimate_s > 0:
            self._errors[task.workload_hash] = price_s / estimate_s

    def _key(self, workload: str) -> str:
        return f"price:{workload}:{self.context_key}"
