"""How each Relax operator is written in Relay: the inverse of the tables in `operators`."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from tvm import relax

from ..relax_ir.functions import operator
from ..relax_ir.tensors import extents
from .printing import Write, Writer, integers, literal, numbers, optional, prim, same
from .printing_layers import LAYERS

__all__ = ["ROWS", "coordinates_last"]


def _reduction(name: str) -> Write:
    def write(w: Writer, call: Any) -> str:
        axis = None if call.attrs.axis is None else numbers(call.attrs.axis)
        if axis == []:  # Relay takes no axes for all axes
            return w.call("copy", call.args)
        return w.call(name, call.args, axis=axis, keepdims=bool(call.attrs.keepdims))

    return write


def _moment(root: bool) -> Write:
    """variance(x, mean(x)), and its square root."""

    def write(w: Writer, call: Any) -> str:
        axis = None if call.attrs.axis is None else numbers(call.attrs.axis)
        mean = w.call("mean", call.args, axis=axis, keepdims=True)
        variance = w.call("variance", [call.args[0], mean], axis=axis, keepdims=bool(call.attrs.keepdims))
        return w.call("sqrt", [variance]) if root else variance

    return write


def _arg_reduction(name: str) -> Write:
    def write(w: Writer, call: Any) -> str:
        axis = None if call.attrs.axis is None else [int(call.attrs.axis)]
        found = w.call(name, call.args, axis=axis, keepdims=bool(call.attrs.keepdims))
        return w.call("cast", [found], dtype=str(call.ty.dtype))

    return write


def _scan(name: str) -> Write:
    def write(w: Writer, call: Any) -> str:
        return w.call(
            name,
            call.args,
            axis=optional(call.attrs.axis),
            dtype=str(call.ty.dtype),
            exclusive=bool(call.attrs.exclusive),
        )

    return write


def _clip(w: Writer, call: Any) -> str:
    low, high = (float(prim(bound)) for bound in call.args[1:])
    return w.call("clip", call.args[:1], a_min=low, a_max=high)


def _round(w: Writer, call: Any) -> str:
    """Relay rounds ties away from zero, Relax to even: to twice the rounded half, which is no tie itself."""
    (data,) = call.args
    if "float" not in str(data.ty.dtype):
        return w.call("copy", [data])
    half = literal(0.5, data)
    even = w.call("multiply", [w.call("round", [w.call("multiply", [data, half])]), literal(2, data)])
    fraction = w.call("abs", [w.call("subtract", [data, w.call("trunc", [data])])])
    return w.call("where", [w.call("equal", [fraction, half]), even, w.call("round", [data])])


def _reshape(w: Writer, call: Any) -> str:
    shape = extents(call.ty)
    return w.call("reshape", call.args[:1], newshape=shape, allowzero=0 in shape)


def _expand_dims(w: Writer, call: Any) -> str:
    rank = call.ty.ndim
    axes = sorted(int(axis) % rank for axis in call.attrs.axis)
    if axes == list(range(axes[0], axes[0] + len(axes))):
        return w.call("expand_dims", call.args, axis=axes[0], num_newaxis=len(axes))
    return _reshape(w, call)


def _squeeze(w: Writer, call: Any) -> str:
    axis = None if call.attrs.axis is None else numbers(call.attrs.axis)
    return w.call("squeeze", call.args, axis=axis)


def _permute(w: Writer, call: Any) -> str:
    axes = None if call.attrs.axes is None else numbers(call.attrs.axes)
    return w.call("transpose", call.args, axes=axes)


def _joined(name: str) -> Write:
    return lambda w, call: w.call(name, call.args, axis=int(call.attrs.axis or 0))


def _split(w: Writer, call: Any) -> str:
    """Relay has equal parts only, or the places between them; of one part, Relax makes no tuple."""
    sections, axis = call.attrs.indices_or_sections, int(call.attrs.axis)
    if not isinstance(call.ty, relax.TupleType):
        return w.call("copy", call.args)
    parts = [extents(part)[axis] for part in call.ty.fields]
    plain: Any = len(parts)
    if isinstance(sections, Sequence):
        plain = numbers(sections)
    elif len(set(parts)) > 1:
        plain = list(accumulate(parts))[:-1]
    return w.call("split", call.args, indices_or_sections=plain, axis=axis)


def _strided_slice(w: Writer, call: Any) -> str:
    axes, begin, end = (integers(argument) for argument in call.args[1:4])
    strides = integers(call.args[4]) if len(call.args) > 4 else [1] * len(axes)
    return w.call("strided_slice", call.args[:1], begin=begin, end=end, strides=strides, axes=axes)


def _filled(name: str) -> Write:
    return lambda w, call: w.call(name, [], shape=extents(call.ty), dtype=str(call.ty.dtype))


def _full(w: Writer, call: Any) -> str:
    return w.call("full", call.args[1:2], shape=extents(call.ty), dtype=str(call.ty.dtype))


def _take(w: Writer, call: Any) -> str:
    return w.call("take", call.args, axis=optional(call.attrs.axis), mode=str(call.attrs.mode))


def coordinates_last(value: Any) -> bool:
    """Whether an expression moves the coordinates of indices from the first axis, Relay's, to the last, Relax's."""
    if operator(value) != "relax.permute_dims" or value.attrs.axes is None:
        return False
    rank = value.ty.ndim
    return numbers(value.attrs.axes) == [*range(1, rank), 0]


def _index_first(w: Writer, indices: Any) -> Any:
    """Indices as Relay has them."""
    rank, moved = indices.ty.ndim, w.definition(indices)
    if coordinates_last(moved):
        return moved.args[0]
    return w.call("transpose", [indices], axes=[rank - 1, *range(rank - 1)]) if rank > 1 else indices


def _gather_nd(w: Writer, call: Any) -> str:
    indices = _index_first(w, call.args[1])
    return w.call("gather_nd", [call.args[0], indices], batch_dims=int(call.attrs.batch_dims))


def _scatter_nd(w: Writer, call: Any) -> str:
    args = [call.args[0], _index_first(w, call.args[1]), call.args[2]]
    return w.call("scatter_nd", args, mode=str(call.attrs.reduction))


def _scatter_elements(w: Writer, call: Any) -> str:
    return w.call("scatter_elements", call.args, axis=int(call.attrs.axis), reduction=str(call.attrs.reduction))


def _triangle(upper: bool) -> Write:
    def write(w: Writer, call: Any) -> str:
        return w.call("trilu", [call.args[0], f"{int(prim(call.args[1]))}i64"], upper=upper)

    return write


def _topk(w: Writer, call: Any) -> str:
    attrs = call.attrs
    return w.call(
        "topk",
        call.args,
        k=int(attrs.k),
        axis=int(attrs.axis),
        ret_type=str(attrs.ret_type),
        is_ascend=not bool(attrs.largest),
        dtype=str(attrs.dtype),
    )


def _argsort(w: Writer, call: Any) -> str:
    attrs = call.attrs
    return w.call(
        "argsort", call.args, axis=int(attrs.axis), is_ascend=not bool(attrs.descending), dtype=str(attrs.dtype)
    )


def _sort(w: Writer, call: Any) -> str:
    return w.call("sort", call.args, axis=int(call.attrs.axis), is_ascend=not bool(call.attrs.descending))


_SAME_NAME = """
    abs acos acosh add asin asinh atan atan2 atanh bitwise_and bitwise_not bitwise_or bitwise_xor ceil cos
    cosh divide equal erf exp floor floor_divide floor_mod greater greater_equal isfinite isinf isnan
    left_shift less less_equal log logical_and logical_not logical_or logical_xor maximum minimum multiply
    negative not_equal ones_like power right_shift rsqrt sigmoid sign sin sinh sqrt subtract tan tanh
    trunc where zeros_like nn.relu
