"""Kernels that take longer in their model than alone, where candidates are timed.

    python -m benchmarks.in_model --models zoo:squeezenet,speech --budget 30

`own_us` is what tuning says of a kernel: the minimum of its candidates, or the estimate where no candidate of it was
measured (`trials` is 0). `in_model_us` is the minimum over runs of the tuned model, `calls` how often it is called in
one. `lost_us` is the difference for all calls, beyond what moving its operands once from memory would explain; rows
with less than `--least` of the model's time are left out. What it can show: estimates that are wrong, code that is
compiled otherwise than its candidate was, one thread that fetches what others have written.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks.output import report

OVERHEAD_S = 1.5e-6
"""Of a call that is timed from Python."""


def kernel_times(machine: Any, inputs: Sequence[Any], runs: int) -> tuple[dict[str, float], Counter[str]]:
    """Seconds of a call of each kernel, the minimum over `runs` of a `relax.VirtualMachine`, and calls of one run."""
    started = 0.0
    best: dict[str, float] = {}
    calls: Counter[str] = Counter()

    def around(_function: Any, name: str, before: bool, _result: Any, *_arguments: Any) -> None:
        nonlocal started
        if before:
            started = time.perf_counter()
        elif not name.startswith("vm."):
            best[name] = min(best.get(name, float("inf")), time.perf_counter() - started)
            calls[name] += 1

    for _ in range(runs):  # caches and threads as in use
        machine["main"](*inputs)
    machine.set_instrument(around)
    for _ in range(runs):
        machine["main"](*inputs)
    return best, Counter({name: count // runs for name, count in calls.items()})


def slower_kernels(
    model: str,
    tasks: Sequence[Any],
    times: Mapping[str, float],
    calls: Mapping[str, int],
    bandwidth_bytes_per_s: float,
    least_s: float,
) -> list[dict[str, Any]]:
    """Rows of the kernels that lose `least_s` and more, the worst first; `tasks` are a result's."""
    known = {task.name: task for task in tasks if task.latency_s is not None}
    rows = []
    for name, seconds in times.items():
        # Ahead of time packed weights are arguments of a kernel of another name.
        task = known.get(name) or known.get(name.removesuffix("_packed"))
        if task is None:
            continue
        explained = max(task.latency_s, task.bytes_moved / bandwidth_bytes_per_s) + OVERHEAD_S
        lost_s = (seconds - explained) * calls[name]
        if lost_s >= least_s:
            row = {"model": model, "kernel": name, "calls": calls[name], "trials": task.trials}
            row |= {"own_us": task.latency_s * 1e6, "in_model_us": seconds * 1e6, "lost_us": lost_s * 1e6}
            rows.append(row)
    return sorted(rows, key=lambda row: -float(row["lost_us"]))


def rows(names: Sequence[str], args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Of all models, and one for the whole of each."""
    import numpy as np
    import tvm
    from torch.utils import _pytree as pytree
    from tvm import relax

    import eqtune
    from benchmarks.architecture_modules import build
    from eqtune import zoo
    from eqtune.frontends.torch.nodes import array_of_torch
    from eqtune.machine import describe_machine, detect_target

    bandwidth = describe_machine(detect_target(threads=args.threads), threads=args.threads).bandwidth_bytes_per_s
    for name in names:
        if name.startswith("zoo:"):
            model: Any = name
            arrays, given = list(zoo.inputs(name.removeprefix("zoo:"), seed=args.seed).values()), {}
        else:
            model, inputs = build(name, args.seed)
            arrays, given = [array_of_torch(leaf) for leaf in pytree.tree_leaves(inputs)], {"example_inputs": inputs}
        with tempfile.TemporaryDirectory() as work_dir:
            result = eqtune.tune_model(
                model,
                time_budget_s=args.budget,
                threads=args.threads,
                fast_math=args.fast_math,
                seed=args.seed,
                work_dir=work_dir,
                progress=False,
                **given,
            )
        machine = relax.VirtualMachine(result.compile(), tvm.cpu())
        tensors = [tvm.runtime.tensor(np.ascontiguousarray(array)) for array in arrays]
        runs = max(5, min(50, int(2.0 / result.latency_s)))
        times, calls = kernel_times(machine, tensors, runs)
        yield {
            "model": name,
            "kernel": "all",
            "calls": sum(calls.values()),
            "trials": sum(task.trials for task in result.tasks),
            "own_us": 1e6 * sum(task.latency_s * task.calls for task in result.tasks if task.latency_s is not None),
            "in_model_us": 1e6 * sum(seconds * calls[kernel] for kernel, seconds in times.items()),
        }
        yield from slower_kernels(name, result.tasks, times, calls, bandwidth, args.least * result.latency_s)


def main() -> None:
    """Parse arguments, measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", required=True, help="comma-separated: zoo:NAME, or of benchmarks.architectures")
    parser.add_argument("--budget", type=float, default=30.0, help="seconds of tuning a model (30)")
    parser.add_argument("--least", type=float, default=0.02, help="share of the model's time worth a row (0.02)")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="(all cores)")
    parser.add_argument("--fast-math", action="store_true", help="as `eqtune tune --fast-math`")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", metavar="FILE", help="write rows here")
    args = parser.parse_args()
    os.environ["TVM_NUM_THREADS"] = str(args.threads)
    report(rows(args.models.split(","), args), args.json)


if __name__ == "__main__":
    main()
