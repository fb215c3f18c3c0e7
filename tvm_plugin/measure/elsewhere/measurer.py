"""Build here, run elsewhere: what measuring over RPC and on a Ray cluster share."""

from __future__ import annotations

import logging
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Self

from ...errors import InputError
from ...gpu_machine import is_gpu
from ...machine import target_json
from ...records.workload import serialize_workload
from ...tasks.task import Task
from ..arguments import Interface
from ..base import Measurement, Overheads, Price
from ..timing import BASELINE, LONG, QUICK, Effort
from ..trial import (
    BASELINE_LIMIT_FACTOR,
    LOST,
    RETIME_ROUNDS,
    SHARED_MODULE,
    Candidate,
    Trial,
    candidate_spec,
    chunks_of,
    fastest_of,
    to_measurement,
    without_reference,
)
from .exported import interface_fields
from .fleet import Fleet

__all__ = ["ElsewhereMeasurer", "FarTrial"]

LOGGER = logging.getLogger(__name__)


@dataclass
class FarTrial(Trial):
    """With what is needed to load the program elsewhere (`exported.py`)."""

    fields: dict[str, Any] = field(default_factory=dict)

    def take(self, built: dict[str, Any]) -> None:
        """Note what the builder answered."""
        super().take(built)
        self.fields = {} if self.failure else built


