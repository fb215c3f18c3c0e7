"""Converters for PyTorch's operators of quantised models (`torch.ops.quantized_decomposed`), which TVM does not know.

They are what models consist of that were quantised for export: products in float32 between a `dequantize` and a
`quantize` each, whose parameters are constants or computed (dynamic quantisation).
`eqtune.transform.FakeQuantizationToInteger` makes products of integers of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.fx
from tvm import relax
from tvm.relax import op

from .nodes import arguments, cast

__all__ = ["QUANTIZED_CONVERTERS"]

_TENSOR = ("input", "scales", "zero_points", "quant_min", "quant_max", "dtype")
_CHANNEL = ("input", "scales", "zero_points", "axis", "quant_min", "quant_max", "dtype")


def _given(node: Any, importer: Any, names: tuple[str, ...]) -> dict[str, Any]:
    """Arguments by name: scales (float32) and zero points (of the stored type) as Relax values, the axis a number."""
    renamed = {"scale": "scales", "zero_point": "zero_points"}
    values = dict(zip(names, node.args, strict=False)) | {renamed.get(k, k): v for k, v in node.kwargs.items()}
    values = {k: importer.env[v] if isinstance(v, torch.fx.Node) else v for k, v in values.items()}
    dtype = str(values["dtype"]).removeprefix("torch.")
    emit = importer.block_builder.emit
    for name, wanted in (("scales", "float32"), ("zero_points", dtype)):
        value = 0 if values[name] is None else values[name]
        if not isinstance(value, relax.Expr):
            values[name] = relax.const(np.asarray(value, wanted))
        elif str(value.ty.dtype) != wanted:
            values[name] = emit(op.astype(value, wanted))
        if "axis" not in names and len(values[name].ty.shape):
            values[name] = emit(op.reshape(values[name], []))  # of one element, as `choose_qparams` gives it
    rank = len(values["input"].ty.shape)
    return values | {"dtype": dtype, "axis": values.get("axis", 0) % max(1, rank), "rank": rank}


def _quantize(names: tuple[str, ...]) -> Callable[[Any, Any], Any]:
    def converted(node: Any, importer: Any) -> Any:
        given = _given(node, importer, names)
        given["input"] = cast(given["input"], "float32", importer)  # where it has 16 bits, as PyTorch does
        if given["dtype"] == "int32":
            return _quantized_widely(importer, given)
        limits, real = np.iinfo(given["dtype"]), given["input"]
        for limit, widest, choose in (
            (given["quant_min"], limits.min, op.maximum),
            (given["quant_max"], limits.max, op.minimum),
        ):
            if limit != widest:  # narrower than the type: cut off before, where the limit is a whole step
                real = importer.block_builder.emit(choose(real, _real(importer, limit, given)))
        parameters = given["scales"], given["zero_points"]
        return importer.block_builder.emit(op.quantize(real, *parameters, axis=given["axis"], out_dtype=given["dtype"]))

    return converted


def _dequantize(names: tuple[str, ...]) -> Callable[[Any, Any], Any]:
    def converted(node: Any, importer: Any) -> Any:
        given = _given(node, importer, names)
        parameters = given["scales"], given["zero_points"]
        real = importer.block_builder.emit(op.dequantize(given["input"], *parameters, axis=given["axis"]))
        out_dtype = str(given.get("out_dtype") or "float32").removeprefix("torch.")
        return real if out_dtype == "float32" else importer.block_builder.emit(op.astype(real, out_dtype))

    return converted


def _quantized_widely(importer: Any, given: dict[str, Any]) -> Any:
    """What TVM's `quantize` refuses: 32 bits, as biases have."""
    emit = importer.block_builder.emit
    scale, zero = (_along(importer, given[name], given) for name in ("scales", "zero_points"))
    whole = emit(op.round(emit(op.divide(given["input"], scale))))
    steps = emit(op.add(whole, emit(op.astype(zero, "float32"))))
    return emit(op.astype(emit(op.clip(steps, given["quant_min"], given["quant_max"])), "int32"))


def _real(importer: Any, integer: int, given: dict[str, Any]) -> Any:
    """What an integer stands for, as it broadcasts against the input."""
    emit = importer.block_builder.emit
    steps = emit(op.subtract(relax.const(float(integer)), emit(op.astype(given["zero_points"], "float32"))))
    return _along(importer, emit(op.multiply(steps, given["scales"])), given)


def _along(importer: Any, parameter: Any, given: dict[str, Any]) -> Any:
    """A number, or one for each channel, as it broadcasts against the input."""
    if not len(parameter.ty.shape):
        return parameter
    shape = [-1 if axis == given["axis"] else 1 for axis in range(given["rank"])]
    return importer.block_builder.emit(op.reshape(parameter, shape))


def _parameters(symmetric: bool) -> Callable[[Any, Any], Any]:
    """Scale (float64) and zero point (int64) of one element each, so that the range of a tensor and zero fit."""

    def converted(node: Any, importer: Any) -> Any:
        x, least, most, smallest, dtype = arguments(
            node, importer, ("input", "quant_min", "quant_max", "eps", "dtype"), ()
        )
        emit, nothing = importer.block_builder.emit, relax.const(0, str(x.ty.dtype))
        low, high = emit(op.minimum(emit(op.min(x)), nothing)), emit(op.maximum(emit(op.max(x)), nothing))
        if symmetric:
            high = emit(op.maximum(high, emit(op.negative(low))))
            extent, steps = high, (most - least) / 2
        else:
            extent, steps = emit(op.subtract(high, low)), most - least
        scale = cast(emit(op.divide(extent, relax.const(steps, str(x.ty.dtype)))), "float32", importer)
        scale = emit(op.maximum(scale, relax.const(smallest, "float32")))
        if symmetric:
            zero: Any = relax.const(128.0 if dtype == torch.uint8 else 0.0, "float32")
        else:
            below = emit(op.round(emit(op.divide(cast(low, "float32", importer), scale))))
            zero = emit(op.clip(emit(op.subtract(relax.const(float(least)), below)), least, most))
        both = cast(scale, "float64", importer), cast(zero, "int64", importer)
        return tuple(emit(op.reshape(one, [1])) for one in both)

    return converted


def _integer_product(node: Any, importer: Any) -> Any:
    """Of bytes, in 32 bits."""
    left, right = (cast(side, "int32", importer) for side in arguments(node, importer, ("input", "mat2"), ()))
    return importer.block_builder.emit(op.matmul(left, right, out_dtype="int32"))


QUANTIZED_CONVERTERS: dict[str, Callable[[Any, Any], Any]] = {
    "_int_mm.default": _integer_product,  # torchao's
    "choose_qparams.tensor": _parameters(symmetric=False),
    "choose_qparams_symmetric.tensor": _parameters(symmetric=True),
    "quantize_per_tensor.default": _quantize(_TENSOR),
    "quantize_per_tensor.tensor": _quantize(_TENSOR),
    "quantize_per_tensor.tensor2": _quantize(_TENSOR),
    "quantize_per_channel.default": _quantize(_CHANNEL),
    "dequantize_per_tensor.default": _dequantize(_TENSOR),
    "dequantize_per_tensor.tensor": _dequantize(_TENSOR),
    "dequantize_per_tensor.tensor2": _dequantize(_TENSOR),
    "dequantize_per_channel.default": _dequantize(_CHANNEL),
}
"""By the operator's name in an exported graph."""
