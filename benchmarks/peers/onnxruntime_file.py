"""An ONNX file in ONNX Runtime, all optimisations on. `python -m benchmarks.peers.onnxruntime_file JSON`."""

from __future__ import annotations

import json
import sys

import numpy as np
import onnx

from benchmarks.peers.onnxruntime_session import timed_s


def main(path: str, inputs: str, threads: int, budget_s: float = 2.0) -> dict[str, float]:
    """Latency in seconds, with the arrays of an .npz file as inputs."""
    names = [given.name for given in onnx.load(path, load_external_data=False).graph.input]
    with np.load(inputs) as arrays:
        feeds = dict(zip(names, arrays.values(), strict=True))
    return {"latency_s": timed_s(path, feeds, threads, budget_s)}


if __name__ == "__main__":
    print(json.dumps(main(**json.loads(sys.argv[1]))))
