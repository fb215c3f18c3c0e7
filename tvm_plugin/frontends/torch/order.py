"""PyTorch operators that order values, look places up in an order, or keep the largest so far: converters, and a mode.

Which of equal values comes first, PyTorch leaves open. Here it is the first one; `EqualsInOrder` makes PyTorch do the
same, so that outputs can be compared.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from tvm import relax
from tvm.relax import op

from ...dtypes import is_floating, numpy_dtype
from ...relax_ir.constants import constant_of
from ...relax_ir.tensors import shape_of
from .nodes import Converter, arguments, cast, compared_as, dtype_of

__all__ = ["ORDER_CONVERTERS", "EqualsInOrder", "so_far"]

aten = torch.ops.aten


class EqualsInOrder(TorchDispatchMode):
    """While it is entered, equal values are sorted in the order in which they come, and the first k are the first."""

    supports_higher_order_operators = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Each of these operators by a stable sort, all others as they are."""
        replaced = _IN_ORDER.get(func)
        return func(*args, **(kwargs or {})) if replaced is None else replaced(*args, **(kwargs or {}))


def _sorted(x: Any, dim: int = -1, descending: bool = False, stable: bool | None = None) -> Any:
    del stable
    return aten.sort.stable(x, stable=True, dim=dim, descending=descending)


def _first_of(x: Any, k: int, dim: int = -1, largest: bool = True, is_sorted: bool = True) -> Any:
    del is_sorted
    return tuple(part.narrow(dim, 0, k) if part.dim() else part for part in _sorted(x, dim, largest))


def _one_of(x: Any, k: int, dim: int = -1, keepdim: bool = False) -> Any:
    parts = [part.narrow(dim, k - 1, 1) if part.dim() else part for part in _sorted(x, dim)]
    return tuple(part if keepdim or not part.dim() else part.squeeze(dim) for part in parts)


_IN_ORDER: dict[Any, Callable[..., Any]] = {
    aten.sort.default: _sorted,
    aten.sort.stable: _sorted,
    aten.topk.default: _first_of,
    aten.kthvalue.default: _one_of,
}


def _largest(node: Any, importer: Any) -> tuple[relax.Expr, ...]:
    """topk, in order also where that is not asked for; none of all, of which TVM would return every one."""
    x, k, axis, largest, _ = arguments(node, importer, ("input", "k", "dim", "largest", "sorted"), (-1, True, True))
    emit = importer.block_builder.emit
    if k == 0:
        none = emit(op.strided_slice(x, [axis % len(shape_of(x))], [0], [0]))
        return none, cast(none, "int64", importer)
    both = emit(op.topk(x, k, axis, "both", largest, "int64"))
    return emit(relax.TupleGetItem(both, 0)), emit(relax.TupleGetItem(both, 1))


def _smallest_but(node: Any, importer: Any) -> tuple[relax.Expr, ...]:
    """kthvalue: of what is sorted, the element k - 1."""
    x, k, axis, keep = arguments(node, importer, ("input", "k", "dim", "keepdim"), (-1, False))
    emit, axis = importer.block_builder.emit, axis % len(shape_of(x))

    def taken(ordered: relax.Expr) -> relax.Expr:
        one = emit(op.strided_slice(emit(ordered), [axis], [k - 1], [k]))
        return one if keep else emit(op.squeeze(one, [axis]))

    return taken(op.sort(x, axis)), taken(op.argsort(x, axis, dtype="int64"))


def _sort(*names: str) -> Callable[[Any, Any], tuple[relax.Expr, ...]]:
    """Of the arguments that `names` has in this order. TVM's sorts are stable in any case."""

    def convert(node: Any, importer: Any) -> tuple[relax.Expr, ...]:
        given = dict(zip(names, arguments(node, importer, names, (-1, False)), strict=True))
        x, axis, descending = given["input"], given["dim"], given["descending"]
        emit = importer.block_builder.emit
        return emit(op.sort(x, axis, descending)), emit(op.argsort(x, axis, descending, dtype="int64"))

    return convert


def _places_in_order(node: Any, importer: Any) -> relax.Expr:
    """searchsorted: how many elements of each sequence are smaller (or, with `right`, not larger)."""
    names = ("sorted_sequence", "input", "out_int32", "right", "side", "sorter")
    sequence, values, _, right, side, sorter = arguments(node, importer, names, (False, False, None, None))
    if sorter is not None:
        axis = len(shape_of(sequence)) - 1
        sequence = importer.block_builder.emit(op.gather_elements(sequence, sorter, axis))
    return _counted(node, importer, sequence, values, right or side == "right")


