"""How each Relax operator is written in Relay: the inverse of the tables in `operators`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np
import tvm

from ..transform.functions import extents, operator

__all__ = ["ROWS", "Writer", "coordinates_last"]


class Writer(Protocol):
    """What a row may ask of the printer."""

    def value(self, expr: Any) -> str:
        """An argument: a variable, a literal, or a reference to the metadata."""

    def definition(self, expr: Any) -> Any:
        """What a variable is bound to; None for anything else."""

    def call(self, name: str, args: Sequence[Any], **attrs: Any) -> str:
        """A call of a Relay operator; arguments are expressions, or text that is written already."""


Write: TypeAlias = Callable[[Writer, Any], str]


def _numbers(value: Any) -> list[int]:
    return [int(element) for element in value]


def _optional(value: Any) -> int | None:
    return None if value is None else int(value)


def _same(name: str) -> Write:
    return lambda w, call: w.call(name, call.args)


def _convolution(name: str, transpose: bool = False) -> Write:
    def write(w: Writer, call: Any) -> str:
        attrs = call.attrs
        layout = str(attrs.kernel_layout)
        shape = extents(call.args[1].ty)
        letter = "I" if transpose else "O"
        extra = {"output_padding": _numbers(attrs.output_padding)} if transpose else {}
        channels = shape[layout.index("O")] * (int(attrs.groups) if transpose else 1)
        if letter == "O" and str(attrs.out_layout or attrs.data_layout) != str(attrs.data_layout):
            raise ValueError("an output layout other than the input's")
        return w.call(
            name,
            call.args,
            strides=_numbers(attrs.strides),
            padding=_numbers(attrs.padding),
            dilation=_numbers(attrs.dilation),
            groups=int(attrs.groups),
            channels=channels,
            kernel_size=[extent for axis, extent in zip(layout, shape, strict=True) if axis not in "OI"],
            data_layout=str(attrs.data_layout),
            kernel_layout=layout,
            out_dtype=_out_dtype(call),
            **extra,
        )

    return write


def _out_dtype(call: Any) -> str | None:
    """The result's dtype where it is not that of the first operand."""
    result = str(call.ty.dtype)
    return None if result == str(call.args[0].ty.dtype) else result


def _pool(name: str, average: bool) -> Write:
    def write(w: Writer, call: Any) -> str:
        attrs = call.attrs
        extra = {"count_include_pad": bool(attrs.count_include_pad)} if average else {}
        return w.call(
            name,
            call.args,
            pool_size=_numbers(attrs.pool_size),
            strides=_numbers(attrs.strides),
            dilation=_numbers(attrs.dilation),
            padding=_numbers(attrs.padding),
            layout=str(attrs.layout),
            ceil_mode=bool(attrs.ceil_mode),
            **extra,
        )

    return write


def _adaptive(name: str) -> Write:
    def write(w: Writer, call: Any) -> str:
        attrs = call.attrs
        size = [] if attrs.output_size is None else _numbers(attrs.output_size)
        return w.call(name, call.args, output_size=size, layout=str(attrs.layout))

    return write


def _reduction(name: str) -> Write:
    def write(w: Writer, call: Any) -> str:
        axis = None if call.attrs.axis is None else _numbers(call.attrs.axis)
        if axis == []:  # Relay takes no axes for all axes
            return w.call("copy", call.args)
        return w.call(name, call.args, axis=axis, keepdims=bool(call.attrs.keepdims))

    return write


def _moment(root: bool) -> Write:
    """variance(x, mean(x)), and its square root."""

    def write(w: Writer, call: Any) -> str:
        axis = None if call.attrs.axis is None else _numbers(call.attrs.axis)
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
            axis=_optional(call.attrs.axis),
            dtype=str(call.ty.dtype),
            exclusive=bool(call.attrs.exclusive),
        )

    return write


def _clip(w: Writer, call: Any) -> str:
    low, high = (float(_prim(bound)) for bound in call.args[1:])
    return w.call("clip", call.args[:1], a_min=low, a_max=high)


