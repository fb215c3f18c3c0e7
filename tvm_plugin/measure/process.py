"""One worker process, seen from whoever asks it."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Protocol

import psutil

from .base import MAX_DETAIL

__all__ = ["Child", "ParentLost", "WorkerProcess", "kill_with_children", "run_limited", "spawn"]

DEATH_LIMIT_S = 1.0


class ParentLost(Exception):
    """The process that had forked another one is gone, and this one's exit code with it. Says what it died of."""


class Child(Protocol):
    """A process whose exit code somebody waits for: as `subprocess.Popen`."""

    pid: int
    returncode: int | None

    def wait(self, timeout: float | None = None) -> int:
        """The exit code, negative for a signal. Raises subprocess.TimeoutExpired, ParentLost."""


class WorkerProcess:
    """Exchanges JSON lines with a process of a group of its own, which a kill ends with all that it started.

    Parameters
    ----------
    process : Child
    stdin, stdout : binary file
        Unbuffered, what it reads and where it answers.
    log : Path
        Where its standard error goes.

    Attributes
    ----------
    busy : bool
        Whether a message is unanswered.
    known : set of str
        Hashes of the kernels it was sent.
    """

    def __init__(self, process: Child, stdin: IO[bytes], stdout: IO[bytes], log: Path) -> None:
        self._process = process
        self._stdin, self._stdout = stdin, stdout
        self._log = log
        self._received = bytearray()
        self._orphaned = ""
        self.busy = False
        self.known: set[str] = set()

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    @property
    def gone(self) -> bool:
        """Whether one that is not busy has closed its pipe: it says nothing unasked."""
        return self._stdout.closed or self._readable(0.0)

    def fileno(self) -> int:
        """What to wait on for `receive`."""
        return self._stdout.fileno()

    def send(self, message: Mapping[str, Any]) -> None:
        """Send one message. To a worker that is gone it does nothing: `receive` will tell."""
        data = memoryview((json.dumps(message) + "\n").encode())
        self.busy = True
        with contextlib.suppress(BrokenPipeError):
            while data:
                data = data[self._stdin.write(data) or 0 :]

    def receive(self) -> dict[str, Any] | None:
        """Read what has arrived: a message once it is whole, else None. Raises EOFError when the worker is gone."""
        chunk = os.read(self.fileno(), 1 << 20)
        if not chunk:
            raise EOFError
        self._received += chunk
        return self._whole()

    def answer(self, limit_s: float) -> dict[str, Any]:
        """The next message. Raises TimeoutError after `limit_s` seconds without one, EOFError when it is gone."""
        end = time.monotonic() + limit_s
        message = self._whole()  # two may have arrived together
        while message is None and self._readable(end - time.monotonic()):
            message = self.receive()
        if message is None:
            raise TimeoutError(f"no result after {limit_s:g} s")
        return message

    def autopsy(self) -> dict[str, str]:
        """Error kind and detail of a worker that has closed its pipe."""
        self._ended(DEATH_LIMIT_S)
        if self._orphaned:
            return {"error": "crash", "detail": f"what forks workers was lost: {self._orphaned}"[:MAX_DETAIL]}
        code = self._process.returncode
        if code is None:
            return {"error": "crash", "detail": "the worker closed its pipe"}
        said = self._log.read_bytes()[-4096:].decode(errors="replace").strip()
        names = {int(number): number.name for number in signal.Signals}
        name = names.get(-code, f"signal {-code}") if code < 0 else f"exit code {code}"
        # Nobody but the kernel's out-of-memory killer sends SIGKILL to a worker that is still waited for.
        memory = code == -signal.SIGKILL or "out of memory" in said.lower() or "bad_alloc" in said
        detail = f"the worker ended with {name}" + (f": {said.splitlines()[-1]}" if said else "")
        return {"error": "out_of_memory" if memory else "crash", "detail": detail[:MAX_DETAIL]}

    def hang_up(self) -> None:
        """Close its input: an idle worker ends."""
        with contextlib.suppress(OSError):
            self._stdin.close()

    def kill(self) -> None:
        """Kill it and all it started. Of one that was spawned, from any thread: whoever receives sees it gone."""
        if not self._ended(0.0):
            self._kill_group()

    def end(self, grace_s: float = 0.0) -> None:
        """Make sure that it has ended, killing it after `grace_s` seconds, and leave no zombie. May be repeated."""
        if self._stdout.closed:
            return
        self.hang_up()
        try:
            if grace_s <= 0 and not self.gone:
                self._kill_group()  # first of all: whoever waits for it may be interrupted
            if not self._ended(grace_s):
                self._kill_group()
                self._wait(None)
        finally:
            self._stdout.close()

    def _whole(self) -> dict[str, Any] | None:
        """The first message of what was received, once it is whole."""
        line, newline, rest = self._received.partition(b"\n")
        if not newline:
            return None
        self._received = rest
        self.busy = False
        message: dict[str, Any] = json.loads(line)
        return message

    def _readable(self, limit_s: float) -> bool:
        poll = select.poll()  # of any number of descriptors, unlike select.select
        poll.register(self, select.POLLIN)
        return bool(poll.poll(max(0.0, limit_s) * 1e3))

    def _ended(self, limit_s: float) -> bool:
        """Whether it has ended, or does within the limit; what it had started, a compiler perhaps, ends with it."""
        if self._process.returncode is None and not self._orphaned:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._wait(limit_s)
                self._kill_group()  # now: later its number may be another's
        return self._process.returncode is not None or bool(self._orphaned)

    def _wait(self, limit_s: float | None) -> None:
        try:
            self._process.wait(limit_s)
        except ParentLost as lost:
            self._orphaned = str(lost)

    def _kill_group(self) -> None:
        if self._orphaned and sys.platform == "linux":
            return  # it died with its parent; by now, its number may be another's
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)


def spawn(
    command: Sequence[str], environment: Mapping[str, str], log: Path, descriptors: Sequence[int] = ()
) -> WorkerProcess:
    """Start a command as a worker.

    Parameters
    ----------
    command : sequence of str
        What to run.
    environment : mapping
        All its environment variables.
    log : Path
        Where its standard error goes; written anew.
    descriptors : sequence of int
        What it gets beside the three standard ones.
    """
    with log.open("wb") as stderr:
        process = subprocess.Popen(
            list(command),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            env=dict(environment),
            start_new_session=True,  # Ctrl-C in the terminal does not reach it
            bufsize=0,
            pass_fds=descriptors,
        )
    assert process.stdin is not None
    assert process.stdout is not None
    return WorkerProcess(process, process.stdin, process.stdout, log)


def run_limited(
    command: Sequence[str], limit_s: float | None, directory: Path | None = None, temporary: str = ""
) -> subprocess.CompletedProcess[str]:
    """As `subprocess.run` with both outputs, but what takes too long is killed with what it started.

    Its temporary files are in the directory `temporary`, where that is given.
    """
    environment = {**os.environ, "TMPDIR": temporary} if temporary else None
    with subprocess.Popen(
        command, cwd=directory, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            stdout, stderr = process.communicate(timeout=limit_s)
        except BaseException:
            kill_with_children(process.pid)
            raise
        return subprocess.CompletedProcess(command, process.returncode, stdout, stderr)


def kill_with_children(pid: int) -> None:
    """Kill a process of the caller's own group, and all that it has started."""
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        children = process.children(recursive=True)
        for one in (process, *children):  # from the top: nobody is left to start another
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()