def _bins(node: Any, importer: Any) -> relax.Expr:
    """bucketize: NaN is behind all boundaries; TVM puts it before them, and takes no numbers without axes."""
    x, boundaries, _, right = arguments(node, importer, ("input", "boundaries", "out_int32", "right"), (False, False))
    if not shape_of(x):
        return _counted(node, importer, boundaries, x, right)
    emit, found = importer.block_builder.emit, importer._bucketize(node)
    if not is_floating(str(x.ty.dtype)):
        return found
    last = relax.const(shape_of(boundaries)[0], dtype_of(node))
    return emit(op.where(emit(op.isnan(x)), last, found))


def _counted(node: Any, importer: Any, sequence: Any, values: Any, right: bool) -> relax.Expr:
    """The elements of each sequence that are smaller than each of its values, or not larger; all, of NaN."""
    emit, dtype = importer.block_builder.emit, compared_as(node.args[:2])
    sequence, value = cast(sequence, dtype, importer), emit(op.expand_dims(cast(values, dtype, importer), -1))
    if len(shape_of(sequence)) > 1:  # else it is that of all values, or of a number
        sequence = emit(op.expand_dims(sequence, -2))
    is_before = emit((op.less_equal if right else op.less)(sequence, value))
    if is_floating(dtype):
        is_before = emit(op.logical_or(is_before, emit(op.isnan(value))))
    return emit(op.sum(emit(op.astype(is_before, dtype_of(node))), axis=-1))


def so_far(emit: Any, values: relax.Expr, axis: int, combine: Callable[..., relax.Expr], neutral: float) -> relax.Expr:
    """Each element combined with all that come before it along an axis: of 2, 4, 8, ... elements up to each one.

    Parameters
    ----------
    emit : callable
        Of a block builder.
    values : relax.Expr
    axis : int
    combine : callable
        Of two tensors, the earlier elements in the second.
    neutral : float
        What changes nothing when it is combined with anything.
    """
    shape = shape_of(values)
    axis %= len(shape)
    before = [0] * (2 * len(shape))
    distance = 1
    while distance < shape[axis]:
        before[2 * axis] = distance
        moved = emit(op.nn.pad(values, before, pad_value=neutral))
        moved = emit(op.strided_slice(moved, [axis], [0], [shape[axis]]))
        values, distance = emit(combine(values, moved)), 2 * distance
    return values


def _extreme_so_far(choose: Callable[..., relax.Expr], is_largest: bool) -> Converter:
    """cummax and cummin, and the last places of what they found."""

    def convert(node: Any, importer: Any) -> tuple[relax.Expr, ...]:
        x, axis = arguments(node, importer, ("input", "dim"), ())
        emit, shape, dtype = importer.block_builder.emit, shape_of(x), str(x.ty.dtype)
        axis %= len(shape)
        if dtype == "int64" and not is_largest:  # a tensor is padded with floats, of which none is the largest integer
            turned = so_far(emit, emit(op.bitwise_not(x)), axis, op.maximum, _limit(dtype, lowest=True))
            values = emit(op.bitwise_not(turned))
        else:
            values = so_far(emit, x, axis, choose, _limit(dtype, lowest=is_largest))
        along = np.arange(shape[axis]).reshape([-1] + [1] * (len(shape) - 1 - axis))
        is_found = emit(op.equal(x, values))
        places = emit(op.where(is_found, constant_of(along), relax.const(0, "int64")))
        return values, so_far(emit, places, axis, op.maximum, 0)

    return convert


def _limit(dtype: str, lowest: bool) -> float:
    if dtype == "bool":
        return not lowest
    if dtype.startswith("int") or dtype == "uint8":
        limits = np.iinfo(numpy_dtype(dtype))
        return int(limits.min if lowest else limits.max)
    return -np.inf if lowest else np.inf


ORDER_CONVERTERS: dict[str, Converter] = {
    "argsort.default": lambda node, importer: _sort("input", "dim", "descending")(node, importer)[1],
    "sort.default": _sort("input", "dim", "descending"),
    "sort.stable": _sort("input", "stable", "dim", "descending"),
    "topk.default": _largest,
    "kthvalue.default": _smallest_but,
    "searchsorted.Tensor": _places_in_order,
    "bucketize.Tensor": _bins,
    "cummax.default": _extreme_so_far(op.maximum, True),
    "cummin.default": _extreme_so_far(op.minimum, False),
}