def _prim(expr: Any) -> Any:
    """The number in a PrimValue."""
    value = getattr(expr, "value", expr)
    return getattr(value, "value", value)


def _integers(expr: Any) -> list[int]:
    """The numbers in a tuple of PrimValues, or in a shape."""
    values = getattr(expr, "fields", None) or getattr(expr, "values", [])
    return [int(_prim(value)) for value in values]


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
    axis = None if call.attrs.axis is None else _numbers(call.attrs.axis)
    return w.call("squeeze", call.args, axis=axis)


def _permute(w: Writer, call: Any) -> str:
    axes = None if call.attrs.axes is None else _numbers(call.attrs.axes)
    return w.call("transpose", call.args, axes=axes)


def _joined(name: str) -> Write:
    return lambda w, call: w.call(name, call.args, axis=int(call.attrs.axis or 0))


def _split(w: Writer, call: Any) -> str:
    sections = call.attrs.indices_or_sections
    plain = int(_prim(sections)) if not isinstance(sections, Sequence) else _numbers(sections)
    return w.call("split", call.args, indices_or_sections=plain, axis=int(call.attrs.axis))


def _strided_slice(w: Writer, call: Any) -> str:
    axes, begin, end = (_integers(argument) for argument in call.args[1:4])
    strides = _integers(call.args[4]) if len(call.args) > 4 else [1] * len(axes)
    return w.call("strided_slice", call.args[:1], begin=begin, end=end, strides=strides, axes=axes)


def _filled(name: str) -> Write:
    return lambda w, call: w.call(name, [], shape=extents(call.ty), dtype=str(call.ty.dtype))


def _full(w: Writer, call: Any) -> str:
    return w.call("full", call.args[1:2], shape=extents(call.ty), dtype=str(call.ty.dtype))


def _take(w: Writer, call: Any) -> str:
    return w.call("take", call.args, axis=_optional(call.attrs.axis), mode=str(call.attrs.mode))


def coordinates_last(value: Any) -> bool:
    """Whether an expression moves the coordinates of indices from the first axis, Relay's, to the last, Relax's."""
    if operator(value) != "relax.permute_dims" or value.attrs.axes is None:
        return False
    rank = value.ty.ndim
    return _numbers(value.attrs.axes) == [*range(1, rank), 0]


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
        return w.call("trilu", [call.args[0], f"{int(_prim(call.args[1]))}i64"], upper=upper)

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


def _batch_norm(w: Writer, call: Any) -> str:
    if call.attrs.training:
        raise ValueError("batch_norm in training mode")
    return w.call("nn.batch_norm", call.args, axis=int(call.attrs.axis), **_norm(call))


def _norm(call: Any) -> dict[str, Any]:
    attrs = call.attrs
    return {"epsilon": float(attrs.epsilon), "center": bool(attrs.center), "scale": bool(attrs.scale)}


def _layer_norm(w: Writer, call: Any) -> str:
    axes = _numbers(call.attrs.axes)
    if len(axes) != 1:
        raise ValueError("layer_norm over several axes")
    return w.call("nn.layer_norm", call.args, axis=axes[0], **_norm(call))


def _instance_norm(w: Writer, call: Any) -> str:
    return w.call("nn.instance_norm", call.args, axis=int(call.attrs.channel_axis), **_norm(call))


def _group_norm(w: Writer, call: Any) -> str:
    attrs = call.attrs
    return w.call(
        "nn.group_norm", call.args, num_groups=int(attrs.num_groups), axis=int(attrs.channel_axis), **_norm(call)
    )


def _pad(w: Writer, call: Any) -> str:
    widths = _numbers(call.attrs.pad_width)
    if str(call.attrs.pad_mode) != "constant":
        raise ValueError(f"padding mode {call.attrs.pad_mode}")
    value = tvm.runtime.tensor(np.asarray(_prim(call.attrs.pad_value), str(call.args[0].ty.dtype)))
    fill = tvm.ir.GenericConst(value, tvm.relax.TensorType((), str(call.args[0].ty.dtype)))
    pairs = [list(pair) for pair in zip(widths[::2], widths[1::2], strict=True)]
    return w.call("nn.pad", [call.args[0], fill], pad_width=pairs)


