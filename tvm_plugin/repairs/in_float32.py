"""Operators of less precise tensors computed in float32, between two casts."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from tvm import ir, relax
from tvm.relax.expr_functor import PyExprMutator, mutator

from ..relax_ir.constants import array_of
from ..relax_ir.functions import map_functions, operator

__all__ = ["ORDERING", "SUMS", "compute_in_float32"]

SUMS = frozenset(
    f"relax.{name}"
    for name in (
        *("sum", "mean", "prod", "variance", "std", "cumsum", "cumprod", "nn.softmax", "nn.log_softmax"),
        *("nn.layer_norm", "nn.group_norm", "nn.instance_norm", "nn.rms_norm"),
        *("nn.avg_pool1d", "nn.avg_pool2d", "nn.avg_pool3d"),
        *("nn.adaptive_avg_pool1d", "nn.adaptive_avg_pool2d", "nn.adaptive_avg_pool3d"),
    )
)
"""Operators that add or multiply many elements; not products, which say what they sum in."""

ORDERING = frozenset({"relax.argsort", "relax.median", "relax.sort", "relax.topk"})
"""Operators that sort. In bfloat16, TVM's runtime writes past the end of its buffers; the order is that of float32."""


def compute_in_float32(mod: ir.IRModule, operators: Collection[str], dtypes: Collection[str]) -> ir.IRModule:
    """Convert tensors of some dtypes that some operators read, and what they make of them back again.

    Results of other dtypes (places, truth values) stay as they are.
    """
    return map_functions(mod, lambda function: _InFloat32(operators, dtypes).visit_expr(function))


@mutator
class _InFloat32(PyExprMutator):
    def __init__(self, operators: Collection[str], dtypes: Collection[str]) -> None:
        super().__init__()
        self._operators, self._dtypes = operators, dtypes

    def visit_call_(self, call: relax.Call) -> Any:
        call = self.visit_expr_post_order(call)
        if operator(call) not in self._operators or not any(map(self._is_wanted, call.args)):
            return call
        emit = self.builder_.emit
        wide = emit(relax.Call(call.op, [self._wide(argument) for argument in call.args], call.attrs))
        if not isinstance(call.ty, relax.TupleType):
            return self._narrow(wide, call.ty)
        parts = [emit(relax.TupleGetItem(wide, place)) for place in range(len(call.ty.fields))]
        return relax.Tuple([emit(self._narrow(*pair)) for pair in zip(parts, call.ty.fields, strict=True)])

    def _narrow(self, wide: Any, given: Any) -> Any:
        """A result as the operator itself would have given it."""
        dtype = str(given.dtype)
        return relax.op.astype(wide, dtype) if dtype in self._dtypes else wide

    def _is_wanted(self, value: Any) -> bool:
        return isinstance(value.ty, relax.TensorType) and str(value.ty.dtype) in self._dtypes

    def _wide(self, argument: Any) -> Any:
        if not self._is_wanted(argument):
            return argument
        if isinstance(argument, ir.GenericConst) and not argument.ty.shape.values:
            return relax.const(float(array_of(argument)), "float32")
        return self.builder_.emit(relax.op.astype(argument, "float32"))
