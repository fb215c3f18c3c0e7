"""The tuning loop: allocate, ask, measure, record, tell, learn."""

from __future__ import annotations

import json
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

import numpy as np

from ..cost_model import BlendedScore, CostModel
from ..measure.base import NO_REFERENCE, Measurement, Measurer, MeasuresTogether
from ..records import Context, Record, RecordDatabase
from ..search.allocation.base import Allocation
from ..search.space.base import Decision
from ..tasks.task import Task
from .budget import Budget
from .interrupt import Interrupt
from .kernel_search import BATCH, KernelSearch, decision_key
from .progress import Progress
from .transfer import Transfer

__all__ = ["BATCH", "LEVEL", "TRIAL_S", "TuningLoop", "Variant"]

LOGGER = logging.getLogger(__name__)

TRIAL_S = 0.08
"""What a trial takes, roughly, before any was measured: compiling dominates."""

OPENING = 4
"""Candidates of a kernel that are measured before the others of its first round: a good one is known earlier..."""

FEW_KERNELS = 4
"""... where so many kernels are tuned at most: of many, nobody waits for one."""

LITTLE = 0.03
"""A kernel that takes less than this share of what the others take has no more than its opening at first: the copies
around a convolution with another layout had half of 64 trials."""

FEW = 8
"""Candidates of a round, at least, where kernels that promise little may stay without."""

HOPEFUL, LEVEL = 1.3, 1.1
"""How many times as long as the fastest form another may take: while it may catch up, and in the end."""

IN_THIS_ROUND = "measured in this round"

RECENT, MOST_UNUSUAL = 8, 2.0
"""The next round is expected to take as long as the slowest of late, but no more than so many times the median of so
many: else, one that something disturbed for 20 s ends a search with as much time left."""

TOGETHER = 4
"""Kernels with fewer candidates than this a round are measured several at a time, so that all cores compile. Untuned
kernels are run for so many kernels in advance, for the same reason."""


@dataclass
class Variant:
    """One equal form of the model: which kernels it calls, how often. Variants compete on measured kernels.

    Attributes
    ----------
    name : str
    calls : dict
        Workload hash to calls a run.
    """

    name: str
    calls: Mapping[str, int]

    def latency_s(self, best_s: Mapping[str, float]) -> float:
        """Sum over the kernels of calls x best latency, in seconds."""
        return sum(calls * best_s[workload] for workload, calls in self.calls.items())


