"""UnflattenProducts: matrix products over the axes that a tensor has, instead of over a flattened copy."""

from __future__ import annotations

from typing import Any

from tvm import ir, relax, transform
from tvm.relax.expr_functor import PyExprMutator, mutator

from ..relax_ir.constants import is_static_tensor
from ..relax_ir.functions import map_functions, operator, top_level_bindings, use_counts
from ..relax_ir.tensors import extents

__all__ = ["UnflattenProducts"]


@transform.module_pass(opt_level=0, name="UnflattenProducts")
class UnflattenProducts:
    """Undo what Relay's importers did for `nn.dense`, which takes two axes.

    reshape(matmul(reshape(x, [M, K]), W), [..., N]) -> matmul(x, W), x of shape [..., K]

    Between a product and what follows it, a reshape keeps them from becoming one kernel.
    """

    def transform_module(self, mod: ir.IRModule, _context: transform.PassContext) -> ir.IRModule:
        """Rewrite every Relax function."""
        return map_functions(mod, _unflatten)


def _unflatten(function: relax.Function) -> relax.Function:
    if not any(operator(binding.value) == "relax.matmul" for binding in top_level_bindings(function)):
        return function
    return relax.analysis.remove_all_unused(_Unflattener(function).visit_expr(function))


@mutator
class _Unflattener(PyExprMutator):
    def __init__(self, function: relax.Function) -> None:
        super().__init__()
        self._uses = use_counts(function)

    def visit_call_(self, call: relax.Call) -> Any:
        used_once = operator(call) == "relax.reshape" and self._uses.get(call.args[0]) == 1
        call = self.visit_expr_post_order(call)
        product: Any = self._value(call.args[0]) if used_once else None
        if operator(product) != "relax.matmul" or not is_static_tensor(call.ty) or product.args[1].ty.ndim != 2:
            return call
        flat: Any = self._value(product.args[0])
        if operator(flat) != "relax.reshape" or not is_static_tensor(flat.args[0].ty):
            return call
        data, wanted = flat.args[0], extents(call.ty)
        inner, columns = extents(product.args[1].ty)
        if not wanted or wanted[-1] != columns or extents(data.ty)[-1:] != [inner] or product.args[0].ty.ndim != 2:
            return call
        shape = [*wanted[:-1], inner]
        if extents(data.ty) != shape:
            data = self.builder_.emit(relax.op.reshape(data, shape))
        return relax.Call(product.op, [data, product.args[1]], product.attrs)

    def _value(self, expr: Any) -> Any:
        return self.lookup_binding(expr) if isinstance(expr, relax.Var) else None
