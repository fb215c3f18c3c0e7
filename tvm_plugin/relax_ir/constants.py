"""Relax constants as numpy arrays, and back, in the same memory."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from tvm import ir, relax, runtime, tirx

from ..arrays import ALIGNMENT, Array, aligned_empty, copy_into
from ..dtypes import numpy_dtype

__all__ = [
    "array_of",
    "constant_of",
    "has_shape",
    "is_number",
    "is_static_tensor",
    "tensor_of",
    "type_bytes",
]

_DTYPES = frozenset(
    ["bool", "bfloat16", "float16", "float32", "float64"] + [f"{s}int{b}" for s in ("", "u") for b in (8, 16, 32, 64)]
)
"""What both numpy (bfloat16: by ml_dtypes) and TVM hold in the same bytes."""


def has_shape(ty: Any) -> bool:
    """Whether a Relax type is a tensor of known rank, some of its sizes perhaps open."""
    return isinstance(ty, relax.TensorType) and isinstance(ty.shape, relax.ShapeExpr)


def is_static_tensor(ty: Any) -> bool:
    """Whether a Relax type is a tensor of known shape whose dtype numpy has."""
    return (
        has_shape(ty)
        and all(isinstance(extent, tirx.IntImm) for extent in ty.shape.values)
        and str(ty.dtype) in _DTYPES
    )


def type_bytes(ty: Any) -> int:
    """Bytes of a static tensor, or of all in a tuple."""
    if isinstance(ty, relax.TupleType):
        return sum(map(type_bytes, ty.fields))
    return math.prod(map(int, ty.shape.values)) * numpy_dtype(str(ty.dtype)).itemsize


def is_number(expr: Any, most_axes: int) -> bool:
    """Whether it is a constant of one element, with so many axes at most: beside a tensor of these it adds none."""
    is_constant = isinstance(expr, ir.GenericConst) and is_static_tensor(expr.ty)
    return is_constant and expr.ty.ndim <= most_axes and math.prod(map(int, expr.ty.shape.values)) == 1


def array_of(constant: ir.GenericConst) -> Array:
    """The constant's data, not copied: do not write into it."""
    value, dtype = constant.value, str(constant.value.dtype)
    plain = _plain(dtype)
    if not plain:
        return np.from_dlpack(value)  # itself: whoever keeps a reordered copy asks whether this one still lives
    return np.from_dlpack(value._create_view(value.shape, plain)).view(numpy_dtype(dtype))


def constant_of(array: Array) -> ir.GenericConst:
    """A Relax constant that holds `array`; see `tensor_of`."""
    return ir.GenericConst(tensor_of(array), relax.TensorType(array.shape, str(array.dtype)))


def tensor_of(array: Array) -> runtime.Tensor:
    """A tensor that holds `array`; the data is copied only where kernels could not read it in place."""
    if array.size == 0:  # numpy's address of nothing is not aligned
        return runtime.empty(array.shape, str(array.dtype))
    readable = array.flags.c_contiguous and array.flags.writeable and array.ctypes.data % ALIGNMENT == 0
    if not readable:
        copy = aligned_empty(array.shape, array.dtype)
        copy_into(copy, array)
        array = copy
    plain = _plain(str(array.dtype))
    stored = array.view(plain) if plain else array
    return runtime.from_dlpack(stored)._create_view(array.shape, str(array.dtype))


def _plain(dtype: str) -> str:
    """As what numpy takes over a dtype that is not its own; "" for the others."""
    return "uint16" if dtype == "bfloat16" else "uint8" if dtype.startswith("float8_") else ""
