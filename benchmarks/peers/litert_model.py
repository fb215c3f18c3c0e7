"""A TFLite model in LiteRT's interpreter, with XNNPACK. `python -m benchmarks.peers.litert_model JSON`."""

from __future__ import annotations

import json
import sys

from ai_edge_litert.interpreter import Interpreter

from benchmarks.peers.timing import minimum_s
from eqtune.frontends import load_model


def main(path: str, threads: int, seed: int = 0, budget_s: float = 2.0) -> dict[str, float]:
    """Latency in seconds of one `invoke`, inputs set before."""
    interpreter = Interpreter(model_path=path, num_threads=threads)
    interpreter.allocate_tensors()
    inputs = load_model(path).random_inputs(seed)
    for details, array in zip(interpreter.get_input_details(), inputs, strict=True):
        interpreter.set_tensor(details["index"], array)
    return {"latency_s": minimum_s(interpreter.invoke, budget_s)}


if __name__ == "__main__":
    print(json.dumps(main(**json.loads(sys.argv[1]))))
