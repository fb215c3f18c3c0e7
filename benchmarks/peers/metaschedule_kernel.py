"""A kernel tuned by MetaSchedule. `python -m benchmarks.peers.metaschedule_kernel JSON`.

What it finds is compiled to libraries, and timed later by another process of this module, as other peers are: its own
figure is one average for each candidate, taken while it tunes.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from pathlib import Path
from typing import Any

import tvm

from benchmarks.peers import metaschedule
from benchmarks.suites import named
from eqtune.machine import detect_target
from eqtune.measure.affinity import on_first_core
from eqtune.measure.arguments import Interface, poison, random_inputs
from eqtune.tasks import extract_tasks, lower_to_kernels
from eqtune.transform.simplify import simplify

MEASUREMENT_S = 0.02
"""Seconds of calls in a row, of which the average is taken."""


def main(
    kernel: str, threads: int, directory: str, trials: int | None = None, seed: int = 0, budget_s: float = 2.0
) -> dict[str, float]:
    """With `trials`: tune, and write a library for each kernel that it breaks into; without: time them.

    Returns
    -------
    dict
        When timing, `latency_s`: the sum of the kernels' latencies in seconds, each the minimum over `budget_s`
        seconds. When tuning, `found_s`: that sum as MetaSchedule measured it, `inf` where a kernel has no schedule; and
        `wall_s` of tuning after imports.
    """
    os.environ["TVM_NUM_THREADS"] = str(threads)
    target = detect_target(threads)
    tasks = extract_tasks(lower_to_kernels(simplify(named(kernel).relax(seed)), target))
    libraries = [str(Path(directory) / f"{number}.so") for number in range(len(tasks))]
    if trials is None:
        found = zip(tasks, libraries, strict=True)
        return {"latency_s": sum(task.calls * _minimum_s(task, library, seed, budget_s) for task, library in found)}
    metaschedule.warm_up()
    found_s, wall_s = 0.0, 0.0
    for task, library in zip(tasks, libraries, strict=True):
        result = metaschedule.tune(task.mod, target, trials, seed)
        wall_s += result.wall_s
        found_s += task.calls * (result.latency_s if result.schedule is not None else math.inf)
        if result.schedule is not None:
            tvm.compile(result.schedule.mod, target).export_library(library)
    return {"found_s": found_s, "wall_s": wall_s}


def _minimum_s(task: Any, library: str, seed: int, budget_s: float) -> float:
    """Seconds of one call on random arguments: the minimum of averages over `MEASUREMENT_S`, as eqtune's are."""
    interface = Interface.of(task.mod["main"])
    inputs = random_inputs(interface, seed, task.workload_hash)
    values = [inputs[i] if i in inputs else poison(spec) for i, spec in enumerate(interface.params)]
    arguments = [tvm.runtime.tensor(value) for value in values]
    module = tvm.runtime.load_module(library)
    with on_first_core():
        once_s = min(module.time_evaluator("main", tvm.cpu(), number=1, repeat=3)(*arguments).results)
        timer = module.time_evaluator("main", tvm.cpu(), number=max(1, int(MEASUREMENT_S / once_s)))
        best_s, end = math.inf, time.monotonic() + budget_s
        while math.isinf(best_s) or time.monotonic() < end:
            best_s = min(best_s, *timer(*arguments).results)
    return best_s


if __name__ == "__main__":
    print(json.dumps(main(**json.loads(sys.argv[1]))))