"""


def _adv_index(w: Writer, call: Any) -> str:
    data, indices = call.args
    return w.call("adv_index", [f"({', '.join(w.value(part) for part in [data, *indices.fields])})"])


def _searchsorted(w: Writer, call: Any) -> str:
    values, boundaries = call.args
    return w.call(
        "searchsorted",
        [boundaries, values],
        right=bool(call.attrs.right),
        dtype="int32" if call.attrs.out_int32 else "int64",
    )


ROWS: dict[str, Write] = {
    **LAYERS,
    **{name: same(name) for name in _SAME_NAME.split()},
    **{name: _reduction(name) for name in ("sum", "mean", "max", "min", "prod")},
    "argmax": _arg_reduction("argmax"),
    "argmin": _arg_reduction("argmin"),
    "argsort": _argsort,
    "astype": lambda w, call: w.call("cast", call.args, dtype=str(call.ty.dtype)),
    "bucketize": _searchsorted,
    "broadcast_to": lambda w, call: w.call("broadcast_to", call.args[:1], shape=extents(call.ty)),
    "clip": _clip,
    "concat": _joined("concatenate"),
    "cumprod": _scan("cumprod"),
    "cumsum": _scan("cumsum"),
    "einsum": lambda w, call: w.call("einsum", call.args, equation=str(call.attrs.subscripts)),
    "expand_dims": _expand_dims,
    "flatten": _reshape,
    "flip": lambda w, call: w.call("reverse", call.args, axis=int(call.attrs.axis)),
    "full": _full,
    "full_like": lambda w, call: w.call("full_like", call.args),
    "gather_elements": lambda w, call: w.call("gather", call.args, axis=int(call.attrs.axis)),
    "gather_nd": _gather_nd,
    "index_tensor": _adv_index,
    "meshgrid": lambda w, call: w.call("meshgrid", call.args, indexing=str(call.attrs.indexing)),
    "nn.batch_flatten": _reshape,
    "ones": _filled("ones"),
    "permute_dims": _permute,
    "repeat": lambda w, call: w.call(
        "repeat", call.args, repeats=int(call.attrs.repeats), axis=optional(call.attrs.axis)
    ),
    "reshape": _reshape,
    "reverse_sequence": lambda w, call: w.call(
        "reverse_sequence", call.args, seq_axis=int(call.attrs.seq_axis), batch_axis=int(call.attrs.batch_axis)
    ),
    "round": _round,
    "scatter_elements": _scatter_elements,
    "scatter_nd": _scatter_nd,
    "sort": _sort,
    "split": _split,
    "square": lambda w, call: w.call("multiply", [call.args[0], call.args[0]]),
    "squeeze": _squeeze,
    "stack": _joined("stack"),
    "std": _moment(root=True),
    "strided_slice": _strided_slice,
    "take": _take,
    "tile": lambda w, call: w.call("tile", call.args, reps=numbers(call.attrs.repeats)),
    "topk": _topk,
    "tril": _triangle(upper=False),
    "triu": _triangle(upper=True),
    "variance": _moment(root=False),
    "zeros": _filled("zeros"),
}
"""By the operator's name without "relax."."""
