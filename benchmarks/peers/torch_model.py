"""A zoo model in PyTorch, eager or compiled. `python -m benchmarks.peers.torch_model JSON`.

Compiled means max-autotune with freezing, without which neither oneDNN's packed weights nor its templates for products
are used on a CPU.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

import torch
import torch._inductor.config as inductor

from benchmarks.peers.timing import minimum_s
from eqtune import zoo


def main(model: str, threads: int, seed: int = 0, compiled: bool = False, budget_s: float = 2.0) -> dict[str, float]:
    """Latency in seconds with the zoo's weights."""
    module, inputs = zoo.torch(model, seed=seed)
    return timed(module.eval(), inputs, threads, compiled, budget_s)


def timed(
    module: torch.nn.Module, inputs: Sequence[Any], threads: int, compiled: bool, budget_s: float
) -> dict[str, float]:
    """Latency in seconds of a module in evaluation mode."""
    torch.set_num_threads(threads)
    if compiled:
        inductor.freezing = True
        module = torch.compile(module, mode="max-autotune")
    with torch.inference_mode():
        return {"latency_s": minimum_s(lambda: module(*inputs), budget_s)}


if __name__ == "__main__":
    print(json.dumps(main(**json.loads(sys.argv[1]))))
