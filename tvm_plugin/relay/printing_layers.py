"""How layers, images and detection are written in Relay: the inverse of their tables in `operators`."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import tvm

from ..relax_ir.tensors import extents
from .printing import Write, Writer, integers, literal, numbers, out_dtype, prim, same

__all__ = ["LAYERS"]


def _convolution(name: str, transpose: bool = False) -> Write:
    def write(w: Writer, call: Any) -> str:
        attrs = call.attrs
        layout = str(attrs.kernel_layout)
        shape = extents(call.args[1].ty)
        letter = "I" if transpose else "O"
        extra = {"output_padding": numbers(attrs.output_padding)} if transpose else {}
        channels = shape[layout.index("O")] * (int(attrs.groups) if transpose else 1)
        if letter == "O" and str(attrs.out_layout or attrs.data_layout) != str(attrs.data_layout):
            raise ValueError("an output layout other than the input's")
        return w.call(
            name,
            call.args,
            strides=numbers(attrs.strides),
            padding=numbers(attrs.padding),
            dilation=numbers(attrs.dilation),
            groups=int(attrs.groups),
            channels=channels,
            kernel_size=[extent for axis, extent in zip(layout, shape, strict=True) if axis not in "OI"],
            data_layout=str(attrs.data_layout),
            kernel_layout=layout,
            out_dtype=out_dtype(call),
            **extra,
        )

    return write


def _pool(name: str, average: bool) -> Write:
    def write(w: Writer, call: Any) -> str:
        attrs = call.attrs
        extra = {"count_include_pad": bool(attrs.count_include_pad)} if average else {}
        return w.call(
            name,
            call.args,
            pool_size=numbers(attrs.pool_size),
            strides=numbers(attrs.strides),
            dilation=numbers(attrs.dilation),
            padding=numbers(attrs.padding),
            layout=str(attrs.layout),
            ceil_mode=bool(attrs.ceil_mode),
            **extra,
        )

    return write


def _adaptive(name: str) -> Write:
    def write(w: Writer, call: Any) -> str:
        attrs = call.attrs
        size = [] if attrs.output_size is None else numbers(attrs.output_size)
        return w.call(name, call.args, output_size=size, layout=str(attrs.layout))

    return write


def _batch_norm(w: Writer, call: Any) -> str:
    if call.attrs.training:
        raise ValueError("batch_norm in training mode")
    return w.call("nn.batch_norm", call.args, axis=int(call.attrs.axis), **_norm(call))


def _norm(call: Any) -> dict[str, Any]:
    attrs = call.attrs
    return {"epsilon": float(attrs.epsilon), "center": bool(attrs.center), "scale": bool(attrs.scale)}


def _layer_norm(w: Writer, call: Any) -> str:
    axes = numbers(call.attrs.axes)
    if len(axes) != 1:
        raise ValueError("layer_norm over several axes")
    return w.call("nn.layer_norm", call.args, axis=axes[0], **_norm(call))


def _channel_axis(call: Any) -> int:
    """That of a norm over all axes but the first and the channels', as Relay has it."""
    rank, channel = call.args[0].ty.ndim, int(call.attrs.channel_axis)
    axes = {axis % rank for axis in numbers(call.attrs.axes)}
    if axes != set(range(rank)) - {0, channel % rank}:
        raise ValueError(f"over the axes {sorted(axes)} of {rank}, with the channels along axis {channel}")
    return channel


def _instance_norm(w: Writer, call: Any) -> str:
    return w.call("nn.instance_norm", call.args, axis=_channel_axis(call), **_norm(call))


def _group_norm(w: Writer, call: Any) -> str:
    return w.call(
        "nn.group_norm", call.args, num_groups=int(call.attrs.num_groups), axis=_channel_axis(call), **_norm(call)
    )


def _pad(w: Writer, call: Any) -> str:
    widths = numbers(call.attrs.pad_width)
    if str(call.attrs.pad_mode) != "constant":
        raise ValueError(f"padding mode {call.attrs.pad_mode}")
    value = tvm.runtime.tensor(np.asarray(prim(call.attrs.pad_value), str(call.args[0].ty.dtype)))
    fill = tvm.ir.GenericConst(value, tvm.relax.TensorType((), str(call.args[0].ty.dtype)))
    pairs = [list(pair) for pair in zip(widths[::2], widths[1::2], strict=True)]
    return w.call("nn.pad", [call.args[0], fill], pad_width=pairs)


def _resize(name: str) -> Write:
    def write(w: Writer, call: Any) -> str:
        attrs = call.attrs
        return w.call(
            name,
            call.args[:1],
            size=integers(call.args[1]),
            roi=[float(prim(edge)) for edge in attrs.roi],
            layout=str(attrs.layout),
            method=str(attrs.method),
            coordinate_transformation_mode=str(attrs.coordinate_transformation_mode),
            rounding_method=str(attrs.rounding_method),
            cubic_alpha=float(attrs.cubic_alpha),
            cubic_exclude=int(attrs.cubic_exclude),
            extrapolation_value=float(attrs.extrapolation_value),
            out_dtype=out_dtype(call),
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
            pooled_size=numbers(attrs.pooled_size),
            spatial_scale=float(attrs.spatial_scale),
            layout=str(attrs.layout),
            **extra,
        )

    return write


