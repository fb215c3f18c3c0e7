"""A process that has loaded TVM and forks workers: each is there within milliseconds, and shares what was loaded.

Importing TVM and making the first code takes two thirds of a second of a core. Workers that each did so for themselves
took cores from whoever prepared what to measure, and one that died was replaced as slowly. For the same reason, a
template that is no longer needed rests for a while: whoever measures next in this thread takes it over (`borrow`).

The template answers one request at a time, as JSON lines (`worker.serve_forks`), with the "number" it came with:

    {"op": "configure", "fields"}       nothing more; workers that are forked from now on work on that
    {"op": "fork"}                      "pid" of a worker; its input, output and log come by a socket, with the number
    {"op": "wait", "pid", "limit_s"}    "code" of one that ends within the limit, negative for a signal; else null
    {"op": "rest", "limit_s"}           nothing more; it ends after so many seconds, unless it is told to rest 0
"""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import subprocess
import threading
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from .process import ParentLost, WorkerProcess, spawn
from .scratch import Scratch

__all__ = ["Template", "borrow", "give_back"]

ANSWER_LIMIT_S = 10.0
"""Forking takes milliseconds; a machine under load may take much longer."""

REST_S = 30.0
"""How long an idle template waits to be needed again."""


class Template:
    """Starts a command that forks workers; it loads what they need while the caller does something else.

    Parameters
    ----------
    command : sequence of str
        What to run, with the number of a socket's descriptor as one more argument.
    environment : mapping
        All environment variables of the template and its workers.

    Attributes
    ----------
    origin
        How it was started; equal ones take each other's place.
    ready : bool
        Whether it is known to be ready: `wait_ready` has returned since it was configured.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self.origin = _origin(command, environment)
        self._directory = Scratch("template")
        self._socket, theirs = socket.socketpair()
        with theirs:
            log = Path(self._directory.name) / "log"
            self._process = spawn([*command, str(theirs.fileno())], environment, log, (theirs.fileno(),))
        self._numbers = itertools.count()
        self._configured = -1
        self._lost = ""
        self._end = weakref.finalize(self, _end, os.getpid(), self._process, self._socket, self._directory)
        self.ready = False

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    def configure(self, configuration: Mapping[str, Any]) -> None:
        """Tell it what its workers work on, before `wait_ready`."""
        self._configured = next(self._numbers)
        self.ready = False
        self._process.send({"op": "configure", "number": self._configured, "fields": configuration})

    def wait_ready(self, limit_s: float) -> None:
        """Wait until it can fork. Raises ParentLost."""
        if not self.ready:
            self._answer(self._configured, limit_s)
            self.ready = True

    def fork(self, log: Path) -> WorkerProcess:
        """A worker; its standard error goes to `log`, written anew. Raises ParentLost."""
        with contextlib.ExitStack() as ours:
            requests, stdin = _pipe()
            stdout, replies = _pipe()
            ours.enter_context(stdin)
            ours.enter_context(stdout)
            with requests, replies, log.open("wb") as stderr:
                pid = self._ask({"op": "fork"}, [file.fileno() for file in (requests, replies, stderr)])["pid"]
            ours.pop_all()  # the worker's from now on
        return WorkerProcess(_Forked(self, pid), stdin, stdout, log)

    def wait(self, pid: int, limit_s: float) -> int | None:
        """The exit code of a worker that ends within the limit, negative for a signal; else None. Raises ParentLost."""
        code: int | None = self._ask({"op": "wait", "pid": pid, "limit_s": limit_s}, limit_s=limit_s)["code"]
        return code

    def rest(self, limit_s: float) -> None:
        """Let it end by itself after so many seconds; with 0, no longer. Raises ParentLost."""
        self._ask({"op": "rest", "limit_s": limit_s})
        self.ready = False

    def end(self) -> None:
        """End it, its workers having ended (on Linux, they would end with it). May be repeated."""
        self._lost = self._lost or "it was ended"
        self._end()

    def _ask(self, message: Mapping[str, Any], descriptors: Sequence[int] = (), limit_s: float = 0.0) -> dict[str, Any]:
        if self._lost:
            raise ParentLost(self._lost)
        number = next(self._numbers)
        if descriptors:
            with contextlib.suppress(OSError):  # it is gone: the answer will tell
                socket.send_fds(self._socket, [b"%d" % number], descriptors)
        self._process.send({**message, "number": number})
        return self._answer(number, limit_s + ANSWER_LIMIT_S)

    def _answer(self, number: int, limit_s: float) -> dict[str, Any]:
        """The answer to the request with this number; those before it are of askers who were interrupted."""
        if self._lost:
            raise ParentLost(self._lost)
        try:
            while (answer := self._process.answer(limit_s))["number"] != number:
                pass
            return answer
        except EOFError:
            self._lost = self._process.autopsy()["detail"]
        except TimeoutError:
            self._lost = "it hangs, or the machine is busy with something else"
        self._process.end()
        raise ParentLost(self._lost)


def borrow(command: Sequence[str], environment: Mapping[str, str]) -> Template:
    """The template that rests in this thread, if it was started in the same way, else a new one."""
    template: Template | None = vars(_RESTING).pop("template", None)
    if template is not None:
        if template.origin == _origin(command, environment):
            with contextlib.suppress(ParentLost):
                template.rest(0.0)
                return template
        template.end()
    return Template(command, environment)


def give_back(template: Template) -> None:
    """Let a template rest, if its workers have ended. On Linux, it would end with the thread that had started it."""
    if template.ready and template.origin.asker == _asker() and not vars(_RESTING):
        with contextlib.suppress(ParentLost):
            template.rest(REST_S)
            _RESTING.template = template
            return
    template.end()


_RESTING = threading.local()


@dataclass(frozen=True)
class _Origin:
    """All that a process takes over from the one that starts it. `asker` is that one's number, and its thread's."""

    command: tuple[str, ...]
    environment: Mapping[str, str]
    directory: str
    cores: frozenset[int]
    asker: tuple[int, int]


def _origin(command: Sequence[str], environment: Mapping[str, str]) -> _Origin:
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else ()
    try:
        directory = os.getcwd()
    except FileNotFoundError:  # somebody has removed it
        directory = ""
    return _Origin(tuple(command), dict(environment), directory, frozenset(cores), _asker())


def _asker() -> tuple[int, int]:
    return os.getpid(), threading.get_ident()


def _end(owner: int, process: WorkerProcess, descriptors: socket.socket, directory: Scratch) -> None:
    if os.getpid() == owner:  # what was forked has them, too
        process.end()
        descriptors.close()
        directory.cleanup()


def _pipe() -> tuple[IO[bytes], IO[bytes]]:
    """Where to read from and where to write to, unbuffered."""
    source, sink = os.pipe()
    return os.fdopen(source, "rb", 0), os.fdopen(sink, "wb", 0)


class _Forked:
    """A `Child` of the template, which alone may wait for it."""

    def __init__(self, template: Template, pid: int) -> None:
        self._template = template
        self.pid = pid
        self.returncode: int | None = None

    def wait(self, timeout: float | None = None) -> int:
        """See `Child`."""
        while self.returncode is None:
            self.returncode = self._template.wait(self.pid, 1.0 if timeout is None else timeout)
            if self.returncode is None and timeout is not None:
                raise subprocess.TimeoutExpired("worker", timeout)
        return self.returncode
