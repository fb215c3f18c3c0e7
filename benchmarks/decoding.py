"""The next word of a language model whose weights have 4 or 8 bits, beside ONNX Runtime, in one run.

    python -m benchmarks.decoding --bits 4 --budget 60 --json out.json

A decoder like Llama's (by default four layers of Llama 3.2's smallest one, random weights) gets one word, and the keys
and values of those before. PyTorch exports it, ONNX Runtime's `MatMulNBitsQuantizer` makes `MatMulNBits` of its
products, and both runtimes get that very file. ONNX Runtime runs it twice: as it says ("onnxruntime", float32), and
with `accuracy_level` 4, which rounds what is multiplied to 8 bits ("onnxruntime-rounded"). Turns are taken; the minimum
over the rounds counts. `rel_err` is the largest difference of eqtune's outputs from ONNX Runtime's in float32.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch

from benchmarks.architecture_modules import GatedDecoder
from benchmarks.models import timed_s
from benchmarks.output import comparison, report
from benchmarks.peers.timing import alternating, in_own_process

PEER = "benchmarks.peers.onnxruntime_file"

HEAD = 64
"""Width of a head."""


def export(directory: Path, args: argparse.Namespace) -> tuple[dict[str, Path], list[np.ndarray[Any, Any]]]:
    """Write the model, for ONNX Runtime at either accuracy; its inputs."""
    from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer

    torch.manual_seed(args.seed)
    queries = args.width // HEAD
    keys = queries // 4
    module = GatedDecoder(args.width, args.layers, args.words, args.places, queries, keys, args.hidden).eval()
    shape = (1, keys, args.places - 1, HEAD)
    inputs = (torch.randint(0, args.words, (1, 1)), [torch.randn(shape) for _ in range(2 * args.layers)])
    plain = directory / "float.onnx"
    with contextlib.redirect_stdout(io.StringIO()):
        torch.onnx.export(module, inputs, plain, dynamo=True, verbose=False)
    paths = {}
    for name, level in {"onnxruntime": 0, "onnxruntime-rounded": 4}.items():
        quantizer = MatMulNBitsQuantizer(
            onnx.load(plain), bits=args.bits, block_size=args.block, is_symmetric=not args.zeros, accuracy_level=level
        )
        quantizer.process()
        paths[name] = directory / f"{name}.onnx"
        quantizer.model.save_model_to_file(str(paths[name]), use_external_data_format=True)
    return paths, [inputs[0].numpy(), *(cache.numpy() for cache in inputs[1])]


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """One row."""
    import eqtune

    with tempfile.TemporaryDirectory() as directory:
        paths, arrays = export(Path(directory), args)
        started = time.monotonic()
        result = eqtune.tune_model(
            paths["onnxruntime"],
            time_budget_s=args.budget,
            threads=args.threads,
            seed=args.seed,
            work_dir=Path(directory) / "work",
            progress=not args.quiet,
        )
        tune_s = time.monotonic() - started
        if not args.quiet:
            print(result)
        np.savez(Path(directory) / "inputs.npz", *arrays)
        runs: dict[str, Any] = {"eqtune": lambda: {"latency_s": timed_s(result, arrays, args.threads)}}
        for name, path in paths.items():
            given = {"path": str(path), "inputs": str(Path(directory) / "inputs.npz"), "threads": args.threads}
            runs[name] = partial(in_own_process, PEER, **given)
        timed = alternating(runs, args.rounds, args.threads)
    return comparison(f"decoder-step-{args.bits}-bits", result, tune_s, timed, paths)


def main() -> None:
    """Parse arguments, measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bits", type=int, choices=(4, 8), default=4, help="of a weight (4)")
    parser.add_argument("--block", type=int, default=32, help="places with one scale (32)")
    parser.add_argument("--zeros", action="store_true", help="a zero point for each block, too")
    parser.add_argument("--width", type=int, default=2048, help="a multiple of 256 (2048)")
    parser.add_argument("--hidden", type=int, default=8192, help="(8192)")
    parser.add_argument("--layers", type=int, default=4, help="(4)")
    parser.add_argument("--words", type=int, default=32000, help="of the vocabulary (32000)")
    parser.add_argument("--places", type=int, default=256, help="words so far, with the next one (256)")
    parser.add_argument("--budget", type=float, default=60.0, help="seconds of tuning (60)")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="of both runtimes (all cores)")
    parser.add_argument("--rounds", type=int, default=2, help="in which the runtimes take turns, 2 s each (2)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("-q", "--quiet", action="store_true")
    parser.add_argument("--json", metavar="FILE", help="write the row here")
    args = parser.parse_args()
    if args.width % (4 * HEAD):
        parser.error(f"--width must be a multiple of {4 * HEAD}, not {args.width}")
    report([measure(args)], args.json)


if __name__ == "__main__":
    main()
