"""How a peer is timed, in a process of its own: thread pools of several runtimes in one process disturb each other."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

__all__ = ["in_own_process", "minimum_s"]


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


def in_own_process(module: str, **arguments: Any) -> dict[str, Any]:
    """Run `python -m MODULE JSON` and return the JSON object on its last line of output.

    Raises RuntimeError with the end of its standard error when it fails.
    """
    environment = dict(os.environ)
    if "threads" in arguments:
        environment.update(OMP_NUM_THREADS=str(arguments["threads"]), TVM_NUM_THREADS=str(arguments["threads"]))
    done = subprocess.run(
        [sys.executable, "-m", module, json.dumps(arguments)], capture_output=True, text=True, env=environment
    )
    if done.returncode:
        raise RuntimeError(f"{module} {arguments}: {done.stderr.strip()[-500:]}")
    return dict(json.loads(done.stdout.strip().splitlines()[-1]))
