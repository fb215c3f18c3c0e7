"""Converters for PyTorch operators that read or write tensors by indices."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from tvm import relax
from tvm.relax import op

from ...dtypes import HALVES, is_floating
from ...errors import UnsupportedModelError
from ...relax_ir.constants import constant_of
from ...relax_ir.tensors import shape_of
from ...repairs.bounded_indices import from_start
from ...repairs.open_slices import from_begin, open_slice
from ..imported import KNOWN_SHAPES
from .halves import rounded_once
from .nodes import Converter, arguments, cast, full, scalar
from .sizes import is_size

__all__ = ["INDEXING_CONVERTERS"]


def _number_of_data(node: Any, importer: Any) -> relax.Expr:
    """What `item` gives, as a tensor without axes: an operand, or a place, but no size."""
    (x,) = arguments(node, importer, ("input",), ())
    return importer.block_builder.emit(op.reshape(x, []))


def _select(node: Any, importer: Any) -> relax.Expr:
    x, axis, index = arguments(node, importer, ("input", "dim", "index"), ())
    extent = shape_of(x)[axis]
    emit = importer.block_builder.emit
    axis %= len(shape_of(x))
    if isinstance(index, relax.Expr) and not is_size(index):
        place = cast(index, "int64", importer)
        return emit(op.take(x, from_start(emit, place, scalar(extent, "int64", importer)), axis=axis))
    begin = from_begin(index, extent)
    if is_size(begin):
        return emit(op.squeeze(open_slice(emit, x, axis, begin, 1), axis=[axis]))
    return emit(op.squeeze(emit(op.strided_slice(x, [axis], [begin], [begin + 1])), axis=[axis]))


def _index(node: Any, importer: Any) -> relax.Expr:
    """x[:, i, j]: the axes of `i` and `j` become one, of which whole slices are taken."""
    x = importer.env[node.args[0]]
    given = {axis: importer.env[index] for axis, index in enumerate(node.args[1]) if index is not None}
    if not all(map(_is_integer, given.values())):
        raise UnsupportedModelError(
            f"{node.name} selects by a mask: how much that is depends on data, and only static shapes can be tuned. "
            "Give places instead of a mask, computed outside of the model, or keep all and use torch.where"
        )
    emit = importer.block_builder.emit
    shape, axes = shape_of(x), list(given)
    if len({str(index.ty.dtype) for index in given.values()}) > 1:
        given = {axis: cast(index, "int64", importer) for axis, index in given.items()}
    if axes != list(range(axes[0], axes[0] + len(axes))):  # apart: what they select comes first
        rest = [axis for axis in range(len(shape)) if axis not in given]
        x = emit(op.permute_dims(x, [*axes, *rest]))
        shape, axes = [shape[axis] for axis in (*axes, *rest)], list(range(len(axes)))
    place = None
    for extent, index in zip(shape[axes[0] :], given.values(), strict=False):
        dtype = str(index.ty.dtype)
        count = scalar(extent, dtype, importer)
        index = from_start(emit, index, count)
        place = index if place is None else emit(op.add(op.multiply(place, count), index))
    joined = math.prod(shape[axis] for axis in axes)
    flat = emit(op.reshape(x, [*shape[: axes[0]], joined, *shape[axes[-1] + 1 :]]))
    return emit(op.take(flat, place, axis=axes[0]))


def _index_select(node: Any, importer: Any) -> relax.Expr:
    """Along an axis, which stays where the index has no axes; a number has nothing else to select."""
    x, axis, index = arguments(node, importer, ("input", "dim", "index"), ())
    emit = importer.block_builder.emit
    given, places = (operand.meta["val"] for operand in (node.args[0], node.args[2]))
    if not given.ndim:
        return x
    return emit(op.take(x, index if places.ndim else emit(op.expand_dims(index, 0)), axis=axis))


def _is_integer(index: Any) -> bool:
    """Bytes without a sign are masks, as PyTorch has it."""
    return str(index.ty.dtype).startswith("int")


def _index_put(node: Any, importer: Any) -> Any:
    """Sums of 16 bits, as `index_add` is exported, are taken in float32; what only moves stays narrow."""
    return (rounded_once(_put) if _accumulates(node) else _put)(node, importer)


def _accumulates(node: Any) -> bool:
    return bool(node.args[3] if len(node.args) > 3 else node.kwargs.get("accumulate", False))


def _put(node: Any, importer: Any) -> relax.Expr:
    """x[:, i, j] = values, or += where values accumulate, of integer indices: those axes come first meanwhile."""
    x, values = importer.env[node.args[0]], importer.env[node.args[2]]
    given = {axis: importer.env[index] for axis, index in enumerate(node.args[1]) if index is not None}
    accumulate = _accumulates(node)
    if [str(index.ty.dtype) for index in given.values()] == ["bool"]:
        return _put_where(x, given, values, accumulate, importer)
    if not all(map(_is_integer, given.values())):
        raise UnsupportedModelError(
            f"{node.name} writes where a mask holds, and at places of other axes: how much that is depends on data. "
            "Use torch.where, or places for the mask"
        )
    emit, shape, axes = importer.block_builder.emit, shape_of(x), list(given)
    rest = [axis for axis in range(len(shape)) if axis not in given]
    places = np.broadcast_shapes(*(tuple(shape_of(index)) for index in given.values()))
    together = axes == list(range(axes[0], axes[0] + len(axes)))
    before = rest[: axes[0]] if together else []  # these are the first of the values
    after = rest[len(before) :]
    values = emit(op.broadcast_to(values, [*(shape[a] for a in before), *places, *(shape[a] for a in after)]))
    if not places:  # one place, of which TVM wants an axis
        values, places = emit(op.expand_dims(values, len(before))), (1,)
    first = range(len(before), len(before) + len(places))
    values = emit(op.permute_dims(values, [*first, *range(len(before)), *range(first.stop, len(shape_of(values)))]))
    coordinates = [_coordinates(index, places, importer) for index in given.values()]
    order = [*axes, *rest]
    moved = emit(op.permute_dims(x, order))
    written = emit(op.scatter_nd(moved, emit(op.concat(coordinates, -1)), values, "add" if accumulate else "update"))
    return emit(op.permute_dims(written, [order.index(axis) for axis in range(len(shape))]))


def _put_where(x: Any, masks: Mapping[int, Any], values: Any, accumulate: bool, importer: Any) -> relax.Expr:
    """x[:, mask] = values, or +=, wherever a mask of some of the axes holds: equal ones, or one after another."""
    emit = importer.block_builder.emit
    ((first, mask),) = masks.items()
    places, given = shape_of(mask), shape_of(values)
    after = len(shape_of(x)) - first - len(places)
    values = cast(values, str(x.ty.dtype), importer)
    axis = len(given) - after - 1  # of the values for one place after another, if there is one
    if axis >= 0:
        if given[axis] != 1:
            counts = emit(op.cumsum(emit(op.astype(emit(op.reshape(mask, [-1])), "int64")), 0))
            numbers = emit(op.clip(emit(op.subtract(counts, relax.const(1, "int64"))), 0, given[axis] - 1))
            values = emit(op.take(values, numbers, axis=axis))
        extents = [1] * len(places) if given[axis] == 1 else places
        values = emit(op.reshape(values, [*given[:axis], *extents, *given[axis + 1 :]]))
    mask = emit(op.reshape(mask, [*places, *[1] * after]))
    return emit(op.where(mask, emit(op.add(x, values)) if accumulate else values, x))


def _coordinates(index: Any, shape: tuple[int, ...], importer: Any) -> relax.Expr:
    """Indices of `shape`, with an axis of one more."""
    emit = importer.block_builder.emit
    return emit(op.astype(emit(op.expand_dims(emit(op.broadcast_to(index, shape)), -1)), "int64"))


def _write_slice(node: Any, importer: Any) -> relax.Expr:
    """x[..., begin:end:step] = source, next to what is before and behind; TVM reads past the end of the source."""
    x, source, axis, *bounds = arguments(
        node, importer, ("input", "src", "dim", "start", "end", "step"), (0, None, None, 1)
    )
    emit, shape = importer.block_builder.emit, shape_of(x)
    axis %= len(shape)
    if any(map(is_size, (shape[axis], *bounds))):
        raise UnsupportedModelError(f"{node.name} writes to a part of an axis of open size; {KNOWN_SHAPES}")
    begin, end, step = slice(*bounds).indices(shape[axis])
    written = np.zeros(shape[axis], bool)
    written[begin:end:step] = True
    if not written.any():
        return x
    if step == 1:
        around = [(0, begin), (end, shape[axis])]
        before, behind = (
            [emit(op.strided_slice(x, [axis], [first], [last]))] if first < last else [] for first, last in around
        )
        parts = [*before, source, *behind]
        return emit(op.concat(parts, axis)) if len(parts) > 1 else source
    taken = emit(op.take(source, constant_of(np.maximum(np.cumsum(written) - 1, 0)), axis=axis))
    mask = constant_of(written.reshape([-1] + [1] * (len(shape) - 1 - axis)))
    return emit(op.where(mask, taken, x))


_REDUCTIONS: Mapping[str, str] = {"sum": "add", "prod": "mul", "amax": "max", "amin": "min", "mean": "add"}


def _scatter(reduction: str) -> Converter:
    def convert(node: Any, importer: Any) -> relax.Expr:
        x, axis, index, source = arguments(node, importer, ("input", "dim", "index", "src"), ())
        return _scattered(importer, x, axis, index, source, reduction)

    return convert


def _scattered(importer: Any, x: Any, axis: int, index: Any, source: Any, reduction: str) -> relax.Expr:
    """Of the source, as much as there are indices."""
    emit, extents = importer.block_builder.emit, shape_of(index)
    axes = list(range(len(extents)))
    used = emit(op.strided_slice(source, axes, [0] * len(axes), extents))
    return emit(op.scatter_elements(x, index, used, axis=axis, reduction=reduction))


def _scatter_reduce(node: Any, importer: Any) -> relax.Expr:
    """Of what is there already and what is scattered there, or of the latter alone, wherever there is some."""
    names = ("input", "dim", "index", "src", "reduce", "include_self")
    x, axis, index, source, reduce, with_own = arguments(node, importer, names, (True,))
    emit, dtype = importer.block_builder.emit, str(x.ty.dtype)
    if dtype == "bool":
        raise UnsupportedModelError(f"{node.name} reduces booleans where it scatters them; convert them to int8 before")
    begin = x if with_own else full(x, shape_of(x), _identity(reduce, dtype))
    result = _scattered(importer, begin, axis, index, source, _REDUCTIONS[reduce])
    if with_own and reduce != "mean":
        return result
    own = constant_of(np.full(shape_of(x), int(with_own), "int32"))
    ones = constant_of(np.ones(shape_of(index), "int32"))
    counts = _scattered(importer, own, axis, index, ones, "add")
    if reduce == "mean":
        divisor = emit(op.astype(emit(op.maximum(counts, relax.const(1, "int32"))), dtype))
        divide = op.divide if is_floating(dtype) else op.floor_divide
        result = emit(divide(result, divisor))
    return result if with_own else emit(op.where(emit(op.greater(counts, relax.const(0, "int32"))), result, x))


def _identity(reduce: str, dtype: str) -> float:
    """What changes no result of a reduction."""
    if reduce in ("amax", "amin"):
        is_float = is_floating(dtype)
        least, most = (-math.inf, math.inf) if is_float else (np.iinfo(dtype).min, np.iinfo(dtype).max)
        return least if reduce == "amax" else most
    return 1 if reduce == "prod" else 0


def _take(node: Any, importer: Any) -> relax.Expr:
    """Of all elements, as they lie in memory."""
    x, index = arguments(node, importer, ("input", "index"), ())
    emit, length = importer.block_builder.emit, math.prod(shape_of(x))
    return emit(op.take(emit(op.reshape(x, [length])), from_start(emit, index, length), axis=0))


_BAG_REDUCTIONS = ("sum", "mean", "max")


def _embedding_bag(node: Any, importer: Any) -> tuple[relax.Expr, ...]:
    """Rows of a table, reduced in the bag that each belongs to: those that `offsets` say begin at or before it, less
    one. Rows behind the end of the last bag, where there is one, and those of the index that is padding do not count.

    The other results, which are for training, are not computed.
    """
    names = ("weight", "indices", "offsets", "scale", "mode", "sparse", "per_sample_weights", "include_last_offset")
    defaults = (False, 0, False, None, False, -1)
    given = arguments(node, importer, (*names, "padding_idx"), defaults)
    table, indices, offsets, _, mode, _, factors, closed, padding = given
    emit, dtype, reduction = importer.block_builder.emit, str(table.ty.dtype), _BAG_REDUCTIONS[mode]
    bags, width = shape_of(offsets)[0] - bool(closed), shape_of(table)[1]
    places = np.arange(shape_of(indices)[0], dtype=str(offsets.ty.dtype))
    begun = emit(op.greater_equal(relax.const(places[:, None]), offsets))
    last = emit(op.subtract(op.sum(op.astype(begun, "int64"), axis=1, keepdims=True), relax.const(1, "int64")))
    wide = "float32" if dtype in HALVES else dtype  # for sums
    rows = cast(emit(op.take(table, indices, axis=0)), wide, importer)
    if factors is not None:
        rows = emit(op.multiply(rows, emit(op.expand_dims(cast(factors, wide, importer), 1))))
    ones, nothing = relax.const(np.ones((shape_of(indices)[0], 1), wide)), -math.inf if reduction == "max" else 0.0
    if padding not in (None, -1):
        counted = emit(op.not_equal(indices, relax.const(padding, str(indices.ty.dtype))))
        counted = emit(op.expand_dims(counted, 1))
        rows, ones = emit(op.where(counted, rows, relax.const(nothing, wide))), cast(counted, wide, importer)

    def collected(values: Any, columns: int, start: float = 0.0, reduce: str = "add") -> relax.Expr:
        begin = relax.const(np.full((shape_of(offsets)[0], columns), start, wide))
        found = emit(op.scatter_nd(begin, last, values, reduce))
        return emit(op.strided_slice(found, [0], [0], [bags])) if closed else found

    if reduction == "sum":
        result = collected(rows, width)
    elif reduction == "mean":
        count = emit(op.maximum(collected(ones, 1), relax.const(1, wide)))
        result = emit(op.divide(collected(rows, width), count))
    else:
        is_empty = emit(op.equal(collected(ones, 1), relax.const(0, wide)))
        result = emit(op.where(is_empty, relax.const(0, wide), collected(rows, width, nothing, "max")))
    return (cast(result, dtype, importer), None, None, None)


def _windows(node: Any, importer: Any) -> relax.Expr:
    """x.unfold(axis, size, step): the windows along an axis, their elements last."""
    x, axis, size, step = arguments(node, importer, ("input", "dimension", "size", "step"), ())
    emit, rank = importer.block_builder.emit, len(shape_of(x))
    axis %= rank
    starts = np.arange(0, shape_of(x)[axis] - size + 1, step)
    taken = emit(op.take(x, relax.const(starts[:, None] + np.arange(size)), axis=axis))
    return emit(op.permute_dims(taken, [*(a for a in range(rank + 1) if a != axis + 1), axis + 1]))


def _strided(node: Any, importer: Any) -> relax.Expr:
    """x.as_strided(size, stride, offset), of an `x` that lies in memory in order."""
    names = ("input", "size", "stride", "storage_offset")
    x, size, strides, offset = arguments(node, importer, names, (None,))
    given = node.args[0].meta["val"]
    if not given.is_contiguous() or given.storage_offset():  # the offset counts from where the storage begins
        raise UnsupportedModelError(f"{node.name} is as_strided of a tensor that is not contiguous, or a part of one")
    places = np.full((), offset or 0, "int64")
    for extent, stride in zip(size, strides, strict=True):
        places = places[..., None] + stride * np.arange(extent)
    if places.size and int(places.max()) >= given.numel():  # of a part whose storage goes on behind it
        raise UnsupportedModelError(f"{node.name} is as_strided of a part of a tensor, and reads what is behind it")
    emit = importer.block_builder.emit
    return emit(op.take(emit(op.reshape(x, [-1])), relax.const(places), axis=0))


INDEXING_CONVERTERS: dict[str, Converter] = {
    "item.default": _number_of_data,
    "_local_scalar_dense.default": _number_of_data,
    "select.int": _select,
    "index.Tensor": _index,
    "index_select.default": _index_select,
    "index_put.default": _index_put,
    "slice_scatter.default": _write_slice,
    "scatter.src": _scatter("update"),
    "scatter_add.default": _scatter("add"),
    "scatter_reduce.two": _scatter_reduce,
    "take.default": _take,
    "unfold.default": _windows,
    "as_strided.default": _strided,
    "_embedding_bag.default": _embedding_bag,
    "_embedding_bag_forward_only.default": _embedding_bag,
}
