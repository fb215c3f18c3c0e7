"""Single kernels: eqtune against the machine's peak and against peers, in one run.

    python -m benchmarks.kernels --suite matmul --trials 64 --threads 1 --json out.json
    python -m benchmarks.kernels --suite all --peers onednn,onnxruntime,metaschedule --threads 1,2

`peak_fraction` is speed over the measured FMA peak for compute-bound kernels. For the others it is the time that the
slower of two limits takes, over the measured time, and `limit` tells which one it is: "bandwidth" of a copy of the same
size (`bandwidth_fraction` is always over this one), or "arithmetic", the multiply-adds of depthwise convolutions and
the multiplications of functions such as exp, at the FMA peak (`Case.arithmetic_s`).

The suites "int8" and "bf16" (benchmarks/dot_suites.py) are compared with the measured peak of the CPU's dot-product
instructions, null where it has none, and `gflops` counts their operations, too; oneDNN and ONNX Runtime have some of
these kernels only.

`wall_s` counts from after the imports to the accepted schedule, but for `machine_s`, the measuring of the machine's
peaks, which is done before, once for all kernels, and for starting workers (half a second), as MetaSchedule's runner is
started before its clock; a first `eqtune tune` has both in its time. Records are fresh. With
peers, eqtune's schedule and the peers take turns for several rounds, each in processes of its own, and the minimum
counts; `*_start_ns` tells the state of the machine around it (benchmarks/peers/parallel_start.py). ONNX Runtime's
inputs and outputs are bound before; `onnxruntime_call_us` of its time is what a call costs that computes nothing.
PyTorch is called as its users do.

MetaSchedule tunes once, before, and is stopped after four minutes a kernel; what it lacks then is null. Its schedule is
timed in turns like the others; `metaschedule_found_us` is its own figure, one average taken while it tuned, and
`metaschedule_us` the smaller of the two: what is built of its schedule may put weights in another order in each call,
which its own figure leaves out. `reached_metaschedule_s` is when a candidate of eqtune, as tuning measured it (the
minimum of its repeats), was as fast as `metaschedule_us`, counted as `wall_s` is; null where none was.

`--fast-math` permits AMX for float32, where the machine has it; the peak stays that of multiply-adds.

`--target x86-64-v3` compiles for fewer instructions than this machine has, as for machines with AVX2 only; the peak is
that of these instructions. Peers choose their own instructions, except that oneDNN can be told in the environment:

    ONEDNN_MAX_CPU_ISA=AVX2 ATEN_CPU_CAPABILITY=avx2 MKL_ENABLE_INSTRUCTIONS=AVX2 \\
    python -m benchmarks.kernels --suite all --target x86-64-v3 --peers onednn --threads 1
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.convergence import reached_s, records_of
from benchmarks.cpu_target import cpu_target
from benchmarks.dot_suites import DotCase
from benchmarks.output import report
from benchmarks.peers.timing import PeerError, alternating, in_own_process
from benchmarks.suites import Case, named, suite
from eqtune.errors import InputError

PEERS = ("onednn", "onnxruntime", "metaschedule")

METASCHEDULE_LIMIT_S = 240.0
"""For one kernel: some candidates of large windows compile for minutes, and it measures none before all are."""

STARTER = "transpose_64x12x64"
"""What is run to start workers."""

TIMING_S = 2.0
"""Seconds for which a kernel is timed in each round, as peers are."""


def measure(case: Case | DotCase, threads: int, args: argparse.Namespace) -> dict[str, Any]:
    """One row."""
    import eqtune
    from eqtune.frontends import load_model
    from eqtune.machine import describe_machine

    target = cpu_target(args.target, threads)
    started = time.monotonic()
    hardware = describe_machine(target, threads=threads)  # measured once, before the clock starts
    machine_s = time.monotonic() - started
    _start_workers(target, hardware, threads)
    limits = _limits(case, hardware, args.target)
    # No rule of the graph search: fast math permits products of smaller numbers (AMX) and nothing else.
    graph = eqtune.GraphConfig(rules=(), fast_math=True) if args.fast_math else "off"
    with tempfile.TemporaryDirectory() as work_dir:
        started_at, started = time.time(), time.monotonic()
        result = eqtune.tune_model(
            case.relax(args.seed),
            target=target,
            trials=args.trials,
            time_budget_s=args.budget,
            threads=threads,
            seed=args.seed,
            work_dir=work_dir,
            graph=graph,
            progress=False,
        )
        wall_s = time.monotonic() - started
        records = records_of(Path(work_dir))
    arguments = {"kernel": case.name, "threads": threads, "seed": args.seed}
    tasks = _tasks(result, load_model(case.relax(args.seed)).mod, target, graph)
    runs = {"eqtune": lambda: {"latency_s": _latency_s(result, tasks, target, threads)}}
    found: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as directory:
        for peer in args.peers:
            own: dict[str, Any] = {"budget_s": TIMING_S}
            if peer == "metaschedule":
                own |= {"directory": directory}
                found = _metaschedule({**arguments, "directory": directory, "trials": args.trials})
                if math.isinf(found["found_s"]):
                    continue
            runs[peer] = partial(in_own_process, f"benchmarks.peers.{peer}_kernel", **arguments, **own)
        timed = alternating(runs, args.rounds, threads) if args.peers else {}
    latency_s = timed["eqtune"].latency_s if timed else _found_s(result)
    row: dict[str, Any] = {"kernel": case.name, "threads": threads, "us": latency_s * 1e6}
    if case.compute_bound:
        row["gflops"] = case.flops / latency_s / 1e9
        row["peak_fraction"] = limits["peak"] / latency_s
    else:
        row["gbytes_per_s"] = case.bytes_moved / latency_s / 1e9
        row["bandwidth_fraction"] = limits["bandwidth"] / latency_s
        row["limit"] = max(limits, key=lambda name: limits[name])
        row["peak_fraction"] = max(limits.values()) / latency_s
    trials = sum(task.trials for task in result.tasks)
    row.update(wall_s=wall_s, machine_s=machine_s, trials=trials, rel_err=result.max_rel_error)
    for peer in args.peers:
        peer_s = timed[peer].latency_s if peer in timed else math.inf
        if peer == "metaschedule":  # in what was built, weights may be put in another order in each call
            peer_s = min(peer_s, found["found_s"])
        row |= {f"{peer}_us": peer_s * 1e6, f"vs_{peer}": peer_s / latency_s}
        if peer == "onnxruntime" and peer in timed:
            row["onnxruntime_call_us"] = timed[peer].answer.get("call_s", math.nan) * 1e6
        if peer == "metaschedule":
            row |= {"metaschedule_found_us": found["found_s"] * 1e6, "metaschedule_wall_s": found["wall_s"]}
            if math.isfinite(peer_s):
                row["reached_metaschedule_s"] = reached_s(result.summary, records, started_at, peer_s)
    row |= {f"{name}_start_ns": one.start_ns for name, one in timed.items()}
    return row


def _start_workers(target: Any, hardware: Any, threads: int) -> None:
    """Those of a measurer that is closed are taken over by the next one (eqtune/measure/template.py)."""
    from eqtune.measure import LocalMeasurer
    from eqtune.tune.forms import model_forms

    with LocalMeasurer(target, hardware, threads=threads) as measurer:
        measurer.baseline(model_forms(named(STARTER).relax(), target, "off")[0].forms[0].tasks)


def _limits(case: Case | DotCase, hardware: Any, cpu: str | None) -> dict[str, float]:
    """Seconds that a kernel takes at least, by what may bound it; NaN where `cpu` has no such instructions."""
    if isinstance(case, DotCase) or case.compute_bound:
        return {"peak": case.flops / case.peak_flops_per_s(hardware, cpu)}
    copied = in_own_process("benchmarks.peers.copy", nbytes=case.bytes_moved, threads=hardware.threads, cpu=cpu)
    return {
        "bandwidth": case.bytes_moved / copied["bytes_per_s"],
        "arithmetic": case.arithmetic_s(hardware.peak_flops_per_s_all),
    }


def _metaschedule(arguments: dict[str, Any]) -> dict[str, Any]:
    """What MetaSchedule says of its tuning: `inf`, after unknown seconds, where it failed or did not end in time."""
    module = "benchmarks.peers.metaschedule_kernel"
    try:
        return in_own_process(module, limit_s=METASCHEDULE_LIMIT_S, **arguments)
    except PeerError as error:
        print(error, file=sys.stderr)
        return {"found_s": math.inf, "wall_s": math.nan}


def _found_s(result: Any) -> float:
    """Seconds of all the kernel's calls as tuning measured them; of the whole run where the untuned model is kept."""
    return sum(task.calls * task.latency_s for task in result.tasks) if result.tasks else float(result.latency_s)


