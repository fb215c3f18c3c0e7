"""Converters for PyTorch's operators of quantised models (`torch.ops.quantized_decomposed`), which TVM does not know.

They are what models consist of that were quantised for export: products in float32 between a `dequantize` and a
`quantize` each. `eqtune.transform.FakeQuantizationToInteger` makes products of integers of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch.fx
from tvm import relax
from tvm.relax import op

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
        value = values[name]
        if not isinstance(value, relax.Expr):
            values[name] = relax.const(np.asarray(value, wanted))
        elif str(value.ty.dtype) != wanted:
            values[name] = emit(op.astype(value, wanted))
    rank = len(values["input"].ty.shape)
    return values | {"dtype": dtype, "axis": values.get("axis", 0) % max(1, rank), "rank": rank}


def _quantize(names: tuple[str, ...]) -> Callable[[Any, Any], Any]:
    def converted(node: Any, importer: Any) -> Any:
        given = _given(node, importer, names)
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
        return importer.block_builder.emit(op.dequantize(given["input"], *parameters, axis=given["axis"]))

    return converted


def _real(importer: Any, integer: int, given: dict[str, Any]) -> Any:
    """What an integer stands for, as it broadcasts against the input."""
    emit = importer.block_builder.emit
    steps = emit(op.subtract(relax.const(float(integer)), emit(op.astype(given["zero_points"], "float32"))))
    real = emit(op.multiply(steps, given["scales"]))
    if not len(real.ty.shape):
        return real
    return emit(op.reshape(real, [-1 if axis == given["axis"] else 1 for axis in range(given["rank"])]))


QUANTIZED_CONVERTERS: dict[str, Callable[[Any, Any], Any]] = {
    "quantize_per_tensor.default": _quantize(_TENSOR),
    "quantize_per_tensor.tensor": _quantize(_TENSOR),
    "quantize_per_channel.default": _quantize(_CHANNEL),
    "dequantize_per_tensor.default": _dequantize(_TENSOR),
    "dequantize_per_tensor.tensor": _dequantize(_TENSOR),
    "dequantize_per_channel.default": _dequantize(_CHANNEL),
}
"""By the operator's name in an exported graph."""
