"""A kernel in ONNX Runtime, all optimisations on. `python -m benchmarks.peers.onnxruntime_kernel JSON`."""

from __future__ import annotations

import json
import sys

from benchmarks.peers.onnxruntime_session import call_s, timed_s
from benchmarks.suites import named


def main(kernel: str, threads: int, seed: int = 0, budget_s: float = 1.0) -> dict[str, float]:
    """Latency in seconds, of which `call_s` is the fixed cost of a call."""
    case = named(kernel)
    model = case.onnx(seed).SerializeToString()
    return {"latency_s": timed_s(model, case.inputs(seed), threads, budget_s), "call_s": call_s(threads)}


if __name__ == "__main__":
    print(json.dumps(main(**json.loads(sys.argv[1]))))
