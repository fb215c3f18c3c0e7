"""Indices out of bounds read the nearest element: TVM's `take` reads whatever memory lies there, and warns of it."""

from __future__ import annotations

from tvm import ir, relax
from tvm.relax import op

from .functions import map_functions, operator, rewrite_calls

__all__ = ["with_bounded_takes"]


def with_bounded_takes(mod: ir.IRModule) -> ir.IRModule:
    """take(x, i, mode="fast") -> take(x, i, mode="clip"), which computes the same where indices are in bounds.

    A token that a model does not know ends a PyTorch program; here it could end the process, or read secrets.
    """
    builder = relax.BlockBuilder()

    def bounded(binding: relax.VarBinding) -> relax.VarBinding:
        call = binding.value
        if operator(call) != "relax.take" or str(call.attrs.mode) != "fast":
            return binding
        axis = None if call.attrs.axis is None else int(call.attrs.axis)
        return relax.VarBinding(binding.var, builder.normalize(op.take(*call.args, axis=axis, mode="clip")))

    return map_functions(mod, lambda function: rewrite_calls(function, bounded))
