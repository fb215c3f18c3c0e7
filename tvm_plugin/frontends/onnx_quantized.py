"""Quantised products of ONNX that TVM's importer does not know: QLinearMatMul, QLinearConv and ConvInteger.

Sums are taken of (x - zero point) * (w - zero point) in int32, as ONNX defines them; `eqtune.transform.NarrowProducts`
makes products of bytes of that where the CPU has instructions for them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from tvm import ir, relax
from tvm.relax import op

__all__ = ["QUANTIZED", "Convolve"]

Convolve = Callable[[Sequence[Any], dict[str, Any]], Any]
"""Data, weight, bias, and attributes of a Conv node -> its result."""


def _matmul(bb: Any, inputs: Sequence[Any], attrs: dict[str, Any], convolve: Convolve) -> Any:
    a, a_scale, a_zero, b, b_scale, b_zero, y_scale, y_zero = inputs[:8]
    left = _centered(bb, a, a_zero, -2)
    right = _centered(bb, b, b_zero, -1)
    sums = bb.emit(op.matmul(left, right, out_dtype="int32"))
    ratio = _along(bb, a_scale, a, -2), _along(bb, b_scale, b, -1)
    return _rescaled(bb, sums, ratio, y_scale, y_zero)


def _convolution(bb: Any, inputs: Sequence[Any], attrs: dict[str, Any], convolve: Convolve) -> Any:
    x, x_scale, x_zero, w, w_scale, w_zero, y_scale, y_zero = inputs[:8]
    sums = bb.emit(convolve([_centered(bb, x, x_zero, 1), _centered(bb, w, w_zero, 0), None], attrs))
    if len(inputs) > 8 and inputs[8] is not None:
        sums = bb.emit(op.add(sums, _along(bb, inputs[8], sums, 1)))
    return _rescaled(bb, sums, (_along(bb, x_scale, sums, 1), _along(bb, w_scale, sums, 1)), y_scale, y_zero)


def _convolution_sums(bb: Any, inputs: Sequence[Any], attrs: dict[str, Any], convolve: Convolve) -> Any:
    x_zero, w_zero = [*inputs[2:], None, None][:2]
    return convolve([_centered(bb, inputs[0], x_zero, 1), _centered(bb, inputs[1], w_zero, 0), None], attrs)


QUANTIZED: dict[str, Callable[[Any, Sequence[Any], dict[str, Any], Convolve], Any]] = {
    "ConvInteger": _convolution_sums,
    "QLinearConv": _convolution,
    "QLinearMatMul": _matmul,
}
"""By operator: a function of the block builder, inputs, attributes, and what converts a Conv node."""


def _along(bb: Any, value: Any, data: Any, axis: int) -> Any:
    """A scalar, or a vector along one axis of `data`, as it broadcasts against `data`; other ranks do so already."""
    if len(value.ty.shape) != 1:
        return value
    if int(value.ty.shape[0]) == 1:
        return bb.emit(op.reshape(value, []))
    shape = [1] * len(data.ty.shape)
    shape[axis] = int(value.ty.shape[0])
    return bb.emit(op.reshape(value, shape))


def _centered(bb: Any, data: Any, zero: Any, axis: int) -> Any:
    """data - zero point, in int32."""
    wide = bb.emit(op.astype(data, "int32"))
    if zero is None or (isinstance(zero, ir.GenericConst) and not zero.value.numpy().any()):
        return wide
    if isinstance(zero, ir.GenericConst):
        known: Any = relax.const(zero.value.numpy().astype(np.int32))
    else:
        known = bb.emit(op.astype(zero, "int32"))
    return bb.emit(op.subtract(wide, _along(bb, known, data, axis)))


def _rescaled(bb: Any, sums: Any, scales: tuple[Any, Any], y_scale: Any, y_zero: Any) -> Any:
    """round(sums * scales / y_scale) + y_zero, within the range of y_zero's dtype; in float32, ties to even."""
    dtype = str(y_zero.ty.dtype)
    limits = np.iinfo(dtype)
    ratio = bb.emit(op.divide(bb.emit(op.multiply(*scales)), _along(bb, y_scale, sums, -1)))
    real = bb.emit(op.multiply(bb.emit(op.astype(sums, "float32")), ratio))
    shift = bb.emit(op.astype(_along(bb, y_zero, sums, -1), "float32"))
    whole = bb.emit(op.add(bb.emit(op.round(real)), shift))
    return op.astype(bb.emit(op.clip(whole, float(limits.min), float(limits.max))), dtype)
