"""Quantised operators of ONNX, and of ONNX Runtime's own domain, that TVM's importer does not know.

QLinearMatMul, QLinearConv, MatMulInteger and ConvInteger sum (x - zero point) * (w - zero point) in int32, as in ONNX;
`eqtune.transform.NarrowProducts` makes products of 8 or 16 bits of that, as the CPU has instructions for. All others
(QLinearAdd, QGemm, ...) become what they stand for: `dequantize`, the operator, `quantize`, which
`eqtune.transform.FakeQuantizationToInteger` takes together again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from tvm import ir, relax
from tvm.relax import op

from ...dtypes import HALVES
from ...relax_ir.tensors import as_dtype
from .nodes import Convert, padded

__all__ = ["QUANTIZED"]

Quantized = Callable[[Any, Sequence[Any], dict[str, Any], Convert], Any]


def _matmul(bb: Any, inputs: Sequence[Any], attrs: dict[str, Any], convert: Convert) -> Any:
    a, a_scale, a_zero, b, b_scale, b_zero, y_scale, y_zero = inputs[:8]
    sums = bb.emit(_matmul_sums(bb, [a, b, a_zero, b_zero], attrs, convert))
    ratio = _along(bb, a_scale, a, -2), _along(bb, b_scale, sums, -1)  # sums of a vector have no rows, unlike `b`
    return _rescaled(bb, sums, ratio, y_scale, y_zero)


def _matmul_sums(bb: Any, inputs: Sequence[Any], attrs: dict[str, Any], convert: Convert) -> Any:
    """TVM makes matrices of vectors whose zero point is a tensor of one element."""
    a, b, a_zero, b_zero = padded(inputs, 4)
    return op.matmul(_centered(bb, a, a_zero, -2), _centered(bb, b, b_zero, -1), out_dtype="int32")


def _convolution(bb: Any, inputs: Sequence[Any], attrs: dict[str, Any], convert: Convert) -> Any:
    x, x_scale, x_zero, w, w_scale, w_zero, y_scale, y_zero = inputs[:8]
    sums = bb.emit(convert("Conv", [_centered(bb, x, x_zero, 1), _centered(bb, w, w_zero, 0), None], attrs))
    if len(inputs) > 8 and inputs[8] is not None:
        sums = bb.emit(op.add(sums, _along(bb, inputs[8], sums, 1)))
    return _rescaled(bb, sums, (_along(bb, x_scale, sums, 1), _along(bb, w_scale, sums, 1)), y_scale, y_zero)


def _convolution_sums(bb: Any, inputs: Sequence[Any], attrs: dict[str, Any], convert: Convert) -> Any:
    x, w, x_zero, w_zero = padded(inputs, 4)
    return convert("Conv", [_centered(bb, x, x_zero, 1), _centered(bb, w, w_zero, 0), None], attrs)


def _linear(bb: Any, inputs: Sequence[Any], attrs: dict[str, Any], convert: Convert) -> Any:
    """Of float16 in float32, as ONNX Runtime computes it: TVM rounds quotients to 16 bits before it rounds them."""
    x, scale, *zero = inputs
    if str(x.ty.dtype) not in HALVES:
        return None
    wide = [as_dtype(bb.emit, part, "float32") for part in (x, scale)]
    return convert("QuantizeLinear", [*wide, *zero], attrs)


def _through(name: str, operands: int = 1) -> Quantized:
    """`name` on dequantised operands, each with scale and zero point; those of the result follow."""

    def converted(bb: Any, inputs: Sequence[Any], attrs: dict[str, Any], convert: Convert) -> Any:
        known = padded(inputs, 3 * operands + 2)
        real = [_real(bb, *known[3 * i : 3 * i + 3]) for i in range(operands)]
        result = bb.emit(convert(name, real, attrs))
        y_scale, y_zero = known[-2:]
        return _stored(result, y_scale, y_zero, like=inputs[0])

    return converted


def _concat(bb: Any, inputs: Sequence[Any], attrs: dict[str, Any], convert: Convert) -> Any:
    y_scale, y_zero, *rest = inputs
    real = [_real(bb, *rest[i : i + 3]) for i in range(0, len(rest), 3)]
    return _stored(bb.emit(convert("Concat", real, attrs)), y_scale, y_zero, like=rest[0])


def _softmax(bb: Any, inputs: Sequence[Any], attrs: dict[str, Any], convert: Convert) -> Any:
    """Along one axis, or until the opset 12 along all from it on, taken together."""
    x, x_scale, x_zero, y_scale, y_zero = padded(inputs, 5)
    real, axis = _real(bb, x, x_scale, x_zero), int(attrs.get("axis", -1))
    if int(attrs["opset"]) >= 13:
        return _stored(bb.emit(op.nn.softmax(real, axis)), y_scale, y_zero, like=x)
    shape = list(x.ty.shape)
    rows = bb.emit(op.reshape(real, [*shape[: axis % len(shape)], -1]))
    return _stored(bb.emit(op.reshape(bb.emit(op.nn.softmax(rows, -1)), shape)), y_scale, y_zero, like=x)


def _where(bb: Any, inputs: Sequence[Any], attrs: dict[str, Any], convert: Convert) -> Any:
    condition, *known, y_scale, y_zero = inputs
    real = [_real(bb, *known[i : i + 3]) for i in (0, 3)]
    return _stored(bb.emit(op.where(condition, *real)), y_scale, y_zero, like=known[0])


def _gemm(bb: Any, inputs: Sequence[Any], attrs: dict[str, Any], convert: Convert) -> Any:
    a, a_scale, a_zero, b, b_scale, b_zero, bias, y_scale, y_zero = padded(inputs, 9)
    channel = 0 if attrs.get("transB") else 1
    left, right = _real(bb, a, a_scale, a_zero), _real(bb, b, b_scale, b_zero, axis=channel)
    result = bb.emit(convert("Gemm", [left, right, None], attrs))
    if bias is not None:
        scale = _product(bb, a_scale, b_scale, float(attrs.get("alpha", 1.0)))
        real = bb.emit(op.dequantize(bias, scale, relax.const(0, "int32"), axis=-1, out_dtype="float32"))
        result = bb.emit(op.add(result, real))
    return result if y_scale is None else _stored(result, y_scale, y_zero, like=a)


def _real(bb: Any, stored: Any, scale: Any, zero: Any, axis: int = -1) -> Any:
    zero = relax.const(0, str(stored.ty.dtype)) if zero is None else zero
    return bb.emit(op.dequantize(stored, scale, zero, axis=axis, out_dtype="float32"))


def _stored(real: Any, scale: Any, zero: Any, like: Any) -> Any:
    dtype = str((like if zero is None else zero).ty.dtype)
    return op.quantize(real, scale, relax.const(0, dtype) if zero is None else zero, axis=-1, out_dtype=dtype)


def _product(bb: Any, a_scale: Any, b_scale: Any, alpha: float) -> Any:
    """The scale of a product's integers, a constant where those of its operands are."""
    if all(isinstance(scale, ir.GenericConst) for scale in (a_scale, b_scale)):
        return relax.const((a_scale.value.numpy() * b_scale.value.numpy() * alpha).astype(np.float32))
    return bb.emit(op.multiply(bb.emit(op.multiply(a_scale, b_scale)), relax.const(alpha)))


