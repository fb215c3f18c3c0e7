"""Converters for PyTorch operators on single elements, and for tensors that are made of one number."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from tvm import relax
from tvm.relax import op

from ...dtypes import HALVES, epsilon, is_floating, numpy_dtype
from ...relax_ir.tensors import is_empty, shape_of
from .digits import floor_quotient
from .nodes import Converter, arguments, cast, compared_as, dtype_of, operand, scalar, shape_in_torch, wrapped
from .order import so_far

__all__ = ["POINTWISE_CONVERTERS"]


def _outer(node: Any, importer: Any) -> relax.Expr:
    """Of vectors, perhaps of two dtypes."""
    emit, dtype = importer.block_builder.emit, dtype_of(node)
    left, right = (operand(part, dtype, importer) for part in arguments(node, importer, ("input", "vec2"), ()))
    return emit(op.multiply(emit(op.expand_dims(left, -1)), right))


def _clamp(node: Any, importer: Any) -> relax.Expr:
    return _limited(node, importer, *arguments(node, importer, ("input", "min", "max"), (None, None)))


def _clamp_min(node: Any, importer: Any) -> relax.Expr:
    x, least = arguments(node, importer, ("input", "min"), ())
    return _limited(node, importer, x, least, None)


def _clamp_max(node: Any, importer: Any) -> relax.Expr:
    x, most = arguments(node, importer, ("input", "max"), ())
    return _limited(node, importer, x, None, most)


def _limited(node: Any, importer: Any, x: relax.Expr, least: Any, most: Any) -> relax.Expr:
    """`x` between two bounds: numbers, tensors, or None; one operator where all are plain numbers."""
    emit, dtype = importer.block_builder.emit, dtype_of(node)
    x = operand(x, dtype, importer)
    numbers = [isinstance(bound, int | float) for bound in (least, most)]
    if all(numbers):
        least, most = wrapped(least, dtype), wrapped(most, dtype)
        return emit(op.clip(x, min(least, most), most))  # the upper bound counts where they cross; TVM takes the lower
    if numbers[0] and least == 0 and most is None and is_floating(dtype):
        return emit(op.nn.relu(x))
    if least is not None:
        x = emit(op.maximum(x, operand(least, dtype, importer)))
    return x if most is None else emit(op.minimum(x, operand(most, dtype, importer)))


def _prelu(node: Any, importer: Any) -> relax.Expr:
    """With a slope for each channel, or one for all, which TVM has no kernel for."""
    x, slope = arguments(node, importer, ("input", "weight"), ())
    emit, axis = importer.block_builder.emit, min(1, len(shape_of(x)) - 1)
    channels, slope = shape_of(x)[axis], cast(slope, str(x.ty.dtype), importer)
    if shape_of(slope) != [channels]:
        slope = emit(op.broadcast_to(slope, [channels]))
    return emit(op.nn.prelu(x, slope, axis))


def _fmax(node: Any, importer: Any) -> relax.Expr:
    return _number_rather_than_nan(node, importer, op.maximum)


def _fmin(node: Any, importer: Any) -> relax.Expr:
    return _number_rather_than_nan(node, importer, op.minimum)


def _number_rather_than_nan(node: Any, importer: Any, function: Callable[[Any, Any], relax.Expr]) -> relax.Expr:
    emit, dtype = importer.block_builder.emit, dtype_of(node)
    left, right = (operand(x, dtype, importer) for x in arguments(node, importer, ("input", "other"), ()))
    if not is_floating(dtype):
        return emit(function(left, right))
    other = emit(op.where(emit(op.isnan(right)), left, emit(function(left, right))))
    return emit(op.where(emit(op.isnan(left)), right, other))


def _hypot(node: Any, importer: Any) -> relax.Expr:
    """Of the larger one, and the quotient of both, 1 of zeros and infinities: squares of large numbers are infinite."""
    emit, dtype = importer.block_builder.emit, dtype_of(node)
    sizes = [emit(op.abs(operand(x, dtype, importer))) for x in arguments(node, importer, ("input", "other"), ())]
    large, small = emit(op.maximum(*sizes)), emit(op.minimum(*sizes))
    one = relax.const(1, dtype)
    quotient = emit(op.where(emit(op.equal(small, large)), one, emit(op.divide(small, large))))
    return emit(op.multiply(large, emit(op.sqrt(emit(op.add(one, emit(op.multiply(quotient, quotient))))))))


def _copysign(node: Any, importer: Any) -> relax.Expr:
    emit, dtype = importer.block_builder.emit, dtype_of(node)
    size, sign = (operand(x, dtype, importer) for x in arguments(node, importer, ("input", "other"), ()))
    size = emit(op.abs(size))
    return emit(op.where(_is_negative(emit, sign), emit(op.negative(size)), size))


def _log_cumulative_sum(node: Any, importer: Any) -> relax.Expr:
    """Each exponential is relative to the largest one so far: relative to the largest of all, early ones vanish."""
    x, axis = arguments(node, importer, ("input", "dim"), ())
    emit, zero = importer.block_builder.emit, relax.const(0, str(x.ty.dtype))

    def added(left: relax.Expr, right: relax.Expr) -> relax.Expr:
        largest = emit(op.maximum(left, right))
        largest = emit(op.where(emit(op.isfinite(largest)), largest, zero))
        sizes = [emit(op.exp(emit(op.subtract(part, largest)))) for part in (left, right)]
        return op.add(emit(op.log(emit(op.add(*sizes)))), largest)

    return so_far(emit, x, axis, added, -math.inf)


def _exp2(node: Any, importer: Any) -> relax.Expr:
    dtype = dtype_of(node)
    x = cast(importer.env[node.args[0]], dtype, importer)
    return importer.block_builder.emit(op.power(relax.const(2, dtype), x))


def _arithmetic(function: Callable[[Any, Any], relax.Expr], reverse: bool = False) -> Converter:
    """Of two operands, or the second and the first; `alpha` is a factor of the one that comes second.

    As in PyTorch, a number that 16 bits cannot hold meets tensors in float32: 1e6 is infinite in float16.
    """

    def convert(node: Any, importer: Any) -> relax.Expr:
        emit, dtype = importer.block_builder.emit, dtype_of(node)
        left, right, alpha = arguments(node, importer, ("input", "other", "alpha"), (1,))
        if any(_is_lost(value, dtype) for value in (left, right, alpha)):
            dtype = "float32"
        left, right = (operand(value, dtype, importer) for value in ((right, left) if reverse else (left, right)))
        if alpha != 1:
            right = emit(op.multiply(right, relax.const(alpha, dtype)))
        return cast(emit(function(left, right)), dtype_of(node), importer)

    return convert


def _is_lost(value: Any, dtype: str) -> bool:
    """Whether it is a number that becomes infinite in a dtype of 16 bits, or loses digits as it is next to zero."""
    if dtype not in HALVES or not isinstance(value, int | float) or not math.isfinite(value):
        return False
    with np.errstate(over="ignore"):
        held = float(np.float64(value).astype(numpy_dtype(dtype)))
    return abs(held - value) > epsilon(dtype) * abs(value)


def _shift(function: Callable[[Any, Any], relax.Expr]) -> Converter:
    """By fewer than no bits, or by all that there are, zero or the sign is left; LLVM leaves open what is."""

    def convert(node: Any, importer: Any) -> relax.Expr:
        emit, dtype = importer.block_builder.emit, dtype_of(node)
        given, last = arguments(node, importer, ("input", "other"), ()), np.iinfo(dtype).bits - 1
        x, count = (operand(value, dtype, importer) for value in given)
        if isinstance(given[1], int) and 0 <= given[1] <= last:
            return emit(function(x, count))
        within = emit(op.clip(count, 0, last))
        is_within = emit(op.equal(count, within))
        if function is op.right_shift and dtype.startswith("int"):
            return emit(function(x, emit(op.where(is_within, within, relax.const(last, dtype)))))
        return emit(op.where(is_within, emit(function(x, within)), relax.const(0, dtype)))

    return convert


def _quotient(node: Any, importer: Any) -> relax.Expr:
    """Rounded down, towards zero, or not at all."""
    rounding, floating = node.kwargs.get("rounding_mode"), is_floating(dtype_of(node))
    if rounding == "floor":
        return floor_quotient(node, importer)
    quotient = _arithmetic(op.divide)(node, importer)
    return importer.block_builder.emit(op.trunc(quotient)) if rounding == "trunc" and floating else quotient


def _power(node: Any, importer: Any) -> relax.Expr:
    """Integers to the power of 0.5 are floats; those to the power of 3 are products of integers; masks stay 0 and 1."""
    x, exponent = arguments(node, importer, ("input", "exponent"), ())
    if str(x.ty.dtype) == "bool" and not is_floating(dtype_of(node)):
        whole = cast(x, dtype_of(node), importer)
        return whole if exponent else importer.block_builder.emit(op.ones_like(whole))
    becomes_float = is_floating(dtype_of(node)) and not is_floating(str(x.ty.dtype))
    return _arithmetic(op.power)(node, importer) if becomes_float else importer._pow(node)


def _comparison(function: Callable[[Any, Any], relax.Expr]) -> Converter:
    """Of operands as PyTorch compares them: the integer 2 is not 2.5, though it would be if that became an integer."""

    def convert(node: Any, importer: Any) -> relax.Expr:
        given, dtype = arguments(node, importer, ("input", "other"), ()), compared_as(node.args)
        left, right = (operand(value, dtype, importer) for value in given)
        return importer.block_builder.emit(function(left, right))

    return convert


def _is_in(node: Any, importer: Any) -> relax.Expr:
    """Which elements are among others, or are not; TVM's importer does not look at `invert`."""
    given, dtype = arguments(node, importer, ("elements", "others"), ()), compared_as(node.args)
    emit = importer.block_builder.emit
    x, others = (operand(value, dtype, importer) for value in given)
    if is_empty(others):
        found = emit(op.zeros(shape_in_torch(node, importer), "bool"))
    else:
        each = emit(op.equal(emit(op.expand_dims(x, -1)), emit(op.reshape(others, [-1]))))
        found = emit(op.astype(emit(op.max(emit(op.astype(each, "int8")), axis=-1)), "bool"))
    return emit(op.logical_not(found)) if node.kwargs.get("invert") else found


