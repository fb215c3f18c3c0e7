"""Operators of ONNX that TVM's importer does not know, or gets wrong, and that have no module of their own."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx.helper
from tvm import ir, relax
from tvm.relax import op

from ...dtypes import HALVES, is_integer, numpy_dtype
from ...errors import UnsupportedModelError
from ...relax_ir.constants import array_of, constant_of
from ...relax_ir.tensors import as_dtype, extents, shape_of
from ..digits import SELU, atanh, elu, mish, scaled_product, softplus, tanh
from .nodes import Convert, numbers_of, padded, text_of

__all__ = ["OPERATORS"]


def _of_one(function: Callable[..., Any], *defaults: tuple[str, float]) -> Callable[..., Any]:
    """Of one tensor, and of attributes of these names and defaults."""

    def convert(bb: Any, inputs: Sequence[Any], attrs: dict[str, Any], _: Convert) -> Any:
        (x,) = inputs
        numbers = [float(attrs.get(name, default)) for name, default in defaults]
        return function(bb.emit, x, str(x.ty.dtype), *numbers)

    return convert


def _atanh(bb: Any, inputs: Sequence[Any], attrs: dict[str, Any], _: Convert) -> Any:
    """With the digits of small numbers, of which TVM's has none left; 16 bits are computed in float32 anyway."""
    (x,) = inputs
    dtype = str(x.ty.dtype)
    return None if dtype in HALVES else atanh(bb.emit, x, dtype)


def _celu(emit: Any, x: Any, dtype: str, alpha: float) -> Any:
    return elu(emit, x, dtype, alpha, slope=1 / alpha)


def _center_crop_pad(bb: Any, inputs: Sequence[Any], attrs: dict[str, Any], _: Convert) -> Any:
    """The middle of a tensor, or zeros around it; of an odd number of elements, one more is behind."""
    x, wanted = inputs
    shape = extents(x.ty)
    axes = [int(axis) % len(shape) for axis in attrs.get("axes", range(len(shape)))]
    around = [0] * (2 * len(shape))
    for axis, number in zip(axes, numbers_of("CenterCropPad", "shape", wanted), strict=True):
        size = int(number)
        first = abs(shape[axis] - size) // 2
        if size < shape[axis]:
            x = bb.emit(op.strided_slice(x, [axis], [first], [first + size]))
        around[2 * axis : 2 * axis + 2] = [first, size - shape[axis] - first] if size > shape[axis] else [0, 0]
    return op.nn.pad(x, around)


def _compress(bb: Any, inputs: Sequence[Any], attrs: dict[str, Any], _: Convert) -> Any:
    """Of a condition that is known, which elements it chooses: TVM looks for them when the model runs."""
    x, condition = inputs
    if not isinstance(condition, ir.GenericConst):
        return None
    places = _integers(np.flatnonzero(array_of(condition)).tolist())
    if "axis" in attrs:
        return op.take(x, places, axis=int(attrs["axis"]) % x.ty.ndim)
    return op.take(bb.emit(op.reshape(x, [-1])), places, axis=0)


def _concat(bb: Any, inputs: Sequence[Any], attrs: dict[str, Any], _: Convert) -> Any:
    """Of constants, a constant: of integers, TVM makes a shape, which few operators read."""
    if not all(isinstance(part, ir.GenericConst) for part in inputs):
        return None
    return constant_of(np.concatenate([array_of(part) for part in inputs], int(attrs["axis"])))


def _cumprod(bb: Any, inputs: Sequence[Any], attrs: dict[str, Any], _: Convert) -> Any:
    x = inputs[0]
    axis = int(numbers_of("CumProd", "axis", inputs[1])[0]) % x.ty.ndim

    def turned(tensor: Any) -> Any:
        return bb.emit(op.flip(tensor, axis)) if attrs.get("reverse", 0) else tensor

    products = bb.emit(op.cumprod(turned(x), axis, exclusive=bool(attrs.get("exclusive", 0))))
    return turned(products)


def _dropout(bb: Any, inputs: Sequence[Any], attrs: dict[str, Any], convert: Convert) -> Any:
    """Its input, and which elements are kept: all. Before version 12 ONNX Runtime says none, before 10 in its type."""
    x, _ratio, training = padded(inputs, 3)
    if training is not None and any(numbers_of("Dropout", "training_mode", training)):
        raise UnsupportedModelError("Dropout with training_mode cannot be imported: its results are random")
    if attrs["tvm_custom"]["num_outputs"] == 1:
        return x
    shape = relax.ShapeExpr(shape_of(x))
    fill = op.zeros if convert.opset < 12 else op.ones
    return relax.Tuple([x, bb.emit(fill(shape, "bool" if convert.opset >= 10 else str(x.ty.dtype)))])


