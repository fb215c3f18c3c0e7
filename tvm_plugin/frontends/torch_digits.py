"""Converters for PyTorch functions whose plain formulas lose digits or overflow, and for functions of integers."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from tvm import relax
from tvm.relax import op

from ..dtypes import is_floating
from .digits import SELU, atanh, elu, erfc, expm1, log1p, mish, softplus, tanh
from .torch_nodes import Converter, arguments, cast, dtype_of, operand

__all__ = ["DIGIT_CONVERTERS"]


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
    rest, zero = emit(op.mod(x, divisor)), relax.const(0, dtype)
    opposite = emit(op.less(emit(op.multiply(emit(op.sign(rest)), emit(op.sign(divisor)))), zero))
    return emit(op.where(opposite, emit(op.add(rest, divisor)), rest))


DIGIT_CONVERTERS: dict[str, Converter] = {
    "atanh.default": _of_one(atanh),
    "celu.default": _celu,
    "elu.default": _elu,
    "erfc.default": _of_one(erfc),
    "expm1.default": _of_one(expm1),
    "log1p.default": _of_one(log1p),
    "logaddexp.default": _log_of_sum,
    "mish.default": _of_one(mish),
    **{f"remainder.{kind}": _remainder for kind in ("Scalar", "Scalar_Tensor", "Tensor")},
    "reciprocal.default": _of_one(lambda emit, x, dtype: emit(op.divide(relax.const(1, dtype), x))),
    "selu.default": _of_one(lambda emit, x, dtype: elu(emit, x, dtype, *SELU)),
    "softplus.default": _softplus,
    "tanh.default": _of_one(tanh),
    **{f"{name}.default": _plain(getattr(op, name)) for name in ("exp", "log", "sigmoid", "sqrt", "erf")},
}
