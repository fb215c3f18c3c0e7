"""`tune_kernels`: the schedule search alone."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import tvm
from tvm import tirx

from ..errors import InputError
from ..relax_ir.kernels import is_scheduled
from ..schedules.apply import schedule_kernels
from ..tasks import Task, extract_tasks, task_of
from .loop import Variant
from .result import KernelsResult, schedules_of
from .session import Session, Settings

if TYPE_CHECKING:
    from ..cost_model import CostModel
    from ..measure import Measurer
    from ..search.allocation import Allocator
    from ..search.strategies import Strategy

__all__ = ["tune_kernels"]


def tune_kernels(
    prim_funcs_or_mod: tirx.PrimFunc | tvm.IRModule | Iterable[tirx.PrimFunc] | Mapping[str, tirx.PrimFunc],
    target: tvm.target.Target | Mapping[str, Any] | str | None = None,
    *,
    trials: int | None = None,
    time_budget_s: float | None = None,
    work_dir: str | os.PathLike[str] = "eqtune-work",
    strategy: str | Strategy = "annealed-evolution",
    cost_model: str | CostModel = "xgboost",
    allocator: str | Allocator = "gradient",
    measure: str | Measurer = "local",
    threads: int | None = None,
    seed: int = 0,
    progress: bool = True,
) -> KernelsResult:
    """Search the schedules of single kernels, without a model around them.

    Parameters
    ----------
    prim_funcs_or_mod : PrimFunc, IRModule, iterable or mapping of PrimFunc
        TensorIR kernels; those that are scheduled already stay as they are. In a module that also has a Relax function,
        its calls are counted; otherwise each kernel counts once. The attribute `layout_free_buffers` names the
        arguments that are weights, whose layout a schedule may change.
    target, trials, time_budget_s, work_dir, strategy, cost_model, allocator, measure, threads, seed, progress
        As in `eqtune.tune_model`.

    Returns
    -------
    KernelsResult

    Raises
    ------
    InputError
        When there is no kernel without a schedule, or an argument cannot be used.
    SetupError
        This installation or machine cannot tune.
    RecordError
        The records in `work_dir` cannot be read or written.
    """
    mod = _as_module(prim_funcs_or_mod)
    settings = Settings(
        target, trials, time_budget_s, work_dir, strategy, cost_model, allocator, measure, threads, seed, progress
    )
    tasks = _tasks(mod)
    with Session(settings) as session:
        session.baselines.choose(sum(task.operations for task in tasks), session.budget)
        loop = session.search(tasks, [Variant("kernels", {task.workload_hash: task.calls for task in tasks})])
        results = session.accept(loop.kernels, look=not loop.interrupted)
        session.tell_unreached(loop.kernels)
        session.save_spent()
    return KernelsResult(schedule_kernels(mod, schedules_of(results)), results, loop.interrupted)


def _as_module(kernels: Any) -> Any:
    if isinstance(kernels, tvm.IRModule):
        return kernels
    if isinstance(kernels, tirx.PrimFunc):
        return tvm.IRModule({"main": kernels})
    if isinstance(kernels, Mapping):
        named = dict(kernels)
    elif isinstance(kernels, Iterable) and not isinstance(kernels, (str, bytes)):
        named = {f"kernel{index}": function for index, function in enumerate(kernels)}
    else:
        raise InputError(f"tune_kernels takes PrimFuncs or an IRModule, not {type(kernels).__name__}")
    wrong = [name for name, function in named.items() if not isinstance(function, tirx.PrimFunc)]
    if wrong:
        raise InputError(f"tune_kernels takes PrimFuncs; these are something else: {wrong}")
    return tvm.IRModule(named)


def _tasks(mod: Any) -> list[Task]:
    kernels = {var.name_hint: f for var, f in mod.functions_items() if isinstance(f, tirx.PrimFunc)}
    if not kernels:
        raise InputError("there is no PrimFunc to tune; for a Relax model use eqtune.tune_model")
    if all(map(is_scheduled, kernels.values())):
        raise InputError("every PrimFunc there is scheduled already; give them as LowerToKernels makes them")
    if len(kernels) < len(mod.functions):
        return extract_tasks(mod)
    kernels = {name: function for name, function in kernels.items() if not is_scheduled(function)}
    return list({task.workload_hash: task for task in (task_of(n, f) for n, f in kernels.items())}.values())
