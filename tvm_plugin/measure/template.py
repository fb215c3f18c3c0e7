"""A process that has loaded TVM and forks workers: each is there within milliseconds, and shares what was loaded.

Importing TVM and making the first code takes two thirds of a second of a core. Workers that each did so for themselves
took cores from whoever prepared what to measure, and one that died was replaced as slowly.

The template answers one request at a time, as JSON lines (`worker.serve_forks`), with the "number" it came with:

    {"op": "fork"}                      "pid" of a worker; its input, output and log come by a socket, with the number
    {"op": "wait", "pid", "limit_s"}    "code" of one that ends within the limit, negative for a signal; else null
"""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from .process import ParentLost, WorkerProcess, spawn

__all__ = ["Template"]

ANSWER_LIMIT_S = 10.0
"""Forking takes milliseconds; a machine under load may take much longer."""

CLOSE_GRACE_S = 1.0


class Template:
    """Starts a command that forks workers; it loads what they need while the caller does something else.

    Parameters
    ----------
    command : sequence of str
        What to run, with the number of a socket's descriptor as one more argument.
    environment : mapping
        All environment variables of the template and its workers.
    log : Path
        Where its standard error goes; written anew.

    Attributes
    ----------
    ready : bool
        Whether it is known to be ready: `wait_ready` has returned.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        self._socket, theirs = socket.socketpair()
        with theirs:
            self._process = spawn([*command, str(theirs.fileno())], environment, log, (theirs.fileno(),))
        self._numbers = itertools.count()
        self._lost = ""
        self.ready = False

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    def configure(self, configuration: Mapping[str, Any]) -> None:
        """Tell it what its workers work on: once, before `wait_ready`."""
        self._process.send(configuration)

    def wait_ready(self, limit_s: float) -> None:
        """Wait until it can fork. Raises ParentLost."""
        if self._lost:
            raise ParentLost(self._lost)
        if not self.ready:
            self._answer(limit_s)
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

    def end(self) -> None:
        """End it, its workers having ended (on Linux, they would end with it). May be repeated."""
        self._lost = self._lost or "it was ended"
        self._process.end(CLOSE_GRACE_S if self.ready else 0.0)
        self._socket.close()

    def _ask(self, message: Mapping[str, Any], descriptors: Sequence[int] = (), limit_s: float = 0.0) -> dict[str, Any]:
        if self._lost:
            raise ParentLost(self._lost)
        number = next(self._numbers)
        if descriptors:
            with contextlib.suppress(OSError):  # it is gone: the answer will tell
                socket.send_fds(self._socket, [b"%d" % number], descriptors)
        self._process.send({**message, "number": number})
        while (answer := self._answer(limit_s + ANSWER_LIMIT_S))["number"] != number:
            pass  # of a request whose asker was interrupted
        return answer

    def _answer(self, limit_s: float) -> dict[str, Any]:
        try:
            return self._process.answer(limit_s)
        except EOFError:
            self._lost = self._process.autopsy()["detail"]
        except TimeoutError:
            self._lost = "it hangs"
        self._process.end()
        raise ParentLost(self._lost)


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
