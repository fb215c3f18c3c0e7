"""The qnn dialect, lowered to plain operators: real = scale * (quantized - zero_point).

The lowering is that of Jacob et al., "Quantization and training of neural networks for efficient integer-arithmetic-
only inference", CVPR 2018, as Relay has it. Rescaling multiplies in float64 where Relay used a 31-bit fixed-point
factor: the same integers, but where the product lies within 2^-31 (relative) of a tie.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
from tvm.relax import op

from ..builder import Builder
from .convolution import convolve, transposed_convolve
from .elementwise import round_half_away
from .nn import pack_product, pool, spread, transposed_product
from .operator import Convert, Operator, row

__all__ = ["QUANTIZED"]


def _along(b: Builder, parameter: Any, data: Any, axis: int, dtype: str) -> Any:
    """A scale or zero point that broadcasts against `data`, in `dtype`; one number, or one for each channel."""
    shape = b.shape(parameter)
    if shape == [1]:
        parameter = b.emit(op.reshape(parameter, []))
    elif shape and b.rank(data):
        parameter = spread(b, parameter, data, axis)
    return parameter if b.dtype(parameter) == dtype else b.emit(op.astype(parameter, dtype))


def _is_zero(b: Builder, value: Any) -> bool:
    known = b.known(value)
    return known is not None and not known.any()


def _centered(b: Builder, data: Any, zero_point: Any, axis: int, dtype: str) -> Any:
    """data - zero_point in `dtype`."""
    wide = data if b.dtype(data) == dtype else b.emit(op.astype(data, dtype))
    return wide if _is_zero(b, zero_point) else b.emit(op.subtract(wide, _along(b, zero_point, data, axis, dtype)))


def _saturate(b: Builder, value: Any, dtype: str) -> Any:
    """Clip to the range of `dtype`, and cast."""
    limits = np.iinfo(dtype)
    number = float if "float" in b.dtype(value) else int
    return b.emit(op.astype(b.emit(op.clip(value, number(limits.min), number(limits.max))), dtype))


def dequantize(b: Builder, data: Any, scale: Any, zero_point: Any, axis: int = -1, dtype: str = "float32") -> Any:
    """scale * (data - zero_point)."""
    return b.emit(op.multiply(_centered(b, data, zero_point, axis, dtype), _along(b, scale, data, axis, dtype)))


def quantize(b: Builder, data: Any, scale: Any, zero_point: Any, axis: int, dtype: str) -> Any:
    """round(data / scale) + zero_point, ties away from zero, within the range of `dtype`."""
    scaled = b.emit(round_half_away(b, b.emit(op.divide(data, _along(b, scale, data, axis, b.dtype(data))))))
    if not _is_zero(b, zero_point):
        scaled = b.emit(op.add(scaled, _along(b, zero_point, data, axis, b.dtype(data))))
    return _saturate(b, scaled, dtype)


def requantize(
    b: Builder,
    data: Any,
    source: tuple[Any, Any],
    target: tuple[Any, Any],
    dtype: str,
    axis: int = -1,
    rounding: str = "UPWARD",
    compute: str = "float64",
    adds_first: bool = False,
) -> Any:
    """From one (scale, zero_point) to another; with `adds_first`, the new zero point is added before the rounding."""
    value = _centered(b, data, source[1], axis, compute)
    ratio = b.emit(op.divide(_along(b, source[0], data, axis, compute), _along(b, target[0], data, axis, compute)))
    value = b.emit(op.multiply(value, ratio))
    zero = None if _is_zero(b, target[1]) else _along(b, target[1], data, axis, compute)
    if zero is not None and adds_first:
        value = b.emit(op.add(value, zero))
    if rounding == "TONEAREST":
        value = b.emit(round_half_away(b, value))
    else:
        value = b.emit(op.floor(b.emit(op.add(value, b.constant(0.5, compute)))))
    if zero is not None and not adds_first:
        value = b.emit(op.add(value, zero))
    return _saturate(b, value, dtype)


def _quantize(b: Builder, args: Sequence[Any], attrs: SimpleNamespace) -> Any:
    return quantize(b, args[0], args[1], args[2], axis=attrs.axis, dtype=attrs.out_dtype)


def _dequantize(b: Builder, args: Sequence[Any], attrs: SimpleNamespace) -> Any:
    return dequantize(b, args[0], args[1], args[2], axis=attrs.axis, dtype=attrs.out_dtype)


def _requantize(b: Builder, args: Sequence[Any], attrs: SimpleNamespace) -> Any:
    rounding = "UPWARD" if attrs.rounding in ("None", "") else attrs.rounding
    if rounding not in ("UPWARD", "TONEAREST"):
        raise ValueError(f"rounding is {rounding!r}, expected UPWARD or TONEAREST")
    compute = "float32" if attrs.compute_dtype == "float32" else "float64"
    # Relay does where it computes in floating point: -0.5 + 3 is rounded to 3, and -0.5 to -1.
    adds_first = attrs.compute_dtype in ("float32", "float64")
    source, target = (args[1], args[2]), (args[3], args[4])
    return requantize(b, args[0], source, target, attrs.out_dtype, attrs.axis, rounding, compute, adds_first)


def _accumulating(layer: Convert, weight_axis: Callable[[SimpleNamespace], int]) -> Convert:
    """A convolution or product of (data - zero point) and (weight - zero point) in int32.

    Arguments: data, weight, both zero points, both scales; what the scales say is left to the requantize that follows.
    """

    def convert(b: Builder, args: Sequence[Any], attrs: SimpleNamespace) -> Any:
        data = _centered(b, args[0], args[2], -1, "int32")
        weight = _centered(b, args[1], args[3], weight_axis(attrs), "int32")
        attrs.out_dtype = attrs.out_dtype or "int32"
        return layer(b, [data, weight], attrs)

    return convert


def _output_axis(attrs: SimpleNamespace) -> int:
    return str(attrs.kernel_layout).index("O")


def _product(b: Builder, args: Sequence[Any], attrs: SimpleNamespace) -> Any:
    """x (M, K) and y (N, K), the second transposed; with a batch for batch_matmul."""
    choice = SimpleNamespace(transpose_a=False, transpose_b=True, out_dtype=attrs.out_dtype)
    return transposed_product(b, args[0], args[1], choice)


def _binary(kind: str) -> Convert:
    """qnn.add, qnn.subtract: in the output's scale; qnn.mul: products in int32, then rescaled.

    Arguments: lhs, rhs, then scale and zero point of each, and of the output.
    """

    def convert(b: Builder, args: Sequence[Any], attrs: SimpleNamespace) -> Any:
        left, right, left_scale, left_zero, right_scale, right_zero, out_scale, out_zero = args
        dtype, target = b.dtype(left), (out_scale, out_zero)
        if kind == "multiply":
            if attrs.lhs_axis != attrs.rhs_axis and any(math.prod(b.shape(scale)) > 1 for scale in args[2:6]):
                raise ValueError(f"scales of channels along the axes {attrs.lhs_axis} and {attrs.rhs_axis}; give one")
            axis = attrs.lhs_axis
            sides = [_centered(b, side, zero, axis, "int32") for side, zero in ((left, left_zero), (right, right_zero))]
            product = b.emit(op.multiply(*sides))
            scale = b.emit(op.multiply(left_scale, right_scale))
            return requantize(b, product, (scale, b.constant(0, "int32")), target, dtype, axis)
        first = requantize(b, left, (left_scale, left_zero), target, "int32", attrs.lhs_axis)
        second = requantize(b, right, (right_scale, right_zero), target, "int32", attrs.rhs_axis)
        zero = _along(b, out_zero, left, -1, "int32")
        if kind == "add":
            return _saturate(b, b.emit(op.subtract(b.emit(op.add(first, second)), zero)), dtype)
        return _saturate(b, b.emit(op.add(b.emit(op.subtract(first, second)), zero)), dtype)

    return convert


def _concatenate(b: Builder, args: Sequence[Any], attrs: SimpleNamespace) -> Any:
    """Arguments: tuples of tensors, scales and zero points; the output's scale and zero point."""
    tensors, scales, zeros = ([b.emit(part) for part in b.fields(arg)] for arg in args[:3])
    target = (args[3], args[4])
    parts = [
        requantize(b, tensor, (scale, zero), target, b.dtype(tensor))
        for tensor, scale, zero in zip(tensors, scales, zeros, strict=True)
    ]
    return op.concat(parts, axis=b.axis(attrs.axis, parts[0]))


