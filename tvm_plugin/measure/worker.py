"""A measuring worker: `python -m eqtune.measure.worker`. It builds and runs candidates for one parent process.

Requests and replies are JSON objects, one a line, on the standard input and output it was started with; `server.py`
says which. Whatever the compiler or a kernel prints goes to standard error. The first line is the configuration
(`pool.Config`), answered by {"ready": true}; TVM is loaded before it arrives. A request that fails in an orderly way is
answered with an error kind; one that hangs or crashes is the parent's to notice. The worker ends when its parent does.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TextIO

from .lean_import import leave_out, load_routines

__all__ = ["limit_memory", "main", "restore_crash_signals", "serve"]

PR_SET_PDEATHSIG = 1


Answer = Callable[[Mapping[str, Any]], dict[str, Any]]


def main() -> None:
    """Serve until the parent closes the pipe."""
    serve(_start, _load)
    sys.stderr.flush()
    os._exit(0)  # nothing is left to save, and taking TVM down takes most of a second


def serve(start: Callable[[Mapping[str, Any]], Answer], load: Callable[[], None] = lambda: None) -> None:
    """Answer requests until the parent closes the pipe.

    Parameters
    ----------
    start : callable
        Takes the configuration, returns what answers requests.
    load : callable
        Imports what takes long, while the parent is busy with something else.
    """
    _die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    replies = _protect_stdout()
    leave_out()
    load()
    answer = start(json.loads(sys.stdin.readline()))
    restore_crash_signals()
    _reply(replies, {"ready": True})
    for line in sys.stdin:
        _reply(replies, answer(json.loads(line)))


def _load() -> None:
    from ..search import space  # noqa: F401 - what the usual configuration names
    from . import server  # noqa: F401

    load_routines()


def _start(fields: Mapping[str, Any]) -> Answer:
    from .pool import Config
    from .server import Server

    config = Config(**fields)
    server = Server(config)
    limit_memory(config.memory_bytes)
    return server.answer


def _die_with_parent() -> None:
    """On Linux, be killed when the parent dies, however busy; elsewhere the closed pipe has to do."""
    if sys.platform == "linux":
        parent = os.getppid()
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)


def _protect_stdout() -> TextIO:
    """The pipe to the parent; from now on, file descriptor 1 is standard error."""
    pipe = os.dup(1)
    os.dup2(2, 1)
    return os.fdopen(pipe, "w", encoding="utf-8")


def restore_crash_signals() -> None:
    """Die at once of a segmentation fault: the backtrace that TVM prints first takes seconds, and nobody reads it."""
    signal.signal(signal.SIGSEGV, signal.SIG_DFL)


def limit_memory(memory_bytes: int) -> None:
    """Refuse allocations beyond `memory_bytes` more than the imports took: one candidate must not take all."""
    status = Path("/proc/self/statm")
    if status.exists():
        limit = int(status.read_text().split()[0]) * resource.getpagesize() + memory_bytes
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        if hard != resource.RLIM_INFINITY:
            limit = min(limit, hard)
        resource.setrlimit(resource.RLIMIT_AS, (limit, hard))


def _reply(pipe: TextIO, message: Mapping[str, Any]) -> None:
    pipe.write(json.dumps(message) + "\n")
    pipe.flush()


if __name__ == "__main__":
    main()