def _affine_grid(w: Writer, call: Any) -> str:
    if not call.attrs.align_corners:
        raise ValueError("align_corners=False")
    return w.call("image.affine_grid", call.args[:1], target_shape=integers(call.args[1]))


def _gelu(w: Writer, call: Any) -> str:
    """x * (0.5 + erf(x / sqrt(2)) / 2), as the importers of Relay wrote it."""
    x = call.args[0]
    scaled = w.call("multiply", [x, literal(math.sqrt(0.5), x)])
    half = w.call("multiply", [w.call("erf", [scaled]), literal(0.5, x)])
    return w.call("multiply", [x, w.call("add", [half, literal(0.5, x)])])


def _silu(w: Writer, call: Any) -> str:
    return w.call("multiply", [call.args[0], w.call("sigmoid", call.args)])


def _matmul(w: Writer, call: Any) -> str:
    """nn.matmul for weights, nn.batch_matmul for batches; more axes are reshaped to one batch axis and back."""
    left, right = call.args
    shapes = extents(left.ty), extents(right.ty)
    dtype = out_dtype(call)
    if len(shapes[1]) == 2 and len(shapes[0]) >= 2:
        return w.call("nn.matmul", call.args, units=shapes[1][1], out_dtype=dtype)
    if len(shapes[0]) == len(shapes[1]) == 3 and shapes[0][0] == shapes[1][0]:
        return w.call("nn.batch_matmul", call.args, out_dtype=dtype)
    if min(len(shapes[0]), len(shapes[1])) < 2:
        raise ValueError("matmul of a vector")
    batch = list(np.broadcast_shapes(tuple(shapes[0][:-2]), tuple(shapes[1][:-2])))
    sides = []
    for side, shape in zip(call.args, shapes, strict=True):
        if shape[:-2] != batch:
            side = w.call("broadcast_to", [side], shape=batch + shape[-2:])
        sides.append(w.call("reshape", [side], newshape=[math.prod(batch), *shape[-2:]]))
    product = w.call("nn.batch_matmul", sides, out_dtype=dtype)
    return w.call("reshape", [product], newshape=extents(call.ty))


def _get_valid_counts(w: Writer, call: Any) -> str:
    attrs = call.attrs
    threshold = literal(float(attrs.score_threshold), call.args[0])
    indices = {"id_index": int(attrs.id_index), "score_index": int(attrs.score_index)}
    return w.call("vision.get_valid_counts", [*call.args, threshold], **indices)


def _non_max_suppression(w: Writer, call: Any) -> str:
    attrs = call.attrs
    if float(attrs.soft_nms_sigma) or float(attrs.score_threshold):
        raise ValueError("soft_nms_sigma or score_threshold")
    limits = [str(int(attrs.max_output_size)), literal(float(attrs.iou_threshold), call.args[0])]
    flags = ("force_suppress", "return_indices", "invalid_to_bottom")
    places = ("top_k", "coord_start", "score_index", "id_index")
    return w.call(
        "vision.non_max_suppression",
        [*call.args, *limits],
        **{name: bool(getattr(attrs, name)) for name in flags},
        **{name: int(getattr(attrs, name)) for name in places},
    )


LAYERS: dict[str, Write] = {
    **{f"nn.conv{n}d": _convolution(f"nn.conv{n}d") for n in (1, 2, 3)},
    **{f"nn.conv{n}d_transpose": _convolution(f"nn.conv{n}d_transpose", transpose=True) for n in (1, 2, 3)},
    **{f"nn.max_pool{n}d": _pool(f"nn.max_pool{n}d", average=False) for n in (1, 2, 3)},
    **{f"nn.avg_pool{n}d": _pool(f"nn.avg_pool{n}d", average=True) for n in (1, 2, 3)},
    **{f"nn.adaptive_avg_pool{n}d": _adaptive(f"nn.adaptive_avg_pool{n}d") for n in (1, 2, 3)},
    "image.affine_grid": _affine_grid,
    "image.grid_sample": _grid_sample,
    "image.resize2d": _resize("image.resize2d"),
    "image.resize3d": _resize("image.resize3d"),
    "matmul": _matmul,
    "nn.batch_norm": _batch_norm,
    "nn.dropout": same("nn.dropout"),
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
    "vision.get_valid_counts": _get_valid_counts,
    "vision.non_max_suppression": _non_max_suppression,
    "vision.roi_align": _region("vision.roi_align", align=True),
    "vision.roi_pool": _region("vision.roi_pool", align=False),
}
"""By the operator's name without "relax."."""
