"""From a module of kernels to tasks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import tvm_ffi
from tvm import ir, relax, s_tir, tirx

from eqtune.records.workload import as_workload, workload_hash

from ..relax_ir.functions import operator
from ..relax_ir.kernels import KERNEL_CALLS, is_scheduled, is_symbolic
from .flops import count_bytes, count_flops, count_integer_operations, count_weight_bytes
from .task import Task

__all__ = ["extract_tasks", "known_tasks", "task_of"]


def extract_tasks(mod: ir.IRModule) -> list[Task]:
    """The distinct kernels that a module of `lower_to_kernels` calls, most work first.

    A user's own kernel that is written in plain loops, without blocks, cannot be scheduled and is left out, as what is
    scheduled already. Calls are call sites in the Relax functions: what one run of a model without control flow does.
    """
    calls: dict[str, int] = {}
    for function in mod.functions.values():
        if isinstance(function, relax.Function):
            for name in _called_kernels(function):
                calls[name] = calls.get(name, 0) + 1
    tasks: dict[str, Task] = {}
    for name, count in calls.items():
        if is_scheduled(mod[name]) or not isinstance(mod[name].body, s_tir.SBlockRealize):
            continue
        task = task_of(name, mod[name], count)
        known = tasks.get(task.workload_hash)
        if known is not None:
            task = replace(known, calls=known.calls + count, functions=(*known.functions, name))
        tasks[task.workload_hash] = task
    return sorted(tasks.values(), key=lambda task: (-task.flops * task.calls, -task.bytes_moved * task.calls))


def known_tasks(mod: ir.IRModule) -> list[Task]:
    """The tasks (`extract_tasks`) whose sizes are known: there is a space of schedules for no others."""
    return [task for task in extract_tasks(mod) if not is_symbolic(task.mod["main"])]


def task_of(name: str, kernel: tirx.PrimFunc, calls: int = 1) -> Task:
    """One unscheduled kernel as a task."""
    workload = as_workload(kernel)
    return Task(
        name=name,
        mod=workload,
        workload_hash=workload_hash(workload),
        calls=calls,
        flops=count_flops(kernel),
        bytes_moved=count_bytes(kernel),
        weight_bytes=count_weight_bytes(kernel),
        integer_operations=count_integer_operations(kernel),
        functions=(name,),
    )


def _called_kernels(function: relax.Function) -> list[str]:
    names: list[str] = []

    def visit(call: Any) -> None:
        if operator(call) in KERNEL_CALLS:
            names.append(call.args[0].name_hint)

    tvm_ffi.structural_walk(function.body, (relax.Call, visit))
    return names
