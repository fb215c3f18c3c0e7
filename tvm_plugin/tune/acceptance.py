"""Which schedule each kernel gets, once the search is over."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from ..measure.base import Measurement, Measurer
from ..records import RecordDatabase
from ..records.traces import trace_to_json
from ..schedules.plain import plain_schedule
from ..search.space.lowering import lowerable_schedule
from .baselines import Baselines
from .budget import Budget
from .kernel_search import KernelSearch, decision_key
from .prices import CANDIDATES, KernelPrices
from .progress import Progress
from .result import TaskResult

__all__ = ["Acceptance", "looks_s"]

LOGGER = logging.getLogger(__name__)

FINALISTS = 3
"""Candidates of each kernel that are timed again, side by side, before one is believed..."""

CONTENDER = 1.05
"""... if they are this close to the fastest: one that is ahead of all others by more needs no second look..."""

WORTH_A_LOOK = 0.005
"""... and, under a budget of time, if the kernel takes this share of all or more: a look takes as long as a trial..."""

LOOKS = 50
"""... of which models need so many at most, roughly..."""

LOOK_S = 0.1
"""... and each takes so long."""


def looks_s(kernels: int) -> float:
    """Seconds that looking again at the finalists of so many kernels takes, roughly."""
    return LOOK_S * min(kernels, LOOKS)


@dataclass
class Acceptance:
    """Times finalists again side by side and chooses; the untuned kernel stays where it is faster.

    Attributes
    ----------
    database : RecordDatabase
        Remembers what was accepted.
    context_key : str
        Names device, target, threads and version there.
    measurer : Measurer
    budget : Budget
    prices : KernelPrices
        Of kernels that the budget did not reach.
    progress : Progress
    finish_s : float
        Kept for what follows: with no more seconds left, nothing is timed again.
    baselines : Baselines
        What kernels take that were not timed untuned.
    """

    database: RecordDatabase
    context_key: str
    measurer: Measurer
    budget: Budget
    prices: KernelPrices
    progress: Progress
    finish_s: float
    baselines: Baselines
    _look_s: float = field(default=LOOK_S, init=False)

    def of(self, kernels: Sequence[KernelSearch], guess: bool = False, look: bool = True) -> list[TaskResult]:
        """What each kernel gets, in order.

        With `guess`, a kernel that the budget did not reach gets the candidate that its price is of, or that the
        estimate likes best: whoever asks for that compares what the model computes. Without `look`, nothing is timed
        again: somebody waits.
        """
        all_s = sum(kernel.status.calls * kernel.best_s for kernel in kernels if math.isfinite(kernel.best_s))
        least_s = 0.0 if self.budget.time_s is None else WORTH_A_LOOK * all_s
        # First what takes its time in any case: looks end when no more is left.
        guesses = {place: self._guess(kernel) for place, kernel in enumerate(kernels) if guess and kernel.unreached}
        results = [
            guesses[place] if place in guesses else self._accept(kernel, least_s, look)
            for place, kernel in enumerate(kernels)
        ]
        unreached = [k for k, result in zip(kernels, results, strict=True) if not result.measured]
        if unreached:
            priced = sum(self.prices.is_measured(kernel.task) for kernel in unreached)
            self.progress.say(
                f"the search did not reach {len(unreached)} of {len(results)} kernels: {priced} get the fastest of "
                f"{CANDIDATES} candidates, {len(unreached) - priced} what the estimate likes best"
            )
        return results

    def _guess(self, kernel: KernelSearch) -> TaskResult:
        for decision in self.prices.defaults(kernel.task):
            known = self.prices.has_run(kernel.task, decision)
            schedule = lowerable_schedule(kernel.space, decision, compiles=known)
            if schedule is not None:
                guess = Measurement(decision, (self.prices.guess_s(kernel.task),), trace=trace_to_json(schedule.trace))
                return replace(self._result(kernel, guess), measured=False)
        return self._result(kernel, None)

    def _accept(self, kernel: KernelSearch, least_s: float, look: bool) -> TaskResult:
        key = f"accepted:{kernel.task.workload_hash}:{self.context_key}"
        fact, known_s = self.database.get_object(key), self.database.get_number(key, "latency_s")
        chosen = kernel.measurements.get(str(fact.get("decision")))
        # Of an earlier run, which may have been killed after more was measured than it had accepted.
        if chosen is not None and known_s is not None and fact.get("trials") == kernel.status.trials:
            chosen = replace(chosen, latencies_s=(known_s,))
        else:
            seconds_left = self.budget.whole_seconds_left
            look = look and (seconds_left is None or seconds_left >= self.finish_s + self._look_s)
            chosen = self._choose(kernel, kernel.status.calls * kernel.best_s >= least_s, look)
            if chosen is not None and look:
                decision, trials = decision_key(chosen.decision), kernel.status.trials
                self.database.put_json(key, {"decision": decision, "latency_s": chosen.latency_s, "trials": trials})
        return self._result(kernel, None if chosen is None or chosen.latency_s > kernel.baseline_s else chosen)

    def _choose(self, kernel: KernelSearch, worth: bool, look: bool) -> Measurement | None:
        """The fastest candidate; where it is `worth` a `look`, contenders are timed again, and built anew for that.

        They run side by side. So do all finalists where the untuned kernel seems to be faster: it was timed at another
        moment, perhaps a quieter one. What an earlier version measured counts as it is, where its sketch has gone.
        """
        loses = kernel.best_s > kernel.baseline_s
        finalists = [m for m in kernel.finalists(FINALISTS) if loses or m.latency_s <= CONTENDER * kernel.best_s]
        if not finalists:
            return None
        if not look or (not loses and (len(finalists) < 2 or not worth)):
            return finalists[0]
        started = time.monotonic()
        known = [m.decision for m in finalists if kernel.space.point(m.decision) is not None]
        again = self.measurer.retime(kernel.task, known) if known else []
        self._look_s = time.monotonic() - started
        others = [m for m in finalists if m.decision not in known]
        best = min([*again, *others], key=lambda measurement: measurement.latency_s)
        if best.error:
            LOGGER.warning("%s: no finalist ran again: %s", kernel.task.name, best.detail)
            return None
        return best

    def _result(self, kernel: KernelSearch, chosen: Measurement | None) -> TaskResult:
        baseline_s = kernel.baseline_s
        if math.isnan(baseline_s):  # not reached: what its operations take in the untuned model, or as long as now
            guess_s = self.baselines.guess_s(kernel.task) or math.nan
            baseline_s = guess_s if chosen is None else max(chosen.latency_s, guess_s)
        baseline_trace = ""
        if self.baselines.plain and (chosen is None or math.isnan(kernel.baseline_s)):
            plain = plain_schedule(kernel.task.mod["main"])
            baseline_trace = "" if plain is None else trace_to_json(plain.trace)
        return TaskResult(
            name=kernel.task.name,
            workload_hash=kernel.task.workload_hash,
            calls=kernel.task.calls,
            flops=kernel.task.operations,
            bytes_moved=kernel.task.bytes_moved,
            baseline_latency_s=baseline_s,
            latency_s=baseline_s if chosen is None else chosen.latency_s,
            trials=kernel.status.trials,
            failed=kernel.failed,
            trace=baseline_trace if chosen is None else chosen.trace,
            decision=None if chosen is None else chosen.decision.to_json(),
            price_s=None if math.isnan(kernel.status.price_s) else kernel.status.price_s,
            baseline_trace=baseline_trace,
        )
