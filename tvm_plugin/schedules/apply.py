"""Schedules onto kernels."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tvm import ir, tirx

from eqtune.records.workload import as_workload, workload_hash

from ..relax_ir.kernels import READY, is_scheduled
from ..search.space.lowering import as_written, prepare_for_lowering
from ..search.space.replay import replay_schedule
from .overwritable import with_overwritable
from .pack_weights import pack_weights

__all__ = ["Schedules", "apply_schedules", "schedule_kernels"]

Schedules = Mapping[str, str | Callable[[ir.IRModule], Any]]
"""Workload hash to a schedule: a trace as text, or a function from the workload to a `tvm.s_tir.Schedule`, or to None
where there is none after all."""


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


def _scheduled(kernel: tirx.PrimFunc, schedule: str | Callable[[ir.IRModule], Any]) -> tirx.PrimFunc | None:
    workload = as_workload(kernel)
    result = replay_schedule(schedule, workload) if isinstance(schedule, str) else schedule(workload)
    if result is None:
        return None
    function = result.mod["main"].with_attr("tirx.is_scheduled", True)
    if "global_symbol" in kernel.attrs:
        function = function.with_attr("global_symbol", kernel.attrs["global_symbol"])
    return function
