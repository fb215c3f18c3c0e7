"""Schedules onto kernels, weights packed ahead of time, and executables from the result."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Mapping
from typing import Any

from tvm import ir, relax, tirx, transform

from eqtune.records.workload import as_workload, workload_hash

from ..gpu_machine import current_target, is_gpu
from ..machine import describe_machine, thread_count
from ..search.space.hardware import Hardware, with_weights
from ..search.space.lowering import ASYNC_COPIES, as_written, prepare_for_lowering
from ..search.space.replay import replay_schedule
from ..symbolic import TILED, tile_symbolic_kernels
from ..tasks import extract_tasks
from ..tasks.choices import write_choices
from ..tasks.norms import legalize_norms
from ..tasks.stacks import MOST, write_stacks_as_copies
from . import side_by_side
from .analytic_schedules import analytic_schedules
from .check_sizes import CheckSizes
from .default_schedules import as_dlight_expects
from .fold_weights import FoldWeights
from .functions import READY, constant_bytes, is_scheduled
from .huge_pages import in_huge_pages
from .in_place import WriteInPlace, with_overwritable
from .pack_weights import pack_weights
from .plain_schedules import with_plain_schedules
from .plan_memory import PLAN, PlanMemory, has_branches
from .round_storage import RoundStorage
from .stored_schedules import stored_decisions, stored_schedules

__all__ = [
    "ApplyTuned",
    "Schedules",
    "apply_schedules",
    "build_executable",
    "build_plain",
    "build_scheduled",
    "machine_running",
    "schedule_kernels",
    "scheduled",
    "untuned_executable",
    "untuned_module",
]

LOGGER = logging.getLogger("eqtune")

Schedules = Mapping[str, str | Callable[[ir.IRModule], Any]]
"""Workload hash to a schedule: a trace as text, or a function from the workload to a `tvm.s_tir.Schedule`, or to None
where there is none after all."""

_BUILD_CONFIG = {"tirx.disable_assert": True, **ASYNC_COPIES}
"""The virtual machine checks the arguments of the whole model; kernels need not check theirs again. CPU kernels have no
asynchronous copies."""

_TILED_CONFIG = {"tirx.disable_cse_tir": True}
"""Of kernels with tiles of many lengths: LLVM finds what they compute twice in a third of the time."""

_GRAPH_CONFIG = {"relax.backend.use_cuda_graph": True}
"""Kernels whose arguments stay where they are become one CUDA graph, which is launched as a whole."""


@transform.module_pass(opt_level=0, name="ApplyTuned")
class ApplyTuned:
    """Schedule the kernels of a lowered module, and pack weights ahead of time.

    Use it after `LowerToKernels`. A kernel without a schedule is left to TVM's default, one thread and no vectors,
    which is logged as a warning; or, with `estimate`, it gets the one that the analytic model likes best. `tune_model`
    tunes the form of a model that is fastest, mostly with channels last (`ChannelsLast`): records fit its kernels.

    Parameters
    ----------
    records : path or RecordDatabase, optional
        A work directory of `eqtune.tune_model`, or its database; the best record of each kernel is used.
    context : eqtune.records.Context, optional
        Where the records must come from. Without it: from this machine, the current target and this version of TVM.
    schedules : mapping, optional
        Schedules by workload hash; they come before the records.
    estimate : bool
        Schedule kernels without a record by the analytic model, unmeasured; needs a current target.
    """

    def __init__(
        self,
        records: str | os.PathLike[str] | Any | None = None,
        context: Any = None,
        schedules: Schedules | None = None,
        estimate: bool = False,
    ) -> None:
        self._records = records
        self._context = context
        self._schedules = dict(schedules or {})
        self._estimate = estimate

    def transform_module(self, mod: ir.IRModule, _context: transform.PassContext) -> ir.IRModule:
        """Apply and pack.

        Raises RecordError for records that cannot be read or do not fit, InputError where there are none or a target
        is missing.
        """
        stored = {} if self._records is None else stored_schedules(self._records, self._context)
        known: dict[str, Any] = {**stored, **self._schedules}
        tasks = extract_tasks(mod)
        missing = [task for task in tasks if task.workload_hash not in known]
        if missing and self._estimate:
            hardware = machine_running(mod, current_target("ApplyTuned(..., estimate=True)"))
            known |= analytic_schedules(missing, hardware)
            mod = tile_symbolic_kernels(mod, hardware, stored_decisions(stored))
        elif missing:
            LOGGER.warning(
                "%d of %d kernels have no schedule and stay as TVM compiles them, among them %s: tune this form of the "
                "model, or permit estimates with ApplyTuned(..., estimate=True)",
                len(missing),
                len(tasks),
                ", ".join(task.name for task in missing[:3]),
            )
        return schedule_kernels(mod, known)


def machine_running(mod: ir.IRModule, target: Any) -> Hardware:
    """What is known of a target without measuring, and of where it has the weights of a module, which are constants."""
    return with_weights(describe_machine(target, measure=False), constant_bytes(mod))


def apply_schedules(mod: ir.IRModule, schedules: Schedules) -> ir.IRModule:
    """A module in which each kernel that has a schedule is replaced by the scheduled one.

    Blocks that repack weights stay inside the kernels: `pack_weights` takes them out. Kernels that are
    scheduled already keep what they have.

    Raises
    ------
    RecordError
        When a trace does not fit the kernel that it is stored for.
    """
    result = mod.clone()
    for variable, kernel in mod.functions_items():
        if not isinstance(kernel, tirx.PrimFunc) or is_scheduled(kernel):
            continue
        schedule = schedules.get(workload_hash(kernel))
        function = None if schedule is None else _scheduled(kernel, schedule)
        if function is not None:
            result.update_func(variable, function)
    return result


def schedule_kernels(mod: ir.IRModule, schedules: Schedules) -> ir.IRModule:
    """Apply schedules, pack weights, and make the scheduled kernels ready for TVM to lower.

    In this order: TVM's packing pass expects the 64-bit indices that `prepare_for_lowering` narrows.
    Raises RecordError when a trace does not fit the kernel that it is stored for.
    """
    result = pack_weights(apply_schedules(mod, schedules))
    for variable, function in result.functions_items():
        if not isinstance(function, tirx.PrimFunc) or READY in (function.attrs or {}):
            continue
        if is_scheduled(function):
            function = prepare_for_lowering(with_overwritable(function)).with_attr(READY, True)
        else:
            function = as_written(function)
        result.update_func(variable, function)
    return result


def build_executable(mod: ir.IRModule, target: Any, schedules: Schedules | None = None) -> relax.VMExecutable:
    """Compile a module of kernels (`lower_to_kernels`) without fusing it again: `build_scheduled` of `scheduled`.

    Parameters
    ----------
    mod : tvm.ir.IRModule
    target : tvm.target.Target
    schedules : mapping, optional
        By workload hash; a kernel without one is compiled as TVM compiles it by default.

    Raises
    ------
    RecordError
        When a trace does not fit its kernel.
    """
    return build_scheduled(scheduled(mod, target, schedules or {}), target)


def scheduled(mod: ir.IRModule, target: Any, schedules: Schedules) -> ir.IRModule:
    """The module with its schedules, weights packed, on a CPU in huge pages. RecordError as `schedule_kernels`."""
    with target:
        mod = schedule_kernels(mod, schedules)
        return mod if is_gpu(target) else in_huge_pages(mod)


def build_scheduled(mod: ir.IRModule, target: Any, calls_compiled: bool = False) -> relax.VMExecutable:
    """Compile what `scheduled` made, without fusing it again. `calls_compiled` as in `side_by_side.build`."""
    with target, transform.PassContext(config=_GRAPH_CONFIG) if is_gpu(target) else contextlib.nullcontext():
        mod = transform.Sequential(after_kernels())(mod)
    is_tiled = any(isinstance(f, tirx.PrimFunc) and TILED in (f.attrs or {}) for f in mod.functions.values())
    config = _BUILD_CONFIG | (_TILED_CONFIG if is_tiled else {})
    return side_by_side.build(mod, target, config, calls_compiled)


def after_kernels() -> list[transform.Pass]:
    """The passes of TVM's default pipeline that follow fusion: memory planning and lowering to the virtual machine."""
    return [
        relax.transform.RewriteDataflowReshape(),
        relax.transform.ToNonDataflow(),
        relax.transform.RemovePurityChecking(),
        relax.transform.CallTIRRewrite(),
        WriteInPlace(),
        PlanMemory(),
        relax.transform.RewriteCUDAGraph(),
        relax.transform.LowerAllocTensor(),
        RoundStorage(),
        relax.transform.KillAfterLastUse(),
        relax.transform.LowerRuntimeBuiltin(),
        relax.transform.ComputePrimValue(),
        CheckSizes(),
        relax.transform.VMShapeLower(),
        relax.transform.AttachGlobalSymbol(),
    ]


