"""Batch norms in training mode, which TVM takes for others."""

from __future__ import annotations

from typing import Any

from tvm import ir, relax
from tvm.relax.expr_functor import PyExprMutator, mutator

from ..relax_ir.functions import map_functions, operator

__all__ = ["with_batch_statistics"]


def with_batch_statistics(mod: ir.IRModule) -> ir.IRModule:
    """The module with batch norms in training mode, Relax's default, as operators on the statistics of the batch.

    TVM's DecomposeOpsForInference takes them for batch norms in inference mode, unlike its default pipeline.
    """
    return map_functions(mod, lambda function: _InTraining().visit_expr(function))


@mutator
class _InTraining(PyExprMutator):
    def visit_call_(self, call: relax.Call) -> Any:
        call = self.visit_expr_post_order(call)
        if operator(call) != "relax.nn.batch_norm" or not call.attrs.training:
            return call
        x, gamma, beta, *moving = call.args
        attrs, dtype = call.attrs, str(x.ty.dtype)
        axis = int(attrs.axis) % x.ty.ndim
        others = [other for other in range(x.ty.ndim) if other != axis]

        def constant(value: float) -> Any:
            return relax.const(value, dtype)

        def along(vector: Any) -> Any:
            return relax.op.expand_dims(vector, others)

        mean, variance = (self.builder_.emit(f(x, others)) for f in (relax.op.mean, relax.op.variance))
        deviation = relax.op.sqrt(along(variance) + constant(float(attrs.epsilon)))
        result = relax.op.divide(relax.op.subtract(x, along(mean)), deviation)
        if attrs.scale:
            result = relax.op.multiply(result, along(gamma))
        if attrs.center:
            result = relax.op.add(result, along(beta))
        momentum = float(attrs.momentum)
        updated = [
            relax.op.add(relax.op.multiply(old, constant(1.0 - momentum)), relax.op.multiply(new, constant(momentum)))
            for old, new in zip(moving, (mean, variance), strict=True)
        ]
        return relax.Tuple([self.builder_.emit(value) for value in (result, *updated)])
