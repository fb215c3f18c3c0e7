"""What TVM makes of a model without tuning: the baseline, and the reference for outputs."""

from __future__ import annotations

from typing import Any

from tvm import ir, relax, tirx, transform

from ..gpu_machine import is_gpu
from ..machine import thread_count
from ..schedules.default import as_dlight_expects
from ..schedules.plain import with_plain_schedules
from ..search.space.lowering import as_written
from ..tasks.choices import write_choices
from ..tasks.norms import legalize_norms
from ..tasks.pad import write_pads_by_limits
from ..tasks.stacks import MOST, write_stacks_as_copies
from ..transform.fold_weights import FoldWeights
from . import side_by_side
from .executable import build_plain
from .plan_memory import PLAN, has_branches

__all__ = ["untuned_executable", "untuned_module"]


def untuned_executable(mod: ir.IRModule, target: Any, plain: bool = False) -> relax.VMExecutable:
    """`untuned_module`, compiled; with plain schedules by `build_plain`."""
    untuned = untuned_module(mod, target, plain)
    return build_plain(untuned, target) if plain else side_by_side.build(untuned, target, {})


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
    mod = write_pads_by_limits(mod)
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
