"""One tuning session: a work directory, a machine, a measurer, and the search over a set of kernels."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from types import TracebackType
from typing import Any

from .. import __version__, cost_model, measure
from ..cost_model import CostModel
from ..gpu_machine import is_gpu, let_tvm_compile, resolve_target
from ..graph_prices import GraphPrices
from ..machine import core_count, describe_machine, detect_target, device_name, is_host, runs_here
from ..measure.base import Measurer, RunsModels, TimesColdWeights
from ..measure.gauge import Gauge, multiply_adds, multiply_adds_at_peak_s
from ..records import Context, Record
from ..records.record import NOT_MEASURED
from ..records.workload import serialize_workload
from ..relax_ir.functions import constant_bytes
from ..report.units import counted
from ..runtime import LocalModels, Models
from ..search import allocation, strategies
from ..search.allocation.base import TaskStatus
from ..search.space import Hardware, Space, build_space
from ..search.space.features import COMPILED, FEATURES
from ..search.space.gpu.hardware import GpuHardware
from ..search.space.hardware import known_hardware, usable_by, with_weights
from ..tasks.task import Task
from .acceptance import Acceptance, looks_s
from .baselines import Baselines
from .budget import Budget
from .kernel_search import KernelSearch
from .loop import BATCH, LEVEL, TRIAL_S, TuningLoop, Variant
from .prices import KernelPrices
from .progress import Progress
from .reference import UNTUNED_TIMING_S
from .result import TaskResult
from .settings import Settings
from .transfer import Transfer
from .workdir import WorkDirectory

__all__ = ["Session", "Settings"]

LOGGER = logging.getLogger(__name__)

MACHINE_SHARE = 0.1
"""Of the time budget, what measuring the speeds of the machine may take..."""

MACHINE_S = 5.0
"""... but this many seconds in any case; a machine that is too busy is described by a table."""

GRAPH_SHARE = 0.2
"""Of the time left, what the graph search may take, with measuring the kernels that it only considers..."""

GRAPH_S = 60.0
"""... seconds at most..."""

LEAST_GRAPH_S = 1.0
"""... and seconds at least: with less it is left out."""

TERMS_S = 8.0
"""With fewer seconds than this, graphs are found by estimates, and only those that were found are measured."""

TRIALS_GRAPH_S = 10.0
"""Without a time budget but with one of trials: seconds of the graph search, more where as many trials take longer."""

PRICES_SHARE = 0.4
"""Of the seconds left, what pricing kernels may take before the search, where there is no time for two rounds of each:
the search then begins where it should save most, and the other kernels get the candidate that was fastest."""

GAUGE_S = 3.0
"""What timing the whole model may take until the cores are at full speed."""

TIMING_S, LEAST_TIMING_S = 1.0, 0.2
"""What timing whole models takes at most, and in any case, where a few runs do not take longer."""

FINISH_S = 8.0
"""What compiling, checking and timing the whole model takes, roughly, where nothing tells better."""


class Session:
    """Opens the work directory, starts the workers, describes the machine; then searches. Use as a context manager.

    Attributes
    ----------
    resumed_trials : int
        Measurements of earlier runs that the search started from.
    run_key : str
        Where the spent budget of this set of kernels is kept; "" before `identify` or `search`.
    baselines : Baselines
        What kernels take that are not tuned.
    """

    def __init__(self, settings: Settings) -> None:
        # Everything that can be refused is refused before a worker starts or a file is written.
        self.settings = settings
        self.budget = Budget(settings.trials, settings.time_budget_s)
        self.strategy = strategies.create(settings.strategy)
        cost_model.check(settings.cost_model)
        self.allocator = allocation.create(settings.allocator)
        target, threads = settings.target, settings.threads
        self.target = detect_target(threads) if target is None else resolve_target(target, threads)
        if is_gpu(self.target):
            let_tvm_compile()
        self.progress = Progress(settings.progress)
        self.resumed_trials = 0
        self.run_key = ""
        self._noted = 0.0, 0
        self.finish_s = FINISH_S
        self._spaces: dict[str, Space] = {}
        with contextlib.ExitStack() as opened:  # closed again where what follows fails, or is interrupted
            self.work = WorkDirectory(settings.work_dir)
            opened.callback(self.work.close)
            # Before the workers start: they would share the cores with what is being measured.
            self.hardware = self._describe_machine()
            self.measurer: Measurer = measure.create(
                settings.measure,
                target=self.target,
                hardware=self.hardware,
                threads=settings.threads,
                seed=settings.seed,
            )
            opened.callback(self.measurer.close)
            self.model = self._cost_model()  # loaded while the workers start
            self.runs = bool(getattr(self.measurer, "runs", True))
            self.progress.note = "" if self.runs else "estimates, not measured | "
            self.baselines = Baselines(self.work.database, self.measurer, self.target, self.runs)
            self.context = self._context()
            opened.pop_all()

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.progress.close()
        self.measurer.close()
        self.work.close()

    def space(self, task: Task) -> Space:
        """The kernel's search space, built once."""
        if task.workload_hash not in self._spaces:
            self._spaces[task.workload_hash] = build_space(task.mod, self.hardware)
        return self._spaces[task.workload_hash]

    @cached_property
    def prices(self) -> KernelPrices:
        """What kernels cost before they are tuned; measured from now on while the graph search's time lasts."""
        return KernelPrices(
            self.work.database,
            self.context,
            self.context_key,
            self.space,
            self.measurer,
            budget_s=self.graph_s,
        )

    def expect(self, mod: Any) -> None:
        """From now on, kernels are scheduled, and where possible timed, as a run of this model leaves the caches.

        With many weights, which are constants, no call finds its own there, and records are others.
        """
        if is_gpu(self.target):
            return
        weights = constant_bytes(mod)
        self.hardware = with_weights(self.hardware, weights)
        self._spaces.clear()
        if isinstance(self.measurer, TimesColdWeights):
            self.measurer.model_bytes = weights if self.hardware.weights_in_memory else 0
            self.context = self._context()

    def graph_prices(self, mod: Any, fast_math: bool = False) -> GraphPrices:
        """What the graph search of a module goes by, after `expect`.

        Half of the search's time may go into terms, the rest is for whole graphs.
        """
        self.expect(mod)
        terms_s = self.graph_s / 2
        terms = None if self.graph_s < TERMS_S else replace(self.prices, budget_s=terms_s)
        guess = None if self.budget.time_s is None else self.prices.guess_s
        return GraphPrices(self.prices, self.target, self.hardware, terms, guess, fast_math, terms_s)

    @cached_property
    def graph_s(self) -> float:
        """Seconds that the graph search may take; 0: it is not worth while."""
        left_s = self.budget.whole_seconds_left  # loading a large model may have taken much
        if left_s is None:
            trials = self.budget.trials
            return math.inf if trials is None else max(TRIALS_GRAPH_S, min(TRIAL_S * trials, GRAPH_S))
        share_s = min(GRAPH_SHARE * left_s, GRAPH_S)
        return share_s if share_s >= LEAST_GRAPH_S else 0.0

    def keep_back(self, finish_s: float, kernels: int) -> None:
        """Reserve time for what follows the search: `finish_s` for whole models, a moment for kernels' finalists.

        Never more than 0.4 of the budget.
        """
        self.finish_s = finish_s
        if self.budget.time_s is not None:
            self.budget.reserve_s = min(0.4 * self.budget.time_s, finish_s + looks_s(kernels))

    def affords(self, tasks: Sequence[Task], candidates: int) -> bool:
        """Whether half of the budget is enough to run each kernel untuned and to measure so many candidates of it."""
        seconds, trials = self.budget.seconds_left, self.budget.trials_left
        needed = candidates * len(tasks)
        untuned_s = sum(map(self.baselines.guess_s, tasks)) / core_count()  # side by side
        needed_s = needed * TRIAL_S + untuned_s
        return (seconds is None or needed_s <= seconds / 2) and (trials is None or needed <= trials / 2)

    def identify(self, variant: Variant, permits: str = "") -> None:
        """Name the set of kernels whose budget and winner are kept: of a model, one form that every run has.

        What earlier runs spent of the budget counts from now on. Runs that permit something else (fast math) have a
        budget of their own; records are shared.
        """
        self.run_key = _run_key(variant, self.context) + (f":{permits}" if permits else "")
        self.budget.spent_s = self.work.database.get_number(self.run_key, "seconds") or 0.0
        self.budget.spent_trials = int(self.work.database.get_number(self.run_key, "trials") or 0)
        self._noted = self.budget.spent_s, self.budget.spent_trials

    def has_measured(self, task: Task) -> bool:
        """Whether an earlier run measured a candidate of it here."""
        return self.work.database.best(task.workload_hash, self.context, searched=True) is not None

    def search(
        self,
        tasks: Sequence[Task],
        variants: Sequence[Variant],
        guess: bool = False,
        spaces: Mapping[str, Space] | None = None,
    ) -> TuningLoop:
        """Search the schedules of `tasks`; returns the finished (or interrupted) loop. Resumes from the records.

        With `guess`, variants are compared by estimates of the kernels that were not reached; see `accept`. `spaces`:
        by workload hash, what is searched in place of all schedules; what was measured of others counts for nothing.
        """
        self._spaces |= spaces or {}
        if not self.run_key:
            self.identify(variants[0])
        kernels = [self._kernel(task, within=task.workload_hash in (spaces or {})) for task in tasks]
        if guess and self.runs:
            self._price(kernels, variants)
        self.resumed_trials = sum(kernel.status.trials for kernel in kernels)
        if self.resumed_trials:
            known = sum(kernel.status.trials > 0 for kernel in kernels)
            self.progress.say(
                f"resumed {self.resumed_trials} measurements of {known} kernels from {self.work.path}; "
                f"of the budget, {self.budget.spent_trials} trials and {self.budget.spent_s:.0f} s are spent"
                + ("" if self.budget.allows() else ": all of it; to go on, give a larger one, for all runs together")
            )
        loop = TuningLoop(
            kernels=kernels,
            variants=list(variants),
            measurer=self.measurer,
            database=self.work.database,
            context=self.context,
            model=self.model,
            allocation=self.allocator.begin(self.settings.seed),
            budget=self.budget,
            progress=self.progress,
            seed=self.settings.seed,
            eqtune_version=__version__,
            transfer=Transfer(self.work.database, self.context),
            spent=self._spent,
            baselines=lambda reached: self.baselines.measure(reached, self.context_key),
            untuned_s=self.baselines.guess_s,
            guess_s=self.prices.guess_s if guess and self.runs else None,
        )
        missing = self.baselines.take_known(kernels, self.context_key)
        if self.budget.allows():
            if missing and not (guess and self.budget.time_s is not None):  # else each once its turn comes
                self.progress.say(f"timing {len(missing)} untuned kernels; their outputs are the reference")
                self.baselines.measure(missing, self.context_key)
            if self.budget.trials is None and self.budget.time_s is None:
                self.progress.say("no budget was given: the search ends when no kernel improves, or by Ctrl-C")
            loop.run()
        else:
            loop.drop_slow_variants()
        return loop

    @cached_property
    def models(self) -> Models:
        """Where whole models run: on the measurer's devices, else in this process."""
        if isinstance(self.measurer, RunsModels):
            return self.measurer.models
        return LocalModels(self.context.threads, make_gauge=self._gauge)

    @property
    def may_settle(self) -> bool:
        """Whether there is time to wait until the cores are at full speed, for timing whole models."""
        left_s = self.budget.whole_seconds_left
        return left_s is None or left_s >= GAUGE_S + TIMING_S

    @property
    def timing_s(self) -> float:
        """Seconds that timing whole models may take: a moment of what is left."""
        left_s = self.budget.whole_seconds_left
        return TIMING_S if left_s is None else min(TIMING_S, max(LEAST_TIMING_S, left_s))

    @property
    def untuned_timing_s(self) -> float:
        """The same for the untuned model."""
        return min(UNTUNED_TIMING_S, self.timing_s)

    def rest(self) -> None:
        """The last kernel was measured; models are next, for which the cores should be free."""
        if not isinstance(self.measurer, RunsModels):
            self.measurer.close()  # the thread pools of idle workers spin for a while

    @property
    def context_key(self) -> str:
        """The context as a short name, for keys in the database."""
        return _context_key(self.context)

    def describe(self) -> str:
        """A line on the machine, for people."""
        machine = self.hardware
        if isinstance(machine, GpuHardware):
            return (
                f"{machine.name} ({machine.arch}), {machine.multiprocessors} multiprocessors: "
                f"{machine.peak_flops_per_s_all / 1e12:.1f} TFLOPS float32, "
                f"{machine.tensor_peak('float16') / 1e12:.0f} float16 on tensor cores, "
                f"{machine.bandwidth_bytes_per_s / 1e9:.0f} GB/s" + ("" if self.runs else f"; {NOT_MEASURED}")
            )
        caches = (machine.l1_bytes // 1024, machine.l2_bytes // 1024, machine.l3_bytes // 1024)
        how = "measured" if self._speeds_measured else "by a table of processors"
        threads = counted(machine.threads, "thread")
        return (
            f"{machine.name}, {threads}: {machine.peak_flops_per_s_all / 1e9:.0f} GFLOPS and "
            f"{machine.bandwidth_bytes_per_s / 1e9:.0f} GB/s {how}, {machine.peak_flops_per_s / 1e9:.0f} GFLOPS a "
            f"thread; {8 * machine.vector_bytes}-bit vectors, caches {', '.join(f'{size} KiB' for size in caches)}"
        )

    def winner(self, trials: int | None = None) -> str:
        """`Form.digest` of the form that won in an earlier run; "" without one.

        With `trials`, only if the kernels of all forms had as many then.
        """
        fact = self.work.database.get_object(f"form:{self.run_key}")
        return str(fact.get("form", "")) if trials is None or fact.get("trials") == trials else ""

    def remember_winner(self, form: str, trials: int) -> None:
        """Note which form won, by its digest, when the kernels of all had so many trials."""
        self.work.database.put_json(f"form:{self.run_key}", {"form": form, "trials": trials})

    def save_spent(self) -> None:
        """Note how much of the budget is gone, so that the next run in this directory goes on from here."""
        self.work.database.add([], sums=self._spent())

    def accept(self, kernels: Sequence[KernelSearch], guess: bool = False, look: bool = True) -> list[TaskResult]:
        """The schedule that each kernel gets; see `Acceptance.of`."""
        acceptance = Acceptance(
            database=self.work.database,
            context_key=self.context_key,
            measurer=self.measurer,
            budget=self.budget,
            prices=self.prices,
            progress=self.progress,
            finish_s=self.finish_s,
            baselines=self.baselines,
        )
        return acceptance.of(kernels, guess, look)

    def tell_unreached(self, kernels: Sequence[KernelSearch]) -> None:
        """Say how many kernels the search did not reach, where nobody guesses what they should get (see `accept`)."""
        unreached = sum(kernel.unreached for kernel in kernels)
        if unreached:
            kept = "have plain schedules, which are the baseline" if self.baselines.plain else "stay untuned"
            self.progress.say(f"the search did not reach {unreached} of {len(kernels)} kernels: they {kept}")

    def keep_unreached(self, results: Sequence[TaskResult]) -> None:
        """Record the schedules of kernels that the budget did not reach, once their model was compared with them.

        Passes find them there. They have no decision: the next run measures and compares them alone, like any other.
        """
        unreached = [r for r in results if not r.measured and r.trace]
        priced_s = {r.workload_hash: self.prices.priced_s(r.workload_hash) for r in unreached}
        known = {r.workload_hash: self.work.database.best(r.workload_hash, self.context) for r in unreached}
        self.work.database.add(
            [
                Record(
                    workload_hash=result.workload_hash,
                    decision="",
                    trace=result.trace,
                    context=self.context,
                    latencies_s=(latency_s,),
                    detail="compared as part of its model",
                    timestamp_s=time.time(),
                    seed=self.settings.seed,
                    eqtune_version=__version__,
                )
                for result in unreached
                if (latency_s := priced_s[result.workload_hash]) is not None
                and ((best := known[result.workload_hash]) is None or latency_s < best.latency_s)
            ]
        )

    def _spent(self) -> dict[str, dict[str, float]]:
        """What this run has spent since it was last asked: others in its directory add to the same numbers."""
        (seconds, trials), self._noted = self._noted, (self.budget.elapsed_s, self.budget.spent_trials)
        return {self.run_key: {"seconds": self._noted[0] - seconds, "trials": self._noted[1] - trials}}

    def _cost_model(self) -> CostModel:
        model = cost_model.create(self.settings.cost_model, seed=self.settings.seed)
        late = [FEATURES.index(name) for name in COMPILED]
        return cost_model.LateColumns(model, late, seed=self.settings.seed) if is_gpu(self.target) else model

    def _context(self) -> Context:
        device = self.measurer.describe()
        return Context(
            target=str(device["target"]),
            device=str(device["device"]),
            threads=int(device["threads"]),
            tvm_version=str(device["tvm_version"]),
        )

    def _price(self, kernels: Sequence[KernelSearch], variants: Sequence[Variant]) -> None:
        """Tell the allocation what kernels are priced at; where time is short, price more, and estimate the others.

        No time goes into a form that would be given up even with all its kernels at their rooflines. How long
        candidates take tells what compiling the whole model will take, too, which is kept back.
        """
        seconds_left = self.budget.seconds_left
        is_short = seconds_left is not None and seconds_left < 2 * BATCH * TRIAL_S * len(kernels)
        if seconds_left is not None and is_short:
            self.prices.extend(PRICES_SHARE * seconds_left)
            tasks = {kernel.task.workload_hash: kernel.task for kernel in kernels}
            rooflines = {kernel.task.workload_hash: kernel.status.roofline_s for kernel in kernels}
            fastest_s = math.inf
            for variant in variants:
                if variant.latency_s(rooflines) <= LEVEL * fastest_s:
                    prices = self.prices([tasks[workload] for workload in variant.calls])
                    fastest_s = min(fastest_s, variant.latency_s(dict(zip(variant.calls, prices, strict=True))))
        for kernel in kernels:
            kernel.status.estimate_s = self.prices.estimate_s(kernel.task)
            if is_short or self.prices.is_measured(kernel.task):
                kernel.status.price_s = self.prices.guess_s(kernel.task)
                kernel.favourite = next(iter(self.prices.defaults(kernel.task)), None)
        if not isinstance(self.measurer, RunsModels):
            prices_s = {kernel.task.workload_hash: self.prices.guess_s(kernel.task) for kernel in kernels}
            count = len(min(variants, key=lambda variant: variant.latency_s(prices_s)).calls)
            self.keep_back(max(self.finish_s, self.prices.candidate_s * count + self.timing_s), count)

    def _gauge(self) -> Gauge:
        at_peak_s = multiply_adds_at_peak_s(self.hardware) if self._speeds_measured else math.inf
        return Gauge(multiply_adds(self.target, self.hardware), at_peak_s)

    def _kernel(self, task: Task, within: bool) -> KernelSearch:
        database = self.work.database
        database.add_workload(task.workload_hash, serialize_workload(task.mod), name=task.name, flops=task.flops)
        space = self.space(task)
        flops = (1.0 - space.skipped_share) * task.flops / space.product_rate
        hardware = usable_by(task.mod, self.hardware)
        roofline_s = hardware.least_latency_s(flops, task.bytes_moved, task.weight_bytes)
        status = TaskStatus(task.name, task.calls, task.operations, roofline_s, space.sketches[0].name, [])
        seed = (self.settings.seed * 1_000_003 + int(task.workload_hash[:8], 16)) % 2**31
        kernel = KernelSearch(task, space, self.strategy.begin(space, seed), status)
        kernel.resume(database.for_workload(task.workload_hash, self.context), within)
        return kernel

    @property
    def _runs_here(self) -> bool:
        """Whether this machine's speeds are those of the kernels: devices elsewhere are like it at best."""
        is_local = self.settings.measure == "local" or isinstance(self.settings.measure, measure.LocalMeasurer)
        return runs_here(self.target) if is_local else is_host(self.target)

    def _describe_machine(self) -> Hardware:
        here = self._runs_here
        key = f"hardware:{device_name(self.target, here)}:{self.target}:{self.settings.threads}"
        known = known_hardware(self.work.database.get_object(key))
        self._speeds_measured = here
        if known is not None:
            return known
        limit_s = None if self.budget.time_s is None else max(MACHINE_S, MACHINE_SHARE * self.budget.time_s)
        started = time.monotonic()
        hardware = describe_machine(self.target, threads=self.settings.threads, limit_s=limit_s, here=here)
        if limit_s is None or time.monotonic() - started < limit_s:
            self.work.database.put_json(key, hardware.to_json())
        else:
            self._speeds_measured = False
            LOGGER.warning("the machine is too busy to measure its speeds in %.0f s: they are guessed", limit_s)
        return hardware


def _context_key(context: Context) -> str:
    text = json.dumps([context.target, context.device, context.threads, context.tvm_version])
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _run_key(variant: Variant, context: Context) -> str:
    text = json.dumps([sorted(variant.calls.items()), _context_key(context)])
    return f"spent:{hashlib.blake2b(text.encode(), digest_size=8).hexdigest()}"
