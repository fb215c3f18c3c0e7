"""Relax operators computed by numpy, so that what depends on weights alone need not be compiled.

TVM's own FoldConstant compiles one LLVM function for each operator that it folds: 13 to 29 s for the models of the
zoo, where numpy takes a tenth of a second.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tvm_ffi
from scipy import special
from tvm import ir, relax

from ..arrays import Array
from ..dtypes import numpy_dtype
from .constants import is_static_tensor
from .functions import operator

__all__ = ["EVALUATORS", "Value", "evaluate"]

Value = Array | tuple[Array, ...]


def evaluate(call: relax.Call, arrays: Sequence[Array]) -> Value | None:
    """Compute one operator.

    Parameters
    ----------
    call : relax.Call
        The call; its attributes, its arguments that are no tensors and its type are read.
    arrays : sequence of arrays
        The tensors among its arguments in order, tuples flattened.

    Returns
    -------
    array, tuple of arrays, or None
        The result with the shape and dtype of `call.ty`, possibly a view of an input. None where numpy cannot do
        it: an operator that is not in `EVALUATORS`, or a use of it whose meaning differs between numpy and TVM.
    """
    function = EVALUATORS.get(operator(call))
    if function is None or _depends_on_sizes(call) or _reads_numbers(call):
        return None
    if call.op.name not in _MOVES:
        arrays = [array.astype(np.float32) if array.dtype.name == "bfloat16" else array for array in arrays]
    with np.errstate(all="ignore"):
        result = function(call, *arrays)
    if result is None:
        return None
    if isinstance(result, tuple):
        fields = call.ty.fields if isinstance(call.ty, relax.TupleType) else ()
        typed = [_typed(part, ty) for part, ty in zip(result, fields, strict=False)]
        return None if len(typed) != len(result) or any(a is None for a in typed) else tuple(typed)  # type: ignore[arg-type]
    return _typed(result, call.ty)


def _depends_on_sizes(call: relax.Call) -> bool:
    """Whether symbolic sizes are among the arguments, as in arange(n, n + 1), whose shape is known."""
    found: list[Any] = []
    for argument in call.args:
        if not isinstance(argument, ir.GenericConst):
            tvm_ffi.structural_walk(argument, (ir.Var, found.append))
    return any(isinstance(variable.ty, ir.PrimType) for variable in found)


def _reads_numbers(call: relax.Call) -> bool:
    """Whether a number that is no tensor stands where the evaluator of the operator wants one: x + 1, x[1]."""
    has_numbers = any(isinstance(argument.ty, ir.PrimType) for argument in call.args)
    return has_numbers and call.op.name not in _OF_NUMBERS


def _typed(array: Array, ty: Any) -> Array | None:
    """`array` in the dtype of `ty`; None when the shapes differ."""
    array = np.asarray(array)
    if not is_static_tensor(ty) or array.shape != tuple(int(extent) for extent in ty.shape.values):
        return None
    return array.astype(numpy_dtype(str(ty.dtype)), copy=False)


def _computed_dtype(call: relax.Call) -> str:
    """The dtype that numpy computes a call in: what ml_dtypes adds to numpy has no products of its own."""
    dtype = str(call.ty.dtype)
    return "float32" if dtype == "bfloat16" else dtype


# Reading a call: attributes and arguments that are no tensors.


def _ints(values: Any) -> tuple[int, ...]:
    return tuple(int(value) for value in values)


def _axis(call: relax.Call) -> int | None:
    return None if call.attrs.axis is None else int(call.attrs.axis)


def _axes(values: Any) -> tuple[int, ...] | None:
    return None if values is None else _ints(values)


def _shape(call: relax.Call) -> tuple[int, ...]:
    return _ints(call.ty.shape.values)


def _scalar(expr: Any) -> int | float:
    """A `relax.prim_value`."""
    value = getattr(expr, "value", expr)
    return float(value) if isinstance(value, float) else int(value)


# Operators. Each takes the call and its tensors.

Evaluator = Callable[..., Any]


def _unary(function: Callable[[Array], Array]) -> Evaluator:
    return lambda call, x: function(x)


def _binary(function: Callable[[Array, Array], Array]) -> Evaluator:
    return lambda call, a, b: function(a, b)


def _floats_only(function: Callable[..., Array]) -> Evaluator:
    """For operators that treat integers otherwise than numpy does."""
    return lambda call, *xs: function(*xs) if all(x.dtype.kind == "f" for x in xs) else None


def _reduce(function: Callable[..., Array]) -> Evaluator:
    def reduce(call: relax.Call, x: Array) -> Array:
        return np.asarray(function(x, axis=_axes(call.attrs.axis), keepdims=bool(call.attrs.keepdims)))

    return reduce


def _extremum(function: Callable[..., Array]) -> Evaluator:
    reduce = _reduce(function)
    return lambda call, x: reduce(call, x) if x.size else None  # of nothing, numpy knows none


def _moment(function: Callable[..., Array]) -> Evaluator:
    reduce = _reduce(function)
    return lambda call, x: reduce(call, x) if x.dtype.kind == "f" else None  # integers are added in their own type


def _matmul(call: relax.Call, a: Array, b: Array) -> Array:
    return np.matmul(a, b, dtype=_computed_dtype(call))


def _split(call: relax.Call, x: Array) -> tuple[Array, ...]:
    parts = call.attrs.indices_or_sections
    axis = int(call.attrs.axis)
    if hasattr(parts, "value") or isinstance(parts, int):
        # TVM cuts equal parts of ceil(extent / sections), the last of them perhaps empty; numpy spreads the remainder.
        step = -(-x.shape[axis] // int(_scalar(parts)))
        return tuple(np.split(x, [place * step for place in range(1, int(_scalar(parts)))], axis))
    return tuple(np.split(x, _ints(parts), axis))


def _strided_slice(call: relax.Call, x: Array) -> Array | None:
    arguments = [[int(_scalar(v)) for v in argument] for argument in call.args[1:]]
    axes, begins, ends = arguments[:3]
    strides = arguments[3] if len(arguments) > 3 else [1] * len(axes)
    index: list[slice] = [slice(None)] * x.ndim
    for axis, begin, end, stride in zip(axes, begins, ends, strides, strict=True):
        if stride <= 0:
            return None
        index[axis] = slice(begin, end, stride)
    return x[tuple(index)]


def _pad(call: relax.Call, x: Array) -> Array | None:
    mode = str(call.attrs.pad_mode)
    widths = np.asarray(_ints(call.attrs.pad_width)).reshape(-1, 2)
    if len(widths) != x.ndim or mode not in ("constant", "reflect", "replicate", "circular"):
        return None
    if widths.size and widths.min() < 0:  # cuts off, which numpy does not
        return None
    if mode == "constant":
        return np.pad(x, widths, constant_values=_scalar(call.attrs.pad_value))
    names: dict[str, Any] = {"reflect": "reflect", "replicate": "edge", "circular": "wrap"}
    return np.pad(x, widths, mode=names[mode])


def _take(call: relax.Call, x: Array, indices: Array) -> Array | None:
    axis = _axis(call)
    extent = x.size if axis is None else x.shape[axis]
    if indices.size and (indices.min() < 0 or indices.max() >= extent):
        return None  # what happens depends on the mode, and "fast" reads out of bounds
    return np.take(x, indices, axis=axis)


def _cumulate(function: Callable[..., Array]) -> Evaluator:
    def cumulate(call: relax.Call, x: Array) -> Array | None:
        if call.attrs.exclusive:
            return None
        return function(x, axis=_axis(call), dtype=_computed_dtype(call))

    return cumulate


def _clip(call: relax.Call, x: Array) -> Array:
    return np.maximum(np.minimum(x, _scalar(call.args[2])), _scalar(call.args[1])).astype(x.dtype)


def _norm(call: relax.Call, x: Array, axes: Sequence[int], of_axes: Sequence[int], *affine: Array) -> Array | None:
    """Mean 0 and variance 1 along `axes`; then times gamma, plus beta, whose dimensions are the axes `of_axes` of x.

    None where one of these is not wanted: TVM applies both all the same; nor where axes are out of order.
    """
    if not (call.attrs.scale and call.attrs.center) or list(axes) != sorted(axes):
        return None
    wide = x.astype(np.float64)
    centred = wide - wide.mean(tuple(axes), keepdims=True)
    result = centred / np.sqrt(np.square(centred).mean(tuple(axes), keepdims=True) + float(call.attrs.epsilon))
    gamma, beta = (np.expand_dims(factor, [axis for axis in range(x.ndim) if axis not in of_axes]) for factor in affine)
    return np.asarray(result * gamma + beta)


def _positive(axes: Any, rank: int) -> list[int]:
    return [axis % rank for axis in _ints(axes)]


def _layer_norm(call: relax.Call, x: Array, *affine: Array) -> Array | None:
    axes = _positive(call.attrs.axes, x.ndim)
    return _norm(call, x, axes, axes, *affine)


def _instance_norm(call: relax.Call, x: Array, *affine: Array) -> Array | None:
    return _norm(call, x, _positive(call.attrs.axes, x.ndim), [int(call.attrs.channel_axis) % x.ndim], *affine)


def _rms_norm(call: relax.Call, x: Array, gamma: Array) -> Array | None:
    axes = _positive(call.attrs.axes, x.ndim)
    if axes != sorted(axes):
        return None
    squares = np.square(x.astype(np.float64)).mean(tuple(axes), keepdims=True)
    others = [axis for axis in range(x.ndim) if axis not in axes]
    return np.asarray(x / np.sqrt(squares + float(call.attrs.epsilon)) * np.expand_dims(gamma, others))


def _arange(call: relax.Call) -> Array:
    return np.arange(*(_scalar(argument) for argument in call.args), dtype=_computed_dtype(call))


def _one_hot(call: relax.Call, indices: Array) -> Array:
    on, off = (_scalar(argument) for argument in call.args[1:3])
    hot = indices[..., None] == np.arange(int(call.attrs.depth))
    return np.moveaxis(np.where(hot, on, off), -1, int(call.attrs.axis))


EVALUATORS: dict[str, Evaluator] = {
    # shape
    "relax.reshape": lambda call, x: x.reshape(_shape(call)),
    "relax.flatten": lambda call, x: x.reshape(_shape(call)),
    "relax.nn.batch_flatten": lambda call, x: x.reshape(_shape(call)),
    "relax.squeeze": lambda call, x: x.reshape(_shape(call)),
    "relax.permute_dims": lambda call, x: x.transpose(_axes(call.attrs.axes)),
    "relax.expand_dims": lambda call, x: np.expand_dims(x, _ints(call.attrs.axis)),
    "relax.broadcast_to": lambda call, x: np.broadcast_to(x, _shape(call)),
    "relax.concat": lambda call, *xs: np.concatenate(xs, _axis(call)),
    "relax.stack": lambda call, *xs: np.stack(xs, _axis(call) or 0),
    "relax.split": _split,
    "relax.strided_slice": _strided_slice,
    "relax.take": _take,
    "relax.flip": lambda call, x: np.flip(x, int(call.attrs.axis)),
    "relax.tile": lambda call, x: np.tile(x, _ints(call.attrs.repeats)),
    "relax.repeat": lambda call, x: np.repeat(x, int(call.attrs.repeats), _axis(call)),
    "relax.nn.pad": _pad,
    "relax.tril": lambda call, x: np.tril(x, int(_scalar(call.args[1]))),
    "relax.triu": lambda call, x: np.triu(x, int(_scalar(call.args[1]))),
    # creation
    "relax.full": lambda call, x: np.broadcast_to(x, _shape(call)),
    "relax.full_like": lambda call, x, value: np.broadcast_to(value, x.shape),
    "relax.zeros": lambda call: np.zeros(_shape(call)),
    "relax.zeros_like": lambda call, x: np.zeros_like(x),
    "relax.ones": lambda call: np.ones(_shape(call)),
    "relax.ones_like": lambda call, x: np.ones_like(x),
    "relax.arange": _arange,
    "relax.one_hot": _one_hot,
    # arithmetic
    "relax.add": _binary(np.add),
    "relax.subtract": _binary(np.subtract),
    "relax.multiply": _binary(np.multiply),
    "relax.divide": _floats_only(np.divide),
    "relax.floor_divide": _floats_only(lambda a, b: np.floor(a / b)),
    "relax.power": _floats_only(np.power),
    "relax.maximum": _binary(np.maximum),
    "relax.minimum": _binary(np.minimum),
    "relax.negative": _unary(np.negative),
    "relax.abs": _unary(np.abs),
    "relax.isnan": _unary(np.isnan),
    "relax.sign": _unary(np.sign),
    "relax.square": _unary(np.square),
    "relax.floor": _floats_only(np.floor),
    "relax.ceil": _floats_only(np.ceil),
    "relax.trunc": _floats_only(np.trunc),
    "relax.round": _floats_only(np.rint),
    "relax.clip": _clip,
    "relax.astype": lambda call, x: x.astype(numpy_dtype(str(call.ty.dtype))),
    # functions
    "relax.sqrt": _floats_only(np.sqrt),
    "relax.rsqrt": _floats_only(lambda x: 1 / np.sqrt(x)),
    "relax.exp": _floats_only(np.exp),
    "relax.log": _floats_only(np.log),
    "relax.sin": _floats_only(np.sin),
    "relax.cos": _floats_only(np.cos),
    "relax.tanh": _floats_only(np.tanh),
    "relax.erf": _floats_only(special.erf),
    "relax.sigmoid": _floats_only(special.expit),
    "relax.nn.relu": _unary(lambda x: np.maximum(x, x.dtype.type(0))),
    "relax.nn.silu": _floats_only(lambda x: x * special.expit(x)),
    "relax.nn.gelu": _floats_only(lambda x: x * special.ndtr(x)),
    "relax.nn.softmax": lambda call, x: special.softmax(x, axis=int(call.attrs.axis)),
    "relax.nn.layer_norm": _layer_norm,
    "relax.nn.instance_norm": _instance_norm,
    "relax.nn.rms_norm": _rms_norm,
    # comparison and logic
    "relax.equal": _binary(np.equal),
    "relax.not_equal": _binary(np.not_equal),
    "relax.greater": _binary(np.greater),
    "relax.greater_equal": _binary(np.greater_equal),
    "relax.less": _binary(np.less),
    "relax.less_equal": _binary(np.less_equal),
    "relax.logical_and": _binary(np.logical_and),
    "relax.logical_or": _binary(np.logical_or),
    "relax.logical_not": _unary(np.logical_not),
    "relax.where": lambda call, condition, a, b: np.where(condition, a, b),
    # reductions and products
    "relax.sum": _reduce(np.sum),
    "relax.mean": _moment(np.mean),
    "relax.prod": _reduce(np.prod),
    "relax.max": _extremum(np.max),
    "relax.min": _extremum(np.min),
    "relax.variance": _moment(np.var),
    "relax.std": _moment(np.std),
    "relax.cumsum": _cumulate(np.cumsum),
    "relax.cumprod": _cumulate(np.cumprod),
    "relax.matmul": _matmul,
    "relax.einsum": lambda call, *xs: np.einsum(str(call.attrs.subscripts), *xs, optimize=True),
}
"""Operator name to a function of the call and its tensors; None from it means "not in this case"."""

_MOVES = frozenset(
    f"relax.{name}" for name in (
        "reshape", "flatten", "nn.batch_flatten", "squeeze", "permute_dims", "expand_dims", "broadcast_to", "concat",
        "stack", "split", "strided_slice", "take", "flip", "tile", "repeat",
    )
)  # fmt: skip
"""Operators that only move elements, of whatever dtype: most of them give a view, or make the only copy."""

_OF_NUMBERS = frozenset(f"relax.{name}" for name in ("arange", "clip", "one_hot", "tril", "triu"))
"""Operators whose evaluators read the numbers among their arguments."""
