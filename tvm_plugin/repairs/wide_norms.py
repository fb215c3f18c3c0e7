"""Norms of dtypes that TVM does not lower: of float64 written out, of bfloat16 computed in float32."""

from __future__ import annotations

from typing import Any

from tvm import ir, relax
from tvm.relax import op
from tvm.relax.expr_functor import PyExprMutator, mutator

from ..relax_ir.functions import map_functions, operator
from ..relax_ir.tensors import shape_of
from .in_float32 import compute_in_float32

__all__ = ["with_norms_of_bfloat16", "with_norms_of_doubles"]

_OF_AXES = frozenset({"relax.nn.layer_norm", "relax.nn.rms_norm"})
"""Norms whose weights have the axes that they are taken over."""

_OF_CHANNELS = frozenset({"relax.nn.group_norm", "relax.nn.instance_norm"})


def with_norms_of_bfloat16(mod: ir.IRModule) -> ir.IRModule:
    """Compute layer, group, instance and root-mean-square norms of bfloat16 in float32."""
    return compute_in_float32(mod, _OF_AXES | _OF_CHANNELS, ["bfloat16"])


def with_norms_of_doubles(mod: ir.IRModule) -> ir.IRModule:
    """Write layer, group, instance and root-mean-square norms of float64 as the operators of their formulas.

    TVM lowers the last alone, which it computes in float32.
    """
    return map_functions(mod, lambda function: _WideNorms().visit_expr(function))


@mutator
class _WideNorms(PyExprMutator):
    def visit_call_(self, call: relax.Call) -> Any:
        call = self.visit_expr_post_order(call)
        name = operator(call)
        if name not in _OF_AXES | _OF_CHANNELS or str(call.ty.dtype) != "float64":
            return call
        emit, (x, gamma, *beta) = self.builder_.emit, call.args
        shape = shape_of(x)
        axes = kept = sorted(int(axis) % len(shape) for axis in call.attrs.axes)
        parts = x
        if name in _OF_CHANNELS:
            channel = int(call.attrs.channel_axis) % len(shape)
            kept = [channel]
        if name == "relax.nn.group_norm":
            groups = int(call.attrs.num_groups)
            split = [*shape[:channel], groups, shape[channel] // groups, *shape[channel + 1 :]]
            parts = emit(op.reshape(x, split))
            axes = [channel + 1, *(axis + (axis > channel) for axis in axes if axis != channel)]
        if beta:  # root-mean-square norms have none
            parts = emit(op.subtract(parts, emit(op.mean(parts, axes, keepdims=True))))
        squares = emit(op.mean(emit(op.multiply(parts, parts)), axes, keepdims=True))
        spread = emit(op.sqrt(emit(op.add(squares, relax.const(float(call.attrs.epsilon), "float64")))))
        result = emit(op.divide(parts, spread))
        if parts.ty.ndim > len(shape):
            result = emit(op.reshape(result, shape))
        column = [extent if axis in kept else 1 for axis, extent in enumerate(shape)]
        gamma, *beta = (emit(op.reshape(factor, column)) for factor in (gamma, *beta))
        result = op.multiply(result, gamma)
        for shift in beta:
            result = op.add(emit(result), shift)
        return self.builder_.normalize(result)
