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
"""Kernels that are priced together: enough to keep all cores compiling, few enough to stop in time."""


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
    3. the analytic estimate, once `budget_s` seconds were spent on measuring, or where `measurer` cannot price.

    Attributes
    ----------
    database, context, context_key :
        Where records and prices are kept, and of which context.
    space : callable
        Task to search space.
    measurer : Measurer or None
    budget_s : float
        Seconds that may be spent on measuring prices in all.
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

    def __call__(self, tasks: Sequence[Task]) -> list[float]:
        """Seconds of one call of each kernel, measuring all that are unknown in one go."""
        unknown = {t.workload_hash: t for t in tasks if t.workload_hash not in self._prices_s}
        for workload, _task in list(unknown.items()):
            price_s = self._recorded_s(workload)
            if price_s is not None:
                self._prices_s[workload] = price_s
                self.known += 1
                del unknown[workload]
        if unknown:
            self._price(list(unknown.values()))
        return [self._prices_s[task.workload_hash] for task in tasks]

    def _recorded_s(self, workload: str) -> float | None:
        best = self.database.best(workload, self.context)
        if best is not None:
            return best.latency_s
        price = self.database.get_json(self._key(workload))
        return None if price is None else float(price["latency_s"])

    def _price(self, tasks: Sequence[Task]) -> None:
        candidates, estimates = zip(*(defaults(self.space(task)) for task in tasks), strict=True)
        measured = [float("inf")] * len(tasks)
        # What runs longest is worth its price first.
        order = sorted(range(len(tasks)), key=lambda i: -estimates[i])
        while order and isinstance(self.measurer, Pricer) and self.measure_s < self.budget_s:
            chosen, order = order[:CHUNK], order[CHUNK:]
            started = time.monotonic()
            prices = self.measurer.price([(tasks[i], candidates[i]) for i in chosen])
            self.measure_s += time.monotonic() - started
            for i, price_s in zip(chosen, prices, strict=True):
                measured[i] = price_s
        for task, measured_s, estimate_s in zip(tasks, measured, estimates, strict=True):
            if math.isfinite(measured_s):
                self.database.put_json(self._key(task.workload_hash), {"latency_s": measured_s})
                self.measured += 1
            else:
                self.estimated += 1
            self._prices_s[task.workload_hash] = measured_s if math.isfinite(measured_s) else estimate_s
            LOGGER.debug("price of %s: %.3g s, estimated %.3g s", task.name, measured_s, estimate_s)

    def _key(self, workload: str) -> str:
        return f"price:{workload}:{self.context_key}"
