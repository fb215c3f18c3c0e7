"""Whole models: tuned by eqtune, untuned TVM, and peers, with the very same weights, in one run.

    python -m benchmarks.models --models squeezenet --budget 60 --json out.json

Latencies are the minimum over several rounds of some seconds each, in which the runtimes take turns, one at a time, all
with the same number of threads; the peers in processes of their own. A peer that fails is told on standard error, and
its columns are empty. The untuned model is timed once, after tuning where tuning itself took plain schedules for the
baseline (`plain_ms`). Records are fresh unless --work-dir is given.

`*_ms` are milliseconds of one run; `tune_s` is all of tuning, of which `overhead_share` (0 to 1) went to neither
building nor running candidates; `rel_err` is the largest difference from the untuned model's outputs, relative to the
largest value. `*_start_ns` is what starting a parallel region cost around the round that counts
(benchmarks/peers/parallel_start.py): figures taken in different states of the machine say little about each other.

    python -m benchmarks.models --models resnet50,resnext50,inceptionv3 --share-records --budget 600 --peers ""

shows how the records of one model help the next: `reused_kernels` had records before the model was tuned, and
`within_5_percent_s` is how long after the start the sum of its kernels was within 5 % of what it became.

The peer torch-compile (max-autotune, frozen) needs a C++ compiler. The peer metaschedule tunes the same model with
TVM's own tuner, whose builder is kept alive, for as many seconds as eqtune took, and at least --budget.
`metaschedule_tune_s` is what it took: it ends the round that has begun, and its first pass measures 64 candidates of
each kernel. `metaschedule_untuned_kernels` of its `metaschedule_kernels` were not reached or found no schedule, and
stay as TVM compiles them; `metaschedule_errors` counts candidates that failed; `metaschedule_rel_err` is as `rel_err`.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from benchmarks.convergence import records_of, within_s
from benchmarks.output import report
from benchmarks.peers.timing import PeerError, alternating, in_own_process

PEERS: dict[str, tuple[str, dict[str, Any]]] = {
    "torch": ("benchmarks.peers.torch_model", {}),
    "torch-compile": ("benchmarks.peers.torch_model", {"compiled": True}),
    "onnxruntime": ("benchmarks.peers.onnxruntime_model", {}),
    "metaschedule": ("benchmarks.peers.metaschedule_model", {}),
}


def measure(model: str, args: argparse.Namespace, work_dir: Path) -> dict[str, Any]:
    """One row."""
    import eqtune
    from eqtune import zoo

    trials = args.trials
    if args.trials_per_kernel:
        trials = len_tasks(model) * args.trials_per_kernel
    mod = zoo.relax(model, seed=args.seed)
    work_dir = work_dir / ("shared" if args.share_records else model)
    known = {record.workload_hash for record in records_of(work_dir)}
    started, started_at = time.monotonic(), time.time()
    result = eqtune.tune_model(
        mod,
        time_budget_s=args.budget,
        trials=trials,
        work_dir=work_dir,
        graph=args.graph,
        fast_math=args.fast_math,
        threads=args.threads,
        seed=args.seed,
        progress=not args.quiet,
    )
    tune_s = time.monotonic() - started
    overheads = result.summary.overheads_s
    arguments = {"model": model, "threads": args.threads, "seed": args.seed}
    inputs = list(zoo.inputs(model, seed=args.seed).values())
    runs = {"eqtune": lambda: {"latency_s": timed_s(result, inputs, args.threads)}}
    metaschedule: dict[str, Any] = {}
    for name in args.peers:
        module, extra = PEERS[name]
        if name == "metaschedule":
            extra = {"library": str((work_dir / f"metaschedule-{model}.so").resolve())}
            metaschedule = tuned_by(
                module, {**arguments, **extra}, args.metaschedule_budget or max(tune_s, args.budget or 0.0)
            )
            if not metaschedule:
                continue
        runs[name] = partial(in_own_process, module, **arguments, **extra)
    timed = alternating(runs, args.rounds, args.threads)
    columns = ["torch", "onnxruntime", *(name for name in args.peers if name not in ("torch", "onnxruntime"))]
    return {
        "model": model,
        "eqtune_ms": timed["eqtune"].latency_s * 1e3,
        "untuned_ms": _untuned_s(result, mod, model, args) * 1e3,
        "plain_ms": result.baseline_latency_s * 1e3 if result.summary.plain_baseline else None,
        **{f"{name.replace('-', '_')}_ms": timed[name].latency_s * 1e3 if name in timed else None for name in columns},
        "rel_err": result.max_rel_error,
        "tune_s": tune_s,
        "trials": sum(task.trials for task in result.tasks),
        "threads": args.threads,
        "kernels": len(result.tasks),
        "untuned_kernels": sum(not task.tuned for task in result.tasks),
        "reused_kernels": sum(task.workload_hash in known for task in result.tasks),
        "within_5_percent_s": within_s(result.summary, records_of(work_dir), started_at),
        **({"fast_math": result.summary.graph["fast math"]} if args.fast_math else {}),
        **{f"metaschedule_{name}": value for name, value in metaschedule.items()},
        "overhead_share": 1.0 - (overheads["build"] + overheads["run"]) / tune_s,
        **{f"{name.replace('-', '_')}_start_ns": one.start_ns for name, one in timed.items()},
    }


def tuned_by(module: str, arguments: dict[str, Any], seconds: float) -> dict[str, Any]:
    """What a peer that tunes says of it; nothing where it fails, and then there is no library to time either."""
    Path(arguments["library"]).unlink(missing_ok=True)  # of another run
    try:
        return in_own_process(module, **arguments, seconds=seconds)
    except PeerError as error:
        print(error, file=sys.stderr)
        return {}


def timed_s(result: Any, inputs: Sequence[NDArray[Any]], threads: int) -> float:
    """Seconds of one run of a tuned model: the minimum over two seconds."""
    from eqtune.runtime import ModelRunner, time_side_by_side

    runner = ModelRunner(result.compile(), threads=threads)
    return time_side_by_side([runner], inputs, budget_s=2.0, at_least=5)[0]


def _untuned_s(result: Any, mod: Any, model: str, args: argparse.Namespace) -> float:
    """Seconds of one run of the model as stock TVM compiles it, which tuning itself may have spared."""
    if not result.summary.plain_baseline:
        return float(result.baseline_latency_s)
    from eqtune import zoo
    from eqtune.compile.untuned import untuned_executable
    from eqtune.frontends import load_model
    from eqtune.machine import detect_target
    from eqtune.runtime import ModelRunner

    untuned = ModelRunner(untuned_executable(load_model(mod).mod, detect_target(args.threads)), threads=args.threads)
    inputs = zoo.inputs(model, seed=args.seed).values()
    started = time.monotonic()
    untuned(*inputs)
    return time.monotonic() - started


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
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="of every runtime (all cores)")
    parser.add_argument("--graph", default="saturate", help="saturate or off")
    parser.add_argument("--fast-math", action="store_true", help="permit Winograd's convolutions, as eqtune tune does")
    parser.add_argument("--share-records", action="store_true", help="one work directory for all models")
    parser.add_argument("--peers", default="torch,onnxruntime", help=f"of {', '.join(PEERS)}; empty for none")
    parser.add_argument("--metaschedule-budget", type=float, help="seconds for it instead of those")
    parser.add_argument("--rounds", type=int, default=3, help="in which the runtimes take turns, 2 s each (3)")
    parser.add_argument("--work-dir", help="keep records here (default: a temporary directory)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("-q", "--quiet", action="store_true")
    parser.add_argument("--json", metavar="FILE", help="write rows here")
    args = parser.parse_args()
    args.peers = [name for name in args.peers.split(",") if name]
    unknown = set(args.peers) - set(PEERS)
    if unknown:
        parser.error(f"unknown peers {sorted(unknown)}; there are {list(PEERS)}")
    if args.trials and args.trials_per_kernel:
        parser.error("--trials and --trials-per-kernel are two ways to say the same: give one")
    names = zoo.names() if args.models == "all" else args.models.split(",")
    with tempfile.TemporaryDirectory() as temporary:
        report((measure(model, args, Path(args.work_dir or temporary)) for model in names), args.json)


if __name__ == "__main__":
    main()