@dataclass
class TuningLoop:
    """Searches the schedules of several kernels under one budget.

    Attributes
    ----------
    kernels : list of KernelSearch
    variants : list of Variant
        The model's forms; one that is clearly slower once all its kernels were measured is dropped, with the kernels
        only it needs.
    measurer, database, context, model, allocation, budget, progress
        The parts, as their protocols say.
    seed : int
        Noted in the records.
    transfer : Transfer or None
        Suggests the first candidates of each kernel.
    spent : callable
        What to add, with each batch of records, to how much of the budget is gone (`RecordDatabase.add`'s `sums`).
    baselines : callable or None
        Sets `baseline_s` of kernels that are reached without one.
    untuned_s : callable
        Task -> seconds that running it untuned takes, roughly.
    guess_s : callable or None
        Task -> seconds of one call that are expected of a kernel which nobody has measured; None: its untuned time.
    """

    kernels: Sequence[KernelSearch]
    variants: list[Variant]
    measurer: Measurer
    database: RecordDatabase
    context: Context
    model: CostModel
    allocation: Allocation
    budget: Budget
    progress: Progress
    seed: int
    eqtune_version: str
    transfer: Transfer | None = None
    spent: Callable[[], Mapping[str, Mapping[str, float]]] = dict
    baselines: Callable[[Sequence[KernelSearch]], None] | None = None
    untuned_s: Callable[[Task], float] = lambda task: 0.0
    guess_s: Callable[[Task], float] | None = None
    interrupted: bool = False
    _interrupt: Interrupt = field(default_factory=Interrupt, init=False)
    _round_s: float = field(default=0.0, init=False)
    _rounds_s: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT), init=False)
    _trial_s: float = field(default=0.0, init=False)
    _guesses_s: dict[str, float] = field(default_factory=dict, init=False)

    def run(self) -> None:
        """Measure until the budget is spent or no kernel has anything left. Ctrl-C ends it early, keeping all."""
        with self._interrupt as interrupt:
            try:
                self._fit()
                while self.budget.allows(self._round_s) and not interrupt.happened:
                    self.drop_slow_variants()
                    count = self._batch()
                    kernels = self._next_kernels(count)
                    if not kernels:
                        break
                    for part in self._parts(kernels, count):
                        if self.budget.allows(self._round_s) and not interrupt.happened:
                            for kernel in kernels:
                                if not kernel.status.finished and not self._in_time(kernel):
                                    kernel.status.finished = "no time is left to run it untuned"
                            self._round([kernel for kernel in kernels if not kernel.status.finished], part)
                        if part < count and self._take_little(kernels):
                            break
            except KeyboardInterrupt:
                interrupt.happened = True
            except Exception:  # what C code makes of a Ctrl-C that it did not expect, XGBoost for one
                if not interrupt.happened:
                    raise
        self.interrupted = interrupt.happened
        self.drop_slow_variants()
        self.progress.close()
        if self.interrupted:
            self.progress.say("interrupted: the best so far is applied and checked; Ctrl-C again gives up")

    @property
    def trials(self) -> int:
        """Measurements of the kernels of all forms, in all runs."""
        return sum(kernel.status.trials for kernel in self.kernels)

    @property
    def best_s(self) -> dict[str, float]:
        """Workload hash to best latency, in seconds: the untuned one where that is faster, or a guess."""
        best = {k.task.workload_hash: min(k.best_s, _or_inf(k.baseline_s)) for k in self.kernels}
        if self.guess_s is not None:
            for task in (kernel.task for kernel in self.kernels if kernel.unreached):
                if task.workload_hash not in self._guesses_s:
                    self._guesses_s[task.workload_hash] = self.guess_s(task)
                best[task.workload_hash] = min(best[task.workload_hash], self._guesses_s[task.workload_hash])
        return best

    @property
    def latency_s(self) -> float:
        """Estimate for the best variant: the sum of its kernels."""
        best = self.best_s
        return min(variant.latency_s(best) for variant in self.variants)

    def _next_kernels(self, count: int) -> list[KernelSearch]:
        """Whose turn it is: one, or several that nobody has measured, where each gets only `count` candidates."""
        wanted = TOGETHER // count if isinstance(self.measurer, MeasuresTogether) else 1
        if self.budget.trials_left is not None:
            wanted = min(wanted, self.budget.trials_left // count)
        turns = self._turns(max(1, wanted))
        new = next((i for i, kernel in enumerate(turns) if kernel.status.trials), len(turns))
        return turns[: max(1, new)]

    def _parts(self, kernels: Sequence[KernelSearch], count: int) -> list[int]:
        """Candidates of a round: all at once, or a few before the others."""
        opens = len(self.kernels) <= FEW_KERNELS and not kernels[0].status.trials and count > OPENING
        return [OPENING, count - OPENING] if opens else [count]

    def _take_little(self, kernels: Sequence[KernelSearch]) -> bool:
        """Whether what these kernels take hardly counts, in each form, beside its others that were measured."""
        best_s = {kernel.task.workload_hash: kernel.best_s for kernel in self.kernels if kernel.status.history}
        own = {kernel.task.workload_hash for kernel in kernels}

        def is_little(calls: Mapping[str, int]) -> bool:
            own_s = sum(calls[workload] * best_s.get(workload, math.inf) for workload in own & calls.keys())
            others_s = sum(calls[workload] * best_s[workload] for workload in (best_s.keys() & calls.keys()) - own)
            return own_s < LITTLE * others_s

        forms = [variant.calls for variant in self.variants if own & variant.calls.keys()]
        return bool(forms) and all(map(is_little, forms))

    def _in_time(self, kernel: KernelSearch) -> bool:
        """Whether there is time for a round and, before it, for the untuned kernel."""
        seconds_left = self.budget.seconds_left
        untimed = math.isnan(kernel.baseline_s)
        return seconds_left is None or not untimed or self._round_s + self.untuned_s(kernel.task) <= seconds_left

    def _turns(self, most: int) -> list[KernelSearch]:
        """The kernels whose turns come next, were nothing learnt meanwhile."""
        turns: list[KernelSearch] = []
        while len(turns) < most:
            index = self.allocation.next_task([kernel.status for kernel in self.kernels])
            if index is None:
                break
            turns.append(self.kernels[index])
            turns[-1].status.finished = IN_THIS_ROUND  # so that the others' turns come
        for kernel in turns:
            kernel.status.finished = ""
        return turns

    def _round(self, kernels: Sequence[KernelSearch], count: int) -> None:
        started = time.monotonic()
        asked = [(kernel, decisions) for kernel in kernels if (decisions := self._ask(kernel, count))]
        if not asked:
            return
        asking_s = time.monotonic() - started
        if self.baselines is not None and any(math.isnan(kernel.baseline_s) for kernel, _ in asked):
            later = [kernel for kernel in self._turns(TOGETHER) if self._in_time(kernel)]
            soon = {id(kernel): kernel for kernel in [*(kernel for kernel, _ in asked), *later]}
            self.baselines([kernel for kernel in soon.values() if math.isnan(kernel.baseline_s)])
        measure_started = time.monotonic()
        answers = zip(asked, self._measure(asked), strict=True)
        measured = [(kernel, of_kernel) for (kernel, _), of_kernel in answers if self._has_reference(kernel, of_kernel)]
        if not measured:
            return
        if self.budget.time_s is not None:  # else trials are what counts, and no clock decides
            for kernel, _ in measured:
                kernel.status.round_s = (time.monotonic() - measure_started) / len(asked)
        records = [self._record(kernel, m) for kernel, of_kernel in measured for m in of_kernel]
        self.budget.spent_trials += len(records)
        self.database.add(records, sums=self.spent())  # at once: a kill must not leave recorded trials uncounted
        for kernel, of_kernel in measured:
            kernel.tell(of_kernel)
        self._fit()
        round_s = asking_s + time.monotonic() - measure_started  # without untuned kernels, which run once
        self._rounds_s.append(round_s)
        self._round_s = min(max(0.8 * self._round_s, round_s), MOST_UNUSUAL * median(self._rounds_s))
        self._trial_s = max(0.8 * self._trial_s, round_s / len(records))
        self.progress.update(
            measured[-1][0].task.name[:40],
            self.latency_s,
            self.budget.spent_trials,
            sum(k.failed for k in self.kernels),
            self.budget,
        )

    def _ask(self, kernel: KernelSearch, count: int) -> list[Decision]:
        """The next candidates of a kernel; without any, it is finished."""
        started = time.monotonic()
        if self.transfer is not None and not kernel.status.trials:
            kernel.suggestions = self.transfer.suggest(kernel, self.kernels)
        decisions = kernel.ask(count, self._score(kernel))
        self.measurer.overheads.search_s += time.monotonic() - started
        if not decisions:
            kernel.status.finished = "every candidate was measured"
        return decisions

    def _measure(self, asked: Sequence[tuple[KernelSearch, Sequence[Decision]]]) -> list[list[Measurement]]:
        if len(asked) > 1 and isinstance(self.measurer, MeasuresTogether):
            return self.measurer.measure_together([(k.task, decisions, k.best_s) for k, decisions in asked])
        return [self.measurer.measure(k.task, decisions, k.best_s) for k, decisions in asked]

    @staticmethod
    def _has_reference(kernel: KernelSearch, measurements: Sequence[Measurement]) -> bool:
        """Whether candidates were tried at all; else the kernel is finished, for this run."""
        if measurements[0].error != NO_REFERENCE:
            return True
        LOGGER.warning("%s is not tuned: %s", kernel.task.name, measurements[0].detail)
        kernel.unreferenced = True
        kernel.status.finished = "the untuned kernel fails"
        return False

    def _batch(self) -> int:
        """Candidates of the next round: a full batch, or fewer where that would leave kernels without any.

        Where kernels are priced, those that promise little may stay without.
        """
        new = [kernel.status for kernel in self.kernels if not kernel.status.trials and not kernel.status.finished]
        untouched, unpriced = len(new), any(math.isnan(status.price_s) for status in new)
        shares = [BATCH]
        if self.budget.trials_left is not None:
            shares.append(self.budget.trials_left // max(1, untouched))
        if self.budget.seconds_left is not None:
            shares.append(int(self.budget.seconds_left / (self._trial_s or TRIAL_S)) // max(1, untouched))
        count = max(1 if unpriced else FEW, min(shares))
        return count if self.budget.trials_left is None else max(1, min(count, self.budget.trials_left))

    def _score(self, kernel: KernelSearch) -> BlendedScore:
        return BlendedScore(kernel.space, self.model, measured=len(kernel.measurements))

    def _fit(self) -> None:
        started = time.monotonic()
        features, latencies, tasks = [], [], []
        for index, kernel in enumerate(self.kernels):
            x, y = kernel.training_data()
            if len(y):
                features.append(x)
                latencies.append(y)
                tasks.append(np.full(len(y), index, dtype=np.int64))
        if features:
            with self._interrupt.held():  # XGBoost reads the data by callbacks
                self.model.fit(np.concatenate(features), np.concatenate(latencies), np.concatenate(tasks))
        self.measurer.overheads.model_s += time.monotonic() - started

    def drop_slow_variants(self) -> None:
        """Give up forms that are clearly slower, and let those that are behind count for less.

        The fastest form is the fastest of those whose kernels were all looked at. Another one is given up where it is
        `HOPEFUL` times as slow; or `LEVEL` times, where time is over or its kernels promise no more than to catch up;
        one that was not looked at as a whole, where even what it promises is `LEVEL` times as slow. Otherwise seconds
        saved in its kernels count by the share of its promises (`TaskStatus.hoped_s`) that goes beyond catching up.
        """
        guessed = self.guess_s is not None and not self.budget.allows()
        looked_at = {
            kernel.task.workload_hash
            for kernel in self.kernels
            if guessed or kernel.status.history or kernel.status.finished or not math.isnan(kernel.status.price_s)
        }
        complete = [variant for variant in self.variants if variant.calls.keys() <= looked_at]
        if not complete:
            return
        best_s = self.best_s
        hoped_s = self._hoped_s(best_s)
        fastest_s = min(variant.latency_s(best_s) for variant in complete)
        kept: dict[str, Variant] = {}
        weights: dict[str, float] = {}
        for variant in self.variants:
            least_s = variant.latency_s(hoped_s)
            latency_s = variant.latency_s(best_s) if variant in complete else least_s
            weight = 1.0
            if latency_s > fastest_s:
                weight = (fastest_s - least_s) / (latency_s - least_s) if least_s < fastest_s else 0.0
            has_hope = weight > 0.0 and self.budget.allows(self._round_s)
            in_race = variant in complete or self.budget.allows()
            if in_race and latency_s <= (HOPEFUL if has_hope else LEVEL) * fastest_s:
                kept[variant.name], weights[variant.name] = variant, weight
            else:
                LOGGER.info("dropped the form %r: %.3g s against %.3g s", variant.name, latency_s, fastest_s)
        self.variants = list(kept.values())
        for kernel in self.kernels:
            users = [variant for variant in self.variants if kernel.task.workload_hash in variant.calls]
            kernel.status.calls = max((variant.calls[kernel.task.workload_hash] for variant in users), default=0)
            kernel.status.weight = max((weights[variant.name] for variant in users), default=0.0)
            if not users:
                kernel.status.finished = "only a slower form of the model needs it"

    def _hoped_s(self, best_s: Mapping[str, float]) -> dict[str, float]:
        """Workload hash to the latency, in seconds, that its kernel promises; `best_s` is what it has."""
        return {
            kernel.task.workload_hash: min(best_s[kernel.task.workload_hash], kernel.status.hoped_s())
            for kernel in self.kernels
        }

    def _record(self, kernel: KernelSearch, measurement: Measurement) -> Record:
        return Record(
            workload_hash=kernel.task.workload_hash,
            decision=decision_key(measurement.decision),
            trace=measurement.trace,
            context=self.context,
            latencies_s=measurement.latencies_s,
            error=measurement.error,
            detail=measurement.detail,
            timestamp_s=time.time(),
            seed=self.seed,
            eqtune_version=self.eqtune_version,
            notes=json.dumps(dict(measurement.notes), sort_keys=True) if measurement.notes else "",
        )


def _or_inf(value: float) -> float:
    return math.inf if math.isnan(value) else value
