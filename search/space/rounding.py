"""Rounding in vectors: TVM computes `nearbyint` lane by lane, and quantised layers end with it.

    T.Cast("uint8", max(min(nearbyint(x) + z, 255.0), 0.0))
        ->  T.Cast("uint8", reinterpret("int32", max(min(x, 255.0 - z), 0.0 - z) + 1.5 * 2^23) + z)

Adding 1.5 * 2^23 leaves the nearest whole number in the last bits of the sum, ties to even, as `nearbyint` does; limits
that are whole numbers cut off the same before rounding as after. They stand between the sum and the product that x
mostly is, so that no multiply-add rounds the two at once. Any other `nearbyint` becomes LLVM's, which has vectors.
"""

from __future__ import annotations

from typing import Any

from tvm import ir, tirx

from .statements import rewritten

__all__ = ["round_in_vectors"]

_ROUNDING = 1.5 * 2.0**23
_ROUNDING_BITS = 0x4B400000
_LARGEST = 2.0**22
"""Larger numbers would reach into the exponent of the sum."""


def round_in_vectors(function: Any) -> Any:
    """Rewrite the roundings of a scheduled PrimFunc for a CPU; the same object when there is none.

    Bit for bit the same, but for NaN where a limited one becomes an integer, which C leaves open.
    """
    return rewritten(rewritten(function, (tirx.Cast, _quantized)), (ir.Call, _nearest))


def _quantized(cast: Any) -> Any:
    """A limited and rounded float32 as an integer, by its bits; the cast itself where it is something else."""
    dtype, value = str(cast.ty.dtype), cast.value
    if "int" not in dtype or str(value.ty.dtype) != "float32" or not isinstance(value, tirx.Max):
        return cast
    low, inner = value.b, value.a
    if not isinstance(inner, tirx.Min) or not all(isinstance(limit, tirx.FloatImm) for limit in (low, inner.b)):
        return cast
    rounded, zero = inner.a, 0.0
    if isinstance(rounded, tirx.Add) and isinstance(rounded.b, tirx.FloatImm):
        rounded, zero = rounded.a, float(rounded.b.value)
    limits = [float(limit.value) - zero for limit in (low, inner.b)]
    if not _rounds(rounded) or not all(x.is_integer() and abs(x) < _LARGEST for x in (*limits, zero)):
        return cast
    least, most = (tirx.const(limit, "float32") for limit in limits)
    bits = tirx.reinterpret("int32", tirx.Max(tirx.Min(rounded.args[0], most), least) + _ROUNDING)
    shift = int(zero) - (0 if dtype in ("int8", "uint8") else _ROUNDING_BITS)  # bytes do not see what is above them
    return tirx.Cast(dtype, bits + shift if shift else bits)


def _nearest(call: Any) -> Any:
    if not _rounds(call):
        return call
    return tirx.call_llvm_pure_intrin(str(call.ty.dtype), "llvm.nearbyint", call.args[0])


def _rounds(value: Any) -> bool:
    return isinstance(value, ir.Call) and getattr(value.op, "name", "") == "tirx.nearbyint"
