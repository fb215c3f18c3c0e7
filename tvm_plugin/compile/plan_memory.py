"""PlanMemory: what tensors share memory, where TVM's plan of it can be trusted."""

from __future__ import annotations

import tvm_ffi
from tvm import ir, relax, transform

__all__ = ["PLAN", "PlanMemory", "has_branches"]

PLAN = "StaticPlanBlockMemory"
"""The name of TVM's pass."""


@transform.module_pass(opt_level=0, name="PlanMemory")
class PlanMemory:
    """TVM's static plan, but for modules with branches, whose tensors get memory one by one while they run.

    Memory that one branch of an If allocates, TVM gives to tensors of the other branch and of what follows, too: the
    process ends where that branch was not taken.
    """

    def transform_module(self, mod: ir.IRModule, _context: transform.PassContext) -> ir.IRModule:
        """Plan the memory of every Relax function, or of none."""
        return mod if has_branches(mod) else relax.transform.StaticPlanBlockMemory()(mod)


def has_branches(mod: ir.IRModule) -> bool:
    """Whether any Relax function of a module has an If."""
    found: list[relax.If] = []
    for function in mod.functions.values():
        if isinstance(function, relax.Function):
            tvm_ffi.structural_walk(function.body, (relax.If, found.append))
    return bool(found)