def _tasks(result: Any, mod: Any, target: Any, graph: Any) -> Any:
    """The unscheduled kernels of the form that `result` has schedules for; of the given one where it kept the model."""
    from eqtune.tune.forms import model_forms

    forms = model_forms(mod, target, graph)[0].forms
    tuned = {task.workload_hash for task in result.tasks}
    return next(form.tasks for form in reversed(forms) if not tuned or form.calls.keys() == tuned)


def _latency_s(result: Any, tasks: Any, target: Any, threads: int) -> float:
    """Seconds of all the kernel's calls, in a worker process that ends with it."""
    from eqtune.measure import LocalMeasurer

    traces = {task.workload_hash: task.trace for task in result.tasks if task.tuned}
    seconds = 0.0
    with LocalMeasurer(target, threads=threads, workers=1) as measurer:
        for task in tasks:
            trace = traces.get(task.workload_hash)
            (baseline_s,) = measurer.baseline([task])
            seconds += task.calls * (baseline_s if trace is None else _minimum_s(measurer, task, trace))
    return seconds


def _minimum_s(measurer: Any, task: Any, trace: str) -> float:
    """Of one call, over as long a time as peers are timed (`peers.timing.minimum_s`)."""
    end = time.monotonic() + TIMING_S
    best_s = measurer.retime(task, [trace])[0].latency_s
    while time.monotonic() < end:
        best_s = min(best_s, measurer.retime(task, [trace])[0].latency_s)
    return float(best_s)


