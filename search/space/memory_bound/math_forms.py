"""Transcendental functions in a form that vectorises.

LLVM has no vector `exp`, `tanh`, `erf` or `log` of its own: on a vector of 16 floats it calls libm 16 times, at 2 to
10 ns each. The forms here are additions, multiplications, comparisons and shifts only, so that any vector length, and
LLVM's own vectoriser too, can use them.

Sources of the approximations: log and the reduction of exp, S. Moshier, Cephes (expf, logf), with a polynomial for
e^r that is minimax in relative error (9e-8, constant term 1, fitted by Lawson's iteration); tanh and erf, the rational
minimax approximations of Eigen (MathFunctionsImpl.h, generic_fast_tanh_float and erf). Measured largest errors are in
tests/search/test_memory_bound_math.py.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

from tvm import tirx

__all__ = ["exp_below_zero", "math_form"]

_FLOAT = "float32"
_INT = "int32"
_MANTISSA_BITS = 23

_TANH_ODD = (
    4.89352455891786e-03,
    6.37261928875436e-04,
    1.48572235717979e-05,
    5.12229709037114e-08,
    -8.60467152213735e-11,
    2.00018790482477e-13,
    -2.76076847742355e-16,
)
_TANH_EVEN = (4.89352518554385e-03, 2.26843463243900e-03, 1.18534705686654e-04, 1.19825839466702e-06)
_ERF_ODD = (
    -1.60960333262415e-02,
    -2.95459980854025e-03,
    -7.34990630326855e-04,
    -5.69250639462346e-05,
    -2.10102402082508e-06,
    2.77068142495902e-08,
    -2.72614225801306e-10,
)
_ERF_EVEN = (
    -1.42647390514189e-02,
    -7.37332916720468e-03,
    -1.68282697438203e-03,
    -2.13374055278905e-04,
    -1.45660718464996e-05,
)
_EXP = (1.0, 9.9999970631e-1, 4.9999147841e-1, 1.6667638127e-1, 4.1898159619e-2, 8.2902721117e-3)
_EXP2 = tuple(coefficient * math.log(2.0) ** power for power, coefficient in enumerate(_EXP))
_LOG2_E = 1.4426950408889634
_LARGEST_EXP = 88.72283
_LEAST_EXP = -87.33654  # of 2^-126, the smallest normal number
_ZERO_EXP = 88.0  # of it n = round(x / ln 2) = 127, and 2^-n becomes zero
_INFINITE_EXP = 89.0  # of it n = 128, and 2^n becomes infinite
_ROUNDING = 1.5 * 2.0**_MANTISSA_BITS
_BIASED_ROUNDING = _ROUNDING + 127.0  # of an exponent
_LOG = (
    3.3333331174e-1,
    -2.4999993993e-1,
    2.0000714765e-1,
    -1.6668057665e-1,
    1.4249322787e-1,
    -1.2420140846e-1,
    1.1676998740e-1,
    -1.1514610310e-1,
    7.0376836292e-2,
)
_SINH = tuple(1.0 / math.factorial(power) for power in range(1, 19, 2))


def math_form(call: Any) -> Any | None:
    """The vectorising form of one call, its arguments as they are; None where there is none.

    Covers float32 `exp`, `tanh`, `sigmoid`, `erf`, `log`, and powers that are products or square roots; `sinh` and
    `cosh` of float64, too, which LLVM does not compile in vectors.
    """
    name = getattr(call.op, "name", "")
    if name in _HYPERBOLIC and str(call.ty.dtype) in (_FLOAT, "float64"):
        return _HYPERBOLIC[name](call.args[0], str(call.ty.dtype))
    form = _FORMS.get(name)
    return None if form is None or str(call.ty.dtype) != _FLOAT else form(*call.args)


def _let(value: Any, body: Callable[[Any], Any], dtype: str = _FLOAT) -> Any:
    """Name a value that the form uses more than once."""
    var = tirx.Var("v", dtype)
    return tirx.Let(var, value, body(var))


def _f(value: float) -> Any:
    return tirx.const(value, _FLOAT)


def _i(value: int) -> Any:
    return tirx.const(value, _INT)


def _polynomial(x: Any, coefficients: Sequence[float], dtype: str = _FLOAT) -> Any:
    """Horner's rule; coefficients from the constant term upwards."""
    result = tirx.const(coefficients[-1], dtype)
    for coefficient in reversed(coefficients[:-1]):
        result = result * x + tirx.const(coefficient, dtype)
    return result