def _einsum(bb: Any, inputs: Sequence[Any], attrs: dict[str, Any], _: Convert) -> Any:
    """TVM's importer makes a kernel of it at once; as an operator, it is seen to be a product of matrices."""
    return op.einsum(list(inputs), text_of(attrs["equation"]))


def _eye_like(bb: Any, inputs: Sequence[Any], attrs: dict[str, Any], _: Convert) -> Any:
    """Of another type than the tensor whose shape it has, which TVM refuses."""
    (x,) = inputs
    if "dtype" not in attrs:
        return None
    dtype = onnx.helper.tensor_dtype_to_np_dtype(int(attrs["dtype"]))
    rows, columns = extents(x.ty)
    return constant_of(np.eye(rows, columns, k=int(attrs.get("k", 0)), dtype=dtype))


def _gemm(bb: Any, inputs: Sequence[Any], attrs: dict[str, Any], _: Convert) -> Any:
    """Of 16 bits with a factor, by which TVM makes the numbers of the first matrix smaller than float16 has them."""
    a, b, c = padded(inputs, 3)
    alpha, beta, dtype = float(attrs.get("alpha", 1)), float(attrs.get("beta", 1)), str(a.ty.dtype)
    if alpha == 1 or dtype not in HALVES:
        return None
    a, b = (
        bb.emit(op.permute_dims(x)) if attrs.get(name) else x
        for x, name in zip((a, b), ("transA", "transB"), strict=True)
    )
    result = scaled_product(bb.emit, a, b, dtype, alpha)
    if c is not None:
        wide = bb.emit(op.multiply(as_dtype(bb.emit, c, "float32"), relax.const(beta, "float32")))
        result = bb.emit(op.add(result, wide))
    return op.astype(result, dtype)


def _is_inf(bb: Any, inputs: Sequence[Any], attrs: dict[str, Any], _: Convert) -> Any:
    """Of one sign, or none: TVM looks for both."""
    (x,) = inputs
    signs = [sign for name, sign in _SIGNS_OF_INFINITY.items() if attrs.get(name, 1)]
    if len(signs) == 2:
        return None
    if not signs:
        return op.zeros(relax.ShapeExpr(shape_of(x)), "bool")
    return op.equal(x, relax.const(signs[0] * math.inf, str(x.ty.dtype)))


def _lp_normalization(bb: Any, inputs: Sequence[Any], attrs: dict[str, Any], _: Convert) -> Any:
    """Rows over their norms; rows of zeros stay."""
    x, axis = inputs[0], int(attrs.get("axis", -1))
    one = int(attrs.get("p", 2)) == 1
    terms = bb.emit(op.abs(x) if one else op.multiply(x, x))
    sums = bb.emit(op.sum(terms, axis, keepdims=True))
    norms = sums if one else bb.emit(op.sqrt(sums))
    nothing = bb.emit(op.equal(norms, relax.const(0, str(x.ty.dtype))))
    return op.divide(x, bb.emit(op.where(nothing, relax.const(1, str(x.ty.dtype)), norms)))


def _mod(bb: Any, inputs: Sequence[Any], attrs: dict[str, Any], _: Convert) -> Any:
    """Of floats with the divisor's sign; TVM multiplies by the divisor, and an infinite one makes NaN of numbers."""
    x, divisor = inputs
    dtype = str(x.ty.dtype)
    if attrs.get("fmod", 0) or is_integer(dtype):
        return None
    zero, rest = relax.const(0, dtype), bb.emit(op.mod(x, divisor))
    differ = bb.emit(op.not_equal(bb.emit(op.less(rest, zero)), bb.emit(op.less(divisor, zero))))
    is_other = bb.emit(op.logical_and(differ, bb.emit(op.not_equal(rest, zero))))
    return op.where(is_other, bb.emit(op.add(rest, divisor)), rest)


