"""Operators of ONNX and ONNX Runtime whose weights are stored in blocks of 8 bits or fewer, with a scale each.

Here they are written out, as floats between products; `eqtune.transform.KeepNarrowWeights` has kernels read the codes
where few rows are multiplied.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper
from tvm import ir, relax
from tvm.relax import op

from ...arrays import Array
from ...dtypes import HALVES
from ...errors import UnsupportedModelError
from ...relax_ir.constants import array_of, constant_of
from ...relax_ir.tensors import as_dtype, extents
from .nodes import Convert, padded

__all__ = ["NARROW_WEIGHTS", "with_exact_products", "with_weights_in_bytes"]

_BELOW_A_BYTE = {
    getattr(onnx.TensorProto, name): dtype
    for name, dtype in (("INT4", np.int8), ("UINT4", np.uint8), ("INT2", np.int8), ("UINT2", np.uint8))
    if hasattr(onnx.TensorProto, name)  # those of two bits came with opset 25
}
"""Types that TVM does not store, in bytes."""

_LARGE = 2**14
"""Elements of a constant from which it may be weights."""

_READERS = frozenset({"Cast", "DequantizeLinear", "Gather", "Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze"})
"""Operators that compute the same of such a type's numbers in bytes."""


def with_weights_in_bytes(model: onnx.ModelProto) -> onnx.ModelProto:
    """Weights and zero points of 4 or 2 bits in bytes; the same model where there are none.

    Raises
    ------
    UnsupportedModelError
        Some are read by an operator that does not only move, convert or dequantise them.
    """
    small = {tensor.name for tensor in model.graph.initializer if tensor.data_type in _BELOW_A_BYTE}
    if not small:
        return model
    for node in model.graph.node:
        if small & set(node.input) and node.op_type not in _READERS:
            raise UnsupportedModelError(f"{node.op_type} of tensors below 8 bits cannot be imported; in bytes it can")
    changed = onnx.ModelProto()
    changed.CopyFrom(model)
    for tensor in changed.graph.initializer:
        if tensor.name in small:
            array = numpy_helper.to_array(tensor).astype(_BELOW_A_BYTE[tensor.data_type])
            tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))
    return changed


def with_exact_products(model: onnx.ModelProto) -> onnx.ModelProto:
    """Without the permission to round what is multiplied by narrow weights to 8 bits (`accuracy_level`)."""
    if not any(attribute.name == "accuracy_level" for node in model.graph.node for attribute in node.attribute):
        return model
    changed = onnx.ModelProto()
    changed.CopyFrom(model)
    for node in changed.graph.node:
        kept = [attribute for attribute in node.attribute if attribute.name != "accuracy_level"]
        if len(kept) < len(node.attribute):
            del node.attribute[:]
            node.attribute.extend(kept)
    return changed


