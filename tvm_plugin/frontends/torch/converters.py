"""Converters for PyTorch operators that TVM's importer gets wrong, refuses, or translates into an opaque form.

Each takes a node of the exported graph and the importer, and returns the Relax value. With TVM 0.27 the importer

- reads `select` and indexing with negative indices out of bounds, and takes `x[:, i, j]` for `x[:, i][:, :, j]`; loses
  the axis along which `index_select` takes one place;
- ignores the correction of `std` and the divisor of average pooling, and translates `pixel_shuffle` into an operator
  without an implementation;
- reads `clamp_max` as nothing to do, `celu` wrongly unless alpha is 1, a `grid_sample` grid as NCHW, and `nearest` to
  sizes that are no multiples at the pixels' centres; resizes with aliases where it should not; makes `zeros_like` of a
  mask another mask, whatever its dtype;
- fails where a mask fills with infinities, at integers that are limited on one side, at `1 - x` of another dtype than
  the number's, and at quotients that are rounded; finds the largest along an axis by sorting;
- does not know `min` along an axis, `amax`, `amin`, `prod` over an axis, `cdist`, `scatter_add`, windows of an axis,
  windows that overlap and are added up, `as_strided`, `cummax`, `kthvalue`, `searchsorted`, writes at some of a
  tensor's indices or where a mask holds, bags of embeddings, shifts, `fmax`, `erfc`, `hypot`, `eye`, adaptive max
  pooling, places of max pooling, sampled volumes and transposed convolutions of them, layer and group norms without
  scale, stacked recurrent layers, attention whose queries share keys, nor what quantised models are exported with; of
  bfloat16, it has no constants; all convolutions are those of a batch in float32;
- joins and stacks tensors of one rank and dtype only, and chooses from such alone where a mask holds; forgets the
  dtype of `new_ones`, of `empty_like` and of sums so far;
- reads past the end of what is written to a slice; logarithms of powers are not whole numbers; one slope of a PReLU is
  not for all channels; the options of `isin`, of norms of vectors and of cross entropy are not looked at; the mean over
  an empty list of axes is not that of all elements; NaN is before all boundaries of bins;
- takes no axis of a tensor without axes, and sorts whatever memory lies there; shifts by more bits than there are to
  anything; repeats what a circular padding cuts off; refuses slices that end before they begin;
- hides `scaled_dot_product_attention` in one operator, which a graph search cannot look into;
- computes with the dtype of an operand, `arange(4) / 4`, `arange(4) * 0.5`, `arange(4) ** 0.5` and `arange(4) < 2.5`
  in integers, and products in float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tvm import relax
from tvm.relax import op

from ...errors import UnsupportedModelError
from ...relax_ir.tensors import is_empty, shape_of
from ..attention import attention
from ..digits import scaled_product
from .digits import DIGIT_CONVERTERS
from .images import IMAGE_CONVERTERS
from .indexing import INDEXING_CONVERTERS
from .nodes import Converter, arguments, cast, dtype_of, full, operand, scalar, shape_in_torch
from .order import ORDER_CONVERTERS
from .pointwise import POINTWISE_CONVERTERS
from .quantized import QUANTIZED_CONVERTERS
from .recurrent import RECURRENT_CONVERTERS
from .shapes import SHAPE_CONVERTERS
from .sizes import is_size

__all__ = ["CONVERTERS", "Converter"]


def _affine(x: relax.Expr, shape: Sequence[int], gamma: Any, beta: Any) -> tuple[Any, Any]:
    """Scale and shift of a norm, which PyTorch may leave out: one alone may have another dtype than `x`."""
    like = next((given for given in (gamma, beta) if given is not None), x)
    return full(like, shape, 1.0) if gamma is None else gamma, full(like, shape, 0.0) if beta is None else beta


def _layer_norm(node: Any, importer: Any) -> relax.Expr:
    names = ("input", "normalized_shape", "weight", "bias", "eps")
    x, shape, gamma, beta, epsilon = arguments(node, importer, names, (None, None, 1e-5))
    gamma, beta = _affine(x, shape, gamma, beta)
    axes = list(range(-len(shape), 0))
    x = cast(x, str(gamma.ty.dtype), importer)  # of 16 bits, under autocast
    norm = op.nn.layer_norm(x, gamma, beta, axes=axes, epsilon=epsilon)
    return cast(importer.block_builder.emit(norm), dtype_of(node), importer)


def _std(node: Any, importer: Any) -> relax.Expr:
    return importer.block_builder.emit(op.sqrt(_var(node, importer)))


def _var(node: Any, importer: Any) -> relax.Expr:
    x, axes, correction, keep = arguments(node, importer, ("input", "dim", "correction", "keepdim"), (None, 1, False))
    shape = shape_of(x)
    reduced = list(range(len(shape))) if not axes else [axis % len(shape) for axis in axes]
    count = math.prod(shape[axis] for axis in reduced)
    correction = 1 if correction is None else correction
    emit, dtype = importer.block_builder.emit, str(x.ty.dtype)
    variance = emit(op.variance(x, axis=reduced, keepdims=keep))
    if correction == 0:
        return variance
    if is_size(count):
        ratio = emit(op.divide(scalar(count, dtype, importer), scalar(count - correction, dtype, importer)))
        return emit(op.multiply(variance, ratio))
    factor = count / (count - correction) if count > correction else math.inf
    return emit(op.multiply(variance, relax.const(factor, dtype)))


def _mean(node: Any, importer: Any) -> relax.Expr:
    """Along axes, or of all elements: that is what an empty list of axes means, too."""
    x, axes, keep = arguments(node, importer, ("input", "dim", "keepdim"), (None, False))
    return importer.block_builder.emit(op.mean(cast(x, dtype_of(node), importer), axes or None, keepdims=keep))


def _vector_norm(node: Any, importer: Any) -> relax.Expr:
    """In the dtype of the result, at which TVM's importer does not look; of the order 0, how many are not zero."""
    x, order, axes, keep = arguments(node, importer, ("input", "ord", "dim", "keepdim"), (2, None, False))
    emit, env, dtype = importer.block_builder.emit, importer.env, dtype_of(node)
    if order == 0:
        counted = emit(op.astype(emit(op.not_equal(x, relax.const(0, str(x.ty.dtype)))), dtype))
        return emit(op.sum(counted, axes or None, keepdims=keep))
    env[node.args[0]] = cast(x, dtype, importer)
    result = importer._norm(node)
    env[node.args[0]] = x
    return result


