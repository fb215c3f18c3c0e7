"""RoundStorage: memory of open sizes in a few sizes only, so that it is used again whatever the sizes are."""

from __future__ import annotations

from typing import Any

from tvm import ir, relax, tirx, transform
from tvm.relax.expr_functor import PyExprMutator, mutator

from ..relax_ir.functions import map_functions, operator

__all__ = ["RoundStorage"]

LEAST = 4096
"""Bytes: a page."""


@transform.module_pass(opt_level=0, name="RoundStorage")
class RoundStorage:
    """Ask for a power of two of bytes wherever the size of storage is symbolic.

    TVM's virtual machine keeps memory that is free by its exact size: a model that is run with ever other sizes would
    keep some for each. Without keeping any, tensors of megabytes come from the operating system each time, page by
    page, which may take longer than to compute them. Of powers of two, what is kept is at most two to three times what
    the largest run needs, and as pages that nobody writes cost nothing, rounding up itself costs address space only.

    Use it where storage is allocated (`StaticPlanBlockMemory`, `LowerAllocTensor`), before shapes are lowered.
    """

    def transform_module(self, mod: ir.IRModule, _context: transform.PassContext) -> ir.IRModule:
        """Rewrite every Relax function that allocates storage of a symbolic size."""
        return map_functions(mod, lambda function: _Rounder().visit_expr(function))


@mutator
class _Rounder(PyExprMutator):
    def visit_call_(self, call: relax.Call) -> Any:
        call = self.visit_expr_post_order(call)
        if operator(call) not in ("relax.memory.alloc_storage", "relax.vm.alloc_storage"):
            return call
        (size,) = call.args[0].values
        if isinstance(size, tirx.IntImm):
            return call
        return relax.Call(call.op, [relax.ShapeExpr([_power_of_two(size)]), *call.args[1:]], call.attrs, call.ty_args)


def _power_of_two(size: Any) -> Any:
    """The smallest one that is not less than a number of bytes, and `LEAST`."""
    zeros = tirx.clz(tirx.max(size, tirx.IntImm("int64", LEAST)) - 1)
    return tirx.IntImm("int64", 1) << (tirx.IntImm("int64", 64) - zeros.astype("int64"))
