"""How each operator of the vocabulary is written in Relax: one row each, read and written by the same table.

`read` gives the vocabulary's view of a Relax call, unless the vocabulary cannot say exactly what the call does: such a
call becomes an `opaque` term. `write` is its inverse.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from tvm import relax

from .attributes import (
    BINARY_KINDS,
    REDUCE_KINDS,
    UNARY_KINDS,
    Axis,
    Conv2d,
    Full,
    Kind,
    Pad,
    Permute,
    Pool2d,
    Reduce,
    Shape,
    Slice,
    TensorType,
    WinogradData,
    WinogradResult,
)
from .blocked_ops import blocked_conv2d
from .operators import OPS, NotTypeable, infer
from .winograd_ops import winograd_conv2d, winograd_data, winograd_result

__all__ = ["read_call", "static_type", "write_term"]

FLOATS = ("float16", "bfloat16", "float32", "float64")
"""Arithmetic rules hold for these; integers wrap and divide differently, and stay opaque."""

DTYPES = (*FLOATS, "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "bool")
MOVES = ("permute", "reshape", "broadcast", "slice", "concat")
"""Operators that only move data, whatever its dtype."""

Read = Callable[[Any, Sequence[TensorType], TensorType], Any]
Write = Callable[..., Any]


@dataclass(frozen=True)
class Row:
    """One Relax operator: `read(call, argument types, result type)` gives attributes, or `_NOT_EXPRESSIBLE`."""

    relax: str
    op: str
    read: Read


def static_type(ty: Any) -> TensorType | None:
    """A Relax type as a `TensorType`; None for anything but a tensor of static shape on the default device."""
    if not isinstance(ty, relax.TensorType) or not isinstance(ty.shape, relax.ShapeExpr) or ty.vdevice is not None:
        return None
    dtype = str(ty.dtype)
    extents = _constants(ty.shape.values)
    return None if extents is None or dtype not in DTYPES else TensorType(extents, dtype)


def read_call(call: Any, types: Sequence[TensorType], result: TensorType) -> tuple[str, Any] | None:
    """Operator and attributes of a Relax call whose tensor arguments have these types; None when it is opaque."""
    row = ROWS.get(getattr(call.op, "name", ""))
    if row is None or (result.dtype not in FLOATS and row.op not in MOVES):
        return None
    if OPS[row.op].arity not in (None, len(types)):  # an operand is a number that is no tensor
        return None
    attrs = row.read(call, types, result)
    if attrs is _NOT_EXPRESSIBLE:
        return None
    try:
        inferred = infer(row.op, attrs, *types)
    except NotTypeable:
        return None
    return (row.op, attrs) if inferred == result else None


def write_term(op: str, attrs: Any, arguments: Sequence[Any], types: Sequence[TensorType], result: TensorType) -> Any:
    """A term as a Relax expression. `types` are those of the arguments."""
    return WRITERS[op](attrs, *arguments, types=types, result=result)


_NOT_EXPRESSIBLE = object()
"""What `read` gives for a call that the vocabulary cannot express: None is what operators without attributes have."""


def _ints(values: Any) -> tuple[int, ...]:
    return tuple(int(value) for value in values)


def _read_matmul(call: Any, types: Sequence[TensorType], result: TensorType) -> None:
    return None


def _read_conv2d(call: Any, types: Sequence[TensorType], result: TensorType) -> Any:
    a = call.attrs
    layouts = (str(a.data_layout), str(a.kernel_layout), str(a.out_layout) or str(a.data_layout))
    if (
        sorted(layouts[0]) != sorted("NCHW")
        or sorted(layouts[1]) != sorted("OIHW")
        or sorted(layouts[2]) != sorted("NCHW")
    ):
        return _NOT_EXPRESSIBLE
    strides, padding, dilation = _ints(a.strides), _ints(a.padding), _ints(a.dilation)
    return Conv2d(strides, padding, dilation, int(a.groups), *layouts)  # type: ignore[arg-type]


def _read_pool2d(kind: str) -> Read:
    def read(call: Any, types: Sequence[TensorType], result: TensorType) -> Any:
        a = call.attrs
        layout = str(a.layout)
        if sorted(layout) != sorted("NCHW") or str(a.out_layout or layout) != layout:
            return _NOT_EXPRESSIBLE
        sizes = _ints(a.pool_size), _ints(a.strides), _ints(a.padding), _ints(a.dilation)
        return Pool2d(kind, *sizes, bool(a.ceil_mode), bool(a.count_include_pad), layout)  # type: ignore[arg-type]

    return read


def _read_permute(call: Any, types: Sequence[TensorType], result: TensorType) -> Permute:
    rank = len(types[0].shape)
    axes = call.attrs.axes
    return Permute(tuple(range(rank))[::-1] if axes is None else tuple(axis % rank for axis in _ints(axes)))


def _read_shape(call: Any, types: Sequence[TensorType], result: TensorType) -> Shape:
    return Shape(result.shape)


def _read_slice(call: Any, types: Sequence[TensorType], result: TensorType) -> Any:
    axes, begins, ends, *strides = (
        _constants(argument.fields) if isinstance(argument, relax.Tuple) else None for argument in call.args[1:]
    )
    if axes is None or begins is None or ends is None:
        return _NOT_EXPRESSIBLE
    if strides and (strides[0] is None or any(stride != 1 for stride in strides[0])):
        return _NOT_EXPRESSIBLE
    shape = types[0].shape
    begin, end = [0] * len(shape), list(shape)
    for axis, first, last in zip(axes, begins, ends, strict=True):
        axis, size = axis % len(shape), shape[axis]
        begin[axis] = min(max(first + size if first < 0 else first, 0), size)
        end[axis] = max(begin[axis], min(last + size if last < 0 else last, size))
    return Slice(tuple(begin), tuple(end))


def _constants(expressions: Any) -> tuple[int, ...] | None:
    """Integer expressions as integers; None when one is symbolic."""
    numbers = [value for value in (getattr(expr, "value", None) for expr in expressions) if isinstance(value, int)]
    return tuple(numbers) if len(numbers) == len(expressions) else None


def _read_axis(call: Any, types: Sequence[TensorType], result: TensorType) -> Any:
    axis = call.attrs.axis
    return _NOT_EXPRESSIBLE if axis is None else Axis(int(axis) % len(types[0].shape))


def _read_pad(call: Any, types: Sequence[TensorType], result: TensorType) -> Any:
    a = call.attrs
    if str(a.pad_mode) != "constant" or float(a.pad_value) != 0:
        return _NOT_EXPRESSIBLE
    widths = _ints(a.pad_width)
    return Pad(widths[0::2], widths[1::2])


def _read_reduce(kind: str) -> Read:
    def read(call: Any, types: Sequence[TensorType], result: TensorType) -> Reduce:
        rank = len(types[0].shape)
        axes = range(rank) if call.attrs.axis is None else (axis % rank for axis in _ints(call.attrs.axis))
        return Reduce(kind, tuple(sorted(axes)), bool(call.attrs.keepdims))

    return read


def _read_kind(kind: str) -> Read:
    return lambda call, types, result: Kind(kind)


UNARY_NAMES = {
    kind: f"relax.nn.{kind}" if kind in ("gelu", "gelu_tanh", "relu", "silu") else f"relax.{kind}"
    for kind in UNARY_KINDS
}

ROWS: dict[str, Row] = {
    row.relax: row
    for row in (
        Row("relax.matmul", "matmul", _read_matmul),
        Row("relax.nn.conv2d", "conv2d", _read_conv2d),
        Row("relax.nn.max_pool2d", "pool2d", _read_pool2d("max")),
        Row("relax.nn.avg_pool2d", "pool2d", _read_pool2d("avg")),
        Row("relax.permute_dims", "permute", _read_permute),
        Row("relax.reshape", "reshape", _read_shape),
        Row("relax.expand_dims", "reshape", _read_shape),
        Row("relax.squeeze", "reshape", _read_shape),
        Row("relax.flatten", "reshape", _read_shape),
        Row("relax.broadcast_to", "broadcast", _read_shape),
        Row("relax.strided_slice", "slice", _read_slice),
        Row("relax.concat", "concat", _read_axis),
        Row("relax.nn.pad", "pad", _read_pad),
        Row("relax.nn.softmax", "softmax", _read_axis),
        *(Row(f"relax.{kind}", "reduce", _read_reduce(kind)) for kind in REDUCE_KINDS),
        *(Row(UNARY_NAMES[kind], "unary", _read_kind(kind)) for kind in UNARY_KINDS),
        *(Row(f"relax.{kind}", "binary", _read_kind(kind)) for kind in BINARY_KINDS),
    )
}


def _write_full(attrs: Full, *, types: Any, result: TensorType) -> Any:
    held = "float32" if attrs.dtype == "bfloat16" else attrs.dtype  # numpy has no bfloat16; Relax rounds
    return relax.const(np.full(attrs.shape, attrs.value, held), attrs.dtype)


def _write_matmul(attrs: None, x: Any, y: Any, *, types: Any, result: TensorType) -> Any:
    return relax.op.matmul(x, y, out_dtype=result.dtype)


def _write_conv2d(a: Conv2d, x: Any, w: Any, *, types: Any, result: TensorType) -> Any:
    return relax.op.nn.conv2d(
        x, w, a.strides, a.padding, a.dilation, a.groups, a.data_layout, a.kernel_layout, a.out_layout, result.dtype
    )


def _write_pool2d(a: Pool2d, x: Any, *, types: Any, result: TensorType) -> Any:
    pool = {"max": relax.op.nn.max_pool2d, "avg": relax.op.nn.avg_pool2d}[a.kind]
    return pool(x, a.pool_size, a.strides, a.padding, a.dilation, a.ceil_mode, a.count_include_pad, a.layout)


def _write_slice(a: Slice, x: Any, *, types: Sequence[TensorType], result: TensorType) -> Any:
    shape = types[0].shape
    if not shape:  # a scalar has nothing to cut, and no axis to name
        return x
    cut = [i for i, size in enumerate(shape) if (a.begin[i], a.end[i]) != (0, size)] or [0]
    return relax.op.strided_slice(x, cut, [a.begin[i] for i in cut], [a.end[i] for i in cut])


def _write_pad(a: Pad, x: Any, *, types: Any, result: TensorType) -> Any:
    return relax.op.nn.pad(x, [width for pair in zip(a.before, a.after, strict=True) for width in pair])


def _write_winograd_data(a: WinogradData, x: Any, *, types: Any, result: TensorType) -> Any:
    return winograd_data(relax.op.permute_dims(x, [0, 2, 3, 1]), a)


def _write_winograd_conv2d(a: WinogradData, x: Any, w: Any, *, types: Any, result: TensorType) -> Any:
    image = winograd_conv2d(relax.op.permute_dims(x, [0, 2, 3, 1]), w, a)
    return relax.op.permute_dims(image, [0, 3, 1, 2])


def _write_winograd_result(a: WinogradResult, x: Any, *, types: Any, result: TensorType) -> Any:
    return relax.op.permute_dims(winograd_result(x, a), [0, 3, 1, 2])


def _write_reduce(a: Reduce, x: Any, *, types: Any, result: TensorType) -> Any:
    return getattr(relax.op, a.kind)(x, list(a.axes), a.keepdims)


def _write_unary(a: Kind, x: Any, *, types: Any, result: TensorType) -> Any:
    _, *scope, name = UNARY_NAMES[a.name].split(".")
    return getattr(relax.op.nn if scope else relax.op, name)(x)


WRITERS: dict[str, Write] = {
    "full": _write_full,
    "matmul": _write_matmul,
    "conv2d": _write_conv2d,
    "blocked_conv2d": lambda a, x, w, **_: blocked_conv2d(x, w, a),
    "pool2d": _write_pool2d,
    "permute": lambda a, x, **_: relax.op.permute_dims(x, list(a.axes)),
    "reshape": lambda a, x, **_: relax.op.reshape(x, a.shape),
    "broadcast": lambda a, x, **_: relax.op.broadcast_to(x, a.shape),
    "slice": _write_slice,
    "concat": lambda a, *parts, **_: relax.op.concat(list(parts), a.axis),
    "pad": _write_pad,
    "winograd_data": _write_winograd_data,
    "winograd_conv2d": _write_winograd_conv2d,
    "winograd_result": _write_winograd_result,
    "reduce": _write_reduce,
    "softmax": lambda a, x, **_: relax.op.nn.softmax(x, a.axis),
    "unary": _write_unary,
    "binary": lambda a, x, y, **_: getattr(relax.op, a.name)(x, y),
}