def _product(node: Any, importer: Any) -> relax.Expr:
    """Along an axis, or of all elements."""
    x, axis, keep = arguments(node, importer, ("input", "dim", "keepdim"), (None, False))
    axes = [axis] if isinstance(axis, int) else None
    return importer.block_builder.emit(op.prod(cast(x, dtype_of(node), importer), axis=axes, keepdims=keep))


def _softmax(function: Callable[..., relax.Expr]) -> Converter:
    """In the dtype of the result, which language models of 16 bits ask to be float32."""

    def convert(node: Any, importer: Any) -> relax.Expr:
        x, axis = arguments(node, importer, ("input", "dim"), ())
        return importer.block_builder.emit(function(cast(x, dtype_of(node), importer), axis=axis))

    return convert


_PLAIN: Mapping[int, Callable[..., relax.Expr]] = {1: op.nn.conv1d, 2: op.nn.conv2d, 3: op.nn.conv3d}
_TRANSPOSED: Mapping[int, Callable[..., relax.Expr]] = {
    1: op.nn.conv1d_transpose,
    2: op.nn.conv2d_transpose,
    3: op.nn.conv3d_transpose,
}
"""Convolutions, by the number of axes of an image."""


def _convolved(
    importer: Any, convolve: Callable[..., relax.Expr], rank: int, x: Any, weight: Any, bias: Any, options: Any
) -> relax.Expr:
    """In the dtype of the images, with a batch of one where there is none.

    TVM's importer sums in float32 and leaves it at that, where the bias of another dtype cannot be added.
    """
    emit = importer.block_builder.emit
    images = x if len(shape_of(x)) == rank + 2 else emit(op.expand_dims(x, 0))
    result = emit(convolve(images, weight, *options, out_dtype=str(x.ty.dtype)))
    if bias is not None:
        result = emit(op.add(result, emit(op.reshape(bias, (1, -1, *[1] * rank)))))
    return result if images is x else emit(op.squeeze(result, [0]))


