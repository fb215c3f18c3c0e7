"""A model of `architecture_modules.py` in PyTorch, eager or compiled.

`python -m benchmarks.peers.torch_architecture JSON`.

Compiled means max-autotune with freezing, as for the models of the zoo (`torch_model.py`).
"""

from __future__ import annotations

import json
import sys

import torch
import torch._inductor.config as inductor

from benchmarks.architecture_modules import build
from benchmarks.peers.timing import minimum_s


def main(
    name: str, threads: int, dtype: str, seed: int = 0, compiled: bool = False, budget_s: float = 2.0
) -> dict[str, float]:
    """Latency in seconds."""
    torch.set_num_threads(threads)
    module, inputs = build(name, seed, dtype)
    if compiled:
        inductor.freezing = True
        module = torch.compile(module, mode="max-autotune")
    with torch.inference_mode():
        return {"latency_s": minimum_s(lambda: module(*inputs), budget_s)}


if __name__ == "__main__":
    print(json.dumps(main(**json.loads(sys.argv[1]))))
