"""A kernel in oneDNN, through PyTorch: `python -m benchmarks.peers.onednn_kernel JSON`.

Weights of linear and convolution layers are reordered ahead of time (torch.compile with freezing, which is how its
users get oneDNN's packed weights); a plain product of two inputs is PyTorch's own call. Results lie in memory as their
shape says: a transposition is carried out, which PyTorch would otherwise put off.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
import torch._inductor.config as inductor

from benchmarks.peers.timing import minimum_s
from benchmarks.suites import named


def main(kernel: str, threads: int, seed: int = 0, budget_s: float = 1.0) -> dict[str, float]:
    """Latency in seconds: the faster of frozen and eager."""
    torch.set_num_threads(threads)
    case = named(kernel)
    module = case.torch(seed).eval()
    inputs = [_tensor(value) for value in case.inputs(seed).values()]
    inductor.freezing = True
    with torch.inference_mode():
        eager_s = minimum_s(lambda: module(*inputs).contiguous(), budget_s)
        frozen = torch.compile(module)
        frozen_s = minimum_s(lambda: frozen(*inputs).contiguous(), budget_s)
        return {"latency_s": min(eager_s, frozen_s), "eager_s": eager_s}


def _tensor(value: Any) -> Any:
    """PyTorch knows bfloat16, and not numpy's."""
    half = value.dtype.name == "bfloat16"
    return torch.from_numpy(value.astype("float32")).bfloat16() if half else torch.from_numpy(value)


if __name__ == "__main__":
    print(json.dumps(main(**json.loads(sys.argv[1]))))
