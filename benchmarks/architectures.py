"""Models of today's architectures, tuned from PyTorch and run beside other runtimes.

They are written in `architecture_modules.py`, or come from libraries (`library_models.py`).

    python -m benchmarks.architectures --budget 30 --json out.json
    python -m benchmarks.architectures --dtype bfloat16 --peers torch,torch-compile
    python -m benchmarks.architectures --architectures libraries --peers onnxruntime,torch
    python -m benchmarks.architectures --architectures image-networks --fast-math
    python -m benchmarks.architectures --architectures torchvision:resnet18,vision-transformer --batch 8

ONNX Runtime gets what `torch.onnx.export` makes of the same weights; it has no bfloat16 on a CPU. The runtimes take
turns, in processes of their own; the minimum over the rounds counts. `rel_err` is the largest difference of the outputs
from PyTorch's, relative to the largest value. A model that eqtune refuses is told on standard error, and the next one
follows; the exit code is 1 then.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from benchmarks.models import timed_s
from benchmarks.output import comparison, report
from benchmarks.peers.timing import alternating, in_own_process

PEERS: dict[str, tuple[str, dict[str, Any]]] = {
    "onnxruntime": ("benchmarks.peers.onnxruntime_architecture", {}),
    "torch": ("benchmarks.peers.torch_architecture", {"compiled": False}),
    "torch-compile": ("benchmarks.peers.torch_architecture", {"compiled": True}),
}
"""Module and further arguments."""


def measure(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """One row."""
    from torch.utils import _pytree as pytree

    import eqtune
    from benchmarks.architecture_modules import build
    from eqtune.frontends.torch.nodes import array_of_torch

    module, inputs = build(name, args.seed, args.dtype, args.batch)
    with tempfile.TemporaryDirectory() as work_dir:
        started = time.monotonic()
        result = eqtune.tune_model(
            module,
            example_inputs=inputs,
            time_budget_s=args.budget,
            threads=args.threads,
            seed=args.seed,
            work_dir=work_dir,
            fast_math=args.fast_math,
            progress=not args.quiet,
        )
        tune_s = time.monotonic() - started
        arrays = [array_of_torch(leaf) for leaf in pytree.tree_leaves(inputs)]
        runs = {"eqtune": lambda: {"latency_s": timed_s(result, arrays, args.threads)}}
        for peer in args.peers:
            peer_module, options = PEERS[peer]
            same = {key: getattr(args, key) for key in ("threads", "seed", "dtype", "batch")} | {"name": name}
            runs[peer] = partial(in_own_process, peer_module, **same, **options)
        timed = alternating(runs, args.rounds, args.threads)
    return comparison(name, result, tune_s, timed, args.peers)


def rows(names: Sequence[str], args: argparse.Namespace, refused: list[str]) -> Iterator[dict[str, Any]]:
    """Of all models but those that are `refused`, to which it adds them."""
    from eqtune.errors import EqtuneError

    for name in names:
        try:
            yield measure(name, args)
        except EqtuneError as error:
            print(f"{name}: {error}", file=sys.stderr)
            refused.append(name)


def main() -> None:
    """Parse arguments, measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = "comma-separated names, or all, libraries or image-networks: those of a kind (all)"
    parser.add_argument("--architectures", default="all", help=kinds)
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    parser.add_argument("--batch", type=int, default=1, help="repeats inputs along their first axis (1)")
    parser.add_argument("--peers", default="onnxruntime", help=f"comma-separated, of {','.join(PEERS)} (onnxruntime)")
    parser.add_argument("--budget", type=float, default=30.0, help="seconds of tuning a model (30)")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="of both runtimes (all cores)")
    parser.add_argument("--fast-math", action="store_true", help="as `eqtune tune --fast-math`")
    parser.add_argument("--rounds", type=int, default=2, help="in which the runtimes take turns, 2 s each (2)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("-q", "--quiet", action="store_true")
    parser.add_argument("--json", metavar="FILE", help="write rows here")
    args = parser.parse_args()
    args.peers = [peer for peer in args.peers.split(",") if peer]
    if set(args.peers) - set(PEERS):
        parser.error(f"unknown peers {sorted(set(args.peers) - set(PEERS))}; there are {list(PEERS)}")
    if args.dtype == "bfloat16" and "onnxruntime" in args.peers:
        parser.error("ONNX Runtime has no bfloat16 on a CPU: choose --peers torch,torch-compile")
    from benchmarks.architecture_modules import ARCHITECTURES
    from benchmarks.library_models import IMAGE_NETWORKS, LIBRARY_MODELS

    groups = {"all": ARCHITECTURES, "libraries": LIBRARY_MODELS, "image-networks": IMAGE_NETWORKS}
    every = ARCHITECTURES | LIBRARY_MODELS | IMAGE_NETWORKS
    names = list(groups.get(args.architectures, args.architectures.split(",")))
    unknown = sorted(set(names) - every.keys())
    if unknown:
        there = ", ".join(every)
        parser.error(f"no architecture {', '.join(unknown)}; there are {there}")
    refused: list[str] = []
    report(rows(names, args, refused), args.json)
    if refused:
        parser.exit(1, f"refused: {', '.join(refused)}\n")


if __name__ == "__main__":
    main()