def _convolution(rank: int) -> Converter:
    def convert(node: Any, importer: Any) -> relax.Expr:
        names = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
        x, weight, bias, *options = arguments(node, importer, names, (None, 1, 0, 1, 1))
        return _convolved(importer, _PLAIN[rank], rank, x, weight, bias, options)

    return convert


def _transposed_convolution(rank: int) -> Converter:
    def convert(node: Any, importer: Any) -> relax.Expr:
        names = ("input", "weight", "bias", "stride", "padding", "output_padding", "groups", "dilation")
        x, weight, bias, *options, groups, dilation = arguments(node, importer, names, (None, 1, 0, 0, 1, 1))
        return _convolved(importer, _TRANSPOSED[rank], rank, x, weight, bias, [*options, dilation, groups])

    return convert


def _any_convolution(node: Any, importer: Any) -> relax.Expr:
    """What convolutions with padding "same" are made of, and all of core ATen."""
    names = ("input", "weight", "bias", "stride", "padding", "dilation", "transposed", "output_padding", "groups")
    x, weight, bias, strides, padding, dilation, transposed, more, groups = arguments(node, importer, names, ())
    rank = len(shape_of(x)) - 2
    if not transposed:
        options = [strides, padding, dilation, groups]
        return _convolved(importer, _PLAIN[rank], rank, x, weight, bias, options)
    options = [strides, padding, more, dilation, groups]
    return _convolved(importer, _TRANSPOSED[rank], rank, x, weight, bias, options)


def _extremum(reduce: Callable[..., relax.Expr]) -> Converter:
    def convert(node: Any, importer: Any) -> relax.Expr:
        x, axes, keep = arguments(node, importer, ("input", "dim", "keepdim"), ((), False))
        return importer.block_builder.emit(reduce(x, axis=list(axes) or None, keepdims=keep))

    return convert


def _any(node: Any, importer: Any) -> relax.Expr:
    """Whether some element is not zero; NaN is not."""
    x, axes, keep = arguments(node, importer, ("input", "dim", "keepdim"), (None, False))
    emit, dtype = importer.block_builder.emit, dtype_of(node)
    held = cast(x, "bool", importer)
    if not shape_of(x):
        return cast(held, dtype, importer)
    if is_empty(x):
        return emit(op.zeros(shape_in_torch(node, importer), dtype))
    found = emit(op.max(emit(op.astype(held, "int8")), axis=axes, keepdims=keep))
    return emit(op.astype(found, dtype))


def _extremum_and_place(reduce: Callable[..., relax.Expr], place: Callable[..., relax.Expr]) -> Converter:
    def convert(node: Any, importer: Any) -> tuple[relax.Expr, ...]:
        x, axis, keep = arguments(node, importer, ("input", "dim", "keepdim"), (False,))
        emit = importer.block_builder.emit
        return emit(reduce(x, axis=[axis], keepdims=keep)), _placed(emit, place, x, axis, keep)

    return convert


def _place(place: Callable[..., relax.Expr]) -> Converter:
    def convert(node: Any, importer: Any) -> relax.Expr:
        x, axis, keep = arguments(node, importer, ("input", "dim", "keepdim"), (None, False))
        return _placed(importer.block_builder.emit, place, x, axis, keep)

    return convert


def _placed(emit: Any, place: Callable[..., relax.Expr], x: Any, axis: int | None, keep: bool) -> relax.Expr:
    """Where the first extremum is."""
    is_mask = str(x.ty.dtype) == "bool"
    return emit(place(emit(op.astype(x, "int8")) if is_mask else x, axis=axis, keepdims=keep))


def _var_mean(node: Any, importer: Any) -> tuple[relax.Expr, ...]:
    x, axes, keep = arguments(node, importer, ("input", "dim", "keepdim"), (None, False))
    return _var(node, importer), importer.block_builder.emit(op.mean(x, axis=axes or None, keepdims=keep))


