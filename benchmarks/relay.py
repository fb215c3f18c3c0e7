"""Relay programs: how fast a BERT-base is read and converted, whether it is right, and how fast it runs once tuned.

    python -m benchmarks.relay --json out.json
    python -m benchmarks.relay --budget 600 --json out.json

The program is written here as the PyTorch importer of Relay wrote it, operator by operator, with the weights of the
zoo's model as parameters. Its outputs are compared with PyTorch's. With --budget, it is tuned, and so is the same model
through the PyTorch front end, each with records of its own and the whole budget; both are then timed in turn.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.output import table, write

Array = NDArray[Any]

LAYERS, HEADS, WIDTH, LENGTH = 12, 12, 768, 64


class Program:
    """Lines of a Relay function, each bound to a graph variable."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def bind(self, right: str) -> str:
        """Append `%n = right;` and return `%n`."""
        self.lines.append(f"  %{len(self.lines)} = {right};\n")
        return f"%{len(self.lines) - 1}"

    def linear(self, x: str, name: str, into: int, out: int) -> str:
        """A layer over the last axis of (1, LENGTH, into): flattened for nn.dense, and back."""
        rows = self.bind(f"reshape({x}, newshape=[-1, {into}])")
        product = self.bind(f"nn.dense({rows}, %{name}.weight, units={out})")
        whole = self.bind(f"reshape({product}, newshape=[1, {LENGTH}, {out}])")
        return self.bind(f"add({whole}, %{name}.bias)")

    def heads(self, x: str, axes: str) -> str:
        """(1, LENGTH, WIDTH) to three axes, one for the heads."""
        split = self.bind(f"reshape({x}, newshape=[1, {LENGTH}, {HEADS}, {WIDTH // HEADS}])")
        moved = self.bind(f"transpose({split}, axes={axes})")
        return self.bind(f"reshape({moved}, newshape=[-3, -2])")

    def norm(self, x: str, name: str) -> str:
        """Layer normalisation over the last axis."""
        return self.bind(f"nn.layer_norm({x}, %{name}.weight, %{name}.bias, epsilon=1e-12f)")

    def gelu(self, x: str) -> str:
        """x * (0.5 + 0.5 * erf(x / sqrt(2)))."""
        error = self.bind(f"erf({self.bind(f'multiply({x}, 0.707106781f)')})")
        half = self.bind(f"add({self.bind(f'multiply({error}, 0.5f)')}, 0.5f)")
        return self.bind(f"multiply({x}, {half})")


def bert_text(params: dict[str, Array]) -> str:
    """BERT-base over embeddings (1, LENGTH, WIDTH); `params` are the parameters by the names of PyTorch's modules."""
    p = Program()
    x = "%embeddings"
    for layer in range(LAYERS):
        name = f"layer{layer}"
        projected = [p.linear(x, f"{name}.attention.{part}", WIDTH, WIDTH) for part in ("query", "key", "value")]
        query, key, value = (p.heads(part, "[0, 2, 1, 3]") for part in projected)
        scores = p.bind(f"nn.batch_matmul({query}, {key}, transpose_b=True)")
        scaled = p.bind(f"multiply({scores}, {(WIDTH // HEADS) ** -0.5!r}f)")
        context = p.bind(f"nn.batch_matmul({p.bind(f'nn.softmax({scaled})')}, {value})")
        split = p.bind(f"reshape({context}, newshape=[-4, 1, {HEADS}, -2])")
        joined = p.bind(f"reshape({p.bind(f'transpose({split}, axes=[0, 2, 1, 3])')}, newshape=[0, 0, -1])")
        attended = p.bind(f"add({p.linear(joined, f'{name}.attention.output', WIDTH, WIDTH)}, {x})")
        x = p.norm(attended, f"{name}.attention.norm")
        hidden = p.gelu(p.linear(x, f"{name}.intermediate", WIDTH, 4 * WIDTH))
        x = p.norm(p.bind(f"add({p.linear(hidden, f'{name}.output', 4 * WIDTH, WIDTH)}, {x})"), f"{name}.norm")
    types = {"embeddings": (1, LENGTH, WIDTH), **{name: array.shape for name, array in params.items()}}
    declared = ",\n  ".join(f"%{name}: Tensor[({', '.join(map(str, s))}), float32]" for name, s in types.items())
    return f'#[version = "0.0.5"]\ndef @main(\n  {declared}) {{\n{"".join(p.lines)}  {x}\n}}\n'


