"""Operators of ONNX Runtime's own domain, com.microsoft, that its optimisers write in place of several standard ones.

What `SessionOptions.optimized_model_filepath` saves, and what `onnxruntime.transformers` and its quantisers make, is
full of them: convolutions and products with activations, skip connections with norms, attention. Here each becomes what
it stands for. Their definitions: docs/ContribOperators.md of ONNX Runtime.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from tvm import ir, relax
from tvm.relax import op

from ...dtypes import numpy_dtype
from ...errors import UnsupportedModelError
from ...relax_ir.constants import constant_of
from ...relax_ir.tensors import as_dtype, extents
from ..attention import attention, join_heads, split_heads
from ..digits import scaled_product
from .nodes import Convert, padded, text_of
from .operators import OPERATORS
from .quantized import QUANTIZED

__all__ = ["ONNX_RUNTIME", "ONNX_RUNTIME_DOMAIN"]

ONNX_RUNTIME_DOMAIN = "com.microsoft"

BLOCKED = -10000.0
"""What a mask adds to a score that does not count, unless the node says otherwise."""

_ACTIVATION_NUMBERS = {
    "Relu": (),
    "Sigmoid": (),
    "Tanh": (),
    "LeakyRelu": ("alpha",),
    "HardSigmoid": ("alpha", "beta"),
    "Clip": ("min", "max"),
}


def _fused_convolution(bb: Any, inputs: Sequence[Any], attrs: dict[str, Any], convert: Convert) -> Any:
    x, weight, bias, addend = padded(inputs, 4)
    result = bb.emit(convert("Conv", [x, weight, bias], _without(attrs, "activation", "activation_params")))
    if addend is not None:
        result = bb.emit(op.add(result, addend))
    return _activated(bb, result, attrs, attrs.get("activation_params", ()))


def _fused_gemm(bb: Any, inputs: Sequence[Any], attrs: dict[str, Any], convert: Convert) -> Any:
    names = [f"activation_{name}" for name in ("alpha", "beta", "gamma")]
    plain, inputs = _without(attrs, "activation", *names), padded(inputs, 3)
    result = OPERATORS["Gemm"](bb, inputs, plain, convert)
    result = bb.emit(convert("Gemm", inputs, plain) if result is None else result)
    return _activated(bb, result, attrs, [attrs[name] for name in names if name in attrs])


def _activated(bb: Any, x: Any, attrs: dict[str, Any], numbers: Sequence[Any]) -> Any:
    name = text_of(attrs.get("activation", ""))
    if not name:
        return x
    if name not in _ACTIVATION_NUMBERS:
        raise UnsupportedModelError(f"the activation {name} in a fused operator cannot be imported")
    given = dict(zip(_ACTIVATION_NUMBERS[name], map(float, numbers), strict=False))
    if name == "Relu":
        return op.nn.relu(x)
    if name == "Sigmoid":
        return op.sigmoid(x)
    if name == "Tanh":
        return op.tanh(x)
    if name == "LeakyRelu":
        return op.nn.leakyrelu(x, given.get("alpha", 0.01))
    if name == "Clip":
        return op.clip(x, given.get("min", -math.inf), given.get("max", math.inf))
    scaled = bb.emit(op.multiply(x, _number(given.get("alpha", 0.2), x)))
    return op.clip(bb.emit(op.add(scaled, _number(given.get("beta", 0.5), x))), 0.0, 1.0)


def _fused_matmul(bb: Any, inputs: Sequence[Any], attrs: dict[str, Any], _: Convert) -> Any:
    left, right = (
        _transposed(bb, x, bool(attrs.get(f"trans{name}")), bool(attrs.get(f"transBatch{name}")))
        for name, x in zip("AB", inputs, strict=True)
    )
    alpha, dtype = float(attrs.get("alpha", 1.0)), str(inputs[0].ty.dtype)
    if alpha == 1.0:
        return op.matmul(left, right)
    return as_dtype(bb.emit, scaled_product(bb.emit, left, right, dtype, alpha), dtype)


def _transposed(bb: Any, x: Any, is_transposed: bool, batch_is_inside: bool) -> Any:
    """[batch..., rows, columns] of what may have its last two axes exchanged, and its first before the last."""
    rank = len(extents(x.ty))
    if rank < 2:
        return x
    axes = list(range(rank))
    if batch_is_inside:
        axes = [*axes[1:-1], 0, axes[-1]]
    if is_transposed:
        axes[-2:] = reversed(axes[-2:])
    return x if axes == list(range(rank)) else bb.emit(op.permute_dims(x, axes))


def _quick_gelu(bb: Any, inputs: Sequence[Any], attrs: dict[str, Any], _: Convert) -> Any:
    (x,) = inputs
    scaled = bb.emit(op.multiply(x, _number(float(attrs.get("alpha", 1.702)), x)))
    return op.multiply(x, bb.emit(op.sigmoid(scaled)))


def _skip_layer_norm(bb: Any, inputs: Sequence[Any], attrs: dict[str, Any], _: Convert) -> Any:
    x, skip, gamma, beta, bias = padded(inputs, 5)
    total = _sum(bb, x, skip, bias)
    beta = constant_of(np.zeros(extents(gamma.ty), numpy_dtype(str(x.ty.dtype)))) if beta is None else beta
    epsilon = float(attrs.get("epsilon", 1e-12))
    result = bb.emit(op.nn.layer_norm(total, gamma, beta, axes=[-1], epsilon=epsilon))
    mean = bb.emit(op.mean(total, axis=[-1], keepdims=True))
    variance = bb.emit(op.variance(total, axis=[-1], keepdims=True))
    return relax.Tuple([result, mean, _inverse_root(bb, variance, epsilon), total])


def _skip_rms_norm(bb: Any, inputs: Sequence[Any], attrs: dict[str, Any], convert: Convert) -> Any:
    x, skip, gamma, bias = padded(inputs, 4)
    total = _sum(bb, x, skip, bias)
    result, inverse = _rms_norm(bb, total, gamma, float(attrs.get("epsilon", 1e-12)), -1)
    return relax.Tuple([result, bb.emit(op.mean(total, axis=[-1], keepdims=True)), inverse, total])


def _simplified_layer_norm(bb: Any, inputs: Sequence[Any], attrs: dict[str, Any], _: Convert) -> Any:
    x, gamma = inputs
    return relax.Tuple(_rms_norm(bb, x, gamma, float(attrs.get("epsilon", 1e-5)), int(attrs.get("axis", -1))))


def _rms_norm(bb: Any, x: Any, gamma: Any, epsilon: float, axis: int) -> list[Any]:
    axes = list(range(axis % len(extents(x.ty)), len(extents(x.ty))))
    squares = bb.emit(op.mean(bb.emit(op.multiply(x, x)), axis=axes, keepdims=True))
    return [bb.emit(op.nn.rms_norm(x, gamma, axes=axes, epsilon=epsilon)), _inverse_root(bb, squares, epsilon)]


def _inverse_root(bb: Any, x: Any, epsilon: float) -> Any:
    return bb.emit(op.rsqrt(bb.emit(op.add(x, _number(epsilon, x)))))


def _rotary_embedding(bb: Any, inputs: Sequence[Any], attrs: dict[str, Any], _: Convert) -> Any:
    """Without positions, each place of each batch has its own row of the tables."""
    x, positions, cosines, sines = inputs
    shape, half = extents(x.ty), extents(cosines.ty)[-1]
    is_flat = len(shape) == 3
    heads, rotated = int(attrs.get("num_heads", 0)), int(attrs.get("rotary_embedding_dim", 0)) or 2 * half
    if is_flat:  # [batch, places, heads * width]
        batch, places, width = shape
        heads = heads or width // rotated
        x = bb.emit(op.reshape(x, [batch, places, heads, width // heads]))
    else:
        x = bb.emit(op.permute_dims(x, [0, 2, 1, 3]))
    batch, places, _heads, width = extents(x.ty)
    if positions is not None and extents(positions.ty) == [1]:  # where the first word is
        steps = constant_of(np.arange(places, dtype=np.int64).reshape(1, places))
        positions = bb.emit(op.add(bb.emit(op.astype(positions, "int64")), steps))
    tables = [cosines, sines]
    if positions is not None:
        tables = [bb.emit(op.take(table, positions, axis=0)) for table in tables]
    cosines, sines = (bb.emit(op.reshape(table, [-1, places, 1, half])) for table in tables)
    if attrs.get("interleaved"):
        pairs = bb.emit(op.reshape(_cut(bb, x, 0, rotated), [batch, places, _heads, half, 2]))
        first, second = (bb.emit(op.squeeze(_cut(bb, pairs, i, i + 1), [-1])) for i in range(2))
    else:
        first, second = _cut(bb, x, 0, half), _cut(bb, x, half, rotated)
    real = bb.emit(op.subtract(_times(bb, first, cosines), _times(bb, second, sines)))
    other = bb.emit(op.add(_times(bb, first, sines), _times(bb, second, cosines)))
    if attrs.get("interleaved"):
        result = bb.emit(op.reshape(bb.emit(op.stack([real, other], -1)), [batch, places, _heads, rotated]))
    else:
        result = bb.emit(op.concat([real, other], -1))
    if rotated < width:
        result = bb.emit(op.concat([result, _cut(bb, x, rotated, width)], -1))
    return op.reshape(result, shape) if is_flat else op.permute_dims(result, [0, 2, 1, 3])


def _cut(bb: Any, x: Any, begin: int, end: int) -> Any:
    """Part of the last axis."""
    return bb.emit(op.strided_slice(x, [len(extents(x.ty)) - 1], [begin], [end]))


def _times(bb: Any, a: Any, b: Any) -> Any:
    return bb.emit(op.multiply(a, b))


def _attention(bb: Any, inputs: Sequence[Any], attrs: dict[str, Any], _: Convert) -> Any:
    """Query, key and value are one product with `weight`."""
    x, weight, bias, mask, past, added, *_rest = padded(inputs, 6)
    for refused in ("do_rotary", "past_present_share_buffer"):  # of whose cache an input tells how much counts
        if attrs.get(refused):
            raise UnsupportedModelError(f"Attention of com.microsoft with {refused} cannot be imported")
    width = extents(weight.ty)[1]
    sizes = [int(n) for n in attrs.get("qkv_hidden_sizes", ())] or [width // 3] * 3
    product = bb.emit(op.matmul(x, weight))
    product = product if bias is None else bb.emit(op.add(product, bias))
    ends = np.cumsum(sizes).tolist()
    parts = (_cut(bb, product, end - size, end) for end, size in zip(ends, sizes, strict=True))
    query, key, value = (split_heads(bb.emit, part, int(attrs["num_heads"])) for part in parts)
    if past is not None:
        old = (bb.emit(op.squeeze(bb.emit(op.strided_slice(past, [0], [i], [i + 1])), [0])) for i in range(2))
        key, value = (bb.emit(op.concat(pair, 2)) for pair in zip(old, (key, value), strict=True))
    kept = 0 if past is None else extents(past.ty)[3]
    result = _attended(bb, query, key, value, mask, added, kept, attrs)
    if extents(key.ty) != extents(value.ty):  # no tensor holds both
        return relax.Tuple([result])
    return relax.Tuple([result, bb.emit(op.stack([key, value], 0))])


def _multi_head_attention(bb: Any, inputs: Sequence[Any], attrs: dict[str, Any], _: Convert) -> Any:
    """Query, key and value are given."""
    query, key, value, bias, mask, added, past_key, past_value, *more = padded(inputs, 8)
    if any(tensor is not None for tensor in more):  # its length, say, of one that the results share
        raise UnsupportedModelError("MultiHeadAttention whose cache is written in place cannot be imported")
    heads = int(attrs["num_heads"])
    if key is None or value is None:
        raise UnsupportedModelError("MultiHeadAttention of packed operands cannot be imported, nor run on a CPU")
    parts = [query, key, value]
    if bias is not None:
        widths = [math.prod(extents(part.ty)) // math.prod(extents(part.ty)[:2]) for part in parts]
        ends = np.cumsum(widths).tolist()
        for i, (end, width) in enumerate(zip(ends, widths, strict=True)):
            if len(extents(parts[i].ty)) == 3:
                parts[i] = bb.emit(op.add(parts[i], _cut(bb, bias, end - width, end)))
    query, key, value = (part if len(extents(part.ty)) == 4 else split_heads(bb.emit, part, heads) for part in parts)
    if past_key is not None:
        key, value = (bb.emit(op.concat(pair, 2)) for pair in ((past_key, key), (past_value, value)))
    kept = 0 if past_key is None else extents(past_key.ty)[2]
    return relax.Tuple([_attended(bb, query, key, value, mask, added, kept, attrs), key, value])


def _attended(
    bb: Any, query: Any, key: Any, value: Any, mask: Any, added: Any, kept: int, attrs: dict[str, Any]
) -> Any:
    """With so many places `kept` before the first query's own, of a cache."""
    batch, _, length, _ = extents(query.ty)
    places, dtype = extents(key.ty)[2], str(query.ty.dtype)
    blocked = float(attrs.get("mask_filter_value", BLOCKED))
    masked = None if mask is None else _mask_addend(bb, mask, batch, length, places, blocked, dtype)
    if attrs.get("unidirectional"):
        if places > kept + length:  # ONNX Runtime's last query sees them, and those before it do not
            raise UnsupportedModelError(
                f"an attention with unidirectional=1 of {length} queries and {places} keys, {kept} of a cache, cannot "
                "be imported: there are keys after the last query"
            )
        masked = _without_later_places(bb, masked, length, places, kept, dtype)
    addends = [addend for addend in (added, masked) if addend is not None]
    total = _sum(bb, *addends) if addends else None
    result = attention(bb.emit, query, key, value, total, scale=float(attrs.get("scale", 0.0)) or None)
    return join_heads(bb.emit, result)


