"""Functions whose plain formulas lose digits of small and large arguments, or overflow.

Each takes what emits an expression, a tensor of floats (or two), and its dtype.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from tvm import relax
from tvm.relax import op

from ..dtypes import HALVES

__all__ = [
    "SELU",
    "atanh",
    "elu",
    "erfc",
    "expm1",
    "log1p",
    "log_to_base",
    "mish",
    "opposite_signs",
    "remainder",
    "scaled_product",
    "softplus",
    "tanh",
]

SELU = (1.6732632423543772, 1.0507009873554805)
"""`alpha` and `scale` that make an ELU keep means of 0 and variances of 1."""

_LOG_BELOW = 0.25
_EXP_BELOW = 0.5
"""Series of arguments of less: from there on, the plain formula's error is three units in the last place."""

_FRACTION_FROM = 2
"""Where `erfc` becomes a continued fraction: below, a hundred units in the last place are lost at most."""

_ONE_FROM = {"float16": 5}
"""From here on, tanh(log(1 + e^x)) is 1; of other types from 20 on."""


def scaled_product(emit: Any, left: relax.Expr, right: relax.Expr, dtype: str, factor: float) -> relax.Expr:
    """A product of matrices times a number; of 16 bits in float32, because it may be infinite before it is scaled."""
    wide = "float32" if dtype in HALVES else dtype
    product = emit(op.matmul(left, right, out_dtype=wide))
    return product if factor == 1 else emit(op.multiply(product, relax.const(factor, wide)))


def log1p(emit: Any, x: relax.Expr, dtype: str) -> relax.Expr:
    """log(1 + x) = 2 artanh(s) with s = x / (2 + x)."""
    one, two = relax.const(1, dtype), relax.const(2, dtype)
    s = emit(op.divide(x, emit(op.add(two, x))))
    terms = 12 if dtype == "float64" else 6
    series = _polynomial(emit, emit(op.multiply(s, s)), [2 / (2 * k + 1) for k in range(terms)], dtype)
    small = emit(op.less(emit(op.abs(x)), relax.const(_LOG_BELOW, dtype)))
    return emit(op.where(small, emit(op.multiply(s, series)), emit(op.log(emit(op.add(one, x))))))


def remainder(emit: Any, x: relax.Expr, divisor: relax.Expr, dtype: str) -> relax.Expr:
    """Of floats, with the divisor's sign, by way of C's fmod: x - floor(x / divisor) * divisor is rounded thrice."""
    rest = emit(op.mod(x, divisor))
    return emit(op.where(opposite_signs(emit, rest, divisor, dtype), emit(op.add(rest, divisor)), rest))


def opposite_signs(emit: Any, one: relax.Expr, other: relax.Expr, dtype: str) -> relax.Expr:
    """Whether one is negative and the other positive."""
    signs = emit(op.multiply(emit(op.sign(one)), emit(op.sign(other))))
    return emit(op.less(signs, relax.const(0, dtype)))


def log_to_base(emit: Any, x: relax.Expr, dtype: str, base: int) -> relax.Expr:
    """log(x) / log(base), and whole numbers of the base's powers: the quotient may be just below, 12.999999 of 2^13."""
    quotient = emit(op.divide(emit(op.log(x)), relax.const(math.log(base), dtype)))
    whole = emit(op.round(quotient))
    is_whole = emit(op.equal(emit(op.power(relax.const(base, dtype), whole)), x))
    return emit(op.where(is_whole, whole, quotient))


def expm1(emit: Any, x: relax.Expr, dtype: str) -> relax.Expr:
    """e^x - 1."""
    terms = 15 if dtype == "float64" else 9
    series = _polynomial(emit, x, [1 / math.factorial(k + 1) for k in range(terms)], dtype)
    small = emit(op.less(emit(op.abs(x)), relax.const(_EXP_BELOW, dtype)))
    plain = emit(op.subtract(emit(op.exp(x)), relax.const(1, dtype)))
    return emit(op.where(small, emit(op.multiply(x, series)), plain))


def atanh(emit: Any, x: relax.Expr, dtype: str) -> relax.Expr:
    """log1p(2 |x| / (1 - |x|)) / 2, with the sign of x."""
    size = emit(op.abs(x))
    quotient = emit(op.divide(emit(op.add(size, size)), emit(op.subtract(relax.const(1, dtype), size))))
    half = emit(op.multiply(log1p(emit, quotient, dtype), relax.const(0.5, dtype)))
    return _with_sign_of(emit, x, half, dtype)


