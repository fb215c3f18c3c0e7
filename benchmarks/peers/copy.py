"""The speed of a plain copy at a kernel's working-set size. `python -m benchmarks.peers.copy JSON`."""

from __future__ import annotations

import json
import sys

import numpy as np
import tvm

from eqtune.machine import describe_machine, detect_target
from eqtune.measure.peak_kernels import copy


def main(nbytes: float, threads: int) -> dict[str, float]:
    """Bytes read plus bytes written a second, when both sides together are `nbytes` large."""
    target = detect_target(threads)
    lanes = describe_machine(target, threads=threads, measure=False).lanes(4)
    vectors = max(1, int(nbytes) // 8 // (threads * lanes))
    module = tvm.compile(copy(threads, vectors, lanes), target).jit()
    elements = threads * vectors * lanes
    function = copy(threads, vectors, lanes)
    shapes = [tuple(int(extent) for extent in parameter.shape) for parameter in function.params]
    arguments = [tvm.runtime.tensor(np.full(shape, 0.5, np.float32)) for shape in shapes]
    number = max(1, int(2e7 // nbytes))
    timer = module.time_evaluator("main", tvm.cpu(), number=number, repeat=20)
    return {"bytes_per_s": 8.0 * elements / min(timer(*arguments).results)}


if __name__ == "__main__":
    print(json.dumps(main(**json.loads(sys.argv[1]))))
