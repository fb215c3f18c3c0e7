"""Norms of ONNX where TVM's importer makes up results, or axes of weights, or has other numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from tvm import relax
from tvm.relax import op

from ...dtypes import numpy_dtype
from ...relax_ir.constants import constant_of
from ...relax_ir.tensors import shape_of
from .nodes import Convert, padded

__all__ = ["NORMS"]


def _batch_normalization(bb: Any, inputs: Sequence[Any], attrs: dict[str, Any], convert: Convert) -> Any:
    """With running statistics of which `momentum` is the share that stays; of TVM's, it is what the batch adds."""
    if not attrs.get("training_mode", 0):
        return None
    added = 1 - float(attrs.get("momentum", 0.9))
    return convert("BatchNormalization", inputs, attrs | {"momentum": added})


def _layer_normalization(bb: Any, inputs: Sequence[Any], attrs: dict[str, Any], convert: Convert) -> Any:
    """With means and inverse deviations, where they are used; TVM takes the axes of weights for those of the norm."""
    x, gamma, beta = padded(inputs, 3)
    axis = int(attrs.get("axis", -1)) % x.ty.ndim
    ones = _ones_for(x, axis, gamma, beta)
    is_alone = attrs["tvm_custom"]["num_outputs"] == 1
    if is_alone and ones is None:
        return None
    weights = [gamma, beta] if ones is None else [ones, None]
    results = bb.emit(convert("LayerNormalization", [x, *weights], attrs))
    normalized = bb.emit(relax.TupleGetItem(results, 0))
    if ones is not None:
        normalized = bb.emit(op.multiply(normalized, gamma))
        normalized = normalized if beta is None else bb.emit(op.add(normalized, beta))
    if is_alone:
        return normalized
    wide = x if str(x.ty.dtype) == "float64" else bb.emit(op.astype(x, "float32"))
    axes = list(range(axis, x.ty.ndim))
    mean, variance = (bb.emit(function(wide, axes, keepdims=True)) for function in (op.mean, op.variance))
    epsilon = relax.const(float(attrs.get("epsilon", 1e-5)), str(variance.ty.dtype))
    inverse = bb.emit(op.rsqrt(bb.emit(op.add(variance, epsilon))))
    return relax.Tuple([normalized, mean, inverse])


def _mean_variance(bb: Any, inputs: Sequence[Any], attrs: dict[str, Any], _: Convert) -> Any:
    """TVM's subtracts the square of the mean from the mean of the squares, of float32 alone, and makes NaN of it."""
    (x,) = inputs
    axes = [int(axis) for axis in attrs.get("axes", (0, 2, 3))]
    centred = bb.emit(op.subtract(x, bb.emit(op.mean(x, axes, keepdims=True))))
    variance = bb.emit(op.mean(bb.emit(op.multiply(centred, centred)), axes, keepdims=True))
    deviation = bb.emit(op.add(bb.emit(op.sqrt(variance)), relax.const(1e-9, str(x.ty.dtype))))
    return op.divide(centred, deviation)


def _rms_normalization(bb: Any, inputs: Sequence[Any], attrs: dict[str, Any], convert: Convert) -> Any:
    """Of all axes with one more before them: TVM's norm needs one that stays, and weights of all elements."""
    x, gamma = inputs
    axis = int(attrs.get("axis", -1)) % x.ty.ndim
    ones = _ones_for(x, axis, gamma)
    if axis and ones is None:
        return None
    weights = gamma if ones is None else ones
    if axis:
        normalized = bb.emit(convert("RMSNormalization", [x, weights], attrs))
    else:
        apart = bb.emit(op.expand_dims(x, 0))
        normalized = bb.emit(convert("RMSNormalization", [apart, weights], attrs | {"axis": 1}))
        normalized = bb.emit(op.squeeze(normalized, [0]))
    return normalized if ones is None else op.multiply(normalized, gamma)


def _ones_for(x: Any, axis: int, *weights: Any) -> Any:
    """Weights that leave a norm of the axes from `axis` on as it is, where its own are repeated along some axes of `x`.

    None where they have just the axes of the norm, or do not fit `x`.
    """
    known = [weight for weight in weights if weight is not None]
    if any(tensor.ty.shape is None for tensor in (x, *known)):
        return None
    shape = shape_of(x)
    over, given = shape[axis:], [shape_of(weight) for weight in known]
    if not all(isinstance(extent, int) for extent in over) or all(own == over for own in given):
        return None
    for own in given:
        pairs = zip(reversed(own), reversed(shape), strict=False)
        fits = all(extent == 1 or (isinstance(whole, int) and extent == whole) for extent, whole in pairs)
        if len(own) > len(shape) or not fits:
            return None
    return constant_of(np.ones(over, numpy_dtype(str(x.ty.dtype))))


NORMS: dict[str, Callable[..., Any]] = {
    "BatchNormalization": _batch_normalization,
    "LayerNormalization": _layer_normalization,
    "MeanVarianceNormalization": _mean_variance,
    "RMSNormalization": _rms_normalization,
}
"""Name of an operator -> a function of block builder, inputs, attributes and `Convert` that returns the result."""
