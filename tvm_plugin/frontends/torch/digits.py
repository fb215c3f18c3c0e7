"""Converters for PyTorch functions whose plain formulas lose digits or overflow, and for functions of integers."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

from tvm import relax
from tvm.relax import op

from ...dtypes import HALVES, is_floating
from ..digits import (
    SELU,
    atanh,
    elu,
    erfc,
    expm1,
    log1p,
    log_to_base,
    mish,
    opposite_signs,
    remainder,
    softplus,
    tanh,
)
from .nodes import Converter, arguments, cast, dtype_of, operand

__all__ = ["DIGIT_CONVERTERS", "floor_quotient"]


def _of_one(function: Callable[[Any, relax.Expr, str], relax.Expr]) -> Converter:
    """Of one tensor, which may hold integers, in the dtype of the result."""

    def convert(node: Any, importer: Any) -> relax.Expr:
        (x,) = arguments(node, importer, ("input",), ())
        dtype = dtype_of(node)
        return function(importer.block_builder.emit, cast(x, dtype, importer), dtype)

    return convert


def _plain(function: Callable[[relax.Expr], relax.Expr]) -> Converter:
    return _of_one(lambda emit, x, dtype: emit(function(x)))


def _softplus(node: Any, importer: Any) -> relax.Expr:
    x, beta, threshold = arguments(node, importer, ("input", "beta", "threshold"), (1, 20))
    emit, dtype = importer.block_builder.emit, str(x.ty.dtype)
    steep = x if beta == 1 else emit(op.multiply(x, relax.const(beta, dtype)))
    smooth = softplus(emit, steep, dtype)
    smooth = smooth if beta == 1 else emit(op.divide(smooth, relax.const(beta, dtype)))
    return emit(op.where(emit(op.greater(steep, relax.const(threshold, dtype))), x, smooth))


def _elu(node: Any, importer: Any) -> relax.Expr:
    x, *factors = arguments(node, importer, ("input", "alpha", "scale", "input_scale"), (1, 1, 1))
    return elu(importer.block_builder.emit, x, str(x.ty.dtype), *factors)


def _celu(node: Any, importer: Any) -> relax.Expr:
    x, alpha = arguments(node, importer, ("input", "alpha"), (1,))
    return elu(importer.block_builder.emit, x, str(x.ty.dtype), alpha, slope=1 / alpha)


def _softshrink(node: Any, importer: Any) -> relax.Expr:
    """x - clip(x): TVM's importer multiplies by masks, which makes NaN of infinities."""
    x, limit = arguments(node, importer, ("input", "lambd"), (0.5,))
    emit = importer.block_builder.emit
    return emit(op.subtract(x, emit(op.clip(x, -limit, limit))))


def _log_of_sum(node: Any, importer: Any) -> relax.Expr:
    """log(e^a + e^b) = max(a, b) + log1p(e^-|a - b|); of equal ones, which may be infinite, a + log(2)."""
    emit, dtype = importer.block_builder.emit, dtype_of(node)
    a, b = (cast(x, dtype, importer) for x in arguments(node, importer, ("input", "other"), ()))
    apart = emit(op.negative(emit(op.abs(emit(op.subtract(a, b))))))
    sum_ = emit(op.add(emit(op.maximum(a, b)), log1p(emit, emit(op.exp(apart)), dtype)))
    return emit(op.where(emit(op.equal(a, b)), emit(op.add(a, relax.const(math.log(2), dtype))), sum_))


def _remainder(node: Any, importer: Any) -> relax.Expr:
    """With the sign of the divisor. Of floats by way of C's fmod, which is exact: quotients may have no digits left."""
    emit, dtype = importer.block_builder.emit, dtype_of(node)
    x, divisor = (operand(part, dtype, importer) for part in arguments(node, importer, ("input", "other"), ()))
    if not is_floating(dtype):
        return emit(op.floor_mod(x, divisor))
    return remainder(emit, x, divisor, dtype)


def floor_quotient(node: Any, importer: Any) -> relax.Expr:
    """Rounded down. Of floats without what remains, as in PyTorch: 1 // 0.1 is 9, though 1 / 0.1 is rounded to 10."""
    emit, dtype = importer.block_builder.emit, dtype_of(node)
    wide = "float32" if dtype in HALVES else dtype
    given = arguments(node, importer, ("input", "other"), ())
    x, divisor = (operand(part, wide, importer) for part in given)
    is_number = isinstance(given[1], int | float)
    if not is_floating(dtype) or (is_number and given[1] == 0):
        return cast(emit(op.floor_divide(x, divisor)), dtype, importer)
    rest, one = emit(op.mod(x, divisor)), relax.const(1, wide)
    whole = emit(op.divide(emit(op.subtract(x, rest)), divisor))
    whole = emit(op.where(opposite_signs(emit, rest, divisor, wide), emit(op.subtract(whole, one)), whole))
    whole = emit(op.round(whole))
    if not is_number:
        is_zero = emit(op.equal(divisor, relax.const(0, wide)))
        whole = emit(op.where(is_zero, emit(op.divide(x, divisor)), whole))
    return cast(whole, dtype, importer)


DIGIT_CONVERTERS: dict[str, Converter] = {
    "atanh.default": _of_one(atanh),
    "celu.default": _celu,
    "elu.default": _elu,
    "erfc.default": _of_one(erfc),
    "expm1.default": _of_one(expm1),
    **{f"floor_divide.{kind}": floor_quotient for kind in ("Scalar", "default")},
    "log1p.default": _of_one(log1p),
    **{f"log{base}.default": _of_one(partial(log_to_base, base=base)) for base in (2, 10)},
    "logaddexp.default": _log_of_sum,
    "mish.default": _of_one(mish),
    **{f"remainder.{kind}": _remainder for kind in ("Scalar", "Scalar_Tensor", "Tensor")},
    "reciprocal.default": _of_one(lambda emit, x, dtype: emit(op.divide(relax.const(1, dtype), x))),
    "selu.default": _of_one(lambda emit, x, dtype: elu(emit, x, dtype, *SELU)),
    "softshrink.default": _softshrink,
    "softplus.default": _softplus,
    "tanh.default": _of_one(tanh),
    **{
        f"{name}.default": _plain(getattr(op, name))
        for name in (
            *("exp", "log", "sigmoid", "sqrt", "rsqrt", "erf", "sin", "cos", "tan", "asin", "acos", "atan"),
            *("sinh", "cosh", "asinh", "acosh"),
        )
    },
}