def _one_hot(bb: Any, inputs: Sequence[Any], attrs: dict[str, Any], _: Convert) -> Any:
    """One of two values, of any type: the second one where a place along the new axis is what the index says."""
    index, depth, values = inputs
    count = int(numbers_of("OneHot", "depth", depth)[0])
    axis = int(attrs.get("axis", -1)) % (index.ty.ndim + 1)
    index = bb.emit(op.astype(index, "int64"))
    negative = bb.emit(op.less(index, relax.const(0, "int64")))
    index = bb.emit(op.where(negative, bb.emit(op.add(index, relax.const(count, "int64"))), index))
    places = np.arange(count, dtype="int64").reshape([-1, *[1] * (index.ty.ndim - axis)])
    here = bb.emit(op.equal(bb.emit(op.expand_dims(index, axis)), constant_of(places)))
    off, on = (bb.emit(op.take(values, relax.const(place, "int64"), axis=0)) for place in range(2))
    return op.where(here, on, off)


def _pad(bb: Any, inputs: Sequence[Any], attrs: dict[str, Any], convert: Convert) -> Any:
    """What is cut off is cut first where a tensor is repeated beside itself, which TVM does not."""
    x, pads, _, axes = padded(inputs, 4)
    if text_of(attrs.get("mode", "constant")) != "wrap" or not isinstance(pads, ir.GenericConst):
        return None
    numbers = np.array(numbers_of("Pad", "pads", pads)).reshape(2, -1)
    if numbers.min(initial=0) >= 0:
        return None
    along = list(range(x.ty.ndim)) if axes is None else [int(n) % x.ty.ndim for n in numbers_of("Pad", "axes", axes)]
    ends = [extents(x.ty)[axis] + min(0, int(after)) for axis, after in zip(along, numbers[1], strict=True)]
    x = bb.emit(op.strided_slice(x, along, [max(0, -int(before)) for before in numbers[0]], ends))
    return convert("Pad", [x, _integers(np.maximum(numbers, 0).reshape(-1).tolist()), None, axes], attrs)


def _pow(bb: Any, inputs: Sequence[Any], attrs: dict[str, Any], convert: Convert) -> Any:
    """Of the base's type, whatever the exponent's."""
    base, exponent = inputs
    dtype, other = (str(x.ty.dtype) for x in inputs)
    if dtype == other:
        return None
    if is_integer(dtype):
        wide = [bb.emit(op.astype(x, "float64")) for x in inputs]
        return op.astype(bb.emit(op.power(*wide)), dtype)
    if isinstance(exponent, ir.GenericConst):
        return convert("Pow", [base, constant_of(array_of(exponent).astype(numpy_dtype(dtype)))], attrs)
    return op.power(base, bb.emit(op.astype(exponent, dtype)))


def _reverse_sequence(bb: Any, inputs: Sequence[Any], attrs: dict[str, Any], _: Convert) -> Any:
    """The first steps of each sequence, as many as it has, in reverse order."""
    x, lengths = inputs
    batch_axis, time_axis = int(attrs.get("batch_axis", 1)), int(attrs.get("time_axis", 0))
    order = [batch_axis, time_axis, *range(2, x.ty.ndim)]  # they are the first two, in either order
    moved = bb.emit(op.permute_dims(x, order))
    steps = extents(moved.ty)[1]
    count = bb.emit(op.reshape(bb.emit(op.astype(lengths, "int64")), [-1, 1]))
    step = constant_of(np.arange(steps, dtype="int64")[None])
    mirrored = bb.emit(op.subtract(bb.emit(op.subtract(count, relax.const(1, "int64"))), step))
    source = bb.emit(op.where(bb.emit(op.less(step, count)), mirrored, step))
    return op.permute_dims(_steps_of_each(bb, moved, source), order)


def _sequence_insert(bb: Any, inputs: Sequence[Any], attrs: dict[str, Any], convert: Convert) -> Any:
    """Before the tensor that a negative place says; TVM puts it behind that one."""
    tensors, tensor, place = padded(inputs, 3)
    number = 0 if place is None else int(numbers_of("SequenceInsert", "position", place)[0])
    if number >= 0:
        return None
    return convert("SequenceInsert", [tensors, tensor, relax.const(len(tensors) + number, "int64")], attrs)


def _shrink(bb: Any, inputs: Sequence[Any], attrs: dict[str, Any], convert: Convert) -> Any:
    """Of integers in float32, as ONNX Runtime computes it: TVM makes integers of the numbers, 1 of 1.5."""
    (x,) = inputs
    dtype = str(x.ty.dtype)
    if not is_integer(dtype):
        return None
    wide = bb.emit(op.astype(x, "float32"))
    return op.astype(bb.emit(convert("Shrink", [wide], attrs)), dtype)


