"""A kernel in oneDNN, through PyTorch: `python -m benchmarks.peers.onednn_kernel JSON`.

Weights of linear and convolution layers are reordered ahead of time (torch.compile with freezing, which is how its
users get oneDNN's packed weights); a plain product of two inputs is PyTorch's own call.
"""

from __future__ import annotations

import json
import sys

import torch
import torch._inductor.config as inductor

from benchmarks.peers.timing import minimum_s
from benchmarks.suites import suite


def main(kernel: str, threads: int, seed: int = 0, budget_s: float = 1.0) -> dict[str, float]:
    """Latency in seconds: the faster of frozen and eager."""
    torch.set_num_threads(threads)
    case = next(case for case in suite("all") if case.name == kernel)
    module = case.torch(seed).eval()
    inputs = [torch.from_numpy(value) for value in case.inputs(seed).values()]
    inductor.freezing = True
    with torch.no_grad():
        eager_s = minimum_s(lambda: module(*inputs), budget_s)
        frozen = torch.compile(module)
        return {"latency_s": min(eager_s, minimum_s(lambda: frozen(*inputs), budget_s)), "eager_s": eager_s}


if __name__ == "__main__":
    print(json.dumps(main(**json.loads(sys.argv[1]))))
