"""Arithmetic of 16-bit floats in float32, rounded once an operator, as PyTorch computes it on a CPU.

TVM rounds inside of operators, each step of a sum or of a softmax, converts in front of every instruction, and calls
libm for functions of such types; none of the vectorised forms fits. Written as float32 between two casts, which are
fused, kernels are those of float32 that load and store half as much. A GPU computes in such types itself, but for a few
functions.
"""

from __future__ import annotations

from typing import Any

from tvm import ir
from tvm.target import codegen

from ..repairs.in_float32 import ORDERING, SUMS, compute_in_float32

__all__ = ["with_float32_arithmetic", "with_functions_that_gpus_have"]

_NATIVE_FLOAT16 = frozenset({"avx512fp16", "fullfp16"})
"""Features of CPUs that compute in float16."""

_ROUNDED_ONCE = frozenset(
    f"relax.{name}"
    for name in (
        *("add", "subtract", "multiply", "divide", "negative", "maximum", "minimum", "clip", "abs", "square", "sqrt"),
        *("max", "min", "argmax", "argmin", "nn.relu", "nn.max_pool1d", "nn.max_pool2d", "nn.max_pool3d"),
    )
)
"""One instruction of such a CPU, whose result is that of float32 rounded; sums and functions would round many times."""

_FUNCTIONS = frozenset(
    f"relax.{name}"
    for name in (
        *("power", "floor_divide", "mod", "floor_mod", "atan2", "rsqrt", "exp", "log", "erf", "tanh", "sigmoid"),
        *("sin", "cos", "tan", "sinh", "cosh", "asin", "acos", "atan", "asinh", "acosh", "atanh"),
        *("nn.leakyrelu", "nn.prelu", "nn.gelu", "nn.gelu_tanh", "nn.silu", "nn.selu", "nn.softplus"),
        *("image.resize2d", "image.grid_sample"),
    )
)
"""What takes several instructions an element."""

_NOT_ON_GPUS = frozenset(
    f"relax.{name}" for name in ("acos", "acosh", "asin", "asinh", "atan2", "atanh", "cosh", "mod", "round", "sinh")
)
"""What TVM does not lower to CUDA, or calls by names that CUDA lacks (hcosh)."""

_ARITHMETIC = _ROUNDED_ONCE | _FUNCTIONS | SUMS
"""Operators that compute numbers: not those that move or select them, nor products, which say what they sum in."""


def with_float32_arithmetic(mod: ir.IRModule, target: Any) -> ir.IRModule:
    """Compute what 16-bit floats are added, scaled or reduced to in float32; on a CPU with arithmetic of float16, all
    but what one instruction computes as exactly.
    """
    native = _NATIVE_FLOAT16 & {str(feature) for feature in codegen.llvm_get_cpu_features(target)}
    mod = compute_in_float32(mod, _ARITHMETIC | ORDERING, ["bfloat16"])
    return compute_in_float32(mod, _FUNCTIONS | SUMS if native else _ARITHMETIC, ["float16"])


def with_functions_that_gpus_have(mod: ir.IRModule) -> ir.IRModule:
    """Compute functions of 16-bit floats that TVM cannot build for a GPU in float32, between casts that are fused."""
    return compute_in_float32(mod, _NOT_ON_GPUS, ["bfloat16", "float16"])