def _resize(name: str) -> Write:
    def write(w: Writer, call: Any) -> str:
        attrs = call.attrs
        return w.call(
            name,
            call.args[:1],
            size=_integers(call.args[1]),
            layout=str(attrs.layout),
            method=str(attrs.method),
            coordinate_transformation_mode=str(attrs.coordinate_transformation_mode),
            rounding_method=str(attrs.rounding_method),
            cubic_alpha=float(attrs.cubic_alpha),
            cubic_exclude=int(attrs.cubic_exclude),
            extrapolation_value=float(attrs.extrapolation_value),
            out_dtype=_out_dtype(call),
        )

    return write


def _grid_sample(w: Writer, call: Any) -> str:
    attrs = call.attrs
    return w.call(
        "image.grid_sample",
        call.args,
        method=str(attrs.method),
        layout=str(attrs.layout),
        padding_mode=str(attrs.padding_mode),
        align_corners=bool(attrs.align_corners),
    )


def _region(name: str, align: bool) -> Write:
    def write(w: Writer, call: Any) -> str:
        attrs = call.attrs
        if align and attrs.aligned:
            raise ValueError("aligned=True")
        extra = {"sample_ratio": int(attrs.sample_ratio), "mode": str(attrs.mode)} if align else {}
        return w.call(
            name,
            call.args,
            pooled_size=_numbers(attrs.pooled_size),
            spatial_scale=float(attrs.spatial_scale),
            layout=str(attrs.layout),
            **extra,
        )

    return write


def _affine_grid(w: Writer, call: Any) -> str:
    if not call.attrs.align_corners:
        raise ValueError("align_corners=False")
    return w.call("image.affine_grid", call.args[:1], target_shape=_integers(call.args[1]))


def _gelu(w: Writer, call: Any) -> str:
    """x * (0.5 + erf(x / sqrt(2)) / 2), as the importers of Relay wrote it."""
    x = call.args[0]
    scaled = w.call("multiply", [x, _literal(math.sqrt(0.5), x)])
    half = w.call("multiply", [w.call("erf", [scaled]), _literal(0.5, x)])
    return w.call("multiply", [x, w.call("add", [half, _literal(0.5, x)])])


def _silu(w: Writer, call: Any) -> str:
    return w.call("multiply", [call.args[0], w.call("sigmoid", call.args)])


def _literal(value: float, like: Any) -> Any:
    dtype = str(like.ty.dtype)
    return tvm.ir.GenericConst(tvm.runtime.tensor(np.asarray(value, dtype)), tvm.relax.TensorType((), dtype))


def _matmul(w: Writer, call: Any) -> str:
    """nn.matmul for weights, nn.batch_matmul for batches; more axes are reshaped to one batch axis and back."""
    left, right = call.args
    shapes = extents(left.ty), extents(right.ty)
    out_dtype = _out_dtype(call)
    if len(shapes[1]) == 2 and len(shapes[0]) >= 2:
        return w.call("nn.matmul", call.args, units=shapes[1][1], out_dtype=out_dtype)
    if len(shapes[0]) == len(shapes[1]) == 3 and shapes[0][0] == shapes[1][0]:
        return w.call("nn.batch_matmul", call.args, out_dtype=out_dtype)
    if min(len(shapes[0]), len(shapes[1])) < 2:
        raise ValueError("matmul of a vector")
    batch = list(np.broadcast_shapes(tuple(shapes[0][:-2]), tuple(shapes[1][:-2])))
    sides = []
    for side, shape in zip(call.args, shapes, strict=True):
        if shape[:-2] != batch:
            side = w.call("broadcast_to", [side], shape=batch + shape[-2:])
        sides.append(w.call("reshape", [side], newshape=[math.prod(batch), *shape[-2:]]))
    product = w.call("nn.batch_matmul", sides, out_dtype=out_dtype)
    return w.call("reshape", [product], newshape=extents(call.ty))