def _quantized_as_it_runs(bb: Any, inputs: Sequence[Any], attrs: dict[str, Any], convert: Convert) -> Any:
    """uint8 by the range of what is there and zero; where all is zero, the scale is 1, which TVM makes 0."""
    (x,) = inputs
    nothing, most = (relax.const(n, str(x.ty.dtype)) for n in (0, 255))
    low = bb.emit(op.minimum(bb.emit(op.min(x)), nothing))
    extent = bb.emit(op.subtract(bb.emit(op.maximum(bb.emit(op.max(x)), nothing)), low))
    is_empty = bb.emit(op.equal(extent, nothing))
    scale = bb.emit(op.where(is_empty, relax.const(1, str(x.ty.dtype)), bb.emit(op.divide(extent, most))))
    place = bb.emit(op.subtract(nothing, bb.emit(op.divide(low, scale))))
    zero = bb.emit(op.astype(bb.emit(op.round(bb.emit(op.clip(place, 0, 255)))), "uint8"))
    return relax.Tuple([bb.emit(op.quantize(x, scale, zero, axis=0, out_dtype="uint8")), scale, zero])


QUANTIZED: dict[str, Quantized] = {
    "ConvInteger": _convolution_sums,
    "DynamicQuantizeLinear": _quantized_as_it_runs,
    "MatMulInteger": _matmul_sums,
    "QGemm": _gemm,
    "QLinearAdd": _through("Add", operands=2),
    "QLinearAveragePool": _through("AveragePool"),
    "QLinearConcat": _concat,
    "QLinearConv": _convolution,
    "QLinearGlobalAveragePool": _through("GlobalAveragePool"),
    "QLinearLeakyRelu": _through("LeakyRelu"),
    "QLinearMatMul": _matmul,
    "QLinearMul": _through("Mul", operands=2),
    "QLinearSigmoid": _through("Sigmoid"),
    "QLinearSoftmax": _softmax,
    "QLinearWhere": _where,
    "QuantizeLinear": _linear,
}
"""By operator: a function of the block builder, inputs, attributes, and what converts other nodes."""


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
    left, right, own = (  # float16 may be given, whose products could be infinite
        as_dtype(bb.emit, scale, "float32") for scale in (*scales, _along(bb, y_scale, sums, -1))
    )
    ratio = bb.emit(op.divide(bb.emit(op.multiply(left, right)), own))
    real = bb.emit(op.multiply(bb.emit(op.astype(sums, "float32")), ratio))
    shift = bb.emit(op.astype(_along(bb, y_zero, sums, -1), "float32"))
    whole = bb.emit(op.add(bb.emit(op.round(real)), shift))
    return op.astype(bb.emit(op.clip(whole, float(limits.min), float(limits.max))), dtype)
