"""Symbolic sizes in one spelling."""

from __future__ import annotations

from typing import Any

from tvm import ir, relax, sym, tirx
from tvm.relax.expr_functor import PyExprMutator, mutator

from ..relax_ir.constants import has_shape
from ..relax_ir.functions import map_functions, top_level_bindings

__all__ = ["with_plain_sizes"]


def with_plain_sizes(mod: ir.IRModule) -> ir.IRModule:
    """Write the symbolic sizes of what functions compute as TVM writes those of kernels: 1 + n as n + 1.

    A join of two kernels (FuseTIR) takes tensors of two spellings for two tensors.
    """
    return map_functions(mod, _plain)


def _plain(function: relax.Function) -> relax.Function:
    analyzer = sym.Analyzer()
    if all(_plain_type(binding.var.ty, analyzer) is None for binding in top_level_bindings(function)):
        return function
    return _PlainSizes(analyzer).visit_expr(function)


def _plain_type(ty: Any, analyzer: sym.Analyzer) -> relax.TensorType | None:
    """The type with simple sizes; None where it has them, or is of no tensor of known rank."""
    if not has_shape(ty):
        return None
    given = list(ty.shape.values)
    plain = [size if isinstance(size, tirx.IntImm | ir.Var) else analyzer.simplify(size) for size in given]
    if all(new.same_as(old) for new, old in zip(plain, given, strict=True)):
        return None
    return relax.TensorType(plain, ty.dtype)


@mutator
class _PlainSizes(PyExprMutator):
    def __init__(self, analyzer: sym.Analyzer) -> None:
        super().__init__()
        self._analyzer = analyzer

    def visit_var_binding_(self, binding: relax.VarBinding) -> None:
        value = self.visit_expr(binding.value)
        plain = _plain_type(binding.var.ty, self._analyzer)
        if plain is None and value.same_as(binding.value):
            self.builder_.emit_normalized(binding)
            return
        if plain is None:
            super().visit_var_binding_(binding)
            return
        kind = relax.DataflowVar if isinstance(binding.var, relax.DataflowVar) else relax.Var
        variable = kind(binding.var.name, plain)
        self.builder_.emit_normalized(relax.VarBinding(variable, self.builder_.normalize(value)))
        self.set_var_remap(binding.var, variable)
