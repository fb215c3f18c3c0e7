"""Reductions of ONNX where TVM's importer returns the input, or another type, or no number."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tvm import ir, relax
from tvm.relax import op

from ...dtypes import is_integer
from ...errors import UnsupportedModelError
from .nodes import Convert, numbers_of, padded

__all__ = ["REDUCTIONS"]

_OF_EACH: dict[str, Callable[[Any], Any]] = {
    "ReduceL1": op.abs,
    "ReduceL2": op.abs,
    "ReduceLogSum": op.log,
    "ReduceSumSquare": lambda x: op.multiply(x, x),
}
"""What is left of reductions of several steps where no axes are reduced."""

_OF_REAL_NUMBERS = frozenset({"ReduceL2", "ReduceLogSum", "ReduceLogSumExp"})
"""These take roots, or logarithms."""


def _reduction(name: str) -> Callable[..., Any]:
    def convert_reduction(bb: Any, inputs: Sequence[Any], attrs: dict[str, Any], convert: Convert) -> Any:
        x, axes = padded(inputs, 2)
        dtype = str(x.ty.dtype)
        if name in _OF_REAL_NUMBERS and is_integer(dtype):
            raise UnsupportedModelError(f"{name} of {dtype} cannot be imported; cast its input to float32 in the model")
        is_empty = axes is None or (isinstance(axes, ir.GenericConst) and not numbers_of(name, "axes", axes))
        is_each = convert.opset >= 18 and bool(attrs.get("noop_with_empty_axes", 0)) and is_empty
        if is_each and name in _OF_EACH:
            return _OF_EACH[name](x)
        if name == "ReduceLogSumExp" and not is_each:
            over = attrs.get("axes", ()) if axes is None else numbers_of(name, "axes", axes)
            return _log_of_sum(bb, x, dtype, [int(axis) for axis in over] or None, bool(attrs.get("keepdims", 1)))
        if name != "ReduceMean" or not is_integer(dtype):
            return None
        return op.astype(bb.emit(convert(name, inputs, attrs)), dtype)

    return convert_reduction


def _log_of_sum(bb: Any, x: Any, dtype: str, axes: list[int] | None, keep: bool) -> Any:
    """log(sum(e^x)) by way of the largest, where that is a number: TVM subtracts infinities from each other."""
    largest = bb.emit(op.max(x, axes, keepdims=True))
    largest = bb.emit(op.where(bb.emit(op.isfinite(largest)), largest, relax.const(0, dtype)))
    powers = bb.emit(op.exp(bb.emit(op.subtract(x, largest))))
    result = bb.emit(op.add(bb.emit(op.log(bb.emit(op.sum(powers, axes, keepdims=True)))), largest))
    return result if keep else op.squeeze(result, axes)


REDUCTIONS = {name: _reduction(name) for name in sorted({"ReduceMean", *_OF_EACH, *_OF_REAL_NUMBERS})}
"""Name of an operator -> a function of block builder, inputs, attributes and `Convert` that returns the result."""
