"""ScaleSmallerOperand: the smaller operand of a product is multiplied by a number, not the larger one."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from tvm import ir, relax, transform
from tvm.relax import op
from tvm.relax.expr_functor import PyExprMutator, mutator

from ..relax_ir.constants import array_of, constant_of, is_number, is_static_tensor
from ..relax_ir.functions import map_functions, operator, values_of_one_block
from ..relax_ir.tensors import extents
from .simplify_shapes import RESHAPES, permutation_of

__all__ = ["ScaleSmallerOperand"]

_BY_A_NUMBER = ("relax.multiply", "relax.divide")

_WIDE = ("float32", "float64", "bfloat16")
"""Types whose range any operand of a model survives a moderate number in: float16 ends at 65504."""


@transform.module_pass(opt_level=0, name="ScaleSmallerOperand")
class ScaleSmallerOperand:
    """matmul(x, y * number) -> matmul(x * number, y), where x is the smaller one; also where y was moved since.

    PyTorch's attention multiplies queries and keys, each by the root of the scale. For the next word of a decoder there
    is one query, and the keys are the whole cache, which would be copied.
    """

    def transform_module(self, mod: ir.IRModule, _context: transform.PassContext) -> ir.IRModule:
        """Rewrite `relax.matmul` of floats in every Relax function."""
        return map_functions(mod, _scale)


def _scale(function: relax.Function) -> relax.Function:
    values = values_of_one_block(function)
    if not any(_has_smaller_operand(value) for value in values.values()):
        return function
    return relax.analysis.remove_all_unused(_Scaler(values).visit_expr(function))


def _has_smaller_operand(value: Any) -> bool:
    if operator(value) != "relax.matmul" or not all(is_static_tensor(arg.ty) for arg in value.args):
        return False
    x, y = value.args
    dtype = str(x.ty.dtype)
    return dtype in _WIDE and dtype == str(y.ty.dtype) and math.prod(extents(x.ty)) < math.prod(extents(y.ty))


@mutator
class _Scaler(PyExprMutator):
    def __init__(self, values: Mapping[relax.Var, Any]) -> None:
        super().__init__()
        self._values = values

    def visit_call_(self, call: relax.Call) -> Any:
        found = self._unscaled(call.args[1]) if _has_smaller_operand(call) else None
        if found is None:
            return self.visit_expr_post_order(call)
        source, by = found
        number = constant_of(array_of(by.args[1]).reshape(()))
        x = self.builder_.emit(relax.Call(by.op, [self.visit_expr(call.args[0]), number], by.attrs))
        return op.matmul(x, source(), out_dtype=str(call.ty.dtype))

    def _unscaled(self, var: Any) -> tuple[Callable[[], Any], relax.Call] | None:
        """What emits the value of a variable without a number's multiple, and the call that multiplies it."""
        value = self._values.get(var) if isinstance(var, relax.Var) else None
        if not isinstance(value, relax.Call) or not is_static_tensor(value.ty):
            return None
        name = operator(value)
        if name in _BY_A_NUMBER and isinstance(value.args[0], relax.Var) and _is_moderate(value.args[1], value.args[0]):
            return (lambda: self.visit_expr(value.args[0])), value
        inner = self._unscaled(value.args[0]) if name in RESHAPES or name == "relax.permute_dims" else None
        if inner is None:
            return None
        source, by = inner
        if name == "relax.permute_dims":
            return (lambda: self.builder_.emit(op.permute_dims(source(), permutation_of(value)))), by
        return (lambda: self.builder_.emit(op.reshape(source(), extents(value.ty)))), by


def _is_moderate(operand: Any, beside: Any) -> bool:
    """Whether it is one constant number beside a tensor, which the range of floats survives."""
    if not is_static_tensor(beside.ty) or not is_number(operand, beside.ty.ndim):
        return False
    return 1e-6 < abs(float(array_of(operand).reshape(-1)[0])) < 1e6