_SAME_NAME = """
    abs acos acosh add asin asinh atan atan2 atanh bitwise_and bitwise_not bitwise_or bitwise_xor ceil cos
    cosh divide equal erf exp floor floor_divide floor_mod greater greater_equal isfinite isinf isnan
    left_shift less less_equal log logical_and logical_not logical_or logical_xor maximum minimum multiply
    negative not_equal ones_like power right_shift round rsqrt sigmoid sign sin sinh sqrt subtract tan tanh
    trunc where zeros_like nn.relu
"""

ROWS: dict[str, Write] = {
    **{name: _same(name) for name in _SAME_NAME.split()},
    **{name: _reduction(name) for name in ("sum", "mean", "max", "min", "prod")},
    **{f"nn.conv{n}d": _convolution(f"nn.conv{n}d") for n in (1, 2, 3)},
    **{f"nn.conv{n}d_transpose": _convolution(f"nn.conv{n}d_transpose", transpose=True) for n in (1, 2, 3)},
    **{f"nn.max_pool{n}d": _pool(f"nn.max_pool{n}d", average=False) for n in (1, 2, 3)},
    **{f"nn.avg_pool{n}d": _pool(f"nn.avg_pool{n}d", average=True) for n in (1, 2, 3)},
    **{f"nn.adaptive_avg_pool{n}d": _adaptive(f"nn.adaptive_avg_pool{n}d") for n in (1, 2, 3)},
    "argmax": _arg_reduction("argmax"),
    "argmin": _arg_reduction("argmin"),
    "argsort": _argsort,
    "astype": lambda w, call: w.call("cast", call.args, dtype=str(call.ty.dtype)),
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
    "image.affine_grid": _affine_grid,
    "image.grid_sample": _grid_sample,
    "image.resize2d": _resize("image.resize2d"),
    "image.resize3d": _resize("image.resize3d"),
    "matmul": _matmul,
    "meshgrid": lambda w, call: w.call("meshgrid", call.args, indexing=str(call.attrs.indexing)),
    "nn.batch_flatten": _reshape,
    "nn.batch_norm": _batch_norm,
    "nn.dropout": _same("nn.dropout"),
    "nn.gelu": _gelu,
    "nn.group_norm": _group_norm,
    "nn.instance_norm": _instance_norm,
    "nn.layer_norm": _layer_norm,
    "nn.leakyrelu": lambda w, call: w.call("nn.leaky_relu", call.args, alpha=float(call.attrs.alpha)),
    "nn.log_softmax": lambda w, call: w.call("nn.log_softmax", call.args, axis=int(call.attrs.axis)),
    "nn.nll_loss": lambda w, call: w.call(
        "nn.nll_loss", call.args, reduction=str(call.attrs.reduction), ignore_index=int(call.attrs.ignore_index)
    ),
    "nn.pad": _pad,
    "nn.prelu": lambda w, call: w.call("nn.prelu", call.args, axis=int(call.attrs.axis)),
    "nn.silu": _silu,
    "nn.softmax": lambda w, call: w.call("nn.softmax", call.args, axis=int(call.attrs.axis)),
    "ones": _filled("ones"),
    "permute_dims": _permute,
    "repeat": lambda w, call: w.call(
        "repeat", call.args, repeats=int(call.attrs.repeats), axis=_optional(call.attrs.axis)
    ),
    "reshape": _reshape,
    "reverse_sequence": lambda w, call: w.call(
        "reverse_sequence", call.args, seq_axis=int(call.attrs.seq_axis), batch_axis=int(call.attrs.batch_axis)
    ),
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
    "tile": lambda w, call: w.call("tile", call.args, reps=_numbers(call.attrs.repeats)),
    "topk": _topk,
    "tril": _triangle(upper=False),
    "triu": _triangle(upper=True),
    "variance": _moment(root=False),
    "vision.roi_align": _region("vision.roi_align", align=True),
    "vision.roi_pool": _region("vision.roi_pool", align=False),
    "zeros": _filled("zeros"),
}
"""By the operator's name without "relax."."""
