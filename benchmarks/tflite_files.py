"""TFLite files: tuned by eqtune, and run beside LiteRT's interpreter (XNNPACK), in one run.

    python -m benchmarks.tflite_files model.tflite model_int8.tflite --budget 60 --json out.json

The runtimes take turns, each in two seconds of calls; the minimum counts. `rel_err` is the largest difference of the
outputs from the interpreter's, relative to the largest.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.models import timed_s
from benchmarks.output import comparison, report
from benchmarks.peers.timing import alternating, in_own_process

PEER = "benchmarks.peers.litert_model"


def measure(path: Path, args: argparse.Namespace) -> dict[str, Any]:
    """One row."""
    import eqtune
    from eqtune.frontends import load_model

    started = time.monotonic()
    with tempfile.TemporaryDirectory() as work_dir:
        result = eqtune.tune_model(
            path,
            time_budget_s=args.budget,
            work_dir=work_dir,
            threads=args.threads,
            fast_math=args.fast_math,
            seed=args.seed,
            progress=not args.quiet,
        )
    tune_s = time.monotonic() - started
    inputs = load_model(path).random_inputs(args.seed)
    timed = alternating(
        {
            "eqtune": lambda: {"latency_s": timed_s(result, inputs, args.threads)},
            "litert": partial(in_own_process, PEER, path=str(path.resolve()), threads=args.threads, seed=args.seed),
        },
        args.rounds,
        args.threads,
    )
    return comparison(path.stem, result, tune_s, timed, ["litert"])


def main() -> None:
    """Parse arguments, measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="TFLite models")
    parser.add_argument("--budget", type=float, default=60.0, help="seconds of tuning a model (60)")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="of both runtimes (all cores)")
    parser.add_argument("--fast-math", action="store_true", help="permit it")
    parser.add_argument("--rounds", type=int, default=3, help="in which the runtimes take turns, 2 s each (3)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("-q", "--quiet", action="store_true")
    parser.add_argument("--json", metavar="FILE", help="write rows here")
    args = parser.parse_args()
    report((measure(path, args) for path in args.files), args.json)


if __name__ == "__main__":
    main()
