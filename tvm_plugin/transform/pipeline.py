"""The pipeline "eqtune": what `relax.build(..., relax_pipeline="eqtune")` runs."""

from __future__ import annotations

import logging
import os
from typing import Any

from tvm import ir, target, transform

from ..machine import describe_machine
from ..tasks import Task, extract_tasks, lower_to_kernels, permit_lossy_products
from .analytic_schedules import analytic_schedules
from .apply_tuned import after_kernels, schedule_kernels
from .batch_norm import FoldBatchNorm
from .equality_saturation import EqualitySaturation
from .fold_weights import FoldWeights
from .layout import ChannelsLast
from .simplify import simplify
from .stored_schedules import stored_schedules

__all__ = ["eqtune_pipeline"]

LOGGER = logging.getLogger("eqtune")

_WORK_DIR_VARIABLE = "EQTUNE_WORK_DIR"


def eqtune_pipeline(
    work_dir: str | os.PathLike[str] | None = None, context: Any = None, graph: bool = True, fast_math: bool = False
) -> transform.Pass:
    """From a Relax module to one that TVM's virtual machine compiles; `relax.get_pipeline("eqtune", ...)`.

    Folds batch norms and weights, searches the graph, lowers to kernels, schedules each from the records of a tuning
    run or, where there is none, by the analytic model, packs weights, and goes on as TVM does. Nothing is measured.

    Parameters
    ----------
    work_dir : path, optional
        Of an `eqtune.tune_model` run. Without it, the environment variable EQTUNE_WORK_DIR; without that, no records.
    context : eqtune.records.Context, optional
        Where the records must come from; see `ApplyTuned`.
    graph : bool
        Whether to search for an equal, cheaper graph.
    fast_math : bool
        Whether products of float32 may be made of smaller numbers, where the machine is faster at that (AMX: three of
        bfloat16). Outputs are compared with nothing: `eqtune.tune_model` does that.
    """
    records = work_dir or os.environ.get(_WORK_DIR_VARIABLE)

    def pipeline(mod: ir.IRModule, _context: transform.PassContext) -> ir.IRModule:
        machine = target.Target.current(allow_none=False)
        graph_passes = [EqualitySaturation(), FoldBatchNorm(), FoldWeights()] if graph else []
        mod = transform.Sequential(graph_passes)(simplify(mod, machine))
        stored = stored_schedules(records, context) if records else {}
        lowered, schedules = _best_form(mod, machine, stored, fast_math)
        lowered = schedule_kernels(lowered, schedules)
        return transform.Sequential(after_kernels())(lowered)

    return transform.module_pass(pipeline, opt_level=0, name="EqtunePipeline")


def _best_form(
    mod: ir.IRModule, machine: Any, stored: dict[str, Any], fast_math: bool
) -> tuple[ir.IRModule, dict[str, Any]]:
    """The module as kernels, as it is or with channels last, whichever runs faster by records and estimates.

    Measured and estimated times do not mix well: the form with fewer calls that were never measured wins.
    """
    hardware = describe_machine(machine, measure=False)
    forms = {"as given": mod}
    last = transform.Sequential([ChannelsLast()])(mod)
    if not last.same_as(mod):
        forms["channels last"] = last
    candidates = []
    for name, form in forms.items():
        lowered = lower_to_kernels(form, machine)
        if fast_math:
            lowered = permit_lossy_products(lowered, hardware)
        tasks = extract_tasks(lowered)
        schedules = {task.workload_hash: stored[task.workload_hash] for task in tasks if task.workload_hash in stored}
        missing = [task for task in tasks if task.workload_hash not in schedules]
        schedules |= analytic_schedules(missing, hardware)
        cost = sum(task.calls for task in missing), _seconds(tasks, schedules)
        LOGGER.info("%s: %d kernels, %d calls never measured, about %.3g ms", name, len(tasks), cost[0], cost[1] * 1e3)
        candidates.append((cost, lowered, schedules))
    _, lowered, schedules = min(candidates, key=lambda candidate: candidate[0])
    return lowered, schedules


def _seconds(tasks: list[Task], schedules: dict[str, Any]) -> float:
    return sum(t.calls * schedules[t.workload_hash].latency_s for t in tasks if t.workload_hash in schedules)
