"""The speed of a plain copy at a kernel's working-set size. `python -m benchmarks.peers.copy JSON`."""

from __future__ import annotations

import json
import sys
from typing import Any

import numpy as np
import tvm

from benchmarks.cpu_target import cpu_target
from eqtune.machine import describe_machine
from eqtune.measure.affinity import on_first_core
from eqtune.measure.peak_kernels import copy

_PAGE_BYTES = 4096
_PLACES = (0, 64, 1024, 2048, 3072)
"""Bytes from the input's place in its page to the output's. Where loads and stores meet in the same places of the first
cache, a copy of 400 KB runs at 63 GB/s, elsewhere at 115: a copy in one place would be a limit that kernels exceed."""


def main(nbytes: float, threads: int, cpu: str | None = None) -> dict[str, float]:
    """Bytes read plus bytes written a second, when both sides together are `nbytes` large; the best of `_PLACES`.

    By the instructions of `cpu` (this machine's).
    """
    target = cpu_target(cpu, threads)
    lanes = describe_machine(target, threads=threads, measure=False).lanes(4)
    vectors = max(1, int(nbytes) // 8 // (threads * lanes))
    function = copy(threads, vectors, lanes)
    module = tvm.compile(function, target).jit()
    shape = (threads, vectors, lanes)
    number = max(1, int(2e7 // nbytes))
    timer = module.time_evaluator("main", tvm.cpu(), number=number, repeat=10)
    with on_first_core():  # as kernels are timed: beside a thread of the pool, the limit would be too low
        seconds = [min(timer(_placed(shape, 0), _placed(shape, place)).results) for place in _PLACES]
    return {"bytes_per_s": 8.0 * threads * vectors * lanes / min(seconds)}


def _placed(shape: tuple[int, ...], place: int) -> Any:
    """A float32 tensor that starts `place` bytes after the start of a page, without a copy."""
    memory = np.zeros(4 * int(np.prod(shape)) + 2 * _PAGE_BYTES, np.uint8)
    start = -memory.ctypes.data % _PAGE_BYTES + place
    values = memory[start : start + 4 * int(np.prod(shape))].view(np.float32).reshape(shape)
    values[...] = 0.5
    return tvm.runtime.from_dlpack(values)


if __name__ == "__main__":
    print(json.dumps(main(**json.loads(sys.argv[1]))))
