"""Layers: products, pooling, normalisation, padding."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
from tvm.relax import op

from ...repairs.bins import max_of_bins
from ..builder import Builder
from .convolution import SPATIAL
from .layouts import change_layout, plain_layout
from .operator import Convert, Operator, row

__all__ = ["NN", "pack_product", "pool", "spread", "transposed_product"]


def _in_plain_layout(convert: Convert) -> Convert:
    """Do what `convert` does without blocks of channels (NCHW16c), which pooling leaves alone, and block the result."""

    def unblocked(b: Builder, args: Sequence[Any], attrs: SimpleNamespace) -> Any:
        layout, plain = attrs.layout, plain_layout(attrs.layout)
        if layout == plain:
            return convert(b, args, attrs)
        data = change_layout(b, args[0], layout, plain)
        result = convert(b, [data], SimpleNamespace(**{**vars(attrs), "layout": plain}))
        return change_layout(b, b.emit(result), plain, layout)

    return unblocked


def pool(function: Callable[..., Any], spatial: str, average: bool) -> Convert:
    """A pooling over the axes `spatial`."""

    def convert(b: Builder, args: Sequence[Any], attrs: SimpleNamespace) -> Any:
        if sorted(attrs.layout) != sorted(f"NC{spatial}"):
            raise ValueError(f"the layout {attrs.layout}; only orders of NC{spatial} can be converted")
        extra = {"count_include_pad": attrs.count_include_pad} if average else {}
        return function(
            args[0],
            pool_size=attrs.pool_size,
            strides=attrs.strides,
            padding=attrs.padding,
            dilation=attrs.dilation,
            ceil_mode=attrs.ceil_mode,
            layout=attrs.layout,
            **extra,
        )

    return _in_plain_layout(convert)


def _global_average(b: Builder, args: Sequence[Any], attrs: SimpleNamespace) -> Any:
    return op.nn.adaptive_avg_pool2d(args[0], (1, 1), layout=attrs.layout)


def _global_max(b: Builder, args: Sequence[Any], attrs: SimpleNamespace) -> Any:
    return op.max(args[0], axis=[axis for axis, letter in enumerate(attrs.layout) if letter in "HW"], keepdims=True)


def _adaptive_average(function: Callable[..., Any], rank: int) -> Convert:
    def convert(b: Builder, args: Sequence[Any], attrs: SimpleNamespace) -> Any:
        size = [int(extent) for extent in attrs.output_size] or None
        if size is not None and len(size) == 1:
            size = size * rank
        return function(args[0], size, layout=attrs.layout)

    return _in_plain_layout(convert)


def _adaptive_max(b: Builder, args: Sequence[Any], attrs: SimpleNamespace) -> Any:
    """By one pooling where all bins are equal."""
    axes = [axis for axis, letter in enumerate(attrs.layout) if letter in "DHW"]
    extents = [b.shape(args[0])[axis] for axis in axes]
    size = [int(extent) for extent in attrs.output_size]
    size = size * len(axes) if len(size) == 1 else size or extents
    if not any(extent % wanted for extent, wanted in zip(extents, size, strict=True)):
        window = [extent // wanted for extent, wanted in zip(extents, size, strict=True)]
        function = {1: op.nn.max_pool1d, 2: op.nn.max_pool2d, 3: op.nn.max_pool3d}[len(axes)]
        return function(args[0], pool_size=window, strides=window, layout=attrs.layout)
    return max_of_bins(b.emit, args[0], axes, size)


def transposed_product(b: Builder, left: Any, right: Any, attrs: SimpleNamespace) -> Any:
    """A matrix product; `transpose_a` and `transpose_b` swap the last two axes first."""
    sides = []
    for value, swap in ((left, attrs.transpose_a), (right, attrs.transpose_b)):
        rank = b.rank(value)
        order = None if rank == 2 else [*range(rank - 2), rank - 1, rank - 2]
        sides.append(b.emit(op.permute_dims(value, order)) if swap else value)
    return op.matmul(*sides, out_dtype=attrs.out_dtype or b.dtype(left))


def _dense(b: Builder, args: Sequence[Any], attrs: SimpleNamespace) -> Any:
    """x (.., K) and weights (units, K) to x W^T."""
    if b.rank(args[1]) != 2:
        raise ValueError(f"weights of shape {tuple(b.shape(args[1]))}; (units, inputs) is expected")
    if attrs.units is not None and attrs.units != b.shape(args[1])[0]:
        raise ValueError(f"units is {attrs.units}, the weights are {tuple(b.shape(args[1]))}")
    choice = SimpleNamespace(transpose_a=False, transpose_b=True, out_dtype=attrs.out_dtype)
    return transposed_product(b, args[0], args[1], choice)


def pack_product(b: Builder, args: Sequence[Any], attrs: SimpleNamespace) -> Any:
    """As `_dense`, with weights in blocks of outputs: (units / 16, K, 16) in NC16n."""
    weight = change_layout(b, args[1], attrs.weight_layout, "NC")
    return _dense(b, [args[0], weight], attrs)


def _matmul(b: Builder, args: Sequence[Any], attrs: SimpleNamespace) -> Any:
    return transposed_product(b, args[0], args[1], attrs)


def _batch_matmul(b: Builder, args: Sequence[Any], attrs: SimpleNamespace) -> Any:
    for arg in args:
        if b.rank(arg) != 3:
            raise ValueError(f"tensors of three axes are expected, found {tuple(b.shape(arg))}")
    return transposed_product(b, args[0], args[1], attrs)


def spread(b: Builder, vector: Any, reference: Any, axis: int) -> Any:
    """A vector along one axis of `reference`, as a tensor that broadcasts against it."""
    rank, axis = b.rank(reference), b.axis(axis, reference)
    extents = b.shape(vector)
    if len(extents) == 0 or axis == rank - 1:
        return vector
    if len(extents) != 1:
        raise ValueError(f"a vector along axis {axis} is expected, found the shape {tuple(extents)}")
    shape = [1] * rank
    shape[axis] = extents[0]
    return b.emit(op.reshape(vector, shape))


def _bias_add(b: Builder, args: Sequence[Any], attrs: SimpleNamespace) -> Any:
    axis = b.axis(attrs.axis, args[0])
    if b.shape(args[1]) != [b.shape(args[0])[axis]]:
        raise ValueError(f"a bias of shape {tuple(b.shape(args[1]))} along axis {axis} of {tuple(b.shape(args[0]))}")
    return op.add(args[0], spread(b, args[1], args[0], axis))


def _batch_norm(b: Builder, args: Sequence[Any], attrs: SimpleNamespace) -> Any:
    return op.nn.batch_norm(
        *args,
        axis=b.axis(attrs.axis, args[0]),
        epsilon=attrs.epsilon,
        center=attrs.center,
        scale=attrs.scale,
        training=False,
    )


def _scaled_and_centered(b: Builder, args: Sequence[Any], attrs: SimpleNamespace) -> list[Any]:
    """Data, gamma and beta; what Relay leaves out is ones and zeros, since Relax lowers a norm with both always."""
    data, gamma, beta = args
    shape, dtype = b.shape(gamma), b.dtype(gamma)
    ones, zeros = b.constant(np.ones(shape), dtype), b.constant(np.zeros(shape), dtype)
    return [data, gamma if attrs.scale else ones, beta if attrs.center else zeros]


def _layer_norm(b: Builder, args: Sequence[Any], attrs: SimpleNamespace) -> Any:
    return op.nn.layer_norm(*_scaled_and_centered(b, args, attrs), axes=[attrs.axis], epsilon=attrs.epsilon)


def _instance_norm(b: Builder, args: Sequence[Any], attrs: SimpleNamespace) -> Any:
    axis = b.axis(attrs.axis, args[0])
    axes = [other for other in range(b.rank(args[0])) if other not in (0, axis)]
    parts = _scaled_and_centered(b, args, attrs)
    return op.nn.instance_norm(*parts, channel_axis=axis, axes=axes, epsilon=attrs.epsilon)


def _group_norm(b: Builder, args: Sequence[Any], attrs: SimpleNamespace) -> Any:
    axis = b.axis(attrs.axis, args[0])
    axes = [other for other in range(b.rank(args[0])) if other not in (0, axis)]
    parts = _scaled_and_centered(b, args, attrs)
    return op.nn.group_norm(*parts, num_groups=attrs.num_groups, channel_axis=axis, axes=axes, epsilon=attrs.epsilon)


def _l2_normalize(b: Builder, args: Sequence[Any], attrs: SimpleNamespace) -> Any:
    """x / sqrt(max(sum(x^2), eps))."""
    squares = b.emit(op.multiply(args[0], args[0]))
    total = b.emit(op.sum(squares, axis=b.axes(attrs.axis, args[0]), keepdims=True))
    return op.divide(args[0], b.emit(op.sqrt(b.emit(op.maximum(total, b.like(attrs.eps, args[0]))))))


def _lrn(b: Builder, args: Sequence[Any], attrs: SimpleNamespace) -> Any:
    """x / (bias + alpha / size * sum of squares of the `size` neighbours along the axis)^beta."""
    axis, data = b.axis(attrs.axis, args[0]), args[0]
    extent = b.shape(data)[axis]
    widths = [0] * (2 * b.rank(data))
    widths[2 * axis] = widths[2 * axis + 1] = attrs.size // 2
    padded = b.emit(op.nn.pad(b.emit(op.multiply(data, data)), widths))
    total = None
    for offset in range(attrs.size):
        part = b.emit(op.strided_slice(padded, axes=[axis], begin=[offset], end=[offset + extent]))
        total = part if total is None else b.emit(op.add(total, part))
    scaled = b.emit(op.multiply(total, b.like(attrs.alpha / attrs.size, data)))
    base = b.emit(op.add(scaled, b.like(attrs.bias, data)))
    return op.divide(data, b.emit(op.power(base, b.like(attrs.beta, data))))


def _prelu(b: Builder, args: Sequence[Any], attrs: SimpleNamespace) -> Any:
    return op.nn.prelu(args[0], args[1], axis=b.axis(attrs.axis, args[0]))


def _dropout(b: Builder, args: Sequence[Any], attrs: SimpleNamespace) -> Any:
    """At inference: the data, and a mask of ones, which nothing reads."""
    return [args[0], b.emit(op.ones_like(args[0]))]


def pad_by_index(b: Builder, data: Any, widths: Sequence[tuple[int, int]], mode: str) -> Any:
    """Padding with elements of the tensor itself, as a gather along each padded axis; modes as in `numpy.pad`."""
    for axis, (before, after) in enumerate(widths):
        if before or after:
            indices = np.pad(np.arange(b.shape(data)[axis]), (before, after), mode=mode)  # type: ignore[call-overload]
            data = b.emit(op.take(data, b.constant(indices, "int64"), axis=axis))
    return data


def pad_widths(b: Builder, data: Any, widths: Sequence[Any] | None) -> list[tuple[int, int]]:
    """(before, after) for each axis."""
    pairs = [tuple(int(width) for width in pair) for pair in widths or () if isinstance(pair, list) and len(pair) == 2]
    if len(pairs) != b.rank(data) or any(width < 0 for pair in pairs for width in pair):
        raise ValueError(f"pad_width is {widths}, expected [before, after] for each of {b.rank(data)} axes")
    return [(before, after) for before, after in pairs]


def _pad(b: Builder, args: Sequence[Any], attrs: SimpleNamespace) -> Any:
    widths = pad_widths(b, args[0], attrs.pad_width)
    if attrs.pad_mode in ("edge", "reflect"):
        return pad_by_index(b, args[0], widths, attrs.pad_mode)
    if attrs.pad_mode != "constant":
        raise ValueError(f"pad_mode is {attrs.pad_mode!r}, expected constant, edge or reflect")
    value = np.zeros(()) if len(args) == 1 else b.known(args[1])
    if value is None:
        raise ValueError("the padding value is computed when the program runs; only a constant can be converted")
    return op.nn.pad(args[0], [width for pair in widths for width in pair], pad_value=float(value.reshape(())))


def _dyn_pad(b: Builder, args: Sequence[Any], attrs: SimpleNamespace) -> Any:
    """The widths are the second argument, flat or in pairs, the value the third."""
    flat = b.integers(args[1], "pad_width")
    pairs = [list(pair) for pair in zip(flat[::2], flat[1::2], strict=True)]
    return _pad(b, [args[0], args[2]], SimpleNamespace(pad_width=pairs, pad_mode=attrs.pad_mode))


def _mirror_pad(b: Builder, args: Sequence[Any], attrs: SimpleNamespace) -> Any:
    modes = {"SYMMETRIC": "symmetric", "REFLECT": "reflect"}
    if attrs.mode not in modes:
        raise ValueError(f"mode is {attrs.mode!r}, expected SYMMETRIC or REFLECT")
    return pad_by_index(b, args[0], pad_widths(b, args[0], attrs.pad_width), modes[attrs.mode])


def _cross_entropy(logits: bool) -> Convert:
    """-sum(targets * log p) / batch."""

    def convert(b: Builder, args: Sequence[Any], attrs: SimpleNamespace) -> Any:
        predicted = args[0] if logits else b.emit(op.log(args[0]))
        total = b.emit(op.sum(b.emit(op.multiply(predicted, args[1]))))
        return op.multiply(total, b.like(-1 / b.shape(args[0])[0], args[0]))

    return convert


def _nll_loss(b: Builder, args: Sequence[Any], attrs: SimpleNamespace) -> Any:
    return op.nn.nll_loss(*args, reduction=attrs.reduction, ignore_index=attrs.ignore_index)


def _batch_flatten(b: Builder, args: Sequence[Any], attrs: SimpleNamespace) -> Any:
    shape = b.shape(args[0])
    return op.reshape(args[0], [shape[0], math.prod(shape[1:])])


_MAX_POOLS = {1: op.nn.max_pool1d, 2: op.nn.max_pool2d, 3: op.nn.max_pool3d}
_AVG_POOLS = {1: op.nn.avg_pool1d, 2: op.nn.avg_pool2d, 3: op.nn.avg_pool3d}
_ADAPTIVE_POOLS = {1: op.nn.adaptive_avg_pool1d, 2: op.nn.adaptive_avg_pool2d, 3: op.nn.adaptive_avg_pool3d}

NN: list[Operator] = [
    *(row(f"nn.max_pool{n}d", 1, f"MaxPool{n}DAttrs", pool(_MAX_POOLS[n], s, False)) for n, s in SPATIAL.items()),
    *(row(f"nn.avg_pool{n}d", 1, f"AvgPool{n}DAttrs", pool(_AVG_POOLS[n], s, True)) for n, s in SPATIAL.items()),
    *(
        row(f"nn.adaptive_avg_pool{n}d", 1, f"AdaptivePool{n}DAttrs", _adaptive_average(_ADAPTIVE_POOLS[n], n))
        for n in SPATIAL
    ),
    *(row(f"nn.adaptive_max_pool{n}d", 1, f"AdaptivePool{n}DAttrs", _adaptive_max) for n in SPATIAL),
    row("nn.global_avg_pool2d", 1, "GlobalPool2DAttrs", _in_plain_layout(_global_average)),
    row("nn.global_max_pool2d", 1, "GlobalPool2DAttrs", _in_plain_layout(_global_max)),
    row("nn.dense", 2, "DenseAttrs", _dense),
    row("nn.contrib_dense_pack", 2, "DensePackAttrs", pack_product),
    row("nn.matmul", 2, "MatmulAttrs", _matmul),
    row("nn.batch_matmul", 2, "BatchMatmulAttrs", _batch_matmul),
    row("nn.bias_add", 2, "BiasAddAttrs", _bias_add),
    row("nn.batch_norm", 5, "BatchNormAttrs", _batch_norm),
    row("nn.layer_norm", 3, "LayerNormAttrs", _layer_norm),
    row("nn.instance_norm", 3, "InstanceNormAttrs", _instance_norm),
    row("nn.group_norm", 3, "GroupNormAttrs", _group_norm),
    row("nn.l2_normalize", 1, "L2NormalizeAttrs", _l2_normalize),
    row("nn.lrn", 1, "LRNAttrs", _lrn),
    row("nn.softmax", 1, "SoftmaxAttrs", lambda b, args, attrs: op.nn.softmax(args[0], axis=attrs.axis)),
    row("nn.fast_softmax", 1, "SoftmaxAttrs", lambda b, args, attrs: op.nn.softmax(args[0], axis=attrs.axis)),
    row("nn.log_softmax", 1, "SoftmaxAttrs", lambda b, args, attrs: op.nn.log_softmax(args[0], axis=attrs.axis)),
    row("nn.leaky_relu", 1, "LeakyReluAttrs", lambda b, args, attrs: op.nn.leakyrelu(args[0], attrs.alpha)),
    row("nn.prelu", 2, "PReluAttrs", _prelu),
    row("nn.dropout", 1, "DropoutAttrs", _dropout),
    row("nn.pad", (1, 2), "PadAttrs", _pad),
    row("dyn.nn.pad", 3, "PadAttrs", _dyn_pad),
    row("nn.mirror_pad", 1, "MirrorPadAttrs", _mirror_pad),
    row("nn.batch_flatten", 1, "", _batch_flatten),
    row("nn.cross_entropy", 2, "", _cross_entropy(logits=False)),
    row("nn.cross_entropy_with_logits", 2, "", _cross_entropy(logits=True)),
    row("nn.nll_loss", 3, "NLLLossAttrs", _nll_loss),
]
