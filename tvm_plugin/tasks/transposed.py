"""Products with transposed weights: one kernel that reads the weight as it is stored, and no copy of it."""

from __future__ import annotations

from typing import Any

from tvm import ir, relax, te

from ..transform.fold_weights import transposed_weights
from ..transform.functions import operator, rewrite_calls, top_level_bindings

__all__ = ["legalize_transposed_weights"]


def legalize_transposed_weights(mod: ir.IRModule) -> ir.IRModule:
    """matmul(x, permute_dims(W)) -> one kernel over x and W, for constants W that `FoldWeights` left transposed.

    A schedule that packs the weight makes the only copy of it; one that does not reads rows of W.
    """
    builder = relax.BlockBuilder(mod)

    def rewrite_function(function: relax.Function) -> relax.Function:
        weights = transposed_weights(function)
        stored = {
            binding.var: binding.value.args[0]
            for binding in top_level_bindings(function)
            if binding.var in weights and isinstance(binding.value.args[0], ir.GenericConst)
        }

        def rewrite(binding: relax.VarBinding) -> relax.VarBinding:
            call = binding.value
            weight = stored.get(call.args[1]) if operator(call) == "relax.matmul" else None
            if weight is None:
                return binding
            dtype = str(call.ty.dtype)
            product = builder.call_te(_product, call.args[0], weight, dtype, primfunc_name_hint="matmul")
            return relax.VarBinding(binding.var, builder.normalize(product))

        return relax.analysis.remove_all_unused(rewrite_calls(function, rewrite)) if stored else function

    rewritten = {
        variable: rewrite_function(function)
        for variable, function in mod.functions_items()
        if isinstance(function, relax.Function)
    }
    result = builder.get()
    for variable, function in rewritten.items():
        result.update_func(variable, function)
    return result


def _product(data: te.Tensor, weight: te.Tensor, dtype: str) -> te.Tensor:
    """`data @ weight.T`, summed in `dtype`; shapes [..., K] and [N, K]."""
    k = te.reduce_axis((0, weight.shape[1]), name="k")

    def element(*indices: Any) -> Any:
        *outer, column = indices
        return te.sum(data(*outer, k).astype(dtype) * weight(column, k).astype(dtype), axis=k)

    return te.compute([*data.shape[:-1], weight.shape[0]], element, name="matmul")
