"""Norms of ONNX where TVM's importer makes up results, or axes of weights, or has other numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tvm import relax
from tvm.relax import op

from .onnx_nodes import Convert, padded

__all__ = ["NORMS"]


def _batch_normalization(bb: Any, inputs: Sequence[Any], attrs: dict[str, Any], convert: Convert) -> Any:
    """With running statistics of which `momentum` is the share that stays; of TVM's, it is what the batch adds."""
    if not attrs.get("training_mode", 0):
        return None
    added = 1 - float(attrs.get("momentum", 0.9))
    return convert("BatchNormalization", inputs, attrs | {"momentum": added})


def _layer_normalization(bb: Any, inputs: Sequence[Any], attrs: dict[str, Any], convert: Convert) -> Any:
    """With means and inverse deviations, where they are used."""
    if attrs["tvm_custom"]["num_outputs"] == 1:
        return None
    x = inputs[0]
    normalized = bb.emit(convert("LayerNormalization", padded(inputs, 3), attrs))
    wide = x if str(x.ty.dtype) == "float64" else bb.emit(op.astype(x, "float32"))
    axes = list(range(int(attrs.get("axis", -1)) % x.ty.ndim, x.ty.ndim))
    mean, variance = (bb.emit(function(wide, axes, keepdims=True)) for function in (op.mean, op.variance))
    epsilon = relax.const(float(attrs.get("epsilon", 1e-5)), str(variance.ty.dtype))
    inverse = bb.emit(op.rsqrt(bb.emit(op.add(variance, epsilon))))
    return relax.Tuple([bb.emit(relax.TupleGetItem(normalized, 0)), mean, inverse])


def _mean_variance(bb: Any, inputs: Sequence[Any], attrs: dict[str, Any], _: Convert) -> Any:
    """TVM's subtracts the square of the mean from the mean of the squares, of float32 alone, and makes NaN of it."""
    (x,) = inputs
    axes = [int(axis) for axis in attrs.get("axes", (0, 2, 3))]
    centred = bb.emit(op.subtract(x, bb.emit(op.mean(x, axes, keepdims=True))))
    variance = bb.emit(op.mean(bb.emit(op.multiply(centred, centred)), axes, keepdims=True))
    deviation = bb.emit(op.add(bb.emit(op.sqrt(variance)), relax.const(1e-9, str(x.ty.dtype))))
    return op.divide(centred, deviation)


def _rms_normalization(bb: Any, inputs: Sequence[Any], attrs: dict[str, Any], convert: Convert) -> Any:
    """Of all axes with one more before them: TVM's norm needs one that stays."""
    x, gamma = inputs
    if int(attrs.get("axis", -1)) % x.ty.ndim:
        return None
    normalized = bb.emit(convert("RMSNormalization", [bb.emit(op.expand_dims(x, 0)), gamma], attrs | {"axis": 1}))
    return op.squeeze(normalized, [0])


NORMS: dict[str, Callable[..., Any]] = {
    "BatchNormalization": _batch_normalization,
    "LayerNormalization": _layer_normalization,
    "MeanVarianceNormalization": _mean_variance,
    "RMSNormalization": _rms_normalization,
}
"""Name of an operator -> a function of block builder, inputs, attributes and `Convert` that returns the result."""
