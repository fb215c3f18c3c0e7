"""What kernels cost before they are tuned: from the records, else measured on the spot, else estimated."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from .. import __version__
from ..measure.base import Measurer, Price, Pricer
from ..records import Context, RecordDatabase
from ..search.space.base import Decision, Space
from ..search.space.memory_bound.stages import UntouchedSketch
from ..search.strategies.moves import Moves
from ..tasks.task import Task

__all__ = ["CANDIDATES", "KernelPrices", "defaults"]

LOGGER = logging.getLogger(__name__)

SAMPLES = 512
"""Random candidates of which the analytic estimate picks the defaults."""

CANDIDATES = 3
"""Defaults that are measured for a price: the estimate's first choice is now and then twice as slow as its third."""

CHUNK = 8
"""Kernels that are priced together: enough to keep all cores compiling, few enough to stop in time..."""

SERIAL_S = 1e-9
"""What a byte or an operation takes, roughly, where no sketch says so: sorting, running sums, kernels of one number."""

FIRST_CHUNK = 2
"""... and how many where time is short and nobody knows yet how long one takes."""


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
    measured, known, estimated : int
        How many kernels each source has priced.
    """

    database: RecordDatabase
    context: Context
    context_key: str
    space: Callable[[Task], Space]
    measurer: Measurer | None = None
    budget_s: float = float("inf")
    measured: int = 0
    known: int = 0
    estimated: int = 0
    _prices: dict[str, float] = field(default_factory=dict)
    _estimated: dict[str, tuple[list[Decision], float]] = field(default_factory=dict)
    _errors: dict[str, float] = field(default_factory=dict)
    _kernel_s: float = 0.0
    _candidates: int = 0
    _candidates_s: float = 0.0
    _started: float = field(default_factory=time.monotonic)

    def __call__(self, tasks: Sequence[Task]) -> list[float]:
        """Seconds of one call of each kernel, measuring all that are unknown in one go."""
        unknown = {t.workload_hash: t for t in tasks if t.workload_hash not in self._prices}
        for workload in list(unknown):
            price_s = self._recorded_s(workload)
            if price_s is not None:
                self._prices[workload] = price_s
                self.known += 1
                del unknown[workload]
        estimated = self._measure(list(unknown.values()))
        self.estimated += len(estimated)
        return [self.guess_s(task) for task in tasks]

    def extend(self, seconds: float) -> None:
        """Kernels may be measured for so many seconds from now on."""
        self.budget_s = time.monotonic() - self._started + seconds

    def guess_s(self, task: Task) -> float:
        """Seconds of one call, by what is known already: nothing is measured."""
        price_s = self._prices.get(task.workload_hash) or self._recorded_s(task.workload_hash)
        return self._estimate(task)[1] * self._error if price_s is None else price_s

    def defaults(self, task: Task) -> Sequence[Decision]:
        """The candidates of a kernel that the analytic estimate likes best; first the one that a price is of."""
        decisions = self._estimate(task)[0]
        favourite = [decision for decision in decisions if self.has_run(task, decision)]
        return [*favourite, *(decision for decision in decisions if decision not in favourite)]

    def has_run(self, task: Task, decision: Decision) -> bool:
        """Whether the kernel's price is of this candidate, so that it is known to compile."""
        return decision.to_json() == self.database.get_object(self._key(task.workload_hash)).get("decision")

    def estimate_s(self, task: Task) -> float:
        """Seconds of one call by the analytic estimate, of the best of some random candidates."""
        return self._estimate(task)[1]

    def is_measured(self, task: Task) -> bool:
        """Whether the kernel's price is a measured one."""
        return task.workload_hash in self._prices or self._recorded_s(task.workload_hash) is not None

    def priced_s(self, workload: str) -> float | None:
        """Seconds of one call of the default candidate that a price is of; None where none was measured."""
        return self.database.get_number(self._key(workload), "latency_s")

    @property
    def candidate_s(self) -> float:
        """Seconds that compiling and measuring a candidate took, side by side with others; 0 where none was."""
        return self._candidates_s / max(1, self._candidates)

    @property
    def _error(self) -> float:
        """How many times as long as estimated a kernel takes: the median of those that were measured."""
        return float(np.median(list(self._errors.values()))) if self._errors else 1.0

    @property
    def _seconds_left(self) -> float:
        return self.budget_s - (time.monotonic() - self._started)

    def _recorded_s(self, workload: str) -> float | None:
        """By earlier runs."""
        # What was imported is no candidate of the search: nobody would get its latency.
        best = self.database.best(workload, self.context, searched=True)
        return self.priced_s(workload) if best is None else best.latency_s

    def _estimate(self, task: Task) -> tuple[list[Decision], float]:
        if task.workload_hash not in self._estimated:
            decisions, estimate_s = defaults(self.space(task))
            if [decision.sketch for decision in decisions] == [
                UntouchedSketch.name
            ]:  # no sketch says how long it takes
                estimate_s = SERIAL_S * (task.bytes_moved + task.operations)
            self._estimated[task.workload_hash] = decisions, estimate_s
        return self._estimated[task.workload_hash]

    def _measure(self, tasks: Sequence[Task]) -> list[Task]:
        """Measure what there is time for; returns the kernels without a price."""
        unpriced: list[Task] = []
        # What runs longest is worth its price first.
        order = sorted(tasks, key=lambda task: -task.calls * self._estimate(task)[1])
        while order and isinstance(self.measurer, Pricer):
            count = self._chunk()
            if not count:
                break
            chosen, order = order[:count], order[count:]
            started = time.monotonic()
            prices = self.measurer.price([(task, self._estimate(task)[0]) for task in chosen])
            took_s = time.monotonic() - started
            self._kernel_s = took_s / len(chosen)
            self._candidates_s += took_s
            self._candidates += sum(len(self._estimate(task)[0]) for task in chosen)
            for task, price in zip(chosen, prices, strict=True):
                if math.isfinite(price.latency_s):
                    self._learn(task, price)
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

    def _learn(self, task: Task, price: Price) -> None:
        decisions, estimate_s = self._estimate(task)
        LOGGER.debug("price of %s: %.3g s, estimated %.3g s", task.name, price.latency_s, estimate_s)
        fact = {"latency_s": price.latency_s, "decision": decisions[price.fastest].to_json()}
        self.database.put_json(self._key(task.workload_hash), fact)
        self._prices[task.workload_hash] = self._recorded_s(task.workload_hash) or price.latency_s
        self.measured += 1
        if estimate_s > 0:
            self._errors[task.workload_hash] = price.latency_s / estimate_s

    def _key(self, workload: str) -> str:
        """Also of the version of eqtune: its schedule of the same decision may be another one."""
        return f"price:{workload}:{self.context_key}:{__version__}"