def best_s(run: Callable[[], Any], repeats: int = 5) -> float:
    """Seconds of one call, the minimum of several."""
    times = []
    for _ in range(repeats):
        before = time.perf_counter()
        run()
        times.append(time.perf_counter() - before)
    return min(times)


def read(text: str, params: dict[str, Array], module: Any, example: Any, threads: int) -> dict[str, Any]:
    """Time parsing and conversion; compare the outputs of the converted program with PyTorch's."""
    import torch

    from eqtune import transform
    from eqtune.compile.untuned import untuned_executable
    from eqtune.machine import detect_target
    from eqtune.relay.convert import convert
    from eqtune.relay.parser import parse
    from eqtune.runtime import ModelRunner

    program = parse(text)
    mod = convert(program, params)
    with torch.no_grad():
        expected = module(example).numpy()
    mod = transform.FoldWeights()(mod)
    (actual,) = ModelRunner(untuned_executable(mod, detect_target(threads)), threads=threads)(example.numpy())
    return {
        "lines": text.count("\n"),
        "parse_s": best_s(lambda: parse(text)),
        "convert_s": best_s(lambda: convert(program, params)),
        "rel_err": float(np.abs(actual - expected).max() / np.abs(expected).max()),
    }


def tuned(text: str, params: dict[str, Array], module: Any, example: Any, args: argparse.Namespace) -> dict[str, Any]:
    """Latencies of both ways, each the minimum of runs in turn."""
    import eqtune

    options = {"time_budget_s": args.budget, "threads": args.threads, "seed": args.seed, "progress": not args.quiet}
    with tempfile.TemporaryDirectory() as temporary:
        # Budgets are totals over all runs in a work directory: in one, the second way would find it spent.
        folder = Path(args.work_dir or temporary)
        by_torch = eqtune.tune_model(module, example_inputs=[example], work_dir=folder / "bert_base-torch", **options)
        by_relay = eqtune.tune_model(text, params=params, work_dir=folder / "bert_base-relay", **options)
    data = example.numpy()
    seconds: dict[str, list[float]] = {"torch": [], "relay": []}
    for _ in range(20):
        seconds["torch"].append(best_s(lambda: by_torch.run(data), 1))
        seconds["relay"].append(best_s(lambda: by_relay.run(data), 1))
    through_torch, through_relay = min(seconds["torch"]), min(seconds["relay"])
    return {
        "torch_frontend_ms": through_torch * 1e3,
        "relay_ms": through_relay * 1e3,
        "relay_to_torch": through_relay / through_torch,
    }


def main() -> None:
    """Parse arguments, measure, print, write."""
    from eqtune import zoo

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", type=float, help="seconds of tuning each way; without it nothing is tuned")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--work-dir", help="keep records here (default: a temporary directory)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("-q", "--quiet", action="store_true")
    parser.add_argument("--json", metavar="FILE", help="write rows here")
    args = parser.parse_args()
    module, (example,) = zoo.torch("bert_base", seed=args.seed, sequence_length=LENGTH)
    params = {name: tensor.detach().numpy() for name, tensor in module.state_dict().items()}
    text = bert_text(params)
    row = {"model": "bert_base", **read(text, params, module, example, args.threads)}
    if args.budget:
        row |= tuned(text, params, module, example, args)
    write([row], args.json)
    print(table([row]))


if __name__ == "__main__":
    main()