def _dequantize(bb: Any, inputs: Sequence[Any], attrs: dict[str, Any], convert: Convert) -> Any:
    """In blocks, which TVM does not know; or to the type of the scale, which for TVM is float32 before version 19."""
    codes, scales, zeros = padded(inputs, 3)
    size = int(attrs.get("block_size", 0))
    if not size:
        is_known = convert.opset >= 19 or str(scales.ty.dtype) not in HALVES
        return None if is_known else op.astype(bb.emit(convert("DequantizeLinear", inputs, attrs)), scales.ty.dtype)
    shape = extents(codes.ty)
    axis = int(attrs.get("axis", 1)) % len(shape)
    blocks = -(-shape[axis] // size)

    def in_blocks(tensor: Any, length: int) -> Any:
        return bb.emit(op.reshape(tensor, [*shape[:axis], blocks, length, *shape[axis + 1 :]]))

    dtype = str(scales.ty.dtype)
    result = str(onnx.helper.tensor_dtype_to_np_dtype(attrs["output_dtype"])) if attrs.get("output_dtype") else dtype
    if result != dtype:  # rounded once
        dtype, scales = "float32", as_dtype(bb.emit, scales, "float32")
    if blocks * size > shape[axis]:
        widths = [0] * (2 * len(shape))
        widths[2 * axis + 1] = blocks * size - shape[axis]
        codes = bb.emit(op.nn.pad(codes, widths))
    values = in_blocks(bb.emit(op.astype(codes, dtype)), size)
    if zeros is not None:
        values = bb.emit(op.subtract(values, bb.emit(op.astype(in_blocks(zeros, 1), dtype))))
    values = bb.emit(op.multiply(values, in_blocks(scales, 1)))
    values = bb.emit(op.reshape(values, [*shape[:axis], blocks * size, *shape[axis + 1 :]]))
    if blocks * size > shape[axis]:
        values = bb.emit(op.strided_slice(values, [axis], [0], [shape[axis]]))
    return as_dtype(bb.emit, values, result)


def _matmul_nbits(bb: Any, inputs: Sequence[Any], attrs: dict[str, Any], _: Convert) -> Any:
    x, packed, scales, zeros, order, bias = padded(inputs, 6)
    places, columns = int(attrs["K"]), int(attrs["N"])
    bits, size = int(attrs.get("bits", 4)), int(attrs["block_size"])
    blocks = -(-places // size)
    if order is not None:
        raise UnsupportedModelError("MatMulNBits whose places are in another order (g_idx) cannot be imported")
    codes = _codes("MatMulNBits", packed, bits).reshape(columns, blocks, -1)[..., :size]
    zero = _zeros("MatMulNBits", zeros, bits, (columns, blocks))
    zero, scales = (
        given if isinstance(given, float) else bb.emit(op.reshape(given, [columns, blocks, 1]))
        for given in (zero, scales)
    )
    weights = _dequantized(bb, constant_of(np.ascontiguousarray(codes)), scales, zero)
    weights = bb.emit(op.reshape(weights, [columns, blocks * size]))
    if blocks * size > places:
        weights = bb.emit(op.strided_slice(weights, [1], [0], [places]))
    result = bb.emit(op.matmul(as_dtype(bb.emit, x, "float32"), bb.emit(op.permute_dims(weights, [1, 0]))))
    if bias is not None:
        result = bb.emit(op.add(result, as_dtype(bb.emit, bias, "float32")))
    dtype = str(x.ty.dtype)
    return result if dtype == "float32" else op.astype(result, dtype)


def _gather_block_quantized(bb: Any, inputs: Sequence[Any], attrs: dict[str, Any], _: Convert) -> Any:
    data, indices, scales, zeros = padded(inputs, 4)
    shape, size = extents(scales.ty), int(attrs.get("block_size", 128))
    rank = len(shape)
    axis, blocked = int(attrs.get("gather_axis", 0)) % rank, int(attrs.get("quantize_axis", 1)) % rank
    if axis != 0 or blocked != rank - 1:
        raise UnsupportedModelError(
            "GatherBlockQuantized is imported where it gathers along the first axis, with blocks along the last"
        )
    bits = int(attrs.get("bits", 4))
    codes = _codes("GatherBlockQuantized", data, bits)
    zero = _zeros("GatherBlockQuantized", zeros, bits, tuple(shape))
    width = codes.shape[-1]
    filled = np.pad(codes, [(0, 0)] * (rank - 1) + [(0, shape[-1] * size - width)])

    def taken(table: Any) -> Any:
        return bb.emit(op.take(table, indices, axis=0, mode="wrap"))

    rows = [*extents(indices.ty), *shape[1:]]
    found = bb.emit(op.reshape(taken(constant_of(filled)), [*rows, size]))
    known, factors = (
        given if isinstance(given, float) else bb.emit(op.reshape(taken(given), [*rows, 1])) for given in (zero, scales)
    )
    result = bb.emit(op.reshape(_dequantized(bb, found, factors, known), [*rows[:-1], rows[-1] * size]))
    if rows[-1] * size > width:
        result = bb.emit(op.strided_slice(result, [len(rows) - 1], [0], [width]))
    return op.astype(result, str(scales.ty.dtype))


def _cast(bb: Any, inputs: Sequence[Any], attrs: dict[str, Any], convert: Convert) -> Any:
    """Of bytes to floats; TVM's importer would compute large constants, and what follows, so that no codes are left."""
    (stored,) = inputs
    if not isinstance(stored, ir.GenericConst) or str(stored.ty.dtype) not in ("int8", "uint8"):
        return None
    is_large = math.prod(extents(stored.ty)) >= _LARGE
    return op.astype(stored, "float32") if is_large and int(attrs["to"]) == onnx.TensorProto.FLOAT else None


def _codes(name: str, packed: Any, bits: int) -> Array:
    """The codes of a constant of bytes, whose first code has the lowest bits; the last axis is as many times longer."""
    if not isinstance(packed, ir.GenericConst):
        raise UnsupportedModelError(f"{name} needs constant weights; these are computed, or inputs")
    if bits not in (2, 4, 8):
        raise UnsupportedModelError(f"{name} with weights of {bits} bits cannot be imported; 2, 4 and 8 can")
    array = array_of(packed)
    return array if bits == 8 else _unpacked(array, bits)


def _unpacked(array: Array, bits: int) -> Array:
    parts = [(array >> np.uint8(shift)) & np.uint8(2**bits - 1) for shift in range(0, 8, bits)]
    return np.stack(parts, -1).reshape(*array.shape[:-1], -1)


def _zeros(name: str, zeros: Any, bits: int, shape: tuple[int, ...]) -> Any:
    """The zero of each block, a constant of float32; without any, a number, the middle of what codes can be."""
    if zeros is None:
        return float(2 ** (bits - 1))
    if not isinstance(zeros, ir.GenericConst):
        raise UnsupportedModelError(f"{name} needs constant zero points; these are computed, or inputs")
    array = array_of(zeros)
    if array.dtype == np.uint8 and bits < 8:
        array = _unpacked(array.reshape(*shape[:-1], -1), bits)[..., : shape[-1]]
    return constant_of(np.ascontiguousarray(array.reshape(shape)).astype(np.float32))


def _dequantized(bb: Any, codes: Any, scales: Any, zeros: Any) -> Any:
    """scales * (codes - zeros), in float32; zeros may be a number."""
    known = relax.const(zeros, "float32") if isinstance(zeros, float) else zeros
    shifted = bb.emit(op.subtract(bb.emit(op.astype(codes, "float32")), known))
    return bb.emit(op.multiply(shifted, as_dtype(bb.emit, scales, "float32")))


NARROW_WEIGHTS = {
    "Cast": _cast,
    "DequantizeLinear": _dequantize,
    "GatherBlockQuantized": _gather_block_quantized,
    "MatMulNBits": _matmul_nbits,
}
"""By operator: a function of the block builder, inputs, attributes, and what converts other nodes, that returns the
result; where one returns None, TVM's converter is right.
"""
