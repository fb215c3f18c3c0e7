"""Workers that can be killed: ask them with a time limit, replace those that hang or die."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..errors import InputError, SetupError
from .base import CLOSED
from .process import ParentLost, WorkerProcess
from .template import Template, borrow, give_back

__all__ = ["START_LIMIT_S", "Config", "Handle", "Request", "WorkerPool", "worker_environment"]

START_LIMIT_S = 120.0
"""TVM is imported in a second or two; a machine under load may take much longer."""

CLOSE_GRACE_S = 1.0

SPINS = 10_000
"""How often an idle thread of TVM's pool looks for work before it sleeps: 4 ms on some machines, 25 on others,
longer than any pause between two parallel loops. TVM's own 300,000 last so long that compiling, which comes next,
took twice the time."""

_COMMAND = (sys.executable, "-m", "eqtune.measure.worker")


@dataclass(frozen=True)
class Config:
    """What a worker is told when it starts.

    Attributes
    ----------
    target : dict
        The target as a JSON object.
    hardware : dict
        `Hardware` as a JSON object.
    space_builder : str
        "module:function"; the function takes an IRModule and a Hardware and returns a `Space`.
    seed : int
        Of the inputs.
    references : str
        Directory of the reference outputs, shared by all workers.
    memory_bytes : int
        What the worker may allocate beyond what it needs itself.
    export : str
        "so" or "tar": write programs as libraries of this kind, to be run elsewhere; "" keeps them in the worker.
    """

    target: dict[str, Any]
    hardware: dict[str, Any]
    space_builder: str
    seed: int
    references: str
    memory_bytes: int
    export: str = ""


@dataclass(frozen=True)
class Request:
    """One message to a worker.

    Attributes
    ----------
    message : mapping
        What `server.py` understands.
    limit_s : float
        How long the answer may take.
    tasks : tuple of str
        Hashes of the kernels that the worker must know: their texts are sent along where it does not.
    """

    message: Mapping[str, Any]
    limit_s: float
    tasks: tuple[str, ...] = ()


@dataclass(frozen=True)
class Handle:
    """A worker as it was: once the worker at `index` is replaced, what it held is gone."""

    index: int
    generation: int


def worker_environment(threads: int) -> dict[str, str]:
    """Environment of a process that runs kernels on so many threads."""
    return {
        **os.environ,
        "TVM_NUM_THREADS": str(threads),
        "TVM_THREAD_POOL_SPIN_COUNT": str(SPINS),
        # Of the libraries that a worker loads, none but TVM's own thread pool may compete with the kernel.
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "TVM_DEVICE_BACKEND_AUTOLOAD": "0",
    }


class WorkerPool:
    """A fixed number of workers. What they need is loaded at once; the first request, after `configure`, waits for it.

    Parameters
    ----------
    count : int
        How many.
    threads : int
        Threads that a kernel may use.
    directory : Path
        For logs.
    workloads : mapping
        Text of every kernel by its hash; may grow.
    command : sequence of str
        What forks workers; by default, `worker.py`.
    """

    def __init__(
        self,
        count: int,
        threads: int,
        directory: Path,
        workloads: Mapping[str, str],
        command: Sequence[str] = _COMMAND,
    ) -> None:
        self._command = command
        self._configuration: Mapping[str, Any] | None = None
        self._closed = False
        self._owner = os.getpid()
        self._directory = directory
        self._workloads = workloads
        self._environment = worker_environment(threads)
        self._generations = [0] * count
        self._workers: list[WorkerProcess | None] = [None] * count
        self._template = borrow(command, self._environment)

    def configure(self, config: Config) -> None:
        """Tell the workers what they work on: once, before the first request. Raises InputError after `close`."""
        if self._closed:
            raise InputError(CLOSED)
        self._configuration = asdict(config)
        self._template.configure(self._configuration)

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers."""
        return [worker.pid for worker in self._workers if worker is not None]

    def __len__(self) -> int:
        return len(self._workers)

    def alive(self, handle: Handle) -> bool:
        """Whether the worker is still the one that `handle` was made for."""
        return self._generations[handle.index] == handle.generation

    def map(self, requests: Sequence[Request]) -> list[tuple[Handle, dict[str, Any]]]:
        """Ask all workers at once, each one request at a time. Who answered, and what, in the order of the requests.

        A worker that hangs or dies is replaced, and its request is answered with {"error": kind, "detail": text}.
        """
        self.wait_ready()
        waiting = deque(enumerate(requests))
        idle = deque(range(len(self._workers)))
        running: dict[int, tuple[int, float]] = {}
        answers: dict[int, tuple[Handle, dict[str, Any]]] = {}
        while waiting or running:
            while waiting and idle:
                number, request = waiting.popleft()
                index = idle.popleft()
                self.wait_ready([index])
                self._send(index, request)
                running[index] = number, time.monotonic() + request.limit_s
            for index, answer in self._events({index: end for index, (_, end) in running.items()}):
                number, _ = running.pop(index)
                handle = Handle(index, self._generations[index])
                answers[number] = handle, self._settle(index, answer, requests[number].limit_s)
                idle.append(index)
        return [answers[number] for number in range(len(requests))]

    def ask(self, handle: Handle, request: Request) -> dict[str, Any]:
        """Ask one worker that is `alive` while all others rest; errors as in `map`."""
        self.wait_ready()
        if not self.alive(handle):
            return {"error": "crash", "detail": "the worker was killed from outside before it could run this"}
        with self._others_stopped(handle.index):
            self._send(handle.index, request)
            ends = {handle.index: time.monotonic() + request.limit_s}
            while True:
                for index, answer in self._events(ends):
                    return self._settle(index, answer, request.limit_s)

    @contextlib.contextmanager
    def _others_stopped(self, index: int) -> Iterator[None]:
        """Stop the other processes: after a kernel, the threads of TVM's pool spin for a while.

        All workers' pools are bound to the same cores, so what runs next would share them: 1.75 times as slow.
        """
        others = [worker for at, worker in enumerate(self._workers) if at != index and worker and not worker.gone]
        try:
            for worker in others:
                _signal(worker.pid, signal.SIGSTOP)
            yield
        finally:
            for worker in others:
                _signal(worker.pid, signal.SIGCONT)

    def wait_ready(self, indices: Sequence[int] | None = None) -> None:
        """Wait until there are workers; all of them, or those at `indices`. Replaces idle ones that were killed.

        Raises
        ------
        InputError
            After `close`: what forks workers may work for somebody else by now.
        SetupError
            When a worker cannot start; the message ends with the last thing it said.
        """
        if self._closed:
            raise InputError(CLOSED)
        for index in range(len(self._workers)) if indices is None else indices:
            worker = self._workers[index]
            if worker is not None and worker.gone:
                self._drop(index)
            if self._workers[index] is None:
                self._workers[index] = self._fork(index)

    def answers(self, requests: Sequence[Request]) -> list[dict[str, Any]]:
        """What `map` was answered. Interrupted (Ctrl-C), it leaves no worker busy with what nobody waits for."""
        try:
            return [answer for _, answer in self.map(requests)]
        except BaseException:
            self.abandon()
            raise

    def abandon(self) -> None:
        """Replace the workers that are in the middle of something, whose answers nobody will read."""
        for index, worker in enumerate(self._workers):
            if worker is not None and worker.busy:
                self._drop(index)

    def close(self) -> None:
        """End all workers, unless this process was forked from the one that they work for. May be repeated."""
        if os.getpid() != self._owner:
            return
        workers = [worker for worker in self._workers if worker is not None]
        for worker in workers:
            worker.hang_up()
        end = time.monotonic() + CLOSE_GRACE_S
        for worker in workers:
            worker.end(0.0 if worker.busy else max(0.0, end - time.monotonic()))
        if not self._closed:
            self._closed = True
            give_back(self._template)

    def _replace_template(self) -> None:
        self._template.end()
        self._template = Template(self._command, self._environment)
        if self._configuration is not None:
            self._template.configure(self._configuration)

    def _fork(self, index: int) -> WorkerProcess:
        log = self._directory / f"worker-{index}.log"
        try:
            if self._template.ready:
                return self._template.fork(log)
        except ParentLost:  # killed from outside, with all workers; the others are found gone
            self._replace_template()
        try:
            self._template.wait_ready(START_LIMIT_S)
            return self._template.fork(log)
        except ParentLost as lost:
            raise SetupError(f"a measuring worker does not start: {lost}; try `eqtune doctor`") from None

    def _drop(self, index: int) -> None:
        """End a worker that is gone, or busy with what nobody waits for. Another takes its place when it is needed."""
        worker = self._workers[index]
        self._generations[index] += 1
        if worker is not None:
            worker.end()
        self._workers[index] = None

    def _worker(self, index: int) -> WorkerProcess:
        worker = self._workers[index]
        assert worker is not None
        return worker

    def _send(self, index: int, request: Request) -> None:
        worker = self._worker(index)
        new = {task: self._workloads[task] for task in request.tasks if task not in worker.known}
        worker.known |= new.keys()
        worker.send({**request.message, "workloads": new})

    def _events(self, ends: Mapping[int, float]) -> list[tuple[int, dict[str, Any] | str]]:
        """Wait for workers, each until its time: a message, "gone" or "late". Empty when half a message arrived."""
        events: list[tuple[int, dict[str, Any] | str]] = []
        with selectors.DefaultSelector() as selector:
            for index in ends:
                selector.register(self._worker(index), selectors.EVENT_READ, index)
            timeout_s = max(0.0, min(ends.values()) - time.monotonic())
            readable = {key.data for key, _ in selector.select(timeout_s)}
        for index, end in ends.items():
            if index in readable:
                try:
                    message = self._worker(index).receive()
                except EOFError:
                    events.append((index, "gone"))
                    continue
                if message is not None:
                    events.append((index, message))
                    continue
            if time.monotonic() >= end:
                events.append((index, "late"))
        return events

    def _settle(self, index: int, answer: dict[str, Any] | str, limit_s: float) -> dict[str, Any]:
        if isinstance(answer, dict):
            return answer
        if answer == "gone":
            failure: dict[str, Any] = dict(self._worker(index).autopsy())
        else:
            failure = {"error": "timeout", "detail": f"no result after {limit_s:g} s"}
        self._drop(index)
        return failure


def _signal(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):  # it died just now; whoever asks it next finds out
        os.kill(pid, number)
