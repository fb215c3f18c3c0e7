"""The pipeline "eqtune": what `relax.build(..., relax_pipeline="eqtune")` runs."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from tvm import ir, relax, transform

from .compile.executable import after_kernels
from .gpu_machine import current_target
from .graph_pass import EqualitySaturation
from .graph_result import GraphConfig
from .relax_ir.functions import constant_bytes, operator, top_level_bindings
from .relax_ir.kernels import is_symbolic
from .relax_ir.tensors import shape_of
from .schedules.analytic import analytic_schedules, machine_running
from .schedules.apply import schedule_kernels
from .schedules.stored import stored_decisions, stored_schedules
from .search.space.amx.halves import HALVES_PERMITTED
from .search.space.base import Decision
from .search.space.hardware import Hardware, with_weights
from .symbolic import (
    TYPICAL_SIZE,
    WINOGRAD,
    TiledKernels,
    permit_winograd,
    tiled_kernels,
    typical_sizes,
    winograd_gain,
    winograd_weight_bytes,
    with_sizes,
)
from .tasks import Task, extract_tasks, lower_to_kernels, permit_lossy_products
from .transform.batch_norm import FoldBatchNorm
from .transform.fold_weights import FoldWeights
from .transform.layout import CHANNELS_FIRST, ChannelsLast
from .transform.simplify import simplify

__all__ = ["EstimatedForm", "cheapest_form", "eqtune_pipeline"]

LOGGER = logging.getLogger("eqtune")

_FAST_MATH = "fast math"

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
        Whether the graph search may use rules that round differently (Winograd's convolutions), and one product of
        float32 may be computed as three of bfloat16 where the machine is faster at that (AMX). Records and estimates
        decide between such a graph and the exact one. What the graph search changed is compared with the given graph on
        random inputs, to 1e-4; schedules are compared with nothing: `eqtune.tune_model` does that.
    """
    records = work_dir or os.environ.get(_WORK_DIR_VARIABLE)

    def pipeline(mod: ir.IRModule, _context: transform.PassContext) -> ir.IRModule:
        machine = current_target("the pipeline")
        stored = stored_schedules(records, context) if records else {}
        form = cheapest_form(mod, machine, stored, graph, fast_math)
        return transform.Sequential(after_kernels())(form.scheduled())

    return transform.module_pass(pipeline, opt_level=0, name="EqtunePipeline")


def _graphs(mod: ir.IRModule, fast_math: bool) -> dict[str, ir.IRModule]:
    """What the graph search makes of a module; with `fast_math`, also what it makes of it with that, if anything."""
    graphs = {"exact": transform.Sequential([EqualitySaturation()])(mod)}  # alone, a pass cannot be switched off
    if fast_math:
        lossy = transform.Sequential([EqualitySaturation(GraphConfig(fast_math=True))])(mod)
        graphs |= {} if lossy.same_as(mod) else {_FAST_MATH: lossy}
    fold = transform.Sequential([FoldBatchNorm(), FoldWeights()])
    return {name: fold(found) for name, found in graphs.items()}


@dataclass(frozen=True)
class EstimatedForm:
    """A form of a model, as kernels.

    Attributes
    ----------
    name : str
        For example "exact, channels last".
    machine : tvm.target.Target
    hardware : Hardware
        What is known of it, and of where it has the weights.
    kernels : tvm.ir.IRModule
        Not scheduled.
    schedules : dict
        By workload hash, of kernels whose sizes are known.
    decisions : mapping
        By workload hash, of tiles of the others that were measured.
    calls, missing : int
        Of kernels, and of those that were never measured.
    seconds : float
        Of one run, about.
    lossy : bool
        Whether it uses what fast math permits.
    channels_first : bool
        Whether convolutions read images with channels first that could have them last.
    """

    name: str
    machine: Any
    hardware: Hardware
    kernels: ir.IRModule
    schedules: dict[str, Any]
    decisions: Mapping[str, Decision]
    calls: int
    missing: int
    seconds: float
    lossy: bool = False
    channels_first: bool = False

    @cached_property
    def tiled(self) -> TiledKernels:
        """Kernels with symbolic sizes as loops over tiles; the others are not scheduled yet."""
        with self.machine:
            return tiled_kernels(self.kernels, self.hardware, self.decisions)

    def scheduled(self) -> ir.IRModule:
        """All kernels with their schedules, weights packed."""
        return schedule_kernels(self.tiled.mod, self.schedules)