def _slice(bb: Any, inputs: Sequence[Any], attrs: dict[str, Any], convert: Convert) -> Any:
    """By numbers that were attributes before version 10; TVM refuses to end before the beginning."""
    if convert.opset < 10:
        count = len(attrs["starts"])
        given = [attrs["starts"], attrs["ends"], attrs.get("axes", range(count)), [1] * count]
        inputs = [inputs[0], *map(_integers, given)]
    x, *bounds = padded(inputs, 5)
    is_known = isinstance(x.ty, relax.TensorType) and x.ty.shape is not None
    if not is_known or not all(isinstance(value, ir.GenericConst | None) for value in bounds):
        return None
    starts, ends = (numbers_of("Slice", "bound", value) for value in bounds[:2])
    axes = list(range(len(starts))) if bounds[2] is None else numbers_of("Slice", "axes", bounds[2])
    steps = [1] * len(starts) if bounds[3] is None else numbers_of("Slice", "steps", bounds[3])
    for i, axis in enumerate(axes):
        extent = shape_of(x)[axis]
        if isinstance(extent, int) and steps[i] and not range(extent)[starts[i] : ends[i] : steps[i]]:
            starts[i], ends[i], steps[i] = 0, 0, 1
    return convert("Slice", [x, *map(_integers, (starts, ends, axes, steps))], attrs)


def _split(bb: Any, inputs: Sequence[Any], attrs: dict[str, Any], convert: Convert) -> Any:
    """Into one part, or parts some of which are empty: TVM takes no such ones."""
    x, sizes = padded(inputs, 2)
    if attrs["tvm_custom"]["num_outputs"] == 1:
        return x
    lengths = [int(n) for n in attrs.get("split", ())]
    if isinstance(sizes, ir.GenericConst):
        lengths = [int(n) for n in numbers_of("Split", "sizes", sizes)]
    return relax.Tuple(_parts(bb, x, int(attrs.get("axis", 0)), lengths)) if 0 in lengths else None


def _split_to_sequence(bb: Any, inputs: Sequence[Any], attrs: dict[str, Any], _: Convert) -> Any:
    """Into parts of a length, the last of which may be shorter: TVM makes as many of equal ones."""
    x, sizes = padded(inputs, 2)
    axis = int(attrs.get("axis", 0)) % x.ty.ndim
    extent = shape_of(x)[axis]
    if not isinstance(extent, int):
        return None
    given = [1] if sizes is None else [int(n) for n in numbers_of("SplitToSequence", "split", sizes)]
    if sizes is None or sizes.ty.ndim == 0:
        given = [min(given[0], extent - begin) for begin in range(0, extent, given[0])]
    parts = _parts(bb, x, axis, given)
    if sizes is None and not attrs.get("keepdims", 1):
        parts = [bb.emit(op.squeeze(part, [axis])) for part in parts]
    return relax.Tuple(parts)


def _parts(bb: Any, x: Any, axis: int, lengths: Sequence[int]) -> list[Any]:
    """Of these lengths along an axis, one behind another."""
    ends = np.cumsum(lengths).tolist()
    pairs = zip([0, *ends], ends, strict=False)
    return [bb.emit(op.strided_slice(x, [axis], [begin], [end])) for begin, end in pairs]


def _swish(bb: Any, inputs: Sequence[Any], attrs: dict[str, Any], _: Convert) -> Any:
    """ONNX writes it as other operators only with `alpha` given."""
    (x,) = inputs
    scaled = bb.emit(op.multiply(x, relax.const(float(attrs.get("alpha", 1.0)), str(x.ty.dtype))))
    return op.multiply(x, bb.emit(op.sigmoid(scaled)))


