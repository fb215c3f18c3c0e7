"""Access by index: gather and scatter of all kinds, one-hot vectors, masks of sequences and diagonals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
from tvm.relax import op

from ...repairs.partial_scatters import scatter_elements
from ..builder import Builder
from .operator import Convert, Operator, row

__all__ = ["INDEXING"]


def _take(b: Builder, args: Sequence[Any], attrs: SimpleNamespace) -> Any:
    if attrs.mode not in ("clip", "wrap", "fast"):
        raise ValueError(f"mode is {attrs.mode!r}, expected clip, wrap or fast")
    data, indices, mode = args[0], args[1], attrs.mode
    if attrs.axis is None and b.rank(data) != 1:
        data = b.emit(op.reshape(data, [math.prod(b.shape(data))]))
    axis = b.axis(attrs.axis or 0, data)
    if attrs.batch_dims:
        count = attrs.batch_dims if attrs.batch_dims > 0 else attrs.batch_dims + b.rank(indices)
        return _take_in_batches(b, data, indices, axis, count, mode)
    extent = b.shape(data)[axis]
    known = b.known(indices)
    if known is not None:  # within bounds, so that the mode does not matter, and others may look into the gather
        wide = known.astype("int64")
        bounded = wide % extent if mode == "wrap" else np.clip(wide, 0, extent - 1)
        narrow = bounded.astype(known.dtype)  # 199 of 200 rows is no int8
        indices, mode = b.constant(narrow if np.array_equal(narrow, bounded) else bounded), "fast"
    return op.take(data, indices, axis=axis, mode=mode)


def _wide(b: Builder, value: Any) -> Any:
    """Whole numbers as int64, for comparing or adding what their own dtype may not hold."""
    return b.emit(op.astype(value, "int64")) if "int" in b.dtype(value) and b.dtype(value) != "int64" else value


def _take_in_batches(b: Builder, data: Any, indices: Any, axis: int, count: int, mode: str) -> Any:
    """data (B.., K, ...) at indices (B.., I..): the first `count` axes of both go together, as one that is folded."""
    if axis != count:
        raise ValueError(f"batch_dims is {count} with axis {axis}; only the axis after those of the batch is converted")
    shape, wanted = b.shape(data), b.shape(indices)
    if shape[:count] != wanted[:count]:
        raise ValueError(f"data {tuple(shape)} and indices {tuple(wanted)} differ in the first {count} axes")
    batch, extent = math.prod(shape[:count]), shape[count]
    starts = np.arange(batch).reshape(*shape[:count], *[1] * (len(wanted) - count)) * extent
    flat = b.emit(op.reshape(data, [batch * extent, *shape[count + 1 :]]))
    indices = _wide(b, indices)
    wraps = mode == "wrap"
    bounded = b.emit(op.floor_mod(indices, b.like(extent, indices)) if wraps else op.clip(indices, 0, extent - 1))
    return op.take(flat, b.emit(op.add(bounded, b.constant(starts, "int64"))), axis=0)


def _gather(b: Builder, args: Sequence[Any], attrs: SimpleNamespace) -> Any:
    return op.gather_elements(args[0], args[1], axis=b.axis(attrs.axis or 0, args[0]))


def _index_last(b: Builder, indices: Any) -> Any:
    """Relay has the coordinates of an index on the first axis, Relax on the last."""
    rank = b.rank(indices)
    return b.emit(op.permute_dims(indices, [*range(1, rank), 0])) if rank > 1 else indices


def _gather_nd(b: Builder, args: Sequence[Any], attrs: SimpleNamespace) -> Any:
    indices = b.emit(op.astype(args[1], "int64")) if b.dtype(args[1]) != "int64" else args[1]
    return op.gather_nd(args[0], _index_last(b, indices), batch_dims=attrs.batch_dims or 0)


def _scatter_elements(reduction: str | None = None) -> Convert:
    def convert(b: Builder, args: Sequence[Any], attrs: SimpleNamespace) -> Any:
        x, indices, updates = args
        axis, how = b.axis(attrs.axis or 0, x), reduction or attrs.reduction
        return scatter_elements(b.emit, x, indices, updates, axis, how)

    return convert


def _scatter_nd(b: Builder, args: Sequence[Any], attrs: SimpleNamespace) -> Any:
    return op.scatter_nd(args[0], _index_last(b, args[1]), args[2], reduction=attrs.mode)


def _one_hot(b: Builder, args: Sequence[Any], attrs: SimpleNamespace) -> Any:
    """where(indices == 0 .. depth - 1, on, off)."""
    rank = b.rank(args[0])
    axis = attrs.axis % (rank + 1)
    shape = [1] * (rank + 1)
    shape[axis] = attrs.depth
    indices = _wide(b, args[0])
    steps = b.constant(np.arange(attrs.depth).reshape(shape), b.dtype(indices))
    hot = b.emit(op.equal(b.emit(op.expand_dims(indices, axis)), steps))
    chosen = op.where(hot, args[1], args[2])
    dtype = attrs.dtype or b.dtype(args[1])
    return chosen if dtype == b.dtype(args[1]) else op.astype(b.emit(chosen), dtype)


def _sequence_mask(b: Builder, args: Sequence[Any], attrs: SimpleNamespace) -> Any:
    """data (length, batch, ...), or (batch, length, ...) with axis 1: positions from the length on are masked."""
    axis = b.axis(attrs.axis, args[0])
    if axis > 1:
        raise ValueError(f"axis is {axis}, expected 0 or 1")
    shape = [1] * b.rank(args[0])
    shape[axis] = b.shape(args[0])[axis]
    lengths = _wide(b, args[1])
    positions = b.constant(np.arange(shape[axis]).reshape(shape), b.dtype(lengths))
    along_batch = [1] * b.rank(args[0])
    along_batch[1 - axis] = b.shape(lengths)[0]
    inside = b.emit(op.less(positions, b.emit(op.reshape(lengths, along_batch))))
    return op.where(inside, args[0], b.like(attrs.mask_value, args[0]))


def _reverse_sequence(b: Builder, args: Sequence[Any], attrs: SimpleNamespace) -> Any:
    return op.reverse_sequence(args[0], args[1], seq_axis=attrs.seq_axis, batch_axis=attrs.batch_axis)


def _dyn_one_hot(b: Builder, args: Sequence[Any], attrs: SimpleNamespace) -> Any:
    return _one_hot(b, args[:3], SimpleNamespace(**{**vars(attrs), "depth": b.integers(args[3], "the depth")[0]}))


def _adv_index(b: Builder, args: Sequence[Any], attrs: SimpleNamespace) -> Any:
    """data[i, j, ...], as numpy's; the tuple has the data first."""
    data, *indices = (b.emit(part) for part in b.fields(args[0]))
    return op.index_tensor(data, indices)


