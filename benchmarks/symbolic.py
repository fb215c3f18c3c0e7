"""An encoder of any number of places: compiled once by the pipeline "eqtune", and run at several lengths by its peers.

    python -m benchmarks.symbolic --layers 4 --lengths 1,16,100,128,384,512 --json out.json

PyTorch exports the encoder with a dynamic length, TVM imports it, and `relax_pipeline="eqtune"` compiles it: nothing is
measured. ONNX Runtime gets the same encoder as a file with a dynamic length; PyTorch runs it eagerly, and compiled with
`dynamic=True`. Each runtime has a process of its own, all lengths in it, and takes its turns; milliseconds are the
minimum. `rel_err` is eqtune's largest difference from PyTorch's eager outputs, relative to the largest.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.output import report
from benchmarks.peers.symbolic_encoder import Encoder, example
from benchmarks.peers.timing import PeerError, in_own_process

PEER = "benchmarks.peers.symbolic_encoder"

RUNTIMES = ("eqtune", "onnxruntime", "torch", "torch-compile")


def compile_encoder(args: argparse.Namespace, directory: Path) -> float:
    """Write what ONNX Runtime and TVM load into the directory; seconds that eqtune's pipeline took."""
    import torch
    import tvm
    from tvm import relax
    from tvm.relax.frontend.torch import from_exported_program

    import eqtune  # noqa: F401  registers the pipeline
    from eqtune.machine import detect_target

    encoder, x = Encoder(args.layers, args.width, args.heads, args.seed), example(20, args.width)
    shapes = ({1: torch.export.Dim("places", min=1, max=4096)},)
    torch.onnx.export(
        encoder,
        (x,),
        directory / "encoder.onnx",
        input_names=["input"],
        dynamo=True,
        dynamic_shapes=shapes,
        verbose=False,
    )
    program = torch.export.export(encoder, (x,), dynamic_shapes=shapes)
    module = from_exported_program(program, unwrap_unit_return_tuple=True)
    started = time.monotonic()
    executable = tvm.compile(module, target=detect_target(), relax_pipeline=relax.get_pipeline("eqtune"))
    executable.export_library(str(directory / "encoder.so"))
    return time.monotonic() - started


def measure(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """One row for each length."""
    lengths = [int(length) for length in args.lengths.split(",")]
    with tempfile.TemporaryDirectory() as directory:
        compile_s = compile_encoder(args, Path(directory))
        best: dict[str, dict[str, float]] = {runtime: {} for runtime in RUNTIMES}
        errors: dict[str, float] = {}
        arguments = {"layers": args.layers, "width": args.width, "heads": args.heads, "seed": args.seed}
        for _ in range(args.rounds):
            for runtime in RUNTIMES:
                try:
                    answer = in_own_process(
                        PEER, runtime=runtime, lengths=lengths, directory=directory, threads=args.threads, **arguments
                    )
                except PeerError as error:
                    print(error, file=sys.stderr)
                    continue
                for length, seconds in answer["latency_s"].items():
                    best[runtime][length] = min(seconds, best[runtime].get(length, float("inf")))
                errors |= answer.get("rel_err", {})
    for length in map(str, lengths):
        row: dict[str, Any] = {"model": f"encoder_{length}", "compile_s": compile_s}
        row |= {f"{name}_ms": best[name].get(length, float("nan")) * 1e3 for name in RUNTIMES}
        fastest = min(best[name].get(length, float("inf")) for name in RUNTIMES[1:])
        yield row | {"vs_best": fastest / best["eqtune"][length], "rel_err": errors[length]}


def main() -> None:
    """Parse arguments, compile, measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--lengths", default="1,7,16,50,100,128,200,384,512", help="comma-separated")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="of every runtime (all cores)")
    parser.add_argument("--rounds", type=int, default=2, help="in which the runtimes take turns (2)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", metavar="FILE", help="write rows here")
    args = parser.parse_args()
    report(measure(args), args.json)


if __name__ == "__main__":
    main()