def _group_norm(node: Any, importer: Any) -> relax.Expr:
    names = ("input", "num_groups", "weight", "bias", "eps")
    return _normalized_groups(importer, *arguments(node, importer, names, (None, None, 1e-5)))


def _native_group_norm(node: Any, importer: Any) -> tuple[relax.Expr, ...]:
    """As core ATen has it. The other results, which are for training, are not computed."""
    names = ("input", "weight", "bias", "N", "C", "HxW", "group", "eps")
    x, gamma, beta, _, _, _, groups, epsilon = arguments(node, importer, names, ())
    return (_normalized_groups(importer, x, groups, gamma, beta, epsilon),)


def _normalized_groups(importer: Any, x: Any, groups: int, gamma: Any, beta: Any, epsilon: float) -> relax.Expr:
    """TVM wants an axis of pixels, and has no kernel without any."""
    if is_empty(x):
        return x
    emit = importer.block_builder.emit
    gamma, beta = _affine(x, shape_of(x)[1:2], gamma, beta)
    images = x if len(shape_of(x)) > 2 else emit(op.expand_dims(x, -1))
    axes = list(range(2, len(shape_of(images))))
    norm = emit(op.nn.group_norm(images, gamma, beta, groups, 1, axes, epsilon))
    return norm if images is x else emit(op.squeeze(norm, [-1]))


def _instance_norm(node: Any, importer: Any) -> relax.Expr:
    """By the statistics of each image, or by the running ones that a model has kept."""
    names = ("input", "weight", "bias", "running_mean", "running_var", "use_input_stats", "momentum", "eps")
    defaults = (None, None, None, None, True, 0.1, 1e-5)
    x, gamma, beta, mean, variance, own_statistics, _, epsilon = arguments(node, importer, names, defaults)
    gamma, beta = _affine(x, shape_of(x)[1:2], gamma, beta)
    if own_statistics:
        x = cast(x, str(gamma.ty.dtype), importer)  # of 16 bits, under autocast
        norm = op.nn.instance_norm(x, gamma, beta, 1, list(range(2, len(shape_of(x)))), epsilon)
        return cast(importer.block_builder.emit(norm), dtype_of(node), importer)
    return _by_statistics(x, gamma, beta, mean, variance, epsilon, importer)


def _batch_norm(node: Any, importer: Any) -> relax.Expr:
    names = ("input", "weight", "bias", "running_mean", "running_var", "momentum", "eps")
    x, gamma, beta, mean, variance, _, epsilon = arguments(node, importer, names, ())
    gamma, beta = _affine(x, shape_of(x)[1:2], gamma, beta)
    return _by_statistics(x, gamma, beta, mean, variance, epsilon, importer)


def _batch_norm_of_training(node: Any, importer: Any) -> tuple[relax.Expr, ...]:
    """By the statistics of the batch: the result, these statistics, and the running ones with a share of them."""
    names = ("input", "weight", "bias", "running_mean", "running_var", "training", "momentum", "eps")
    x, gamma, beta, mean, variance, training, momentum, epsilon = arguments(node, importer, names, ())
    shape, dtype, emit = shape_of(x), str(mean.ty.dtype), importer.block_builder.emit
    axes = [axis for axis in range(len(shape)) if axis != 1]
    count = math.prod(shape[axis] for axis in axes)
    if not training or is_size(count):
        raise UnsupportedModelError(f"{node.name} keeps statistics of batches whose size is open, or of none")
    gamma, beta = _affine(mean, shape[1:2], gamma, beta)
    of_batch = cast(x, dtype, importer)
    own_mean, own_variance = emit(op.mean(of_batch, axes)), emit(op.variance(of_batch, axes))
    unbiased = emit(op.multiply(own_variance, relax.const(count / (count - 1) if count > 1 else math.inf, dtype)))

    def mixed(running: relax.Expr, own: relax.Expr) -> relax.Expr:
        kept = emit(op.multiply(running, relax.const(1 - momentum, dtype)))
        return emit(op.add(kept, emit(op.multiply(own, relax.const(momentum, dtype)))))

    result = _by_statistics(x, gamma, beta, own_mean, own_variance, epsilon, importer)
    deviation = emit(op.rsqrt(emit(op.add(own_variance, relax.const(epsilon, dtype)))))
    return result, own_mean, deviation, mixed(mean, own_mean), mixed(variance, unbiased)