def _average_pool(b: Builder, args: Sequence[Any], attrs: SimpleNamespace) -> Any:
    """In int32, in the scale of the output. Arguments: data, its scale and zero point, those of the output."""
    wide = requantize(b, args[0], (args[1], args[2]), (args[3], args[4]), "int32")
    average = b.emit(pool(op.nn.avg_pool2d, "HW", average=True)(b, [wide], attrs))
    return _saturate(b, average, b.dtype(args[0]))


def _through_float(function: Convert) -> Convert:
    """Dequantize, compute, quantize. Arguments: data, its scale and zero point, the output's scale and zero point."""

    def convert(b: Builder, args: Sequence[Any], attrs: SimpleNamespace) -> Any:
        real = b.emit(function(b, [dequantize(b, args[0], args[1], args[2])], attrs))
        return quantize(b, real, args[3], args[4], -1, b.dtype(args[0]))

    return convert


def _hardswish(b: Builder, args: Sequence[Any], attrs: SimpleNamespace) -> Any:
    """x * clip(x + 3, 0, 6) / 6."""
    shifted = b.emit(op.clip(b.emit(op.add(args[0], b.like(3, args[0]))), 0.0, 6.0))
    return op.multiply(b.emit(op.multiply(args[0], shifted)), b.like(1 / 6, args[0]))


