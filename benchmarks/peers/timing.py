"""How a peer is timed, in a process of its own: thread pools of several runtimes in one process disturb each other."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["PeerError", "Timed", "alternating", "in_own_process", "minimum_s"]


class PeerError(RuntimeError):
    """A peer's process failed. The message has the end of its standard error."""


@dataclass
class Timed:
    """A runtime's rounds.

    Attributes
    ----------
    latency_s : float
        The minimum over all rounds; `inf` where the peer failed.
    start_ns : float
        What starting a parallel region cost around that round (`parallel_start.py`), the larger of before and after;
        NaN for one thread.
    answer : dict
        All that the round with the minimum answered.
    """

    latency_s: float = float("inf")
    start_ns: float = float("nan")
    answer: dict[str, Any] = field(default_factory=dict)


def alternating(runs: Mapping[str, Callable[[], dict[str, Any]]], rounds: int, threads: int) -> dict[str, Timed]:
    """Time several runtimes in turn, `rounds` times, so that the machine's moods meet all of them.

    A peer that fails is told on standard error, and left out from then on.

    Parameters
    ----------
    runs : mapping of str to callable
        Each returns a mapping with "latency_s", in seconds, measured by itself.
    rounds : int
    threads : int
        What the probe of the machine's state uses.
    """
    timed = {name: Timed() for name in runs}

    def probe() -> float:
        if threads == 1:
            return float("nan")
        return float(in_own_process("benchmarks.peers.parallel_start", threads=threads)["parallel_start_ns"])

    before = probe()
    waiting = dict(runs)
    for _ in range(rounds):
        for name, run in list(waiting.items()):
            try:
                answer = run()
            except PeerError as error:
                print(error, file=sys.stderr)
                del waiting[name]
                continue
            after = probe()
            if answer["latency_s"] < timed[name].latency_s:
                timed[name] = Timed(float(answer["latency_s"]), max(before, after), answer)
            before = after
    return timed


def minimum_s(run: Callable[[], Any], budget_s: float = 2.0, at_least: int = 5) -> float:
    """Seconds of one call after warming up: the minimum over `budget_s` seconds, of at least `at_least` calls."""
    run()
    run()
    best, calls, started = float("inf"), 0, time.monotonic()
    while calls < at_least or time.monotonic() - started < budget_s:
        before = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - before)
        calls += 1
    return best


def in_own_process(module: str, limit_s: float | None = None, **arguments: Any) -> dict[str, Any]:
    """Run `python -m MODULE JSON` and return the JSON object on its last line of output.

    Raises PeerError when it fails, or takes longer than `limit_s` seconds.
    """
    environment = dict(os.environ)
    if "threads" in arguments:
        environment.update(OMP_NUM_THREADS=str(arguments["threads"]), TVM_NUM_THREADS=str(arguments["threads"]))
    runtime = str(arguments.get("runtime", module.rpartition(".")[2]))
    if runtime.startswith(("torch", "onednn")):  # OpenMP's threads have a core each, as eqtune's
        environment.update(OMP_PROC_BIND="true", OMP_PLACES="cores")
    command = [sys.executable, "-m", module, json.dumps(arguments)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=limit_s)
    except subprocess.TimeoutExpired:
        raise PeerError(f"{module} {arguments}: stopped after {limit_s:.0f} s") from None
    if done.returncode:
        raise PeerError(f"{module} {arguments}: {done.stderr.strip()[-500:]}")
    return dict(json.loads(done.stdout.strip().splitlines()[-1]))