def _by_statistics(
    x: Any, gamma: Any, beta: Any, mean: Any, variance: Any, epsilon: float, importer: Any
) -> relax.Expr:
    """Normalised by what a model has kept, in the dtype of that: under autocast, images have 16 bits."""
    dtype, emit = str(x.ty.dtype), importer.block_builder.emit
    x, gamma, beta = (cast(part, str(mean.ty.dtype), importer) for part in (x, gamma, beta))
    result = emit(emit(op.nn.batch_norm(x, gamma, beta, mean, variance, 1, epsilon, training=False))[0])
    return cast(result, dtype, importer)


def _masked_fill(node: Any, importer: Any) -> relax.Expr:
    x, mask, value = arguments(node, importer, ("input", "mask", "value"), ())
    return importer.block_builder.emit(op.where(mask, operand(value, str(x.ty.dtype), importer), x))


def _distances(node: Any, importer: Any) -> relax.Expr:
    """Of each row of one matrix to each row of another: by a root of a sum of powers, the largest, or their count."""
    left, right, p = arguments(node, importer, ("x1", "x2", "p"), ())
    emit, dtype = importer.block_builder.emit, str(left.ty.dtype)
    apart = emit(op.subtract(emit(op.expand_dims(left, -2)), emit(op.expand_dims(right, -3))))
    if p == 2:
        return emit(op.sqrt(emit(op.sum(emit(op.square(apart)), axis=-1))))
    if p == 0:
        return emit(op.sum(emit(op.astype(emit(op.not_equal(apart, relax.const(0, dtype))), dtype)), axis=-1))
    size = emit(op.abs(apart))
    if p == math.inf:
        return emit(op.max(size, axis=-1))
    if p == 1:
        return emit(op.sum(size, axis=-1))
    total = emit(op.sum(emit(op.power(size, relax.const(p, dtype))), axis=-1))
    return emit(op.power(total, relax.const(1 / p, dtype)))


def _trilinear(node: Any, importer: Any) -> relax.Expr:
    """The product of three tensors, each with some axes of one more, summed along some: `nn.Bilinear`."""
    names = ("i1", "i2", "i3", "expand1", "expand2", "expand3", "sumdim")
    *tensors, one, two, three, summed = arguments(node, importer, names, ())
    emit = importer.block_builder.emit
    first, second, third = (
        emit(op.expand_dims(tensor, list(axes))) if axes else tensor
        for tensor, axes in zip(tensors, (one, two, three), strict=True)
    )
    return emit(op.sum(emit(op.multiply(emit(op.multiply(first, second)), third)), axis=list(summed)))


def _concat(node: Any, importer: Any) -> relax.Expr:
    """Tensors without elements, which PyTorch accepts in any rank, are left out; all get the dtype of the result."""
    tensors, axis = arguments(node, importer, ("tensors", "dim"), (0,))
    emit, dtype = importer.block_builder.emit, dtype_of(node)
    tensors = [importer.env[tensor] for tensor in tensors]
    parts = [x for x in tensors if not is_empty(x)]
    parts = parts or [x for x in tensors if len(shape_of(x)) == node.meta["val"].ndim]
    parts = [cast(x, dtype, importer) for x in parts]
    return parts[0] if len(parts) == 1 else emit(op.concat(parts, axis))


def _stack(node: Any, importer: Any) -> relax.Expr:
    """Along a new axis; all get the dtype of the result."""
    tensors, axis = arguments(node, importer, ("tensors", "dim"), (0,))
    parts = [cast(importer.env[tensor], dtype_of(node), importer) for tensor in tensors]
    return importer.block_builder.emit(op.stack(parts, axis))


def _matmul(node: Any, importer: Any) -> relax.Expr:
    left, right = (importer.env[argument] for argument in node.args[:2])
    return importer.block_builder.emit(op.matmul(left, right, out_dtype=str(left.ty.dtype)))