def tanh(emit: Any, x: relax.Expr, dtype: str) -> relax.Expr:
    """-f / (2 + f) with f = expm1(-2 |x|), and the sign of x, in float64.

    In float32, in which networks ask for it, TVM's, whose error is one unit in the last place of 1.
    """
    if dtype != "float64":
        return emit(op.tanh(x))
    less = expm1(emit, emit(op.multiply(emit(op.abs(x)), relax.const(-2, dtype))), dtype)
    size = emit(op.divide(emit(op.negative(less)), emit(op.add(relax.const(2, dtype), less))))
    return _with_sign_of(emit, x, size, dtype)


def erfc(emit: Any, x: relax.Expr, dtype: str) -> relax.Expr:
    """1 - erf(x); e^(-x^2) / sqrt(pi) / (x + 1/2 / (x + 2/2 / (x + 3/2 / (x + ...)))) of large arguments."""
    large = emit(op.maximum(x, relax.const(_FRACTION_FROM, dtype)))
    fraction = large
    for numerator in range(50 if dtype == "float64" else 14, 0, -1):
        fraction = emit(op.add(large, emit(op.divide(relax.const(numerator / 2, dtype), fraction))))
    bell = emit(op.exp(emit(op.negative(emit(op.multiply(large, large))))))
    tail = emit(op.divide(emit(op.multiply(bell, relax.const(math.pi**-0.5, dtype))), fraction))
    is_large = emit(op.greater_equal(x, relax.const(_FRACTION_FROM, dtype)))
    return emit(op.where(is_large, tail, emit(op.subtract(relax.const(1, dtype), emit(op.erf(x))))))


def softplus(emit: Any, x: relax.Expr, dtype: str) -> relax.Expr:
    """log(1 + e^x) = max(x, 0) + log1p(e^-|x|): a seventh slower than by log, and no zero whose logarithm is asked."""
    apart = emit(op.exp(emit(op.negative(emit(op.abs(x))))))
    return emit(op.add(emit(op.nn.relu(x)), log1p(emit, apart, dtype)))


def mish(emit: Any, x: relax.Expr, dtype: str) -> relax.Expr:
    """x tanh(log(1 + e^x)) = x n / (n + 2) with n = e^x (e^x + 2)."""
    two = relax.const(2, dtype)
    power = emit(op.exp(emit(op.minimum(x, relax.const(_ONE_FROM.get(dtype, 20), dtype)))))
    n = emit(op.multiply(power, emit(op.add(power, two))))
    return emit(op.multiply(x, emit(op.divide(n, emit(op.add(n, two))))))


def elu(emit: Any, x: relax.Expr, dtype: str, alpha: float = 1, scale: float = 1, slope: float = 1) -> relax.Expr:
    """`scale` x above 0, `scale` `alpha` (e^(`slope` x) - 1) below; without the digits of tiny ones in float32.

    They would take a kernel of ELU alone half as long again, in networks, which add much larger numbers.
    """
    zero, one = (relax.const(number, dtype) for number in (0, 1))
    below = emit(op.minimum(x, zero))
    if slope != 1:
        below = emit(op.multiply(below, relax.const(slope, dtype)))
    less = expm1(emit, below, dtype) if dtype == "float64" else emit(op.subtract(emit(op.exp(below)), one))
    above, less = (
        part if factor == 1 else emit(op.multiply(part, relax.const(factor, dtype)))
        for part, factor in ((emit(op.nn.relu(x)), scale), (less, scale * alpha))
    )
    return emit(op.add(above, less))


def _with_sign_of(emit: Any, x: relax.Expr, size: relax.Expr, dtype: str) -> relax.Expr:
    return emit(op.where(emit(op.less(x, relax.const(0, dtype))), emit(op.negative(size)), size))


def _polynomial(emit: Any, x: relax.Expr, coefficients: Sequence[float], dtype: str) -> relax.Expr:
    """Horner's rule; coefficients from the constant term upwards."""
    result: relax.Expr = relax.const(coefficients[-1], dtype)
    for coefficient in reversed(coefficients[:-1]):
        result = emit(op.add(emit(op.multiply(result, x)), relax.const(coefficient, dtype)))
    return result
