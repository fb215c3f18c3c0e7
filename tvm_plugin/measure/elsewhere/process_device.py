"""A device that is reached through a process of its own, which can be killed when it hangs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..pool import START_LIMIT_S, worker_environment
from ..process import WorkerProcess, spawn
from .fleet import DeviceLost

__all__ = ["ProcessDevice"]


class ProcessDevice:
    """Starts a process, tells it its configuration, and asks it one thing at a time. Most of a `Device`.

    Parameters
    ----------
    command : sequence of str
        What the process runs.
    configuration : mapping
        Its first message.
    log : Path
        Where its standard error goes.
    """

    called = ""
    """How the process is named before what it died of."""

    def __init__(self, command: Sequence[str], configuration: Mapping[str, Any], log: Path) -> None:
        self._command = command
        self._configuration = configuration
        self._log = log
        self._process: WorkerProcess | None = None

    def open(self) -> None:
        """See `Device`: start the process where there is none."""
        if self._process is None:
            self._process = spawn(self._command, worker_environment(1), self._log)
            self.ask(self._configuration, START_LIMIT_S)

    def close(self) -> None:
        """See `Device`."""
        process = self._process
        if process is not None:
            process.kill()

    def release(self) -> None:
        """See `Device`."""
        if self._process is not None:
            self._process.end()
        self._process = None

    def ask(self, message: Mapping[str, Any], limit_s: float) -> dict[str, Any]:
        """The process's answer within `limit_s` seconds. Raises DeviceLost."""
        process = self._process
        assert process is not None
        process.send(message)
        try:
            answer = process.answer(limit_s)
        except EOFError:
            failure = process.autopsy()
            self.release()
            raise DeviceLost(failure["error"], self.called + failure["detail"]) from None
        except TimeoutError as error:
            self.release()
            raise DeviceLost("timeout", str(error)) from None
        if "lost" in answer:
            raise self.lost(str(answer["lost"]))
        return answer

    def lost(self, detail: str) -> DeviceLost:
        """What to raise where the process says that it has lost the device."""
        self.release()
        return DeviceLost("crash", detail)