def _unravel_index(b: Builder, args: Sequence[Any], attrs: SimpleNamespace) -> Any:
    """Positions in a flattened tensor to coordinates in one of the given shape, along a new first axis."""
    first, *others = b.integers(args[1], "the shape")
    rest, coordinates = _wide(b, args[0]), []
    for extent in reversed(others):
        divisor = b.like(extent, rest)
        coordinates.append(b.emit(op.floor_mod(rest, divisor)))
        rest = b.emit(op.floor_divide(rest, divisor))
    coordinates.append(b.emit(op.floor_mod(rest, b.like(first, rest))))
    stacked, dtype = op.stack(coordinates[::-1], axis=0), b.dtype(args[0])
    return stacked if b.dtype(rest) == dtype else op.astype(b.emit(stacked), dtype)


def _invert_permutation(b: Builder, args: Sequence[Any], attrs: SimpleNamespace) -> Any:
    return op.argsort(args[0], axis=-1, dtype=b.dtype(args[0]))


def _searchsorted(b: Builder, args: Sequence[Any], attrs: SimpleNamespace) -> Any:
    if b.rank(args[0]) != 1:
        raise ValueError(f"sorted sequences of shape {tuple(b.shape(args[0]))}; Relax searches a single one")
    dtype = attrs.dtype or "int32"
    found = op.bucketize(args[1], args[0], out_int32=dtype != "int64", right=attrs.right)
    return found if dtype in ("int32", "int64") else op.astype(b.emit(found), dtype)


def _matrix_set_diag(b: Builder, args: Sequence[Any], attrs: SimpleNamespace) -> Any:
    """Replace the diagonal k1: where(column - row == k1, diagonal, data)."""
    if attrs.k1 != attrs.k2:
        raise ValueError(f"diagonals {attrs.k1} to {attrs.k2}; one at a time can be converted")
    rows, columns = b.shape(args[0])[-2:]
    row_of, column_of = np.indices((rows, columns))
    length = b.shape(args[1])[-1]
    source = np.clip(row_of if attrs.k1 >= 0 else column_of, 0, length - 1)
    spread = b.emit(op.take(args[1], b.constant(source, "int64"), axis=b.rank(args[1]) - 1))
    return op.where(b.constant(column_of - row_of == attrs.k1), spread, args[0])


def _sparse_to_dense(b: Builder, args: Sequence[Any], attrs: SimpleNamespace) -> Any:
    """A tensor of the default value with others at the given coordinates, one index a row."""
    shape = [int(extent) for extent in attrs.output_shape]
    indices, values, default = args
    count = b.shape(indices)[0] if b.rank(indices) else 1
    strides = np.cumprod([1, *shape[:0:-1]])[::-1].copy()
    places = b.emit(op.reshape(b.emit(op.astype(indices, "int64")), [count, len(shape)]))
    flat_places = b.emit(op.sum(b.emit(op.multiply(places, b.constant(strides, "int64"))), axis=1))
    updates = values if b.rank(values) else b.emit(op.broadcast_to(values, [count]))
    flat = b.emit(op.full([math.prod(shape)], default, dtype=b.dtype(values)))
    return op.reshape(b.emit(op.scatter_elements(flat, flat_places, updates, axis=0)), shape)


INDEXING: list[Operator] = [
    row("take", 2, "TakeAttrs", _take),
    row("gather", 2, "GatherAttrs", _gather),
    row("gather_nd", 2, "GatherNDAttrs", _gather_nd),
    row("scatter", 3, "ScatterAttrs", _scatter_elements("update")),
    row("scatter_add", 3, "ScatterAddAttrs", _scatter_elements("add")),
    row("scatter_elements", 3, "ScatterElementsAttrs", _scatter_elements()),
    row("scatter_nd", 3, "ScatterNDAttrs", _scatter_nd),
    row("one_hot", 3, "OneHotAttrs", _one_hot),
    row("sequence_mask", 2, "SequenceMaskAttrs", _sequence_mask),
    row("reverse_sequence", 2, "ReverseSequenceAttrs", _reverse_sequence),
    row("dyn.one_hot", 4, "OneHotAttrs", _dyn_one_hot),
    row("adv_index", 1, "", _adv_index),
    row("unravel_index", 2, "", _unravel_index),
    row("invert_permutation", 1, "", _invert_permutation),
    row("searchsorted", 2, "SearchSortedAttrs", _searchsorted),
    row("matrix_set_diag", 2, "MatrixSetDiagAttrs", _matrix_set_diag),
    row("sparse_to_dense", 3, "SparseToDenseAttrs", _sparse_to_dense),
]
