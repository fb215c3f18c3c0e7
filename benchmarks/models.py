"""Whole models: tuned by eqtune, untuned TVM, PyTorch and ONNX Runtime, with the very same weights, in one run.

    python -m benchmarks.models --models squeezenet --budget 60 --json out.json

Latencies are the minimum over some seconds, each runtime in a process of its own with the same number of threads.
Records are fresh unless --work-dir is given.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.output import table, write
from benchmarks.peers.timing import in_own_process

PEERS = {
    "torch": ("benchmarks.peers.torch_model", {}),
    "torch-compile": ("benchmarks.peers.torch_model", {"compiled": True}),
    "onnxruntime": ("benchmarks.peers.onnxruntime_model", {}),
}


def measure(model: str, args: argparse.Namespace, work_dir: Path) -> dict[str, Any]:
    """One row."""
    import eqtune
    from eqtune import zoo

    started = time.monotonic()
    result = eqtune.tune_model(
        zoo.relax(model, seed=args.seed),
        time_budget_s=args.budget,
        trials=args.trials or (len_tasks(model) * args.trials_per_kernel if args.trials_per_kernel else None),
        work_dir=work_dir / model,
        graph=args.graph,
        threads=args.threads,
        seed=args.seed,
        progress=not args.quiet,
    )
    tune_s = time.monotonic() - started
    overheads = result.summary.overheads_s
    row: dict[str, Any] = {
        "model": model,
        "eqtune_ms": result.latency_s * 1e3,
        "untuned_ms": result.baseline_latency_s * 1e3,
        **{f"{name.replace('-', '_')}_ms": None for name in PEERS if name in args.peers},
        "rel_err": result.max_rel_error,
        "tune_s": tune_s,
        "trials": sum(task.trials for task in result.tasks),
        "threads": args.threads,
        "kernels": len(result.tasks),
        "untuned_kernels": sum(not task.tuned for task in result.tasks),
        "overhead_share": 1.0 - (overheads["build"] + overheads["run"]) / tune_s,
    }
    for name in args.peers:
        module, extra = PEERS[name]
        seconds = in_own_process(module, model=model, threads=args.threads, seed=args.seed, **extra)["latency_s"]
        row[f"{name.replace('-', '_')}_ms"] = seconds * 1e3
    return row


def len_tasks(model: str) -> int:
    """Number of distinct kernels of the model's channels-last and channels-first forms together."""
    from eqtune import zoo
    from eqtune.machine import detect_target
    from eqtune.tune.forms import model_forms

    return len(model_forms(zoo.relax(model), detect_target(), "off")[0].tasks)


def main() -> None:
    """Parse arguments, measure, print, write."""
    from eqtune import zoo

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="squeezenet", help="comma-separated names, or all")
    parser.add_argument("--budget", type=float, help="seconds of tuning a model")
    parser.add_argument("--trials", type=int, help="measurements a model")
    parser.add_argument("--trials-per-kernel", type=int, help="measurements a distinct kernel, on average")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--graph", default="saturate", help="saturate or off")
    parser.add_argument("--peers", default="torch,onnxruntime", help=f"of {', '.join(PEERS)}; empty for none")
    parser.add_argument("--work-dir", help="keep records here (default: a temporary directory)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("-q", "--quiet", action="store_true")
    parser.add_argument("--json", metavar="FILE", help="write rows here")
    args = parser.parse_args()
    args.peers = [name for name in args.peers.split(",") if name]
    unknown = set(args.peers) - set(PEERS)
    if unknown:
        parser.error(f"unknown peers {sorted(unknown)}; there are {list(PEERS)}")
    names = zoo.names() if args.models == "all" else args.models.split(",")
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        for model in names:
            rows.append(measure(model, args, Path(args.work_dir or temporary)))
            write(rows, args.json)  # a long sweep that is cut short has lost nothing
            print(table(rows[-1:]), flush=True)
    print(table(rows))


if __name__ == "__main__":
    main()
