"""What starting and joining an empty parallel region costs. `python -m benchmarks.peers.parallel_start JSON`.

Almost all of it is cache lines going from core to core, so it tells in which state the machine is: on shared hosts,
virtual cores move between physical ones that share a cache and ones that do not, and everything that runs on several
threads is slower for minutes. Timings whose figures here differ by half should not be compared.
"""

from __future__ import annotations

import json
import sys

import numpy as np
import tvm

from eqtune.machine import detect_target
from eqtune.measure.affinity import on_first_core
from eqtune.measure.peak_kernels import touch


def main(threads: int) -> dict[str, float]:
    """Nanoseconds of one region, the median of 50 averages over 200 regions: a state, not a lucky moment."""
    kernel = touch(threads)
    module = tvm.compile(kernel, detect_target(threads)).jit()
    arguments = [
        tvm.runtime.tensor(np.zeros([int(extent) for extent in parameter.shape], str(parameter.dtype)))
        for parameter in kernel.params
    ]
    timer = module.time_evaluator("main", tvm.cpu(), number=200, repeat=50)
    with on_first_core():
        return {"parallel_start_ns": 1e9 * float(np.median(timer(*arguments).results))}


if __name__ == "__main__":
    print(json.dumps(main(**json.loads(sys.argv[1]))))