def main() -> None:
    """Parse arguments, measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", default="matmul", help="comma-separated names, or all")
    parser.add_argument("--kernels", help="only kernels whose name contains one of these, comma-separated")
    parser.add_argument("--trials", type=int, default=64)
    parser.add_argument("--budget", type=float, help="seconds of tuning a kernel")
    parser.add_argument("--threads", default=str(os.cpu_count() or 1), help="comma-separated numbers of threads")
    parser.add_argument("--target", metavar="CPU", help="a processor as LLVM names it that runs here (this one)")
    parser.add_argument("--fast-math", action="store_true", help="products of float32 in halves, on a CPU with AMX")
    parser.add_argument("--peers", default="", help=f"of {','.join(PEERS)}")
    parser.add_argument("--rounds", type=int, default=3, help="in which eqtune and the peers take turns (3)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", metavar="FILE", help="write rows here")
    args = parser.parse_args()
    args.peers = [name for name in args.peers.split(",") if name]
    unknown = set(args.peers) - set(PEERS)
    if args.target and "metaschedule" in args.peers:
        parser.error("metaschedule is tuned for this machine's CPU only: leave out --target")
    if unknown:
        parser.error(f"unknown peers {sorted(unknown)}; there are {list(PEERS)}")
    wanted = args.kernels.split(",") if args.kernels else [""]
    try:
        cases = [case for case in suite(args.suite) if any(part in case.name for part in wanted)]
    except InputError as error:
        parser.error(f"{error}; --kernels takes names of kernels")
    if not cases:
        parser.error(f"no kernel of the suite {args.suite!r} has one of {wanted} in its name")
    report((measure(case, int(n), args) for n in args.threads.split(",") for case in cases), args.json)


if __name__ == "__main__":
    main()