def _reduced_exp(x: Any, rounding: float, scaled: Callable[[Any, Any], Any]) -> Any:
    """e^x = 2^n * e^r with n = round(x / ln 2), |r| <= ln 2 / 2: `scaled(e^r, x / ln 2 + rounding)`.

    Eight multiply-adds. Adding `_ROUNDING` rounds x / ln 2 to whole numbers and leaves n in the last bits of the sum.
    """

    def reduced(v: Any, shifted: Any) -> Any:
        def of(n: Any) -> Any:
            # ln 2 in two parts, the first with few enough bits that n * 0.693359375 is exact.
            r = (v - n * _f(0.693359375)) - n * _f(-2.12194440e-4)
            return _let(r, lambda r: scaled(_polynomial(r, _EXP), shifted))

        return _let(shifted - _f(rounding), of)

    return _let(x, lambda v: _let(v * _f(_LOG2_E) + _f(rounding), lambda shifted: reduced(v, shifted)))


def _with_exponent(value: Any, shifted: Any) -> Any:
    """value * 2^n, where n is in the last bits of `shifted`: also where 2^n is infinite and the product is not.

    Any number may come out of NaN.
    """
    exponent = tirx.reinterpret(_INT, shifted) << _i(_MANTISSA_BITS)
    return tirx.reinterpret(_FLOAT, tirx.reinterpret(_INT, value) + exponent)


def _times_power(value: Any, shifted: Any) -> Any:
    """value * 2^n, where n + 127 is in the last bits of `shifted`: zero for n = -127, NaN for NaN; not for n > 127."""
    return value * tirx.reinterpret(_FLOAT, tirx.reinterpret(_INT, shifted) << _i(_MANTISSA_BITS))


def exp_below_zero(x: Any) -> Any:
    """e^x for x <= 0 or NaN: seven multiply-adds, a multiplication, a maximum.

    e^x = 2^n * 2^r with n = round(x * log2 e), r = x * log2 e - n. The error of log2 e in float32 makes a relative one
    of 1.3e-8 * |x|, and where the CPU has no multiply-add, the rounded product one of 6e-8 * |x|: as large as that of
    a difference x that had to be rounded. Results below 2^-126 may become zero; those below 2^-126.5 do.
    """

    def of(v: Any, shifted: Any) -> Any:
        r = v * _f(_LOG2_E) - (shifted - _f(_BIASED_ROUNDING))
        return _let(r, lambda r: _times_power(_polynomial(r, _EXP2), shifted))

    # The constant first: a comparison with NaN is false, so that NaN goes through.
    clamped = _let(x, lambda v: tirx.Select(_f(-_ZERO_EXP) > v, _f(-_ZERO_EXP), v))
    return _let(clamped, lambda v: _let(v * _f(_LOG2_E) + _f(_BIASED_ROUNDING), lambda shifted: of(v, shifted)))


def _exp(x: Any) -> Any:
    def edges(v: Any) -> Any:
        # NaN fails both comparisons and comes out of the sum.
        finite = _reduced_exp(v, _ROUNDING, _with_exponent)
        above = tirx.Select(v <= _f(_LARGEST_EXP), finite, v + _f(math.inf))
        return tirx.Select(v < _f(_LEAST_EXP), _f(0.0), above)

    return _let(x, edges)


def _sigmoid(x: Any) -> Any:
    """1 / (1 + e^-x), of x clamped to [-_INFINITE_EXP, _ZERO_EXP]: 0 at the end, so that x times it vanishes, too."""

    def exp_of_negated(c: Any) -> Any:
        return _reduced_exp(_f(0.0) - c, _BIASED_ROUNDING, _times_power)

    return _f(1.0) / (_f(1.0) + _let(_clamped(x, -_INFINITE_EXP, _ZERO_EXP), exp_of_negated))


def _clamped(x: Any, low: float, high: float) -> Any:
    # Constants first: a comparison with NaN is false, so that NaN goes through.
    above = _let(x, lambda v: tirx.Select(_f(low) > v, _f(low), v))
    return _let(above, lambda v: tirx.Select(_f(high) < v, _f(high), v))


def _rational(x: Any, odd: Sequence[float], even: Sequence[float], bound: float) -> Any:
    """x * odd(x^2) / even(x^2) for x clamped to [-bound, bound]."""

    def quotient(c: Any) -> Any:
        return _let(c * c, lambda s: c * _polynomial(s, odd) / _polynomial(s, even))

    return _let(_clamped(x, -bound, bound), quotient)


