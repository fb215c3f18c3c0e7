"""Converters for PyTorch operators that order values, look places up in an order, or keep the largest so far."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from tvm import relax
from tvm.relax import op

from ..dtypes import numpy_dtype
from ..errors import UnsupportedModelError
from ..transform.constants import constant_of
from .torch_nodes import Converter, arguments, dtype_of, shape_of

__all__ = ["ORDER_CONVERTERS"]


def _smallest_but(node: Any, importer: Any) -> tuple[relax.Expr, ...]:
    """kthvalue: of what is sorted, the element k - 1."""
    x, k, axis, keep = arguments(node, importer, ("input", "k", "dim", "keepdim"), (-1, False))
    emit, axis = importer.block_builder.emit, axis % len(shape_of(x))

    def taken(ordered: relax.Expr) -> relax.Expr:
        one = emit(op.strided_slice(emit(ordered), [axis], [k - 1], [k]))
        return one if keep else emit(op.squeeze(one, [axis]))

    return taken(op.sort(x, axis)), taken(op.argsort(x, axis, dtype="int64"))


def _places_in_order(node: Any, importer: Any) -> relax.Expr:
    """searchsorted: how many elements of each sequence are smaller (or, with `right`, not larger)."""
    names = ("sorted_sequence", "input", "out_int32", "right", "side", "sorter")
    sequence, values, _, right, side, sorter = arguments(node, importer, names, (False, False, None, None))
    if sorter is not None:
        raise UnsupportedModelError(f"{node.name} is a searchsorted with a sorter")
    compare = op.less_equal if right or side == "right" else op.less
    emit = importer.block_builder.emit
    is_before = compare(emit(op.expand_dims(sequence, -2)), emit(op.expand_dims(values, -1)))
    return emit(op.sum(emit(op.astype(emit(is_before), dtype_of(node))), axis=-1))


def _extreme_so_far(choose: Callable[..., relax.Expr], is_largest: bool) -> Converter:
    """cummax and cummin, and the last places of what they found: of 2, 4, 8, ... elements up to each one."""

    def convert(node: Any, importer: Any) -> tuple[relax.Expr, ...]:
        x, axis = arguments(node, importer, ("input", "dim"), ())
        emit, shape, dtype = importer.block_builder.emit, shape_of(x), str(x.ty.dtype)
        axis %= len(shape)

        def so_far(values: relax.Expr, choose: Callable[..., relax.Expr], least: float) -> relax.Expr:
            before = [0] * (2 * len(shape))
            distance = 1
            while distance < shape[axis]:
                before[2 * axis] = distance
                moved = emit(op.nn.pad(values, before, pad_value=least))
                moved = emit(op.strided_slice(moved, [axis], [0], [shape[axis]]))
                values, distance = emit(choose(values, moved)), 2 * distance
            return values

        values = so_far(x, choose, _limit(dtype, lowest=is_largest))
        along = np.arange(shape[axis]).reshape([-1] + [1] * (len(shape) - 1 - axis))
        is_found = emit(op.equal(x, values))
        places = emit(op.where(is_found, constant_of(along), relax.const(0, "int64")))
        return values, so_far(places, op.maximum, 0)

    return convert


def _limit(dtype: str, lowest: bool) -> float:
    if dtype.startswith("int") or dtype == "uint8":
        limits = np.iinfo(numpy_dtype(dtype))
        return int(limits.min if lowest else limits.max)
    return -np.inf if lowest else np.inf


ORDER_CONVERTERS: dict[str, Converter] = {
    "kthvalue.default": _smallest_but,
    "searchsorted.Tensor": _places_in_order,
    "cummax.default": _extreme_so_far(op.maximum, True),
    "cummin.default": _extreme_so_far(op.minimum, False),
}
