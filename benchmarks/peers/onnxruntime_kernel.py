"""A kernel in ONNX Runtime, all optimisations on. `python -m benchmarks.peers.onnxruntime_kernel JSON`."""

from __future__ import annotations

import json
import sys

import onnxruntime as ort

from benchmarks.peers.timing import minimum_s
from benchmarks.suites import named


def main(kernel: str, threads: int, seed: int = 0, budget_s: float = 1.0) -> dict[str, float]:
    """Latency in seconds. The call's fixed cost of some microseconds is part of it, as for its users."""
    case = named(kernel)
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_ALL
    session = ort.InferenceSession(case.onnx(seed).SerializeToString(), options, ["CPUExecutionProvider"])
    feeds = case.inputs(seed)
    return {"latency_s": minimum_s(lambda: session.run(None, feeds), budget_s)}


if __name__ == "__main__":
    print(json.dumps(main(**json.loads(sys.argv[1]))))
