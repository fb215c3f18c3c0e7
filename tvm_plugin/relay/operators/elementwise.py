"""Arithmetic, functions, comparisons, casts."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
from tvm.relax import op

from ..builder import Builder
from .operator import Convert, Operator, row

__all__ = ["ELEMENTWISE", "round_half_away"]


def unary(function: Callable[[Any], Any]) -> Convert:
    """One tensor, no attributes."""
    return lambda b, args, attrs: function(args[0])


def binary(function: Callable[[Any, Any], Any]) -> Convert:
    """Two tensors that broadcast."""
    return lambda b, args, attrs: function(args[0], args[1])


def _scaled_log(base: float) -> Convert:
    def convert(b: Builder, args: Sequence[Any], attrs: SimpleNamespace) -> Any:
        return op.multiply(b.emit(op.log(args[0])), b.like(1 / math.log(base), args[0]))

    return convert


def _is_float(b: Builder, value: Any) -> bool:
    return "float" in b.dtype(value)


def _divide(b: Builder, args: Sequence[Any], attrs: SimpleNamespace) -> Any:
    """Relay's divide of whole numbers truncates."""
    if _is_float(b, args[0]):
        return op.divide(*args)
    return _truncating(b, args)


def _truncating(b: Builder, args: Sequence[Any]) -> Any:
    """floor(a / b), and one more where it was rounded down below zero; |a| would overflow at the smallest value."""
    quotient, dtype = b.emit(op.floor_divide(*args)), b.dtype(args[0])
    if dtype.startswith("uint"):
        return quotient
    zero = b.like(0, args[0])
    rest = b.emit(op.subtract(args[0], b.emit(op.multiply(quotient, args[1]))))
    opposite = b.emit(op.less(b.emit(op.bitwise_xor(*args)), zero))
    below = b.emit(op.logical_and(b.emit(op.not_equal(rest, zero)), opposite))
    return op.add(quotient, b.emit(op.astype(below, dtype)))


def round_half_away(b: Builder, value: Any) -> Any:
    """The nearest whole numbers, ties away from zero as in Relay; Relax's own round takes ties to even.

    The fraction is compared, since adding a half to it would round 0.49999997 up.
    """
    magnitude = b.emit(op.abs(value))
    whole = b.emit(op.floor(magnitude))
    up = b.emit(op.greater_equal(b.emit(op.subtract(magnitude, whole)), b.like(0.5, value)))
    rounded = b.emit(op.add(whole, b.emit(op.astype(up, b.dtype(value)))))
    return op.multiply(b.emit(op.sign(value)), rounded)


def _round(b: Builder, args: Sequence[Any], attrs: SimpleNamespace) -> Any:
    return round_half_away(b, args[0]) if _is_float(b, args[0]) else args[0]


def _trunc_divide(b: Builder, args: Sequence[Any], attrs: SimpleNamespace) -> Any:
    return op.trunc(b.emit(op.divide(*args))) if _is_float(b, args[0]) else _truncating(b, args)


def _trunc_mod(b: Builder, args: Sequence[Any], attrs: SimpleNamespace) -> Any:
    quotient = b.emit(_trunc_divide(b, args, attrs))
    return op.subtract(args[0], b.emit(op.multiply(quotient, args[1])))


def _cast(b: Builder, args: Sequence[Any], attrs: SimpleNamespace) -> Any:
    return args[0] if b.dtype(args[0]) == attrs.dtype else op.astype(args[0], attrs.dtype)


def _cast_like(b: Builder, args: Sequence[Any], attrs: SimpleNamespace) -> Any:
    return op.astype(args[0], b.dtype(args[1]))


def _clip(b: Builder, args: Sequence[Any], attrs: SimpleNamespace) -> Any:
    if _is_float(b, args[0]):
        return op.clip(args[0], attrs.a_min, attrs.a_max)
    limits = np.iinfo(b.dtype(args[0]))  # bounds beyond them stand for "none"
    low, high = (math.trunc(min(max(bound, limits.min), limits.max)) for bound in (attrs.a_min, attrs.a_max))
    return op.clip(args[0], low, high)


def _identity(b: Builder, args: Sequence[Any], attrs: SimpleNamespace) -> Any:
    return args[0]