def _where(node: Any, importer: Any) -> relax.Expr:
    """Of two dtypes: a mask chooses from floats and the integer 0, say."""
    mask, *values = arguments(node, importer, ("condition", "input", "other"), ())
    values = [operand(value, dtype_of(node), importer) for value in values]
    return importer.block_builder.emit(op.where(cast(mask, "bool", importer), *values))


def _filled(value: Any = None) -> Converter:
    """Of any shape and dtype, whatever the tensor's that it is to be like or next to."""

    def convert(node: Any, importer: Any) -> relax.Expr:
        fill = value if value is not None else node.kwargs.get("fill_value", node.args[-1])
        fill = importer.env.get(fill, fill)
        shape, dtype = shape_in_torch(node, importer), dtype_of(node)
        if not isinstance(fill, relax.Expr) and math.isfinite(fill):
            return importer.block_builder.emit(op.full(shape, scalar(fill, dtype, importer), dtype))
        return importer.block_builder.emit(op.broadcast_to(operand(fill, dtype, importer), shape))

    return convert


def _one_number(node: Any, importer: Any) -> relax.Expr:
    """A tensor without axes, also of a size that is open."""
    (value,) = arguments(node, importer, ("s",), ())
    return operand(value, dtype_of(node), importer)


def _identity(node: Any, importer: Any) -> relax.Expr:
    """Ones on the diagonal, where sizes are open or too large for a constant; TVM's importer wants a dtype."""
    emit = importer.block_builder.emit
    down, across = (emit(op.arange(0, count, 1, "int64")) for count in shape_in_torch(node, importer))
    return cast(emit(op.equal(emit(op.expand_dims(down, 1)), across)), dtype_of(node), importer)


