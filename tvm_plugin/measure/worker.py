"""Measuring workers: `python -m eqtune.measure.worker SOCKET`. They build and run candidates for one parent process.

Requests and replies are JSON objects, one a line, on standard input and output. Whatever the compiler or a kernel
prints goes to standard error. What is asked first is a template, which loads TVM at once, is told the configuration
(`pool.Config`) and forks workers (`template.py`); `server.py` says what these answer. A request that fails in an
orderly way is answered with an error kind; one that hangs or crashes is the parent's to notice. All end when the parent
does; elsewhere than on Linux, once they are idle.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, TextIO

from .lean_import import leave_out, load_routines

__all__ = ["limit_memory", "main", "restore_crash_signals", "serve", "serve_forks"]

PR_SET_PDEATHSIG = 1

WAIT_STEP_S = 0.002

Answer = Callable[[Mapping[str, Any]], dict[str, Any]]


def main() -> None:
    """Fork workers until the parent closes the pipe."""
    serve_forks(_start, _load)


def serve(start: Callable[[Mapping[str, Any]], Answer]) -> None:
    """Answer requests until the parent closes the pipe.

    Parameters
    ----------
    start : callable
        Takes the configuration, returns what answers requests.
    """
    requests, replies = _open()
    answer = start(json.loads(requests.readline()))
    restore_crash_signals()
    _reply(replies, {"ready": True})
    _answer_all(requests, replies, answer)


def serve_forks(start: Callable[[Mapping[str, Any]], Answer], load: Callable[[], None] = lambda: None) -> None:
    """Fork workers, each of which answers requests, until the parent closes the pipe. Does not return.

    Parameters
    ----------
    start : callable
        Takes the configuration, returns what answers requests, in each worker with the state that it had here. It must
        start no thread: those are not forked, and what they have locked stays so.
    load : callable
        Imports what takes long, while the parent is busy with something else.
    """
    requests, replies = _open()
    load()
    template, codes = os.getpid(), dict[int, int]()
    with socket.socket(fileno=int(sys.argv[1])) as descriptors:
        for line in requests:
            request = json.loads(line)
            reply: dict[str, Any] = {"number": request["number"]}
            if request["op"] == "rest":
                signal.signal(signal.SIGALRM, signal.SIG_DFL)  # which ends the process; workers have no timer
                signal.setitimer(signal.ITIMER_REAL, request["limit_s"])
            elif request["op"] == "configure":
                memory_bytes = request["fields"]["memory_bytes"]
                answer = start(request["fields"])
                restore_crash_signals()
            elif request["op"] == "fork":
                pipes = _received(descriptors, request["number"])
                reply["pid"] = os.fork()
                if not reply["pid"]:
                    replies.close()
                    descriptors.close()
                    _work(pipes, answer, memory_bytes, template)
                codes.pop(reply["pid"], None)  # of an earlier worker with this number
                os.setpgid(reply["pid"], reply["pid"])  # before anybody knows its number: a kill reaches all it starts
                for descriptor in pipes:
                    os.close(descriptor)
            else:
                reply["code"] = _exit_code(request["pid"], request["limit_s"], codes)
            _reply(replies, reply)
    _leave()


def _open() -> tuple[TextIO, TextIO]:
    """What to read and where to reply; from now on, standard output is standard error."""
    _die_with_parent(os.getppid())
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    replies = os.dup(1)
    os.dup2(2, 1)
    leave_out()
    return sys.stdin, os.fdopen(replies, "w", encoding="utf-8")


def _received(descriptors: socket.socket, number: int) -> list[int]:
    """The three that were sent with a request's number. Those of others are closed: who sent them was interrupted."""
    while True:
        sent_with, received, _, _ = socket.recv_fds(descriptors, 64, 3)
        if int(sent_with) == number:
            for descriptor in received:
                os.set_inheritable(descriptor, False)
            return received
        for descriptor in received:
            os.close(descriptor)


def _work(descriptors: Sequence[int], answer: Answer, memory_bytes: int, template: int) -> NoReturn:
    """Be a worker, just forked, with the descriptors of its requests, replies and log."""
    _die_with_parent(template)
    requests, replies, log = descriptors
    for descriptor, standard in ((requests, 0), (log, 1), (log, 2)):
        os.dup2(descriptor, standard)
    limit_memory(memory_bytes)
    with os.fdopen(requests, encoding="utf-8") as lines, os.fdopen(replies, "w", encoding="utf-8") as pipe:
        _answer_all(lines, pipe, answer)
    _leave()


def _answer_all(requests: TextIO, replies: TextIO, answer: Answer) -> None:
    for line in requests:
        _reply(replies, answer(json.loads(line)))


def _exit_code(pid: int, limit_s: float, codes: dict[int, int]) -> int | None:
    """Of a worker that ends within so many seconds, negative for a signal; None while it runs. May be asked again."""
    end = time.monotonic() + limit_s
    while pid not in codes:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            codes[pid] = os.waitstatus_to_exitcode(status)
        elif time.monotonic() >= end:
            return None
        else:
            time.sleep(WAIT_STEP_S)
    return codes[pid]


def _leave() -> NoReturn:
    sys.stderr.flush()
    os._exit(0)  # nothing is left to save, and taking TVM down takes most of a second


def _load() -> None:
    from ..search import space  # noqa: F401 - what the usual configuration names
    from . import server  # noqa: F401

    load_routines()


def _start(fields: Mapping[str, Any]) -> Answer:
    from .pool import Config
    from .server import Server

    config = Config(**fields)
    return Server(config).answer


def _die_with_parent(parent: int) -> None:
    """On Linux, be killed when the parent dies, however busy; elsewhere the closed pipe has to do."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)


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
