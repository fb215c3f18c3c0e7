"""A zoo model tuned by MetaSchedule for a while. `python -m benchmarks.peers.metaschedule_model JSON`.

The passes are those of TVM's own pipeline "static_shape_tuning" with `cpu_weight_prepack`: layouts stay as imported,
weights are repacked ahead of time. Its task scheduler counts trials and knows no clock, so the builder ends the search
(`PersistentBuilder`), and what was measured until then counts. Rounds have 64 candidates by default, as MetaSchedule's,
and the first ones visit each kernel once; a kernel that time does not reach is left as TVM compiles it.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Mapping
from typing import Any

import tvm
from tvm import relax
from tvm.s_tir import meta_schedule as ms

from benchmarks.peers import metaschedule
from eqtune import zoo
from eqtune.compile.untuned import untuned_executable
from eqtune.frontends.verify import compare
from eqtune.machine import detect_target
from eqtune.runtime import ModelRunner, time_side_by_side
from eqtune.transform.simplify import simplify

ENDLESS = 1_000_000
"""Trials: time ends first."""


def main(
    model: str,
    threads: int,
    library: str,
    seconds: float | None = None,
    seed: int = 0,
    budget_s: float = 2.0,
    trials: int = ENDLESS,
    round_trials: int = 64,
    options: Mapping[str, Any] | None = None,
) -> dict[str, float]:
    """With `seconds`: tune and write `library`, a path that ends in .so; without: time it.

    `trials` ends the search too, where it comes first; `options` are of the zoo's model.

    Returns
    -------
    dict
        When timing, `latency_s`, in seconds. When tuning: `tune_s` (a round that has begun is ended, so it may exceed
        `seconds`), `kernels` (distinct ones), `untuned_kernels`, `trials`, `errors` (candidates that failed, and
        failures of MetaSchedule itself), `rel_err` (against the untuned model).
    """
    os.environ["TVM_NUM_THREADS"] = str(threads)
    inputs = list(zoo.inputs(model, seed=seed, **(options or {})).values())
    if seconds is None:
        runner = ModelRunner(tvm.runtime.load_module(library), threads=threads)
        return {"latency_s": time_side_by_side([runner], inputs, budget_s, at_least=5)[0]}
    mod = zoo.relax(model, seed=seed, **(options or {}))
    target = detect_target(threads)
    executable, found = _tune(simplify(mod), target, seconds, seed, trials, round_trials)
    executable.export_library(library)
    outputs, expected = (
        ModelRunner(built, threads=threads)(*inputs) for built in (executable, untuned_executable(mod, target))
    )
    return {**found, "rel_err": compare(outputs, expected)[1]}


def _tune(
    mod: Any, target: Any, seconds: float, seed: int, trials: int, round_trials: int
) -> tuple[Any, dict[str, float]]:
    """An executable with the best of each kernel, and figures."""
    passes = relax.transform
    before = [passes.DecomposeOpsForInference(), passes.CanonicalizeBindings(), relax.get_pipeline("zero")]
    with target, tempfile.TemporaryDirectory() as work_dir:
        mod = tvm.transform.Sequential([*before, passes.AttachAttrLayoutFreeBuffers()])(mod)
        database = ms.database.JSONDatabase(work_dir=work_dir)
        found = _search(mod, target, database, work_dir, seconds, seed, trials, round_trials)
        with database:
            mod = passes.MetaScheduleApplyDatabase()(mod)
        mod = tvm.transform.Sequential([passes.SplitLayoutRewritePreproc(), passes.FoldConstant()])(mod)
        return tvm.compile(mod, target), found


def _search(
    mod: Any, target: Any, database: Any, work_dir: str, seconds: float, seed: int, trials: int, round_trials: int
) -> dict[str, float]:
    """Fill the database. Imports and starting the runner are not in the time."""
    metaschedule.warm_up()
    runner = ms.runner.LocalRunner()
    scheduler = ms.TaskScheduler.create("gradient")
    started = time.monotonic()
    builder = metaschedule.PersistentBuilder(os.cpu_count() or 1, started + seconds)
    kernels = ms.relax_integration.extract_tasks(mod, target)
    contexts, weights = ms.relax_integration.extracted_tasks_to_tune_contexts(kernels, work_dir, seed=seed)
    errors = 0
    try:
        ms.tune.tune_tasks(
            tasks=contexts,
            task_weights=weights,
            work_dir=work_dir,
            max_trials_global=trials,
            num_trials_per_iter=round_trials,
            builder=builder,
            runner=runner,
            database=database,
            task_scheduler=scheduler,
        )
    except (RuntimeError, TypeError, ValueError) as error:  # what was measured before still counts
        if not builder.out_of_time:
            print(f"MetaSchedule failed: {error}", file=sys.stderr)
            errors += 1
    for index, record in enumerate(scheduler.tasks_):
        if record.runner_futures is not None:  # measured, not yet recorded
            scheduler.join_running_task(index)
    tune_s = time.monotonic() - started
    tuned = [
        kernel
        for kernel in kernels
        if database.has_workload(kernel.dispatched[0])
        and database.query_tuning_record(kernel.dispatched[0], target, kernel.task_name) is not None
    ]
    return {
        "tune_s": tune_s,
        "kernels": len(kernels),
        "untuned_kernels": len(kernels) - len(tuned),
        "trials": builder.built,
        "errors": errors + builder.failed + sum(int(record.run_error_count) for record in scheduler.tasks_),
    }


if __name__ == "__main__":
    print(json.dumps(main(**json.loads(sys.argv[1]))))