def _so_far_in_its_dtype(function: Callable[..., relax.Expr]) -> Converter:
    """Sums and products of all up to each: of masks and short integers, PyTorch's are 64 bits wide."""

    def convert(node: Any, importer: Any) -> relax.Expr:
        x, axis = arguments(node, importer, ("input", "dim"), ())
        if not shape_of(x) or is_empty(x):
            return cast(x, dtype_of(node), importer)
        return importer.block_builder.emit(function(cast(x, dtype_of(node), importer), axis))

    return convert


def _heaviside(node: Any, importer: Any) -> relax.Expr:
    x, at_zero = arguments(node, importer, ("input", "values"), ())
    emit, zero = importer.block_builder.emit, relax.const(0, str(x.ty.dtype))
    above = emit(op.astype(emit(op.greater(x, zero)), str(x.ty.dtype)))
    return emit(op.where(emit(op.equal(x, zero)), at_zero, above))


def _signbit(node: Any, importer: Any) -> relax.Expr:
    (x,) = arguments(node, importer, ("input",), ())
    return _is_negative(importer.block_builder.emit, x)


def _is_negative(emit: Any, x: relax.Expr) -> relax.Expr:
    """Also of -0, whose reciprocal is below zero."""
    dtype = str(x.ty.dtype)
    below = emit(op.less(x, relax.const(0, dtype)))
    if not is_floating(dtype):
        return below
    reciprocal = emit(op.divide(relax.const(1, dtype), x))
    return emit(op.logical_or(below, emit(op.less(reciprocal, relax.const(0, dtype)))))