_FLOAT_FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "abs": op.abs,
    "erf": op.erf,
    "exp": op.exp,
    "log": op.log,
    "rsqrt": op.rsqrt,
    "sigmoid": op.sigmoid,
    "sqrt": op.sqrt,
    "tanh": op.tanh,
}


def _float_row(name: str, function: Callable[[Any], Any]) -> Operator:
    return row(f"qnn.{name}", 5, "", _through_float(lambda b, args, attrs: function(args[0])))


QUANTIZED: list[Operator] = [
    row("qnn.quantize", 3, "QuantizeAttrs", _quantize),
    row("qnn.dequantize", 3, "DequantizeAttrs", _dequantize),
    row("qnn.requantize", 5, "RequantizeAttrs", _requantize),
    row("qnn.conv2d", 6, "Conv2DAttrs", _accumulating(convolve("HW"), _output_axis)),
    row("qnn.conv2d_transpose", 6, "Conv2DTransposeAttrs", _accumulating(transposed_convolve("HW"), _output_axis)),
    row("qnn.contrib_dense_pack", 6, "DensePackAttrs", _accumulating(pack_product, lambda attrs: 0)),
    row("qnn.dense", 6, "DenseAttrs", _accumulating(_product, lambda attrs: 0)),
    row("qnn.batch_matmul", 6, "BatchMatmulAttrs", _accumulating(_product, lambda attrs: -1)),
    row("qnn.avg_pool2d", 5, "AvgPool2DAttrs", _average_pool),
    row("qnn.add", 8, "BroadcastAttrs", _binary("add")),
    row("qnn.subtract", 8, "BroadcastAttrs", _binary("subtract")),
    row("qnn.mul", 8, "BroadcastAttrs", _binary("multiply")),
    row("qnn.concatenate", 5, "ConcatenateAttrs", _concatenate),
    row(
        "qnn.leaky_relu", 5, "LeakyReluAttrs", _through_float(lambda b, xs, attrs: op.nn.leakyrelu(xs[0], attrs.alpha))
    ),
    row("qnn.softmax", 5, "SoftmaxAttrs", _through_float(lambda b, xs, attrs: op.nn.softmax(xs[0], axis=attrs.axis))),
    row("qnn.hardswish", 5, "", _through_float(_hardswish)),
    *(_float_row(name, function) for name, function in _FLOAT_FUNCTIONS.items()),
]
