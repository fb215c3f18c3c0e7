"""Zoo models in 8 bits: quantised by ONNX Runtime, tuned by eqtune, and run by both, in one run.

    python -m benchmarks.quantized --models squeezenet,mobilenetv2,resnet50 --budget 120 --json out.json

ONNX Runtime's `quantize_static` calibrates on three random inputs, with unsigned activations and weights a channel
(`--signed`: signed activations, its default). Both runtimes get the very same file, and take turns; `float_ms` is ONNX
Runtime on the model before. `rel_err` is the largest difference of the outputs from ONNX Runtime's, relative to the
largest; 0 means bit for bit the same. `--target x86-64-v3` lets eqtune use fewer instructions than this machine has;
ONNX Runtime takes those that it finds.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.models import timed_s
from benchmarks.output import comparison, report
from benchmarks.peers.timing import alternating, in_own_process

PEER = "benchmarks.peers.onnxruntime_model"

CALIBRATION = 3
"""Random inputs that tell the ranges of activations."""


def quantize(model: str, directory: Path, args: argparse.Namespace) -> Path:
    """Write a zoo model, quantised; its path."""
    import onnx
    from onnxruntime import quantization
    from onnxruntime.quantization.shape_inference import quant_pre_process

    from eqtune import zoo

    class Calibration(quantization.CalibrationDataReader):  # type: ignore[misc]
        def __init__(self) -> None:
            self.left = [zoo.inputs(model, seed=args.seed + number) for number in range(CALIBRATION)]

        def get_next(self) -> Any:
            return self.left.pop() if self.left else None

    plain, prepared, result = (directory / f"{model}-{name}.onnx" for name in ("float", "prepared", "quantized"))
    onnx.save(zoo.onnx(model, seed=args.seed), plain)
    quant_pre_process(plain, prepared, skip_symbolic_shape=True)
    quantization.quantize_static(
        prepared,
        result,
        Calibration(),
        quant_format=quantization.QuantFormat[args.format],
        activation_type=quantization.QuantType.QInt8 if args.signed else quantization.QuantType.QUInt8,
        weight_type=quantization.QuantType.QInt8,
        per_channel=True,
    )
    return result


def measure(model: str, args: argparse.Namespace) -> dict[str, Any]:
    """One row."""
    import eqtune
    from eqtune import zoo

    with tempfile.TemporaryDirectory() as directory:
        path = quantize(model, Path(directory), args)
        started = time.monotonic()
        result = eqtune.tune_model(
            path,
            target={"kind": "llvm", "mcpu": args.target} if args.target else None,
            time_budget_s=args.budget,
            work_dir=Path(directory) / "work",
            threads=args.threads,
            seed=args.seed,
            progress=not args.quiet,
        )
        tune_s = time.monotonic() - started
        arguments = {"model": model, "threads": args.threads, "seed": args.seed}
        inputs = [np.asarray(value) for value in zoo.inputs(model, seed=args.seed).values()]
        timed = alternating(
            {
                "eqtune": lambda: {"latency_s": timed_s(result, inputs, args.threads)},
                "onnxruntime": partial(in_own_process, PEER, **arguments, path=str(path)),
                "float": partial(in_own_process, PEER, **arguments),
            },
            args.rounds,
            args.threads,
        )
    kernels_s = sum(task.calls * task.latency_s for task in result.tasks)
    return comparison(model, result, tune_s, timed, ["onnxruntime"]) | {"kernels_ms": kernels_s * 1e3}


def main() -> None:
    """Parse arguments, quantise, measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="squeezenet", help="comma-separated names of the zoo")
    parser.add_argument("--format", default="QDQ", choices=["QDQ", "QOperator"])
    parser.add_argument("--signed", action="store_true", help="signed activations")
    parser.add_argument("--budget", type=float, default=120.0, help="seconds of tuning a model (120)")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="of both runtimes (all cores)")
    parser.add_argument("--target", metavar="CPU", help="of eqtune, as LLVM names it (this one)")
    parser.add_argument("--rounds", type=int, default=3, help="in which the runtimes take turns, 2 s each (3)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("-q", "--quiet", action="store_true")
    parser.add_argument("--json", metavar="FILE", help="write rows here")
    args = parser.parse_args()
    report((measure(model, args) for model in args.models.split(",")), args.json)


if __name__ == "__main__":
    main()