POINTWISE_CONVERTERS: dict[str, Converter] = {
    "add.Tensor": _arithmetic(op.add),
    "sub.Tensor": _arithmetic(op.subtract),
    "mul.Tensor": _arithmetic(op.multiply),
    "div.Tensor": _arithmetic(op.divide),
    "div.Tensor_mode": _quotient,
    **{
        f"{name}.Scalar": _arithmetic(function)
        for name, function in (("add", op.add), ("sub", op.subtract), ("mul", op.multiply), ("div", op.divide))
    },
    "div.Scalar_mode": _quotient,
    "rsub.Scalar": _arithmetic(op.subtract, reverse=True),
    "outer.default": _outer,
    "rsub.Tensor": _arithmetic(op.subtract, reverse=True),
    "pow.Scalar": _arithmetic(op.power),
    "pow.Tensor_Tensor": _arithmetic(op.power),
    "pow.Tensor_Scalar": _power,
    **{
        f"{name}.{kind}": _comparison(function)
        for name, function in (
            *(("eq", op.equal), ("ne", op.not_equal), ("lt", op.less), ("le", op.less_equal)),
            *(("gt", op.greater), ("ge", op.greater_equal)),
        )
        for kind in ("Scalar", "Tensor")
    },
    "fmod.Scalar": _arithmetic(op.mod),
    "fmod.Tensor": _arithmetic(op.mod),
    "where.self": _where,
    **{
        name: _arithmetic(function)
        for function, names in (
            (op.maximum, ("maximum.default", "max.other")),
            (op.minimum, ("minimum.default", "min.other")),
            (op.atan2, ("atan2.default",)),
        )
        for name in names
    },
    **{
        f"{name}.{kind}": _arithmetic(getattr(op, f"bitwise_{logic}"))
        for logic in ("and", "or", "xor")
        for name in (f"bitwise_{logic}", f"__{logic}__")
        for kind in ("Tensor", "Scalar", "Scalar_Tensor")
    },
    **{
        f"bitwise_{side}_shift.{kind}": _shift(getattr(op, f"{side}_shift"))
        for side in ("left", "right")
        for kind in ("Tensor", "Tensor_Scalar", "Scalar_Tensor")
    },
    **{f"isin.{kind}": _is_in for kind in ("Tensor_Tensor", "Tensor_Scalar", "Scalar_Tensor")},
    "__lshift__.Scalar": _shift(op.left_shift),
    "__lshift__.Tensor": _shift(op.left_shift),
    "__rshift__.Scalar": _shift(op.right_shift),
    "__rshift__.Tensor": _shift(op.right_shift),
    "clamp.default": _clamp,
    "clamp.Tensor": _clamp,
    "clamp_min.default": _clamp_min,
    "clamp_min.Tensor": _clamp_min,
    "clamp_max.default": _clamp_max,
    "clamp_max.Tensor": _clamp_max,
    "prelu.default": _prelu,
    "fmax.default": _fmax,
    "fmin.default": _fmin,
    "hypot.default": _hypot,
    "heaviside.default": _heaviside,
    "signbit.default": _signbit,
    "copysign.Tensor": _copysign,
    "copysign.Scalar": _copysign,
    "logcumsumexp.default": _log_cumulative_sum,
    "exp2.default": _exp2,
    "scalar_tensor.default": _one_number,
    "zeros.default": _filled(0),
    "ones.default": _filled(1),
    "full.default": _filled(),
    "zeros_like.default": _filled(0),
    "ones_like.default": _filled(1),
    "full_like.default": _filled(),
    "new_zeros.default": _filled(0),
    "new_ones.default": _filled(1),
    "new_full.default": _filled(),
    "fill.Scalar": _filled(),
    "empty_like.default": _filled(0),
    "empty.memory_format": _filled(0),
    "empty_permuted.default": _filled(0),
    "empty_strided.default": _filled(0),
    "new_empty_strided.default": _filled(0),
    "eye.default": _identity,
    "eye.m": _identity,
    "cumsum.default": _so_far_in_its_dtype(op.cumsum),
    "cumprod.default": _so_far_in_its_dtype(op.cumprod),
}
