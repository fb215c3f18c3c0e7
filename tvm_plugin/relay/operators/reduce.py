"""Reductions, sorting, scans, and access by index."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
from tvm.relax import op

from ..builder import Builder
from .operator import Convert, Operator, row

__all__ = ["REDUCE"]


def _reduce(function: Callable[..., Any]) -> Convert:
    def convert(b: Builder, args: Sequence[Any], attrs: SimpleNamespace) -> Any:
        axes = b.axes(attrs.axis, args[0], attrs.exclude) if attrs.axis else None
        return function(args[0], axis=axes, keepdims=attrs.keepdims)

    return convert


def _logic_reduce(function: Callable[..., Any]) -> Convert:
    """all and any: the least and the greatest of zeros and ones."""

    def convert(b: Builder, args: Sequence[Any], attrs: SimpleNamespace) -> Any:
        numbers = b.emit(op.astype(args[0], "int8"))
        axes = b.axes(attrs.axis, args[0], attrs.exclude)
        return op.astype(b.emit(function(numbers, axis=axes, keepdims=attrs.keepdims)), "bool")

    return convert


def _arg_reduce(function: Callable[..., Any]) -> Convert:
    """Relay's positions are int32, Relax's int64."""

    def convert(b: Builder, args: Sequence[Any], attrs: SimpleNamespace) -> Any:
        axes = b.axes(attrs.axis, args[0], attrs.exclude)
        if len(axes) not in (1, b.rank(args[0])):
            raise ValueError(f"over the axes {axes}; one axis or all can be converted")
        if attrs.select_last_index:
            raise ValueError("select_last_index=True has no counterpart in Relax")
        axis = axes[0] if len(axes) == 1 else None
        return op.astype(b.emit(function(args[0], axis=axis, keepdims=attrs.keepdims)), "int32")

    return convert


def _variance(b: Builder, args: Sequence[Any], attrs: SimpleNamespace) -> Any:
    """The mean is the second argument, with the reduced axes kept."""
    axes = b.axes(attrs.axis, args[0], attrs.exclude)
    offset = b.emit(op.subtract(args[0], args[1]))
    squares = b.emit(op.multiply(offset, offset))
    if not attrs.unbiased:
        return op.mean(squares, axis=axes, keepdims=attrs.keepdims)
    count = math.prod(b.shape(args[0])[axis] for axis in axes) - 1
    total = b.emit(op.sum(squares, axis=axes, keepdims=attrs.keepdims))
    return op.multiply(total, b.like(1 / max(count, 1), args[0]))


def _scan(function: Callable[..., Any]) -> Convert:
    def convert(b: Builder, args: Sequence[Any], attrs: SimpleNamespace) -> Any:
        return function(
            args[0], axis=attrs.axis, dtype=attrs.dtype or b.dtype(args[0]), exclusive=bool(attrs.exclusive)
        )

    return convert


def _argsort(b: Builder, args: Sequence[Any], attrs: SimpleNamespace) -> Any:
    return op.argsort(args[0], axis=attrs.axis, descending=not attrs.is_ascend, dtype=attrs.dtype or "int32")


def _sort(b: Builder, args: Sequence[Any], attrs: SimpleNamespace) -> Any:
    return op.sort(args[0], axis=attrs.axis, descending=not attrs.is_ascend)


def _topk(b: Builder, args: Sequence[Any], attrs: SimpleNamespace) -> Any:
    count = attrs.k if len(args) == 1 else b.integers(args[1], "k")[0]
    if count is None or count < 1:
        count = b.shape(args[0])[attrs.axis]
    return op.topk(
        args[0],
        k=count,
        axis=attrs.axis,
        ret_type=attrs.ret_type,
        largest=not attrs.is_ascend,
        dtype=attrs.dtype or "int32",
    )


def _take(b: Builder, args: Sequence[Any], attrs: SimpleNamespace) -> Any:
    if attrs.batch_dims:
        raise ValueError("batch_dims has no counterpart in Relax")
    if attrs.mode not in ("clip", "wrap", "fast"):
        raise ValueError(f"mode is {attrs.mode!r}, expected clip, wrap or fast")
    axis = None if attrs.axis is None else b.axis(attrs.axis, args[0])
    extent = math.prod(b.shape(args[0])) if axis is None else b.shape(args[0])[axis]
    indices, mode = args[1], attrs.mode
    known = b.known(indices)
    if known is not None:  # within bounds, so that the mode does not matter, and others may look into the gather
        bounded = known % extent if mode == "wrap" else np.clip(known, 0, extent - 1)
        indices, mode = b.constant(np.asarray(bounded, known.dtype)), "fast"
    return op.take(args[0], indices, axis=axis, mode=mode)


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
        how = reduction or attrs.reduction
        return op.scatter_elements(*args, axis=b.axis(attrs.axis or 0, args[0]), reduction=how)

    return convert


def _scatter_nd(b: Builder, args: Sequence[Any], attrs: SimpleNamespace) -> Any:
    return op.scatter_nd(args[0], _index_last(b, args[1]), args[2], reduction=attrs.mode)


def _one_hot(b: Builder, args: Sequence[Any], attrs: SimpleNamespace) -> Any:
    """where(indices == 0 .. depth - 1, on, off)."""
    rank = b.rank(args[0])
    axis = attrs.axis % (rank + 1)
    shape = [1] * (rank + 1)
    shape[axis] = attrs.depth
    steps = b.constant(np.arange(attrs.depth).reshape(shape), b.dtype(args[0]))
    hot = b.emit(op.equal(b.emit(op.expand_dims(args[0], axis)), steps))
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
    positions = b.constant(np.arange(shape[axis]).reshape(shape), b.dtype(args[1]))
    lengths = [1] * b.rank(args[0])
    lengths[1 - axis] = b.shape(args[1])[0]
    inside = b.emit(op.less(positions, b.emit(op.reshape(args[1], lengths))))
    return op.where(inside, args[0], b.like(attrs.mask_value, args[0]))


def _trilu(b: Builder, args: Sequence[Any], attrs: SimpleNamespace) -> Any:
    function = op.triu if attrs.upper else op.tril
    return function(args[0], b.integers(args[1], "k")[0])


def _einsum(b: Builder, args: Sequence[Any], attrs: SimpleNamespace) -> Any:
    return op.einsum([b.emit(part) for part in b.fields(args[0])], attrs.equation)


def _reverse_sequence(b: Builder, args: Sequence[Any], attrs: SimpleNamespace) -> Any:
    return op.reverse_sequence(args[0], args[1], seq_axis=attrs.seq_axis, batch_axis=attrs.batch_axis)


REDUCE: list[Operator] = [
    row("sum", 1, "ReduceAttrs", _reduce(op.sum)),
    row("mean", 1, "ReduceAttrs", _reduce(op.mean)),
    row("max", 1, "ReduceAttrs", _reduce(op.max)),
    row("min", 1, "ReduceAttrs", _reduce(op.min)),
    row("prod", 1, "ReduceAttrs", _reduce(op.prod)),
    row("all", 1, "ReduceAttrs", _logic_reduce(op.min)),
    row("any", 1, "ReduceAttrs", _logic_reduce(op.max)),
    row("argmax", 1, "ArgReduceAttrs", _arg_reduce(op.argmax)),
    row("argmin", 1, "ArgReduceAttrs", _arg_reduce(op.argmin)),
    row("variance", 2, "VarianceAttrs", _variance),
    row("cumsum", 1, "ScanopAttrs", _scan(op.cumsum)),
    row("cumprod", 1, "ScanopAttrs", _scan(op.cumprod)),
    row("argsort", 1, "ArgsortAttrs", _argsort),
    row("sort", 1, "ArgsortAttrs", _sort),
    row("topk", (1, 2), "TopKAttrs", _topk),
    row("dyn.topk", 2, "TopKAttrs", _topk),
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
    row("trilu", 2, "TriluAttrs", _trilu),
    row("einsum", 1, "EinsumAttrs", _einsum),
]