def _linear(node: Any, importer: Any) -> relax.Expr:
    x, weight, bias = arguments(node, importer, ("input", "weight", "bias"), (None,))
    return importer.block_builder.emit(op.linear(x, weight, bias, str(x.ty.dtype)))


def _sum_with_product(node: Any, importer: Any) -> relax.Expr:
    """Of a tensor and a product of matrices, with a factor each: of 16 bits, these are added before they are rounded.

    What the factor 0 is of does not count, even where it is infinite.
    """
    beta, alpha = (node.kwargs.get(name, 1) for name in ("beta", "alpha"))
    x, left, right = (importer.env[argument] for argument in node.args)
    emit, dtype = importer.block_builder.emit, str(left.ty.dtype)
    if (beta, alpha) == (1, 1):
        return emit(op.add(x, emit(op.matmul(left, right, out_dtype=dtype))))
    result = scaled_product(emit, left, right, dtype, alpha)
    if beta != 0:
        wide = str(result.ty.dtype)
        scaled = emit(op.multiply(cast(x, wide, importer), relax.const(beta, wide)))
        result = emit(op.add(scaled, result))
    return cast(result, dtype, importer)


def _attention(node: Any, importer: Any) -> relax.Expr:
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
    defaults = (None, 0.0, False, None, False)
    query, key, value, mask, dropout, causal, scale, _ = arguments(node, importer, names, defaults)
    if dropout:
        raise UnsupportedModelError(f"{node.name} is an attention with dropout")
    emit = importer.block_builder.emit
    return attention(emit, query, key, value, mask, causal, scale, zero_without_keys=True)


CONVERTERS: dict[str, Converter] = {
    "layer_norm.default": _layer_norm,
    "native_layer_norm.default": lambda node, importer: (_layer_norm(node, importer),),
    "std.correction": _std,
    "var.correction": _var,
    "mean.default": _mean,
    "mean.dim": _mean,
    "linalg_vector_norm.default": _vector_norm,
    "prod.default": _product,
    "prod.dim_int": _product,
    "softmax.int": _softmax(op.nn.softmax),
    "log_softmax.int": _softmax(op.nn.log_softmax),
    "_softmax.default": _softmax(op.nn.softmax),
    "_log_softmax.default": _softmax(op.nn.log_softmax),
    **{f"conv{rank}d.default": _convolution(rank) for rank in (1, 2, 3)},
    "conv_transpose1d.default": _transposed_convolution(1),
    "conv_transpose2d.input": _transposed_convolution(2),
    "conv_transpose3d.input": _transposed_convolution(3),
    "convolution.default": _any_convolution,
    "argmax.default": _place(op.argmax),
    "argmin.default": _place(op.argmin),
    "max.dim": _extremum_and_place(op.max, op.argmax),
    "min.dim": _extremum_and_place(op.min, op.argmin),
    "var_mean.correction": _var_mean,
    "group_norm.default": _group_norm,
    "native_group_norm.default": _native_group_norm,
    "instance_norm.default": _instance_norm,
    "_native_batch_norm_legit_no_training.default": _batch_norm,
    "_native_batch_norm_legit_functional.default": _batch_norm_of_training,
    "masked_fill.Scalar": _masked_fill,
    "masked_fill.Tensor": _masked_fill,
    "_cdist_forward.default": _distances,
    "any.default": _any,
    "any.dim": _any,
    "any.dims": _any,
    "amax.default": _extremum(op.max),
    "amin.default": _extremum(op.min),
    "scaled_dot_product_attention.default": _attention,
    "_trilinear.default": _trilinear,
    "cat.default": _concat,
    "stack.default": _stack,
    "linear.default": _linear,
    "matmul.default": _matmul,
    "mm.default": _matmul,
    "bmm.default": _matmul,
    "addmm.default": _sum_with_product,
    "baddbmm.default": _sum_with_product,
    **DIGIT_CONVERTERS,
    **IMAGE_CONVERTERS,
    **INDEXING_CONVERTERS,
    **ORDER_CONVERTERS,
    **POINTWISE_CONVERTERS,
    **QUANTIZED_CONVERTERS,
    **RECURRENT_CONVERTERS,
    **SHAPE_CONVERTERS,
}
