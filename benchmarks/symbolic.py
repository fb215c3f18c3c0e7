"""A model whose sizes are open: tuned once by eqtune, and run at several sizes, as by its peers.

    python -m benchmarks.symbolic --layers 4 --lengths 1,16,100,128,384,512 --json out.json
    python -m benchmarks.symbolic --model resnet50 --batches 1,4,16 --budget 150
    python -m benchmarks.symbolic --model mobilenetv2 --images 224x224,480x640
    python -m benchmarks.symbolic --model vgg19 --batches 4,1,16 --fast-math

An encoder of any number of places, or a network of the zoo for any batch, or for images of any size. PyTorch exports it
with that size open, and `eqtune.tune_model` makes a library of it. ONNX Runtime gets the same model as a file with that
size open; PyTorch runs it eagerly, and compiled with `dynamic=True`, frozen. Each runtime has a process of its own, all
sizes in it, and takes its turns; milliseconds are the minimum. `rel_err` is eqtune's largest difference from PyTorch's
eager outputs, relative to the largest.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.output import report
from benchmarks.peers.symbolic_model import example, model_of
from benchmarks.peers.timing import PeerError, in_own_process

PEER = "benchmarks.peers.symbolic_model"

RUNTIMES = ("eqtune", "onnxruntime", "torch", "torch-compile")


def open_model(args: argparse.Namespace) -> tuple[dict[str, list[int]], dict[int, Any]]:
    """Shapes of the input by label, the first one to export with; the open dimensions."""
    from torch.export import Dim

    if args.model == "encoder":
        lengths = [int(length) for length in args.lengths.split(",")]
        return {str(n): [1, n, args.width] for n in lengths}, {1: Dim("places", min=1, max=4096)}
    if args.images:
        sizes = [[int(side) for side in size.split("x")] for size in args.images.split(",")]
        shapes = {f"{height}x{width}": [1, 3, height, width] for height, width in sizes}
        return shapes, {2: Dim("height", min=64, max=4096), 3: Dim("width", min=64, max=4096)}
    batches = [int(batch) for batch in args.batches.split(",")]
    return {str(n): [n, 3, args.image, args.image] for n in batches}, {0: Dim("batch", min=1, max=1024)}


def compile_model(given: Mapping[str, Any], args: argparse.Namespace, open_dimensions: dict[int, Any]) -> float:
    """Write what ONNX Runtime and TVM load into the directory; seconds that eqtune took, with all comparisons."""
    import torch

    import eqtune

    directory, model, dynamic = Path(given["directory"]), model_of(given), (open_dimensions,)
    shape = next(iter(given["shapes"].values()))
    x = example([2 if place in open_dimensions and extent == 1 else extent for place, extent in enumerate(shape)])
    torch.onnx.export(
        model,
        (x,),
        directory / "model.onnx",
        input_names=["input"],
        dynamo=True,
        dynamic_shapes=dynamic,
        verbose=False,
    )
    program = torch.export.export(model, (x,), dynamic_shapes=dynamic)
    started = time.monotonic()
    result = eqtune.tune_model(
        program,
        work_dir=directory / "work",
        threads=args.threads,
        time_budget_s=args.budget,
        seed=args.seed,
        fast_math=args.fast_math,
    )
    compiled_s = time.monotonic() - started
    result.export(directory / "model.so")
    return compiled_s


def measure(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """One row for each size."""
    shapes, open_dimensions = open_model(args)
    with tempfile.TemporaryDirectory() as directory:
        given = {name: getattr(args, name) for name in ("model", "layers", "width", "heads", "seed", "threads")}
        given |= {"shapes": shapes, "directory": directory}
        compile_s = compile_model(given, args, open_dimensions)
        best: dict[str, dict[str, float]] = {runtime: {} for runtime in RUNTIMES}
        errors: dict[str, float] = {}
        for _ in range(args.rounds):
            for runtime in RUNTIMES:
                try:
                    answer = in_own_process(PEER, runtime=runtime, **given)
                except PeerError as error:
                    print(error, file=sys.stderr)
                    continue
                for label, seconds in answer["latency_s"].items():
                    best[runtime][label] = min(seconds, best[runtime].get(label, float("inf")))
                errors |= answer.get("rel_err", {})
    for label in shapes:
        row: dict[str, Any] = {"model": f"{args.model}_{label}", "compile_s": compile_s}
        row |= {f"{name}_ms": best[name].get(label, float("nan")) * 1e3 for name in RUNTIMES}
        fastest = min(best[name].get(label, float("inf")) for name in RUNTIMES[1:])
        yield row | {"vs_best": fastest / best["eqtune"][label], "rel_err": errors[label]}


def main() -> None:
    """Parse arguments, compile, measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="encoder", help='"encoder" (default), or an image network of the zoo')
    parser.add_argument("--layers", type=int, default=4, help="of the encoder, as the next two")
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--lengths", default="1,7,16,50,100,128,200,384,512", help="of the encoder, comma-separated")
    parser.add_argument("--batches", default="1,2,4,16", help="of images, where --images is not given")
    parser.add_argument("--image", type=int, default=224, help="height and width of a batch's images (224)")
    parser.add_argument("--images", help="sizes of single images instead, as 224x224,480x640")
    parser.add_argument(
        "--budget", type=float, default=1.0, help="seconds of tuning, at the first size; 1 (default) measures nothing"
    )
    parser.add_argument("--fast-math", action="store_true", help="permit eqtune Winograd's convolutions")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="of every runtime (all cores)")
    parser.add_argument("--rounds", type=int, default=2, help="in which the runtimes take turns (2)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", metavar="FILE", help="write rows here")
    args = parser.parse_args()
    report(measure(args), args.json)


if __name__ == "__main__":
    main()
