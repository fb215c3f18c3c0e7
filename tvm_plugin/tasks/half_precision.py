"""Arithmetic of 16-bit floats in float32, rounded once an operator, as PyTorch computes it on a CPU.

TVM rounds inside of operators, each step of a sum or of a softmax, converts in front of every instruction, and calls
libm for functions of such types; none of the vectorised forms fits. Written as float32 between two casts, which are
fused, kernels are those of float32 that load and store half as much.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from tvm import ir, relax
from tvm.relax.expr_functor import PyExprMutator, mutator
from tvm.target import codegen

from ..dtypes import HALVES
from ..transform.constants import array_of, is_static_tensor
from ..transform.functions import map_functions, operator

__all__ = ["with_float32_arithmetic"]

_NATIVE_FLOAT16 = frozenset({"avx512fp16", "fullfp16"})
"""Features of CPUs that compute in float16."""

_ARITHMETIC = frozenset(
    f"relax.{name}"
    for name in (
        *("add", "subtract", "multiply", "divide", "power", "floor_divide", "mod", "floor_mod", "atan2", "negative"),
        *("maximum", "minimum", "clip", "abs", "square", "sqrt", "rsqrt", "exp", "log", "erf", "tanh", "sigmoid"),
        *("sin", "cos", "tan", "sinh", "cosh", "asin", "acos", "atan", "asinh", "acosh", "atanh"),
        *("sum", "mean", "max", "min", "prod", "variance", "std", "cumsum", "cumprod"),
        *("nn.relu", "nn.leakyrelu", "nn.prelu", "nn.gelu", "nn.gelu_tanh", "nn.silu", "nn.selu", "nn.softplus"),
        *("nn.softmax", "nn.log_softmax", "nn.layer_norm", "nn.group_norm", "nn.instance_norm", "nn.rms_norm"),
        *("nn.avg_pool1d", "nn.avg_pool2d", "nn.avg_pool3d", "nn.max_pool1d", "nn.max_pool2d", "nn.max_pool3d"),
        *("nn.adaptive_avg_pool1d", "nn.adaptive_avg_pool2d", "nn.adaptive_avg_pool3d"),
        *("image.resize2d", "image.grid_sample"),
    )
)
"""Operators that compute numbers: not those that move or select them, nor products, which say what they sum in."""


def with_float32_arithmetic(mod: ir.IRModule, target: Any) -> ir.IRModule:
    """Compute what 16-bit floats are added, scaled or reduced to in float32, on a CPU that has no such arithmetic."""
    native = _NATIVE_FLOAT16 & {str(feature) for feature in codegen.llvm_get_cpu_features(target)}
    types = [dtype for dtype in HALVES if dtype != "float16" or not native]
    return map_functions(mod, lambda function: _InFloat32(types).visit_expr(function))


@mutator
class _InFloat32(PyExprMutator):
    def __init__(self, types: Collection[str]) -> None:
        super().__init__()
        self._types = types

    def visit_call_(self, call: relax.Call) -> Any:
        call = self.visit_expr_post_order(call)
        dtype = str(getattr(call.ty, "dtype", ""))
        if dtype not in self._types or operator(call) not in _ARITHMETIC:
            return call
        wide = relax.Call(call.op, [self._wide(argument) for argument in call.args], call.attrs)
        return relax.op.astype(self.builder_.emit(wide), dtype)

    def _wide(self, argument: Any) -> Any:
        if not is_static_tensor(argument.ty) or str(argument.ty.dtype) not in self._types:
            return argument
        if isinstance(argument, ir.GenericConst) and not argument.ty.shape.values:
            return relax.const(float(array_of(argument)), "float32")
        return self.builder_.emit(relax.op.astype(argument, "float32"))
