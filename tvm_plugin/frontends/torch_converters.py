"""Converters for PyTorch operators that TVM's importer gets wrong, refuses, or translates into an opaque form.

Each takes a node of the exported graph and the importer, and returns the Relax value. With TVM 0.27 the importer

- reads `select` and indexing with negative indices out of bounds, and takes `x[:, i, j]` for `x[:, i][:, :, j]`;
- ignores the correction of `std` and translates `pixel_shuffle` into an operator without an implementation;
- does not know `amax`, `amin`, `prod` over an axis, adaptive max pooling, transposed convolutions of volumes, a layer
  norm without scale, stacked recurrent layers, nor what quantised models are exported with;
- hides `scaled_dot_product_attention` in one operator, which a graph search cannot look into;
- computes with the dtype of an operand, `arange(4) / 4` and `arange(4) * 0.5` in integers, and products in float32.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch.fx
from tvm import relax
from tvm.relax import op

from ..errors import UnsupportedModelError
from .torch_quantized import QUANTIZED_CONVERTERS
from .torch_recurrent import RECURRENT_CONVERTERS

__all__ = ["CONVERTERS", "Converter"]

Converter = Callable[[Any, Any], relax.Expr | tuple[relax.Expr, ...]]


def _arguments(node: Any, importer: Any, names: Sequence[str], defaults: Sequence[Any]) -> list[Any]:
    """Positional and keyword arguments of `node` in the order of `names`, nodes replaced by their values."""
    given = dict(zip(names, node.args, strict=False)) | node.kwargs
    defaulted = dict(zip(names[len(names) - len(defaults) :], defaults, strict=True))
    values = [given.get(name, defaulted.get(name)) for name in names]
    return [importer.env[value] if isinstance(value, torch.fx.Node) else value for value in values]


def _shape(value: relax.Expr) -> list[int]:
    return [int(dim) for dim in value.ty.shape]


def _full(value: relax.Expr, shape: Sequence[int], fill: float) -> relax.Expr:
    return relax.const(np.full(tuple(shape), fill, str(value.ty.dtype)))


def _layer_norm(node: Any, importer: Any) -> relax.Expr:
    names = ("input", "normalized_shape", "weight", "bias", "eps")
    x, shape, gamma, beta, epsilon = _arguments(node, importer, names, (None, None, 1e-5))
    gamma = _full(x, shape, 1.0) if gamma is None else gamma
    beta = _full(x, shape, 0.0) if beta is None else beta
    axes = list(range(-len(shape), 0))
    return importer.block_builder.emit(op.nn.layer_norm(x, gamma, beta, axes=axes, epsilon=epsilon))


def _select(node: Any, importer: Any) -> relax.Expr:
    x, axis, index = _arguments(node, importer, ("input", "dim", "index"), ())
    extent = _shape(x)[axis]
    begin = index + extent if index < 0 else index
    emit = importer.block_builder.emit
    sliced = emit(op.strided_slice(x, axes=[axis % len(_shape(x))], begin=[begin], end=[begin + 1]))
    return emit(op.squeeze(sliced, axis=[axis]))


def _index(node: Any, importer: Any) -> relax.Expr:
    """x[:, i, j]: the axes of `i` and `j` become one, of which whole slices are taken."""
    x = importer.env[node.args[0]]
    given = {axis: importer.env[index] for axis, index in enumerate(node.args[1]) if index is not None}
    if not all(str(index.ty.dtype).startswith("int") for index in given.values()):
        return importer._index_tensor(node)
    emit = importer.block_builder.emit
    shape, axes = _shape(x), list(given)
    if axes != list(range(axes[0], axes[0] + len(axes))):  # apart: what they select comes first
        rest = [axis for axis in range(len(shape)) if axis not in given]
        x = emit(op.permute_dims(x, [*axes, *rest]))
        shape, axes = [shape[axis] for axis in (*axes, *rest)], list(range(len(axes)))
    place = None
    for extent, index in zip(shape[axes[0] :], given.values(), strict=False):
        dtype = str(index.ty.dtype)
        negative = op.less(index, relax.const(0, dtype))
        index = emit(op.where(negative, op.add(index, relax.const(extent, dtype)), index))
        place = index if place is None else emit(op.add(op.multiply(place, relax.const(extent, dtype)), index))
    joined = math.prod(shape[axis] for axis in axes)
    flat = emit(op.reshape(x, [*shape[: axes[0]], joined, *shape[axes[-1] + 1 :]]))
    return emit(op.take(flat, place, axis=axes[0]))


def _std(node: Any, importer: Any) -> relax.Expr:
    return importer.block_builder.emit(op.sqrt(_var(node, importer)))


def _var(node: Any, importer: Any) -> relax.Expr:
    x, axes, correction, keep = _arguments(node, importer, ("input", "dim", "correction", "keepdim"), (None, 1, False))
    shape = _shape(x)
    reduced = list(range(len(shape))) if not axes else [axis % len(shape) for axis in axes]
    count = math.prod(shape[axis] for axis in reduced)
    correction = 1 if correction is None else correction
    emit = importer.block_builder.emit
    variance = emit(op.variance(x, axis=reduced, keepdims=keep))
    factor = count / (count - correction) if count > correction else math.inf
    return emit(op.multiply(variance, relax.const(factor, str(x.ty.dtype))))


def _product(node: Any, importer: Any) -> relax.Expr:
    x, axis, keep = _arguments(node, importer, ("input", "dim", "keepdim"), (False,))
    emit, dtype = importer.block_builder.emit, str(node.meta["val"].dtype).removeprefix("torch.")
    x = x if str(x.ty.dtype) == dtype else emit(op.astype(x, dtype))
    return emit(op.prod(x, axis=[axis], keepdims=keep))


def _pixel_shuffle(node: Any, importer: Any) -> relax.Expr:
    x, factor = _arguments(node, importer, ("input", "upscale_factor"), ())
    *batch, channels, height, width = _shape(x)
    emit = importer.block_builder.emit
    rank = len(batch)
    split = emit(op.reshape(x, (*batch, channels // factor**2, factor, factor, height, width)))
    axes = [*range(rank), rank, rank + 3, rank + 1, rank + 4, rank + 2]
    interleaved = emit(op.permute_dims(split, axes))
    return emit(op.reshape(interleaved, (*batch, channels // factor**2, height * factor, width * factor)))


def _conv_transpose3d(node: Any, importer: Any) -> relax.Expr:
    names = ("input", "weight", "bias", "stride", "padding", "output_padding", "groups", "dilation")
    x, weight, bias, strides, padding, more, groups, dilation = _arguments(node, importer, names, (None, 1, 0, 0, 1, 1))
    if set(np.atleast_1d(dilation)) != {1}:
        raise UnsupportedModelError(f"{node.name} is a transposed convolution of volumes with dilation")
    emit = importer.block_builder.emit
    result = emit(op.nn.conv3d_transpose(x, weight, strides, padding, more, groups=groups))
    return result if bias is None else emit(op.add(result, emit(op.reshape(bias, (1, -1, 1, 1, 1)))))


def _extremum(reduce: Callable[..., relax.Expr]) -> Converter:
    def convert(node: Any, importer: Any) -> relax.Expr:
        x, axes, keep = _arguments(node, importer, ("input", "dim", "keepdim"), ((), False))
        return importer.block_builder.emit(reduce(x, axis=list(axes) or None, keepdims=keep))

    return convert


def _adaptive_max_pool(node: Any, importer: Any) -> tuple[relax.Expr, ...]:
    """The largest value of each bin [floor(i H / O), ceil((i + 1) H / O)), axis by axis; bins may overlap."""
    if any(user.target is operator.getitem and user.args[1] == 1 for user in node.users):
        raise UnsupportedModelError(f"{node.name} is an adaptive max pooling whose indices are used")
    x, sizes = _arguments(node, importer, ("input", "output_size"), ())
    emit, shape = importer.block_builder.emit, _shape(x)
    first = len(shape) - len(sizes)
    if len(shape) == 4 and len(sizes) == 2 and not any(h % o for h, o in zip(shape[2:], sizes, strict=True)):
        window = [h // o for h, o in zip(shape[2:], sizes, strict=True)]
        return (emit(op.nn.max_pool2d(x, window, strides=window)),)
    for axis, size in enumerate(sizes, start=first):
        extent = shape[axis]
        bins = [(i * extent // size, -(-(i + 1) * extent // size)) for i in range(size)]
        parts = [emit(op.strided_slice(x, axes=[axis], begin=[begin], end=[end])) for begin, end in bins]
        x = emit(op.concat([emit(op.max(part, axis=[axis], keepdims=True)) for part in parts], axis=axis))
    return (x,)


def _arithmetic(function: Callable[[Any, Any], relax.Expr]) -> Converter:
    def convert(node: Any, importer: Any) -> relax.Expr:
        emit = importer.block_builder.emit
        dtype = str(node.meta["val"].dtype).removeprefix("torch.")

        def operand(value: Any) -> Any:
            value = importer.env[value] if isinstance(value, torch.fx.Node) else value
            if not isinstance(value, relax.Expr):
                return relax.const(value, dtype)
            return value if str(value.ty.dtype) == dtype else emit(op.astype(value, dtype))

        left, right = map(operand, node.args)
        if node.kwargs.get("alpha", 1) != 1:
            right = emit(op.multiply(right, relax.const(node.kwargs["alpha"], dtype)))
        return emit(function(left, right))

    return convert


def _matmul(node: Any, importer: Any) -> relax.Expr:
    left, right = (importer.env[argument] for argument in node.args[:2])
    return importer.block_builder.emit(op.matmul(left, right, out_dtype=str(left.ty.dtype)))


def _linear(node: Any, importer: Any) -> relax.Expr:
    x, weight, bias = _arguments(node, importer, ("input", "weight", "bias"), (None,))
    return importer.block_builder.emit(op.linear(x, weight, bias, str(x.ty.dtype)))


def _addmm(node: Any, importer: Any) -> relax.Expr:
    names = ("input", "mat1", "mat2", "beta", "alpha")
    x, left, right, beta, alpha = _arguments(node, importer, names, (1, 1))
    emit, dtype = importer.block_builder.emit, str(left.ty.dtype)

    def scaled(value: Any, factor: float) -> Any:
        return value if factor == 1 else emit(op.multiply(value, relax.const(factor, dtype)))

    product = emit(op.matmul(left, right, out_dtype=dtype))
    return emit(op.add(scaled(x, beta), scaled(product, alpha)))


def _attention(node: Any, importer: Any) -> relax.Expr:
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
    defaults = (None, 0.0, False, None, False)
    query, key, value, mask, dropout, causal, scale, grouped = _arguments(node, importer, names, defaults)
    if dropout or grouped:
        raise UnsupportedModelError(f"{node.name} is an attention with dropout or grouped queries")
    *batch, length, width = _shape(query)
    emit = importer.block_builder.emit
    rank = len(batch) + 2
    transposed = emit(op.permute_dims(key, [*range(rank - 2), rank - 1, rank - 2]))
    dtype, keys = str(query.ty.dtype), None
    scores = emit(op.matmul(query, transposed, out_dtype=dtype))
    scores = emit(op.multiply(scores, relax.const(width**-0.5 if scale is None else scale, dtype)))
    if causal:
        blocked = np.triu(np.full((length, _shape(key)[-2]), -math.inf, dtype), 1)
        scores = emit(op.add(scores, relax.const(blocked)))
    elif mask is not None and str(mask.ty.dtype) == "bool":
        scores = emit(op.where(mask, scores, relax.const(-math.inf, dtype)))
        keys = mask
    elif mask is not None:
        scores = emit(op.add(scores, mask))
        keys = emit(op.not_equal(mask, relax.const(-math.inf, str(mask.ty.dtype))))
    result = emit(op.matmul(emit(op.nn.softmax(scores, axis=-1)), value, out_dtype=dtype))
    if keys is None:
        return result
    # Rows without keys are 0 in PyTorch, not NaN. The result is cleared, not the softmax: `tasks.attention` looks for
    # a product that reads a softmax.
    count = emit(op.sum(emit(op.astype(keys, "int32")), axis=-1, keepdims=True))
    return emit(op.where(emit(op.greater(count, relax.const(0, "int32"))), result, relax.const(0, dtype)))


CONVERTERS: dict[str, Converter] = {
    "layer_norm.default": _layer_norm,
    "select.int": _select,
    "index.Tensor": _index,
    "std.correction": _std,
    "var.correction": _var,
    "prod.dim_int": _product,
    "pixel_shuffle.default": _pixel_shuffle,
    "adaptive_max_pool2d.default": _adaptive_max_pool,
    "adaptive_max_pool3d.default": _adaptive_max_pool,
    "conv_transpose3d.input": _conv_transpose3d,
    "amax.default": _extremum(op.max),
    "amin.default": _extremum(op.min),
    "scaled_dot_product_attention.default": _attention,
    "linear.default": _linear,
    "matmul.default": _matmul,
    "mm.default": _matmul,
    "bmm.default": _matmul,
    "addmm.default": _addmm,
    "add.Tensor": _arithmetic(op.add),
    "sub.Tensor": _arithmetic(op.subtract),
    "mul.Tensor": _arithmetic(op.multiply),
    "div.Tensor": _arithmetic(op.divide),
    "pow.Scalar": _arithmetic(op.power),
    "pow.Tensor_Tensor": _arithmetic(op.power),
    **QUANTIZED_CONVERTERS,
    **RECURRENT_CONVERTERS,
}