def _where(b: Builder, args: Sequence[Any], attrs: SimpleNamespace) -> Any:
    """Conditions of Relay may be numbers, which hold where they are not zero."""
    condition, *values = args
    if b.dtype(condition) != "bool":
        condition = b.emit(op.not_equal(condition, b.like(0, condition)))
    return op.where(condition, *values)


def _fixed_point_multiply(b: Builder, args: Sequence[Any], attrs: SimpleNamespace) -> Any:
    """x * multiplier * 2^(shift - 31), rounded half up; the multiplier is a Q31 fraction."""
    wide = b.emit(op.astype(args[0], "float64"))
    scaled = b.emit(op.multiply(wide, b.constant(attrs.multiplier * 2.0 ** (attrs.shift - 31), "float64")))
    return op.astype(b.emit(op.floor(b.emit(op.add(scaled, b.constant(0.5, "float64"))))), b.dtype(args[0]))


_UNARY: dict[str, Callable[[Any], Any]] = {
    "abs": op.abs,
    "acos": op.acos,
    "acosh": op.acosh,
    "asin": op.asin,
    "asinh": op.asinh,
    "atan": op.atan,
    "atanh": op.atanh,
    "bitwise_not": op.bitwise_not,
    "ceil": op.ceil,
    "cos": op.cos,
    "cosh": op.cosh,
    "erf": op.erf,
    "exp": op.exp,
    "fast_erf": op.erf,
    "fast_exp": op.exp,
    "fast_tanh": op.tanh,
    "floor": op.floor,
    "isfinite": op.isfinite,
    "isinf": op.isinf,
    "isnan": op.isnan,
    "log": op.log,
    "logical_not": op.logical_not,
    "negative": op.negative,
    "nn.relu": op.nn.relu,
    "rsqrt": op.rsqrt,
    "sigmoid": op.sigmoid,
    "sign": op.sign,
    "sin": op.sin,
    "sinh": op.sinh,
    "sqrt": op.sqrt,
    "tan": op.tan,
    "tanh": op.tanh,
    "trunc": op.trunc,
    "zeros_like": op.zeros_like,
    "ones_like": op.ones_like,
}

_BINARY: dict[str, Callable[[Any, Any], Any]] = {
    "add": op.add,
    "atan2": op.atan2,
    "bitwise_and": op.bitwise_and,
    "bitwise_or": op.bitwise_or,
    "bitwise_xor": op.bitwise_xor,
    "equal": op.equal,
    "floor_divide": op.floor_divide,
    "floor_mod": op.floor_mod,
    "greater": op.greater,
    "greater_equal": op.greater_equal,
    "left_shift": op.left_shift,
    "less": op.less,
    "less_equal": op.less_equal,
    "logical_and": op.logical_and,
    "logical_or": op.logical_or,
    "logical_xor": op.logical_xor,
    "maximum": op.maximum,
    "minimum": op.minimum,
    "multiply": op.multiply,
    "not_equal": op.not_equal,
    "power": op.power,
    "right_shift": op.right_shift,
    "subtract": op.subtract,
}

ELEMENTWISE: list[Operator] = [
    *(row(name, 1, "", unary(function)) for name, function in _UNARY.items()),
    *(row(name, 2, "", binary(function)) for name, function in _BINARY.items()),
    row("round", 1, "", _round),
    row("divide", 2, "", _divide),
    row("trunc_divide", 2, "", _trunc_divide),
    row("mod", 2, "", _trunc_mod),
    row("trunc_mod", 2, "", _trunc_mod),
    row("log2", 1, "", _scaled_log(2)),
    row("log10", 1, "", _scaled_log(10)),
    row("cast", 1, "CastAttrs", _cast),
    row("cast_like", 2, "", _cast_like),
    row("clip", 1, "ClipAttrs", _clip),
    row("where", 3, "", _where),
    row("fixed_point_multiply", 1, "FixedPointMultiplyAttrs", _fixed_point_multiply),
    row("copy", 1, "", _identity),
    row("device_copy", 1, "DeviceCopyAttrs", _identity),
    row("on_device", 1, "OnDeviceAttrs", _identity),
    row("annotation.cast_hint", 1, "CastHintAttrs", _identity),
    row("annotation.checkpoint", 1, "", _identity),
    row("annotation.compiler_begin", 1, "CompilerAttrs", _identity),
    row("annotation.compiler_end", 1, "CompilerAttrs", _identity),
    row("annotation.stop_fusion", 1, "", _identity),
]