def _log(x: Any) -> Any:
    """log(2^e * m) = e * ln 2 + log(m), sqrt(1/2) <= m < sqrt(2)."""
    smallest_normal = 1.17549435e-38

    def of_mantissa(v: Any, e: Any, f: Any) -> Any:
        def finish(square: Any) -> Any:
            tail = _polynomial(f, _LOG) * f * square + e * _f(-2.12194440e-4) - square * _f(0.5)
            return f + tail + e * _f(0.693359375)

        special = tirx.Select(v == _f(0.0), _f(-math.inf), _f(math.nan))
        return tirx.Select(v > _f(0.0), tirx.Select(v < _f(math.inf), _let(f * f, finish), _f(math.inf)), special)

    def of_normal(v: Any) -> Any:
        tiny = v < _f(smallest_normal)
        bits = tirx.reinterpret(_INT, tirx.Select(tiny, v * _f(2.0**23), v))
        return _let(bits, lambda i: split(v, tiny, i), _INT)

    def split(v: Any, tiny: Any, i: Any) -> Any:
        sqrt_half = 0x3F3504F3
        shift = _i(_MANTISSA_BITS)
        return _let(
            (i - _i(sqrt_half)) >> shift,
            lambda e: _let(
                tirx.reinterpret(_FLOAT, i - (e << shift)) - _f(1.0),
                lambda f: of_mantissa(v, e.astype(_FLOAT) - tirx.Select(tiny, _f(23.0), _f(0.0)), f),
            ),
            _INT,
        )

    return _let(x, of_normal)


def _pow(x: Any, exponent: Any) -> Any | None:
    """Products and roots for a constant exponent: whole up to 4, a half, quarters below 1, or one of these below zero.

    As PyTorch takes them, a root of minus infinity is no number, and a square root of minus zero has its sign.
    """
    value = float(exponent.value) if isinstance(exponent, tirx.FloatImm) else math.nan
    if abs(value) in _ROOTS:
        power = _let(x, _ROOTS[abs(value)])
    elif abs(value) in (1.0, 2.0, 3.0, 4.0):
        power = _let(x, lambda v: functools.reduce(operator.mul, [v] * int(abs(value))))
    else:
        return None
    return power if value > 0 else _f(1.0) / power


def _of_exponential(size: Any, sign: float, dtype: str) -> Any:
    """(e^size +- e^-size) / 2 by way of the square root of e^size, which is finite where half of e^size is."""

    def of(root: Any) -> Any:
        half = tirx.const(0.5, dtype)
        return half * root * root + tirx.const(sign / 2, dtype) / (root * root)

    half = size * tirx.const(0.5, dtype)
    return _let(_exp(half) if dtype == _FLOAT else tirx.exp(half), of, dtype)


def _cosh(x: Any, dtype: str) -> Any:
    return _let(tirx.abs(x), lambda size: _of_exponential(size, 1.0, dtype), dtype)


def _sinh(x: Any, dtype: str) -> Any:
    """Below 1 by its series, where the difference of both exponentials would have lost digits."""

    def with_sign(v: Any, size: Any) -> Any:
        zero, one = tirx.const(0.0, dtype), tirx.const(1.0, dtype)
        large = _let(_of_exponential(size, -1.0, dtype), lambda r: tirx.Select(v < zero, zero - r, r), dtype)
        return tirx.Select(size < one, _let(v * v, lambda s: v * _polynomial(s, _SINH, dtype), dtype), large)

    return _let(x, lambda v: _let(tirx.abs(v), lambda size: with_sign(v, size), dtype), dtype)


_HYPERBOLIC: dict[str, Callable[[Any, str], Any]] = {"tirx.sinh": _sinh, "tirx.cosh": _cosh}

_ROOTS: dict[float, Callable[[Any], Any]] = {
    0.25: lambda x: tirx.sqrt(tirx.abs(tirx.sqrt(x))),
    0.5: tirx.sqrt,
    0.75: lambda x: _let(tirx.sqrt(x), lambda root: root * tirx.sqrt(root)),
}


_FORMS: dict[str, Callable[..., Any]] = {
    "tirx.exp": _exp,
    "tirx.sigmoid": _sigmoid,
    "tirx.tanh": lambda x: _rational(x, _TANH_ODD, _TANH_EVEN, 9.0),
    "tirx.erf": lambda x: _rational(x, _ERF_ODD, _ERF_EVEN, 4.0),
    "tirx.log": _log,
    "tirx.pow": _pow,
}