def _without_later_places(bb: Any, masked: Any, length: int, places: int, kept: int, dtype: str) -> Any:
    """The addend `masked`, if any, where later places are never seen: a row that a mask leaves no place sees the others
    that it blocks, not these."""
    later = np.triu(np.ones((length, places), bool), kept + 1)
    low = np.finfo(numpy_dtype(dtype)).min
    if masked is None:
        return constant_of(np.where(later, low, 0).astype(numpy_dtype(dtype)))
    return bb.emit(op.where(constant_of(later), relax.const(float(low), dtype), masked))


def _mask_addend(bb: Any, mask: Any, batch: int, length: int, places: int, blocked: float, dtype: str) -> Any:
    """What a mask of 0 and 1, or of how many places count, adds to the scores."""
    shape = extents(mask.ty)
    if shape == [batch]:
        numbers = constant_of(np.arange(places, dtype=np.int64).reshape(1, places))
        counts = bb.emit(op.reshape(bb.emit(op.astype(mask, "int64")), [batch, 1]))
        counted, shape = bb.emit(op.less(numbers, counts)), [batch, places]
    elif shape in ([batch, places], [batch, length, places]):
        counted = bb.emit(op.greater(mask, relax.const(0, str(mask.ty.dtype))))
    else:
        raise UnsupportedModelError(f"a mask of shape {shape} for {batch} x {length} x {places} scores cannot be used")
    zero, low = relax.const(0.0, dtype), relax.const(blocked, dtype)
    addend = bb.emit(op.where(counted, zero, low))
    return bb.emit(op.reshape(addend, [batch, 1, *([1] if len(shape) == 2 else [length]), places]))


