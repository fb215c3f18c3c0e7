"""One runtime on a model with open sizes, at several of them: `python -m benchmarks.peers.symbolic_model JSON`."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch._inductor.config as inductor
import torch.nn.functional as F
from torch import nn

from benchmarks.peers.timing import minimum_s
from eqtune import zoo

SECONDS = 1.5
"""Of each size, in which calls are repeated."""


class Layer(nn.Module):
    """Attention and two dense layers, normalised first."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.projections, self.joined = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[1, places, width] -> [1, places, width]."""
        batch, places, width = x.shape
        parts = self.projections(self.first(x)).split(width, dim=-1)
        query, key, value = (p.view(batch, places, self.heads, width // self.heads).transpose(1, 2) for p in parts)
        seen = F.scaled_dot_product_attention(query, key, value)
        x = x + self.joined(seen.transpose(1, 2).reshape(batch, places, width))
        return x + self.narrow(F.gelu(self.wide(self.second(x))))


class Encoder(nn.Sequential):
    """Layers with seeded random weights."""

    def __init__(self, layers: int, width: int, heads: int, seed: int) -> None:
        torch.manual_seed(seed)
        super().__init__(*(Layer(width, heads) for _ in range(layers)))
        self.eval().requires_grad_(False)


def model_of(given: Mapping[str, Any]) -> nn.Module:
    """The encoder, or a model of the zoo; `given` as this program is."""
    if given["model"] == "encoder":
        return Encoder(given["layers"], given["width"], given["heads"], given["seed"])
    module, _ = zoo.torch(given["model"], given["seed"])
    return module.eval().requires_grad_(False)


def example(shape: Sequence[int]) -> torch.Tensor:
    """Seeded inputs."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def of_eqtune(directory: Path) -> Callable[[torch.Tensor], torch.Tensor]:
    """The library that eqtune exported, as a function."""
    import tvm
    from tvm import relax

    machine = relax.VirtualMachine(tvm.runtime.load_module(str(directory / "model.so")), tvm.cpu())
    return lambda x: torch.from_dlpack(machine["main"](tvm.runtime.from_dlpack(x)))


def main() -> None:
    """Time one runtime at each shape of its input."""
    given = json.loads(sys.argv[1])
    directory, runtime, threads = Path(given["directory"]), given["runtime"], given["threads"]
    torch.set_num_threads(threads)
    inputs = {label: example(shape) for label, shape in given["shapes"].items()}
    if runtime == "onnxruntime":
        from benchmarks.peers.onnxruntime_session import timed_s

        path = directory / "model.onnx"
        answer = {"latency_s": {n: timed_s(path, {"input": x.numpy()}, threads, SECONDS) for n, x in inputs.items()}}
        print(json.dumps(answer))
        return
    model = model_of(given)
    call = model
    if runtime == "eqtune":
        call = of_eqtune(directory)
    elif runtime == "torch-compile":
        inductor.freezing = True  # without it, oneDNN's packed weights are not used
        call = torch.compile(model, dynamic=True)
    with torch.inference_mode():
        seconds = {n: minimum_s(partial(call, x), SECONDS) for n, x in inputs.items()}
        # PyTorch's threads would be in the way of what is timed.
        errors = {n: relative_error(call(x), model(x)) for n, x in inputs.items()} if runtime == "eqtune" else {}
    print(json.dumps({"latency_s": seconds, "rel_err": errors}))


def relative_error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """The largest difference, relative to the largest value."""
    return float((found - wanted).abs().max() / wanted.abs().max())


if __name__ == "__main__":
    main()
