"""A zoo model in ONNX Runtime, all optimisations on. `python -m benchmarks.peers.onnxruntime_model JSON`."""

from __future__ import annotations

import json
import sys

from benchmarks.peers.onnxruntime_session import timed_s
from eqtune import zoo


def main(model: str, threads: int, seed: int = 0, budget_s: float = 2.0, path: str = "") -> dict[str, float]:
    """Latency in seconds with the zoo's weights, or of the file that was made of them."""
    source = path or zoo.onnx(model, seed=seed).SerializeToString()
    return {"latency_s": timed_s(source, zoo.inputs(model, seed=seed), threads, budget_s)}


if __name__ == "__main__":
    print(json.dumps(main(**json.loads(sys.argv[1]))))