def _dynamic_quantize_matmul(bb: Any, inputs: Sequence[Any], attrs: dict[str, Any], convert: Convert) -> Any:
    a, b, b_scale, b_zero, bias = padded(inputs, 5)
    quantized = bb.emit(QUANTIZED["DynamicQuantizeLinear"](bb, [a], {}, convert))
    narrow, scale, zero = (bb.emit(relax.TupleGetItem(quantized, i)) for i in range(3))
    return _matmul_integer_to_float(bb, [narrow, b, scale, b_scale, zero, b_zero, bias], attrs, convert)


def _matmul_integer_to_float(bb: Any, inputs: Sequence[Any], _: dict[str, Any], convert: Convert) -> Any:
    a, b, a_scale, b_scale, a_zero, b_zero, bias = padded(inputs, 7)
    sums = bb.emit(QUANTIZED["MatMulInteger"](bb, [a, b, a_zero, b_zero], {}, convert))
    scale = _times(bb, a_scale, b_scale)
    result = _times(bb, bb.emit(op.astype(sums, str(scale.ty.dtype))), scale)
    return result if bias is None else bb.emit(op.add(result, bias))


def _sum(bb: Any, *terms: Any) -> Any:
    total, *rest = [term for term in terms if term is not None]
    for term in rest:
        total = bb.emit(op.add(total, term))
    return total


def _number(value: float, like: Any) -> ir.GenericConst:
    return relax.const(value, str(like.ty.dtype))


def _without(attrs: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in attrs.items() if name not in names}


ONNX_RUNTIME: dict[str, Callable[[Any, Sequence[Any], dict[str, Any], Convert], Any]] = {
    "Attention": _attention,
    "DynamicQuantizeMatMul": _dynamic_quantize_matmul,
    "FusedConv": _fused_convolution,
    "FusedGemm": _fused_gemm,
    "FusedMatMul": _fused_matmul,
    "MatMulIntegerToFloat": _matmul_integer_to_float,
    "MultiHeadAttention": _multi_head_attention,
    "QuickGelu": _quick_gelu,
    "RotaryEmbedding": _rotary_embedding,
    "SimplifiedLayerNormalization": _simplified_layer_norm,
    "SkipLayerNormalization": _skip_layer_norm,
    "SkipSimplifiedLayerNormalization": _skip_rms_norm,
    "TransposeMatMul": _fused_matmul,
}
"""By operator: a function of the block builder, inputs, attributes, and what converts other nodes."""
