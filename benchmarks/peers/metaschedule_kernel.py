"""A kernel tuned by MetaSchedule. `python -m benchmarks.peers.metaschedule_kernel JSON`."""

from __future__ import annotations

import json
import os
import sys

from benchmarks.peers import metaschedule
from benchmarks.suites import named
from eqtune.machine import detect_target
from eqtune.tasks import extract_tasks, lower_to_kernels
from eqtune.transform.simplify import simplify


def main(kernel: str, threads: int, trials: int, seed: int = 0) -> dict[str, float]:
    """Sum of the kernels' latencies in seconds, and the wall-clock seconds of tuning them after imports."""
    os.environ["TVM_NUM_THREADS"] = str(threads)
    case = named(kernel)
    target = detect_target(threads)
    metaschedule.warm_up()
    results = [
        (task.calls, metaschedule.tune(task.mod, target, trials, seed))
        for task in extract_tasks(lower_to_kernels(simplify(case.relax(seed)), target))
    ]
    return {
        "latency_s": sum(calls * result.latency_s for calls, result in results),
        "wall_s": sum(result.wall_s for _, result in results),
    }


if __name__ == "__main__":
    print(json.dumps(main(**json.loads(sys.argv[1]))))
