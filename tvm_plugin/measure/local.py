"""Measure on this machine: build on all cores, then run one candidate at a time while everything else rests."""

from __future__ import annotations

import json
import math
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from ..errors import InputError, SetupError
from ..machine import core_count, describe_machine, device_name, missing_here, target_json
from ..records.record import COLD_WEIGHTS
from ..records.workload import serialize_workload
from ..search.space.hardware import Hardware
from ..tasks.task import Task
from .base import Measurement, Overheads, Price
from .pool import Config, Handle, Request, WorkerPool
from .scratch import Scratch
from .timing import BASELINE, COLD, LONG, QUICK, SLOW_BASELINE_S, SLOW_PLAIN_BASELINE_S, Effort
from .trial import (
    BASELINE_LIMIT_FACTOR,
    LOST,
    RETIME_ROUNDS,
    SHARED_MODULE,
    SPACE_BUILDER,
    Candidate,
    Trial,
    candidate_spec,
    chunks_of,
    fastest_of,
    to_measurement,
    without_reference,
    worker_memory_bytes,
)

__all__ = ["Candidate", "LocalMeasurer"]

_T = TypeVar("_T")


PATIENCE = 2.0
"""So many times as long as a batch ran its candidates run again, at most, while the machine is disturbed."""

RETIME_PATIENCE = 3
"""Finalists get so many times the rounds, at most, until each has run undisturbed."""

WAITING_SHARE, LEAST_WEIGHT_BYTES = 0.1, 64 * 1024
"""Kernels wait for their weights where reading these from memory takes this share of their roofline or more, and there
are so many: only those are timed with cold ones, which takes longer."""

MOST_MODEL_BYTES = 256 * 1024**2
"""Weights of larger models are not in any cache either."""

DISTURBED_FACTOR = 2.2
"""What is slower than the best by more would not be the best on an undisturbed machine either."""


@dataclass
class _Trial(Trial):
    """With the worker that built it and will run it.

    `model_bytes` are those of all weights of the model as in which it is timed; 0 where its kernel waits for none.
    """

    handle: Handle | None = None
    model_bytes: int = 0

    @property
    def effort(self) -> Effort:
        """How hard a candidate is timed."""
        return COLD if self.model_bytes else QUICK