def untuned_executable(mod: ir.IRModule, target: Any, plain: bool = False) -> relax.VMExecutable:
    """`untuned_module`, compiled; with plain schedules by `build_plain`."""
    untuned = untuned_module(mod, target, plain)
    return build_plain(untuned, target) if plain else side_by_side.build(untuned, target, {})


def build_plain(mod: ir.IRModule, target: Any) -> relax.VMExecutable:
    """Compile kernels with plain schedules, which do not check their arguments: that took a third of the time."""
    return side_by_side.build(mod, target, _BUILD_CONFIG)


def untuned_module(mod: ir.IRModule, target: Any, plain: bool = False) -> ir.IRModule:
    """What TVM's default pipeline makes of a Relax module: fused, not scheduled. The baseline, and the reference:
    where TVM itself would compile an index wrongly (`as_written`), this does not.

    Weights are folded with numpy first, which only saves the minutes that FoldConstant may take. With `plain`, the same
    kernels with plain schedules (CPUs only): no baseline, but the same outputs, much sooner, and norms that lose no
    digits. On a CPU, stacks of more than a hundred or so tensors are copies, which saves the minute that LLVM may take
    for one, and boxes are chosen as in tuned models (tasks/choices.py): TVM may not lower what it makes of them.
    """
    if not is_gpu(target):
        mod = write_stacks_as_copies(write_choices(mod, thread_count(target)), MOST + 1)
    if plain:
        with target:
            mod = legalize_norms(mod, "float64")
    with transform.PassContext(opt_level=3, disabled_pass=[PLAN] if has_branches(mod) else []):
        mod = transform.Sequential([FoldWeights(transposes=True)])(mod)
        with as_dlight_expects(target) if is_gpu(target) else target:
            mod = relax.get_default_pipeline(target)(mod)
    mod = with_plain_schedules(mod) if plain else mod.clone()
    for variable, function in mod.functions_items():
        if isinstance(function, tirx.PrimFunc):
            mod.update_func(variable, as_written(function))
    return mod


def _scheduled(kernel: tirx.PrimFunc, schedule: str | Callable[[ir.IRModule], Any]) -> tirx.PrimFunc | None:
    workload = as_workload(kernel)
    result = replay_schedule(schedule, workload) if isinstance(schedule, str) else schedule(workload)
    if result is None:
        return None
    function = result.mod["main"].with_attr("tirx.is_scheduled", True)
    if "global_symbol" in kernel.attrs:
        function = function.with_attr("global_symbol", kernel.attrs["global_symbol"])
    return function
