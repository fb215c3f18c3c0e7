"""RecognizeActivations: GELU and SiLU, which Relay has no operators for, out of the arithmetic that importers wrote."""

from __future__ import annotations

import math
from typing import Any

import tvm_ffi
from tvm import ir, relax, transform
from tvm.relax.expr_functor import PyExprMutator, mutator

from ..relax_ir.constants import array_of
from ..relax_ir.functions import map_functions, operator, top_level_bindings

__all__ = ["RecognizeActivations"]

_TOLERANCE = 1e-6
"""Relative. Importers wrote 1 / sqrt(2) with six to seventeen digits."""

_MOST_PRODUCTS = 8
"""Of one product that are looked into: an activation has at most four, and squares of squares double what there is."""


@transform.module_pass(opt_level=0, name="RecognizeActivations")
class RecognizeActivations:
    """One operator for an activation that is written out.

    x * (0.5 + 0.5 * erf(x / sqrt(2))), in any order -> gelu(x)
    x * sigmoid(x) -> silu(x)

    Kernels are then those of the same model through another front end, and records serve both.
    """

    def transform_module(self, mod: ir.IRModule, _context: transform.PassContext) -> ir.IRModule:
        """Rewrite every Relax function."""
        return map_functions(mod, _recognize)


def _recognize(function: relax.Function) -> relax.Function:
    if not any(operator(binding.value) in ("relax.erf", "relax.sigmoid") for binding in top_level_bindings(function)):
        return function
    return relax.analysis.remove_all_unused(_Recognizer().visit_expr(function))


@mutator
class _Recognizer(PyExprMutator):
    def visit_call_(self, call: relax.Call) -> Any:
        call = self.visit_expr_post_order(call)
        if operator(call) != "relax.multiply":
            return call
        factors, scale = self._factors(call)
        if len(factors) != 2:
            return call
        for data, other in (factors, factors[::-1]):
            if not tvm_ffi.structural_equal(data.ty, call.ty):
                continue
            if self._is_sigmoid(other, data) and math.isclose(scale, 1, rel_tol=_TOLERANCE):
                return relax.op.nn.silu(data)
            if self._is_gauss(other, data, scale):
                return relax.op.nn.gelu(data)
        return call

    def _value(self, expr: Any) -> Any:
        value = self.lookup_binding(expr) if isinstance(expr, relax.Var) else None
        return expr if value is None else value

    def _factors(self, expr: Any) -> tuple[list[Any], float]:
        """What a product consists of but for constant factors, and the product of those."""
        factors, scale, products = [], 1.0, 0
        pending = [expr]
        while pending:
            factor = pending.pop()
            number = _number(factor)
            if number is not None:
                scale *= number
                continue
            call: Any = self._value(factor) if products < _MOST_PRODUCTS else None
            divisor = _number(call.args[1]) if operator(call) == "relax.divide" else None
            if operator(call) == "relax.multiply":
                pending += reversed(call.args)
            elif divisor:
                pending.append(call.args[0])
                scale /= divisor
            else:
                factors.append(factor)
                continue
            products += 1
        return factors, scale

    def _is_sigmoid(self, expr: Any, data: Any) -> bool:
        call = self._value(expr)
        return operator(call) == "relax.sigmoid" and call.args[0].same_as(data)

    def _is_gauss(self, expr: Any, data: Any, scale: float) -> bool:
        """Whether scale * expr is 0.5 + 0.5 * erf(data / sqrt(2))."""
        call = self._value(expr)
        if operator(call) != "relax.add":
            return False
        for offset, term in (call.args, list(call.args)[::-1]):
            number = _number(offset)
            if number is None or not math.isclose(scale * number, 0.5, rel_tol=_TOLERANCE):
                continue
            factors, weight = self._factors(term)
            if len(factors) != 1 or not math.isclose(scale * weight, 0.5, rel_tol=_TOLERANCE):
                continue
            error = self._value(factors[0])
            if operator(error) != "relax.erf":
                continue
            inner, width = self._factors(error.args[0])
            if len(inner) == 1 and inner[0].same_as(data) and math.isclose(width**2, 0.5, rel_tol=_TOLERANCE):
                return width > 0
        return False


def _number(expr: Any) -> float | None:
    """The value of a constant scalar of floating point."""
    if not isinstance(expr, ir.GenericConst):
        return None
    array = array_of(expr)
    return float(array.reshape(())) if array.size == 1 and array.dtype.kind == "f" else None
