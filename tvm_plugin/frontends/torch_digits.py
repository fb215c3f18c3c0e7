"""Converters for PyTorch functions whose plain formulas lose digits or overflow, and for functions of integers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from tvm import relax
from tvm.relax import op

from ..dtypes import is_floating
from .torch_nodes import Converter, arguments, cast, dtype_of, operand

__all__ = ["DIGIT_CONVERTERS"]

_LOG_BELOW = 0.25
_EXP_BELOW = 0.5
"""Series of arguments of less: from there on, the plain formula's error is three units in the last place."""


def _of_one(function: Callable[[Any, relax.Expr, str], relax.Expr]) -> Converter:
    """Of one tensor, which may hold integers, in the dtype of the result."""

    def convert(node: Any, importer: Any) -> relax.Expr:
        (x,) = arguments(node, importer, ("input",), ())
        dtype = dtype_of(node)
        return function(importer.block_builder.emit, cast(x, dtype, importer), dtype)

    return convert


def _plain(function: Callable[[relax.Expr], relax.Expr]) -> Converter:
    return _of_one(lambda emit, x, dtype: emit(function(x)))


def _log1p(emit: Any, x: relax.Expr, dtype: str) -> relax.Expr:
    """log(1 + x) = 2 artanh(s) with s = x / (2 + x)."""
    one, two = relax.const(1, dtype), relax.const(2, dtype)
    s = emit(op.divide(x, emit(op.add(two, x))))
    terms = 12 if dtype == "float64" else 6
    series = _polynomial(emit, emit(op.multiply(s, s)), [2 / (2 * k + 1) for k in range(terms)], dtype)
    small = emit(op.less(emit(op.abs(x)), relax.const(_LOG_BELOW, dtype)))
    return emit(op.where(small, emit(op.multiply(s, series)), emit(op.log(emit(op.add(one, x))))))


def _expm1(emit: Any, x: relax.Expr, dtype: str) -> relax.Expr:
    terms = 15 if dtype == "float64" else 9
    series = _polynomial(emit, x, [1 / math.factorial(k + 1) for k in range(terms)], dtype)
    small = emit(op.less(emit(op.abs(x)), relax.const(_EXP_BELOW, dtype)))
    plain = emit(op.subtract(emit(op.exp(x)), relax.const(1, dtype)))
    return emit(op.where(small, emit(op.multiply(x, series)), plain))


def _atanh(emit: Any, x: relax.Expr, dtype: str) -> relax.Expr:
    """log1p(2 |x| / (1 - |x|)) / 2, with the sign of x."""
    size = emit(op.abs(x))
    quotient = emit(op.divide(emit(op.add(size, size)), emit(op.subtract(relax.const(1, dtype), size))))
    half = emit(op.multiply(_log1p(emit, quotient, dtype), relax.const(0.5, dtype)))
    return emit(op.where(emit(op.less(x, relax.const(0, dtype))), emit(op.negative(half)), half))


def _polynomial(emit: Any, x: relax.Expr, coefficients: Sequence[float], dtype: str) -> relax.Expr:
    """Horner's rule; coefficients from the constant term upwards."""
    result: relax.Expr = relax.const(coefficients[-1], dtype)
    for coefficient in reversed(coefficients[:-1]):
        result = emit(op.add(emit(op.multiply(result, x)), relax.const(coefficient, dtype)))
    return result


def _log_of_sum(node: Any, importer: Any) -> relax.Expr:
    """log(e^a + e^b) = max(a, b) + log1p(e^-|a - b|); of equal ones, which may be infinite, a + log(2)."""
    emit, dtype = importer.block_builder.emit, dtype_of(node)
    a, b = (cast(x, dtype, importer) for x in arguments(node, importer, ("input", "other"), ()))
    apart = emit(op.negative(emit(op.abs(emit(op.subtract(a, b))))))
    sum_ = emit(op.add(emit(op.maximum(a, b)), _log1p(emit, emit(op.exp(apart)), dtype)))
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
    "atanh.default": _of_one(_atanh),
    "expm1.default": _of_one(_expm1),
    "log1p.default": _of_one(_log1p),
    "logaddexp.default": _log_of_sum,
    **{f"remainder.{kind}": _remainder for kind in ("Scalar", "Scalar_Tensor", "Tensor")},
    "reciprocal.default": _of_one(lambda emit, x, dtype: emit(op.divide(relax.const(1, dtype), x))),
    **{f"{name}.default": _plain(getattr(op, name)) for name in ("exp", "log", "sigmoid", "sqrt", "tanh", "erf")},
}