class ElsewhereMeasurer(ABC):
    """A `Measurer` that spreads candidates over devices. Devices must be alike: a kernel is timed on any of them.

    All builds of a batch are done before its first run, so that a device on this machine is not disturbed by them.

    Parameters
    ----------
    target : tvm.target.Target
        What to compile for.
    fleet : Fleet
        The devices.
    timeout_s : float
        How long a candidate may take to compile, and to run.
    seed : int
        Of the random inputs.

    Attributes
    ----------
    plain_baselines : bool
        False; True compares with plain schedules, as `LocalMeasurer`'s. For CPUs.
    baseline_failures : dict of str to str
        Why a GPU's kernels have no baseline, by workload hash, where dlight's schedule does not compile, run or compute
        what it should.
    """

    def __init__(self, target: Any, fleet: Fleet, timeout_s: float, seed: int) -> None:
        if not timeout_s > 0:
            raise InputError(f"timeout_s must be positive, got {timeout_s!r}")
        if seed < 0:
            raise InputError(f"seed must not be negative, got {seed}")
        self.target = target
        self.overheads = Overheads()
        self.plain_baselines = False
        self.baseline_failures: dict[str, str] = {}
        self._fleet = fleet
        self._close: Callable[[], object] = fleet.close
        self._timeout_s = timeout_s
        self._batch = 0
        self._device: dict[str, Any] = {}
        self._workloads: dict[str, str] = {}
        self._interfaces: dict[str, dict[str, Any]] = {}
        self._domains: dict[str, str] = {}
        self._baselines: dict[str, float] = {}
        self._unreferenced: dict[str, str] = {}
        self._outcomes: dict[str, dict[str, Any]] = {}

    @property
    def losses(self) -> int:
        """How often a device was lost with something on it."""
        return self._fleet.losses

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of all devices, and stop what builds. May be repeated."""
        self._close()

    @abstractmethod
    def _build_all(self, chunks: Sequence[Sequence[FarTrial]], limit_s: float) -> list[dict[str, Any]]:
        """What `../server.py` answers to each chunk's "build" request, or an error where its builder hung or died."""

    @abstractmethod
    def _refresh(self) -> None:
        """Add devices that have turned up, delete the libraries of the batch before."""

    @property
    @abstractmethod
    def _builders(self) -> int:
        """Chunks that are built at once."""

    def baseline(self, tasks: Sequence[Task]) -> list[float]:
        """Seconds of one call of each kernel as TVM compiles it without a schedule; `inf` where that is impossible.

        With `plain_baselines`, of each kernel with its plain schedule.
        """
        new = list({task.workload_hash: task for task in tasks if task.workload_hash not in self._baselines}.values())
        if new:
            self._measure_baselines(new)
        return [self._baselines[task.workload_hash] for task in tasks]

    def measure(self, task: Task, decisions: Sequence[Candidate], best_s: float = math.inf) -> list[Measurement]:
        """One `Measurement` for each candidate, in order. See `Measurer.measure`.

        Candidates that schedule to the same program, now or earlier, are run once. Raises SetupError when all devices
        are gone.
        """
        if not decisions:
            return []
        self.baseline([task])
        if task.workload_hash not in self._domains:
            return without_reference(decisions, self._unreferenced[task.workload_hash])
        trials = self._build([candidate_spec(self._know(task), candidate) for candidate in decisions], self._timeout_s)
        first_of = {trial.program: trial for trial in trials if not trial.failure}
        new = [trial for trial in first_of.values() if trial.program not in self._outcomes]
        fresh: dict[str, dict[str, Any]] = {}

        def ask(number: int) -> Mapping[str, Any]:
            seen = [best_s, *(s for answer in fresh.values() for s in answer.get("latencies_s", ()))]
            return self._request(new[number], QUICK, self._timeout_s, best_s=min(seen))

        def note(number: int, answer: dict[str, Any]) -> None:
            fresh[new[number].program] = answer

        self._run([[number] for number in range(len(new))], ask, note)
        # A crash or a timeout may have come from outside; what a program computes, and how fast, stays.
        lasting = {key: a for key, a in fresh.items() if a.get("error", "wrong_result") == "wrong_result"}
        self._outcomes |= lasting
        for trial in trials:
            if not trial.failure:
                trial.answer = fresh.get(trial.program) or self._outcomes[trial.program]
        return [to_measurement(candidate, trial) for candidate, trial in zip(decisions, trials, strict=True)]

    def retime(self, task: Task, decisions: Sequence[Candidate]) -> list[Measurement]:
        """Time candidates again on one device: `RETIME_ROUNDS` rounds in turns, each longer than a measurement's."""
        if not decisions:
            return []
        self.baseline([task])
        if task.workload_hash not in self._domains:
            return without_reference(decisions, self._unreferenced[task.workload_hash])
        specs = [candidate_spec(self._know(task), candidate) for candidate in decisions]
        trials = self._build(specs, self._timeout_s, shared=len(specs))

        def ask(number: int) -> Mapping[str, Any] | None:
            trial = trials[number % len(trials)]
            return None if trial.failure else self._request(trial, LONG, self._timeout_s)

        def note(number: int, answer: dict[str, Any]) -> None:
            trials[number % len(trials)].add_round(answer)

        self._run([range(RETIME_ROUNDS * len(trials))], ask, note)
        return [to_measurement(candidate, trial) for candidate, trial in zip(decisions, trials, strict=True)]

    def price(self, candidates: Sequence[tuple[Task, Sequence[Candidate]]]) -> list[Price]:
        """See `Pricer`. Nothing is compared, so that the untuned kernels, which take seconds, need not run."""
        specs = [candidate_spec(self._know(task), candidate) for task, some in candidates for candidate in some]
        every = self._build(specs, self._timeout_s) if specs else []
        built = [trial for trial in every if not trial.failure]
        best = {task.workload_hash: math.inf for task, _ in candidates}

        def ask(number: int) -> Mapping[str, Any]:
            trial = built[number]
            return self._request(trial, QUICK, self._timeout_s, best_s=best[trial.task], check=False)

        def note(number: int, answer: dict[str, Any]) -> None:
            trial = built[number]
            trial.answer = answer
            best[trial.task] = min(best[trial.task], trial.latency_s)

        self._run([[number] for number in range(len(built))], ask, note)
        prices = []
        for task, some in candidates:
            of_task, every = every[: len(some)], every[len(some) :]
            price_s = best[task.workload_hash] if some else math.inf
            prices.append(Price(price_s, fastest_of(of_task)))
        return prices

    def describe(self) -> dict[str, Any]:
        """Device name with the way to it, target as canonical JSON, threads, and TVM's version."""
        import tvm

        return {
            "device": self._device["device"],
            "target": target_json(self.target),
            "threads": self._device["threads"],
            "tvm_version": str(tvm.__version__),
        }

    def _make_references(self, hashes: Sequence[str], limit_s: float) -> list[dict[str, Any]]:
        """For GPUs, whose untuned kernels cannot run there: make outputs on the CPU that builds.

        One {"domain": ...} or error for each workload.
        """
        raise NotImplementedError(f"{type(self).__name__} makes no references for GPUs")

    def _measure_gpu_baselines(self, tasks: Sequence[Task]) -> None:
        """References from a CPU, then the times of dlight's kernels; `inf` where dlight has none that is right."""
        limit_s = BASELINE_LIMIT_FACTOR * self._timeout_s
        hashes = [self._know(task) for task in tasks]
        started = time.monotonic()
        answers = [
            self._make_references([h], limit_s)[0] if answer.get("error") in LOST else answer
            for h, answer in zip(hashes, self._make_references(hashes, limit_s), strict=True)
        ]
        self.overheads.build_s += time.monotonic() - started
        for workload_hash, answer in zip(hashes, answers, strict=True):
            self._baselines[workload_hash] = math.inf
            if "error" in answer:
                self._unreferenced[workload_hash] = str(answer["detail"])
            else:
                self._domains[workload_hash] = answer["domain"]
        specs = [{"task": h, "untuned": True} for h in hashes if h in self._domains]
        trials = self._build(specs, limit_s)
        built = [trial for trial in trials if not trial.failure]

        def ask(number: int) -> Mapping[str, Any]:
            return self._request(built[number], BASELINE, limit_s)

        def note(number: int, answer: dict[str, Any]) -> None:
            trial = built[number]
            self._baselines[trial.task] = min(answer.get("latencies_s", ()), default=math.inf)
            trial.failure = answer if "error" in answer else {}

        self._run([[number] for number in range(len(built))], ask, note)
        names = {task.workload_hash: task.name for task in tasks}
        for trial in trials:
            if trial.failure:
                self.baseline_failures[trial.task] = f"{trial.failure['error']}: {trial.failure['detail']}"
                LOGGER.warning(
                    "%s has no baseline: dlight's schedule fails (%s)",
                    names[trial.task],
                    self.baseline_failures[trial.task],
                )

    def _measure_baselines(self, tasks: Sequence[Task]) -> None:
        if is_gpu(self.target):
            self._measure_gpu_baselines(tasks)
            return
        hashes = [self._know(task) for task in tasks]
        refused = self._run_untuned(hashes, self.plain_baselines)
        if refused and self.plain_baselines:  # a few LLVM does not take
            refused = self._run_untuned(list(refused), plain=False)
        for workload_hash in [h for h, failure in refused.items() if failure["error"] in LOST]:
            del refused[workload_hash]
            refused |= self._run_untuned([workload_hash], plain=False)
        for workload_hash, failure in refused.items():
            self._baselines[workload_hash] = math.inf
            self._unreferenced[workload_hash] = str(failure["detail"])

    def _run_untuned(self, hashes: Sequence[str], plain: bool) -> dict[str, dict[str, Any]]:
        """Time kernels and keep their outputs as the reference. Returns the failures of those that do not run."""
        limit_s = BASELINE_LIMIT_FACTOR * self._timeout_s
        trials = self._build([{"task": h, "untuned": True, "plain": plain} for h in hashes], limit_s)
        built = [trial for trial in trials if not trial.failure]

        def ask(number: int) -> Mapping[str, Any]:
            return self._request(built[number], BASELINE, limit_s, save=True)

        def note(number: int, answer: dict[str, Any]) -> None:
            trial = built[number]
            if "error" in answer:
                trial.failure = answer
            else:
                self._domains[trial.task] = answer["domain"]
                self._baselines[trial.task] = min(answer["latencies_s"])

        self._run([[number] for number in range(len(built))], ask, note)
        return {trial.task: trial.failure for trial in trials if trial.failure}

    def _know(self, task: Task) -> str:
        if task.workload_hash not in self._workloads:
            self._workloads[task.workload_hash] = serialize_workload(task.mod)
            self._interfaces[task.workload_hash] = interface_fields(Interface.of(task.mod["main"]))
        return task.workload_hash

    def _build(self, specs: Sequence[dict[str, Any]], limit_s: float, shared: int = SHARED_MODULE) -> list[FarTrial]:
        """Schedule, compile and export; where a builder hangs or dies on several candidates, one by one."""
        started = time.monotonic()
        self._batch += 1
        self._refresh()
        trials = [FarTrial(spec) for spec in specs]
        chunks = chunks_of(trials, self._builders, shared)
        while chunks:
            again: list[Sequence[FarTrial]] = []
            # Compilers for GPUs take one candidate at a time; those for CPUs a module of several.
            most = max(map(len, chunks)) if is_gpu(self.target) else 1
            for chunk, answer in zip(chunks, self._build_all(chunks, limit_s * most), strict=True):
                if "built" in answer:
                    for trial, built in zip(chunk, answer["built"], strict=True):
                        trial.take(built)
                elif len(chunk) == 1:
                    chunk[0].failure = answer
                else:
                    again += [[trial] for trial in chunk]
            chunks = again
        self.overheads.build_s += time.monotonic() - started
        return trials

    def _run(
        self,
        jobs: Sequence[Sequence[int]],
        ask: Callable[[int], Mapping[str, Any] | None],
        note: Callable[[int, dict[str, Any]], None],
    ) -> None:
        started = time.monotonic()
        self._fleet.run(jobs, ask, note)
        self.overheads.run_s += time.monotonic() - started

    def _ask_first(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """What the first device answers, once it is there."""
        found: list[dict[str, Any]] = []
        self._fleet.run([[0]], lambda _: request, lambda _, answer: found.append(answer))
        return found[0]

    def _request(
        self,
        trial: FarTrial,
        effort: Effort,
        limit_s: float,
        best_s: float = math.inf,
        save: bool = False,
        check: bool = True,
    ) -> dict[str, Any]:
        return {
            "task": trial.task,
            "interface": self._interfaces[trial.task],
            "batch": self._batch,
            "program": trial.program,
            "fields": trial.fields,
            "domain": self._domains.get(trial.task, "normal"),
            "effort": asdict(effort),
            "best_s": best_s,
            "save": save,
            "check": check,
            "limit_s": limit_s,
        }