def cheapest_form(
    mod: ir.IRModule,
    machine: Any,
    stored: dict[str, Any],
    graph: bool = True,
    fast_math: bool = False,
    sizes: Mapping[str, int] | None = None,
) -> EstimatedForm:
    """A model as kernels, rewritten or as it is, with channels first or last: the form that runs fastest, unmeasured.

    By records and estimates, with these symbolic sizes, or typical ones. Measured and estimated times do not mix well:
    the form with the smaller share of calls that were never measured wins; of two with about the same, the faster one,
    channels first only where they are clearly faster.
    """
    given, sizes = simplify(mod, machine), sizes or typical_sizes(mod)
    forms: list[EstimatedForm] = []
    estimated: dict[Any, Any] = {}
    for name, mod in (_graphs(given, fast_math) if graph else {"as given": given}).items():
        last = transform.Sequential([ChannelsLast()])(mod)
        layouts = {name: mod} if last.same_as(mod) else {name: mod, f"{name}, channels last": last}
        if len(layouts) > 1 and _has_open_images(mod):  # whose tiles would have vectors of few pixels
            del layouts[name]
        for one, layout in layouts.items():
            form = _scheduled_form(one, layout, machine, stored, estimated, fast_math, sizes)
            forms.append(replace(form, channels_first=layout is mod and len(layouts) > 1))

    def badness(form: EstimatedForm) -> tuple[float, float]:
        missing = round(form.missing / max(form.calls, 1), 1)
        return missing, form.seconds * (CHANNELS_FIRST if form.channels_first else 1.0)

    return min(forms, key=badness)


def _has_open_images(mod: ir.IRModule) -> bool:
    """Whether the height or width of a convolution's image is symbolic."""
    images = [
        binding.value.args[0]
        for function in mod.functions.values()
        if isinstance(function, relax.Function)
        for binding in top_level_bindings(function)
        if operator(binding.value) == "relax.nn.conv2d"
    ]
    return any(not isinstance(extent, int) for image in images for extent in shape_of(image)[2:])


def _scheduled_form(
    name: str,
    mod: ir.IRModule,
    machine: Any,
    stored: dict[str, Any],
    estimated: dict[Any, Any],
    fast_math: bool,
    sizes: Mapping[str, int],
) -> EstimatedForm:
    hardware = machine_running(mod, machine)
    lowered = lower_to_kernels(mod, machine)
    if fast_math:
        lowered = permit_winograd(permit_lossy_products(lowered, hardware), hardware, sizes, TYPICAL_SIZE)
        name += ", Winograd" if _any_has(lowered, WINOGRAD) else ""
    lossy = name.startswith(_FAST_MATH) or _any_has(lowered, WINOGRAD, HALVES_PERMITTED)
    tasks = extract_tasks(lowered)
    if lossy:
        more = sum(
            task.calls * winograd_weight_bytes(task.mod["main"]) for task in tasks if is_symbolic(task.mod["main"])
        )
        hardware = with_weights(hardware, constant_bytes(mod) + int(more))
    schedules = {task.workload_hash: stored[task.workload_hash] for task in tasks if task.workload_hash in stored}
    unknown = [task for task in tasks if task.workload_hash not in schedules]
    schedules |= analytic_schedules(unknown, hardware, estimated=estimated)
    calls, missing = sum(task.calls for task in tasks), sum(task.calls for task in unknown)
    seconds = _seconds(tasks, schedules) + _symbolic_seconds(unknown, hardware, sizes)
    LOGGER.info("%s: %d kernels, %d calls never measured, about %.3g ms", name, len(tasks), missing, seconds * 1e3)
    decisions = stored_decisions(stored)
    return EstimatedForm(name, machine, hardware, lowered, schedules, decisions, calls, missing, seconds, lossy)


def _any_has(mod: ir.IRModule, *attributes: str) -> bool:
    return any(name in (function.attrs or {}) for function in mod.functions.values() for name in attributes)


def _symbolic_seconds(tasks: list[Task], hardware: Any, sizes: Mapping[str, int]) -> float:
    """Of kernels with symbolic sizes, as if those were these, or `TYPICAL_SIZE`."""
    symbolic = [task for task in tasks if is_symbolic(task.mod["main"])]
    known = [replace(task, mod=with_sizes(task.mod, TYPICAL_SIZE, sizes)) for task in symbolic]
    schedules = analytic_schedules(known, hardware)
    gains = [winograd_gain(task.mod["main"], hardware, sizes, TYPICAL_SIZE) for task in symbolic]
    return sum(_seconds([task], schedules) / gain for task, gain in zip(known, gains, strict=True))


def _seconds(tasks: list[Task], schedules: dict[str, Any]) -> float:
    return sum(t.calls * schedules[t.workload_hash].latency_s for t in tasks if t.workload_hash in schedules)