class LocalMeasurer:
    """Builds and runs candidates in long-lived worker processes of this machine. A `Measurer`; also a context manager.

    Parameters
    ----------
    target : tvm.target.Target
        What to compile for.
    hardware : Hardware, optional
        What the workers' spaces are built from; by default, tables for `target`. Where it is not given, it may be
        assigned until the first measurement.
    threads : int, optional
        Threads that a kernel may use; by default, all cores (`eqtune.machine.core_count`).
    workers : int, optional
        Processes that compile; by default, one a core.
    timeout_s : float
        How long a candidate may take to compile, and to run.
    seed : int
        Of the random inputs.
    space_builder : str
        "module:function" that the workers import: (IRModule, Hardware) -> Space.
    memory_bytes : int, optional
        What one worker may allocate; by default, 60 % of the memory of the machine, or of this process's container.

    Attributes
    ----------
    plain_baselines : bool
        False; True compares with plain schedules (`schedules/plain.py`) instead of untuned kernels, which
        take seconds each. Assign it before the first measurement.
    model_bytes : int
        0; more times calls as in a model with weights of so many bytes, whose caches have passed all others before a
        kernel's own are read again. As above.

    Raises
    ------
    InputError
        For a number that is not positive, or a negative seed.
    SetupError
        When this machine cannot run code for the target.
    """

    def __init__(
        self,
        target: Any,
        hardware: Hardware | None = None,
        threads: int | None = None,
        workers: int | None = None,
        timeout_s: float = 10.0,
        seed: int = 0,
        space_builder: str = SPACE_BUILDER,
        memory_bytes: int | None = None,
    ) -> None:
        missing = missing_here(target)
        if missing:
            raise SetupError(
                f"code for the target {target_json(target)} does not run on this machine: {missing}; leave out the "
                "target to tune for this machine's CPU, or give `measure` a machine that has the target "
                '("rpc://HOST:PORT/KEY")'
            )
        cores = core_count()
        self.target = target
        self.hardware = hardware
        if threads is None:
            threads = cores if hardware is None else min(cores, hardware.threads)
        self.threads = threads
        self.overheads = Overheads()
        self.plain_baselines = False
        self.model_bytes = 0
        workers = cores if workers is None else workers
        for name, value in (("threads", self.threads), ("workers", workers), ("timeout_s", timeout_s)):
            if not value > 0:
                raise InputError(f"{name} must be positive, got {value!r}")
        if seed < 0:
            raise InputError(f"seed must not be negative, got {seed}")
        self._timeout_s = timeout_s
        self._seed = seed
        self._space_builder = space_builder
        self._memory_bytes = memory_bytes or worker_memory_bytes()
        self._batch = 0
        self._configured = False
        self._workloads: dict[str, str] = {}
        self._domains: dict[str, str] = {}
        self._baselines: dict[str, float] = {}
        self._unreferenced: dict[str, str] = {}
        self._outcomes: dict[str, dict[str, Any]] = {}
        self._directory = Scratch("measure")
        self._pool = WorkerPool(workers, self.threads, Path(self._directory.name), self._workloads)
        self._close = weakref.finalize(self, _close, self._pool, self._directory)
        if hardware is not None:
            self._configure()

    def __enter__(self) -> LocalMeasurer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def baseline(self, tasks: Sequence[Task]) -> list[float]:
        """Seconds of one call of each kernel as TVM compiles it without a schedule; `inf` where that is impossible.

        With `plain_baselines`, of each kernel with its plain schedule. Kernels that take long run once, two or more at
        a time; the others are timed one by one. Their outputs are the reference.
        """
        new = list({task.workload_hash: task for task in tasks if task.workload_hash not in self._baselines}.values())
        if new:
            self._guarded(lambda: self._measure_baselines(new))
        return [self._baselines[task.workload_hash] for task in tasks]

    def measure(self, task: Task, decisions: Sequence[Candidate], best_s: float = math.inf) -> list[Measurement]:
        """One `Measurement` for each candidate, in order. See `Measurer.measure`.

        Candidates that schedule to the same program, now or earlier, are run once.
        """
        return self.measure_together([(task, decisions, best_s)])[0]

    def measure_together(self, requests: Sequence[tuple[Task, Sequence[Candidate], float]]) -> list[list[Measurement]]:
        """See `MeasuresTogether`: all are compiled side by side, then run one by one."""
        asked = [task for task, candidates, _ in requests if candidates]
        if not asked:
            return [[] for _ in requests]
        self.baseline(asked)
        return self._guarded(lambda: self._measure(requests))

    def retime(self, task: Task, decisions: Sequence[Candidate]) -> list[Measurement]:
        """Time candidates again: `RETIME_ROUNDS` rounds in turns, each longer than a measurement's."""
        if not decisions:
            return []
        self.baseline([task])
        return self._guarded(lambda: self._retime(task, decisions))

    def price(self, candidates: Sequence[tuple[Task, Sequence[Candidate]]]) -> list[Price]:
        """See `Pricer`. Nothing is compared, so that the untuned kernels, which take seconds, need not run."""
        return self._guarded(lambda: self._price(candidates)) if candidates else []

    def close(self) -> None:
        """Stop all workers and delete the reference outputs. May be repeated."""
        self._close()

    def describe(self) -> dict[str, Any]:
        """Device name, target as canonical JSON, threads, and TVM's version."""
        import tvm

        return {
            "device": device_name(self.target) + (COLD_WEIGHTS if self.model_bytes else ""),
            "target": target_json(self.target),
            "threads": self.threads,
            "tvm_version": str(tvm.__version__),
        }

    @property
    def worker_pids(self) -> list[int]:
        """Process ids of the workers."""
        return self._pool.pids

    def _guarded(self, work: Callable[[], _T]) -> _T:
        """Do `work`; when it is interrupted (Ctrl-C), leave no worker busy with what nobody waits for."""
        self._configure()
        self._batch += 1
        try:
            return work()
        except BaseException:
            self._pool.abandon()
            raise

    def _configure(self) -> None:
        """Tell the workers, once: they get ready while the caller does something else."""
        if not self._configured:
            self._configured = True
            self._pool.configure(self._configuration())

    def _configuration(self) -> Config:
        if self.hardware is None:
            self.hardware = describe_machine(self.target, self.threads, measure=False)
        return Config(
            target=json.loads(target_json(self.target)),
            hardware=self.hardware.to_json(),
            space_builder=self._space_builder,
            seed=self._seed,
            references=self._directory.name,
            memory_bytes=self._memory_bytes,
        )

    def _measure_baselines(self, tasks: Sequence[Task]) -> None:
        """All run once, side by side, which gives the reference; those that are not slow are then timed one by one.

        Of one that is lost only then, the time of its first run stays.
        """
        plain = self.plain_baselines
        trials = [self._trial(task, {"task": task.workload_hash, "untuned": True, "plain": plain}) for task in tasks]
        limit_s = BASELINE_LIMIT_FACTOR * self._timeout_s
        started = time.monotonic()
        requests = [
            Request({"op": "untuned", "batch": self._batch, **trial.spec}, limit_s, (trial.task,)) for trial in trials
        ]
        answers = [
            self._pool.map([request])[0] if answer.get("error") in LOST else (handle, answer)
            for request, (handle, answer) in zip(requests, self._pool.map(requests), strict=True)
        ]
        self.overheads.run_s += time.monotonic() - started
        for trial, (handle, answer) in zip(trials, answers, strict=True):
            trial.handle = handle
            trial.take(answer)
            if trial.failure:
                self._baselines[trial.task] = math.inf
                self._unreferenced[trial.task] = str(trial.failure["detail"])
            else:
                self._domains[trial.task] = answer["domain"]
                self._baselines[trial.task] = min(answer["latencies_s"])
        slow_s = SLOW_PLAIN_BASELINE_S if plain else SLOW_BASELINE_S
        fast = [t for t in trials if not t.failure and self._baselines[t.task] < slow_s]
        for trial in self._in_turn(fast, limit_s):
            answer = self._run(trial, BASELINE, limit_s=limit_s, check=False)
            if "error" not in answer:
                self._baselines[trial.task] = min(answer["latencies_s"])

    def _measure(self, requests: Sequence[tuple[Task, Sequence[Candidate], float]]) -> list[list[Measurement]]:
        trials = [
            [self._trial(task, candidate_spec(task.workload_hash, candidate)) for candidate in candidates]
            for task, candidates, _ in requests
        ]
        checked = [trial for of_task in trials for trial in of_task if trial.task in self._domains]
        best_s = {task.workload_hash: latency_s for task, _, latency_s in requests}
        if checked:
            self._build(checked, self._timeout_s)
        for trial in self._until_undisturbed(checked, best_s):
            known = None if trial.answer else self._outcomes.get(trial.program)
            trial.add_run(known or self._run(trial, trial.effort, best_s[trial.task]))
            # A crash or a timeout may have come from outside; what a program computes, and how fast, stays.
            if trial.answer.get("error", "wrong_result") == "wrong_result":
                self._outcomes[trial.program] = trial.answer
            best_s[trial.task] = min(best_s[trial.task], trial.latency_s)
        return [
            [to_measurement(candidate, trial) for candidate, trial in zip(candidates, of_task, strict=True)]
            if task.workload_hash in self._domains
            else without_reference(candidates, self._unreferenced.get(task.workload_hash, ""))
            for (task, candidates, _), of_task in zip(requests, trials, strict=True)
        ]

    def _price(self, candidates: Sequence[tuple[Task, Sequence[Candidate]]]) -> list[Price]:
        trials = [
            [self._trial(task, candidate_spec(task.workload_hash, decision)) for decision in decisions]
            for task, decisions in candidates
        ]
        every = [trial for trials_of_task in trials for trial in trials_of_task]
        if every:
            self._build(every, self._timeout_s)
        best_s = {trial.task: math.inf for trial in every}
        for trial in self._until_undisturbed(every, best_s):
            trial.add_run(self._run(trial, trial.effort, best_s[trial.task], check=False))
            best_s[trial.task] = min(best_s[trial.task], trial.latency_s)
        return [
            Price(best_s[of_task[0].task], fastest_of(of_task)) if of_task else Price(math.inf) for of_task in trials
        ]

    def _retime(self, task: Task, candidates: Sequence[Candidate]) -> list[Measurement]:
        trials = [self._trial(task, candidate_spec(task.workload_hash, candidate)) for candidate in candidates]
        if task.workload_hash not in self._domains:
            return without_reference(candidates, self._unreferenced[task.workload_hash])
        self._build(trials, self._timeout_s, shared=len(trials))
        for number in range(RETIME_PATIENCE * RETIME_ROUNDS):
            if number >= RETIME_ROUNDS and not any(trial.disturbed for trial in trials):
                break
            for trial in self._in_turn(trials, self._timeout_s):
                trial.add_round(self._run(trial, LONG))
        return [to_measurement(candidate, trial) for candidate, trial in zip(candidates, trials, strict=True)]

    def _until_undisturbed(self, trials: Sequence[_Trial], best_s: Mapping[str, float]) -> Iterator[_Trial]:
        """The trials in turn; then those again that ran while the machine was disturbed and may be the fastest, once,
        and on as long as patience lasts.
        """
        started_s = time.monotonic()
        yield from self._in_turn(trials, self._timeout_s)
        until = time.monotonic() + PATIENCE * (time.monotonic() - started_s)
        while doubtful := [t for t in trials if t.disturbed and t.latency_s < DISTURBED_FACTOR * best_s[t.task]]:
            yield from self._in_turn(doubtful, self._timeout_s)
            if time.monotonic() >= until:
                break

    def _trial(self, task: Task, spec: dict[str, Any]) -> _Trial:
        if task.workload_hash not in self._workloads:
            self._workloads[task.workload_hash] = serialize_workload(task.mod)
        return _Trial(spec, model_bytes=min(self.model_bytes, MOST_MODEL_BYTES) if self._waits(task) else 0)

    def _waits(self, task: Task) -> bool:
        """Whether calls in a large model wait for their weights."""
        assert self.hardware is not None
        roofline_s = self.hardware.least_latency_s(task.flops, task.bytes_moved)
        reading_s = task.weight_bytes / self.hardware.bandwidth_bytes_per_s
        return task.weight_bytes >= LEAST_WEIGHT_BYTES and reading_s >= WAITING_SHARE * roofline_s

    def _build(self, trials: Sequence[_Trial], limit_s: float, shared: int = SHARED_MODULE) -> None:
        """Schedule and compile, `shared` at most in a module; where a worker hangs or dies on several, one by one."""
        started = time.monotonic()
        chunks = chunks_of(trials, len(self._pool), shared)
        while chunks:
            requests = [
                Request(
                    {"op": "build", "batch": self._batch, "candidates": [trial.spec for trial in chunk]},
                    limit_s,
                    tuple({trial.task for trial in chunk}),
                )
                for chunk in chunks
            ]
            again: list[Sequence[_Trial]] = []
            for chunk, (handle, answer) in zip(chunks, self._pool.map(requests), strict=True):
                if "built" in answer:
                    for trial, built in zip(chunk, answer["built"], strict=True):
                        trial.handle = handle
                        trial.take(built)
                elif len(chunk) == 1:
                    chunk[0].failure = answer
                else:
                    again += [[trial] for trial in chunk]
            chunks = again
        self.overheads.build_s += time.monotonic() - started

    def _in_turn(self, trials: Sequence[_Trial], limit_s: float) -> Iterator[_Trial]:
        """The trials that can be run, worker by worker. What died with a worker is built again first."""
        waiting = [trial for trial in trials if not trial.failure]
        while waiting:
            lost = [trial for trial in waiting if trial.handle is None or not self._pool.alive(trial.handle)]
            if lost:
                self._build(lost, limit_s)
                waiting = [trial for trial in waiting if not trial.failure]
                continue
            waiting.sort(key=lambda trial: trial.handle.index if trial.handle else 0)
            yield waiting.pop(0)

    def _run(
        self,
        trial: _Trial,
        effort: Effort,
        best_s: float = math.inf,
        limit_s: float | None = None,
        check: bool = True,
    ) -> dict[str, Any]:
        assert trial.handle is not None
        started = time.monotonic()
        message = {
            "op": "run",
            "task": trial.task,
            "program": trial.program,
            "domain": self._domains.get(trial.task, "normal"),
            "effort": asdict(effort),
            "best_s": best_s,
            "save": False,
            "check": check,
            "model_bytes": trial.model_bytes,
        }
        answer = self._pool.ask(trial.handle, Request(message, limit_s or self._timeout_s))
        self.overheads.run_s += time.monotonic() - started
        return answer


def _close(pool: WorkerPool, directory: Scratch) -> None:
    pool.close()
    directory.cleanup()