def _tensor_scatter(bb: Any, inputs: Sequence[Any], attrs: dict[str, Any], _: Convert) -> Any:
    """A cache of keys or values with new ones at, for each batch, another place: linear, or as a ring."""
    cache, update, starts = padded(inputs, 3)
    axis = int(attrs.get("axis", -2)) % cache.ty.ndim
    ring = text_of(attrs.get("mode", "linear")) == "circular"
    if axis == 0:
        raise UnsupportedModelError("TensorScatter along the batch cannot be imported")
    order = [0, axis, *(a for a in range(1, cache.ty.ndim) if a != axis)]
    old, new = (bb.emit(op.permute_dims(tensor, order)) for tensor in (cache, update))
    places, count = extents(old.ty)[1], extents(new.ty)[1]
    start = constant_of(np.zeros((extents(old.ty)[0], 1), "int64"))
    if starts is not None:
        start = bb.emit(op.reshape(bb.emit(op.astype(starts, "int64")), [-1, 1]))
    number = bb.emit(op.subtract(constant_of(np.arange(places, dtype="int64")[None]), start))
    if ring:
        number = bb.emit(op.floor_mod(number, relax.const(places, "int64")))
    inside = bb.emit(
        op.logical_and(
            bb.emit(op.less_equal(relax.const(0, "int64"), number)),
            bb.emit(op.less(number, relax.const(count, "int64"))),
        )
    )
    source = bb.emit(op.clip(number, 0, count - 1))
    written = _steps_of_each(bb, new, source)
    inside = bb.emit(op.reshape(inside, [*extents(inside.ty), *([1] * (cache.ty.ndim - 2))]))
    result = bb.emit(op.where(inside, written, old))
    return op.permute_dims(result, [order.index(a) for a in range(cache.ty.ndim)])


def _thresholded_relu(bb: Any, inputs: Sequence[Any], attrs: dict[str, Any], _: Convert) -> Any:
    """Zeros up to a threshold: TVM multiplies by them, and makes NaN of -inf."""
    (x,) = inputs
    dtype = str(x.ty.dtype)
    above = bb.emit(op.greater(x, relax.const(float(attrs.get("alpha", 1.0)), dtype)))
    return op.where(above, x, relax.const(0, dtype))


def _top(bb: Any, inputs: Sequence[Any], attrs: dict[str, Any], convert: Convert) -> Any:
    """In version 10, as many as an input says: TVM looks for the attribute that said so before. Any order will do where
    none is asked for, which TVM refuses."""
    if convert.opset > 10 and not attrs.get("sorted", 1):
        return convert("TopK", inputs, attrs | {"sorted": 1})
    if convert.opset != 10:
        return None
    x, count = inputs
    number = int(numbers_of("TopK", "k", count)[0])
    return bb.emit(op.topk(x, number, int(attrs.get("axis", -1)), "both", largest=True, dtype="int64"))


def _steps_of_each(bb: Any, x: Any, source: Any) -> Any:
    """Of [batch, step, ...] the steps that `source`, [batch, new step], says."""
    batch, steps, *rest = extents(x.ty)
    first = constant_of((np.arange(batch, dtype="int64") * steps)[:, None])
    rows = bb.emit(op.reshape(bb.emit(op.add(source, first)), [-1]))
    taken = bb.emit(op.take(bb.emit(op.reshape(x, [batch * steps, *rest])), rows, axis=0))
    return bb.emit(op.reshape(taken, [batch, -1, *rest]))


def _integers(numbers: Sequence[int]) -> Any:
    return constant_of(np.array(numbers, "int64"))


_SIGNS_OF_INFINITY = {"detect_negative": -1, "detect_positive": 1}

OPERATORS: dict[str, Callable[..., Any]] = {
    "Atanh": _atanh,
    "Celu": _of_one(_celu, ("alpha", 1)),
    "CenterCropPad": _center_crop_pad,
    "Compress": _compress,
    "Concat": _concat,
    "CumProd": _cumprod,
    "Dropout": _dropout,
    "Einsum": _einsum,
    "Elu": _of_one(elu, ("alpha", 1)),
    "EyeLike": _eye_like,
    "Gemm": _gemm,
    "IsInf": _is_inf,
    "LpNormalization": _lp_normalization,
    "Mish": _of_one(mish),
    "Mod": _mod,
    "OneHot": _one_hot,
    "Pad": _pad,
    "Pow": _pow,
    "ReverseSequence": _reverse_sequence,
    "Selu": _of_one(elu, *zip(("alpha", "gamma"), SELU, strict=True)),
    "SequenceInsert": _sequence_insert,
    "Shrink": _shrink,
    "Slice": _slice,
    "Softplus": _of_one(softplus),
    "Split": _split,
    "SplitToSequence": _split_to_sequence,
    "Swish": _swish,
    "Tanh": _of_one(tanh),
    "TensorScatter": _tensor_scatter,
    "ThresholdedRelu": _thresholded_relu,
    "TopK": _top,
}
"""Name of an operator -> a function of block builder, inputs, attributes and `Convert` that returns the result."""
