"""A zoo model in ONNX Runtime, all optimisations on. `python -m benchmarks.peers.onnxruntime_model JSON`."""

from __future__ import annotations

import json
import sys

import onnxruntime as ort

from benchmarks.peers.timing import minimum_s
from eqtune import zoo


def main(model: str, threads: int, seed: int = 0, budget_s: float = 2.0, path: str = "") -> dict[str, float]:
    """Latency in seconds with the zoo's weights, or of the file that was made of them."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_ALL
    source = path or zoo.onnx(model, seed=seed).SerializeToString()
    session = ort.InferenceSession(source, options, ["CPUExecutionProvider"])
    feeds = zoo.inputs(model, seed=seed)
    return {"latency_s": minimum_s(lambda: session.run(None, feeds), budget_s)}


if __name__ == "__main__":
    print(json.dumps(main(**json.loads(sys.argv[1]))))
