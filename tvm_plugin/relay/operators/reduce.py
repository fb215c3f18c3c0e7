"""Reductions, sorting, scans, and products by subscripts."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from tvm.relax import op

from ..builder import Builder
from .operator import Convert, Operator, row

__all__ = ["REDUCE"]


def _reduce(function: Callable[..., Any]) -> Convert:
    def convert(b: Builder, args: Sequence[Any], attrs: SimpleNamespace) -> Any:
        axes = b.axes(attrs.axis, args[0], attrs.exclude) if attrs.axis else None
        return function(args[0], axis=axes, keepdims=attrs.keepdims)

    return convert


def _in_float32(convert: Convert) -> Convert:
    """Of float16 in float32, as Relay takes means since 0.11: a sum of many numbers is more than float16 holds."""

    def wide(b: Builder, args: Sequence[Any], attrs: SimpleNamespace) -> Any:
        if b.dtype(args[0]) != "float16":
            return convert(b, args, attrs)
        result = convert(b, [b.emit(op.astype(arg, "float32")) for arg in args], attrs)
        return op.astype(b.emit(result), "float16")

    return wide


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


def _trilu(b: Builder, args: Sequence[Any], attrs: SimpleNamespace) -> Any:
    function = op.triu if attrs.upper else op.tril
    return function(args[0], b.integers(args[1], "k")[0])


def _einsum(b: Builder, args: Sequence[Any], attrs: SimpleNamespace) -> Any:
    return op.einsum([b.emit(part) for part in b.fields(args[0])], attrs.equation)


REDUCE: list[Operator] = [
    row("sum", 1, "ReduceAttrs", _reduce(op.sum)),
    row("mean", 1, "ReduceAttrs", _in_float32(_reduce(op.mean))),
    row("max", 1, "ReduceAttrs", _reduce(op.max)),
    row("min", 1, "ReduceAttrs", _reduce(op.min)),
    row("prod", 1, "ReduceAttrs", _reduce(op.prod)),
    row("all", 1, "ReduceAttrs", _logic_reduce(op.min)),
    row("any", 1, "ReduceAttrs", _logic_reduce(op.max)),
    row("argmax", 1, "ArgReduceAttrs", _arg_reduce(op.argmax)),
    row("argmin", 1, "ArgReduceAttrs", _arg_reduce(op.argmin)),
    row("variance", 2, "VarianceAttrs", _in_float32(_variance)),
    row("cumsum", 1, "ScanopAttrs", _scan(op.cumsum)),
    row("cumprod", 1, "ScanopAttrs", _scan(op.cumprod)),
    row("argsort", 1, "ArgsortAttrs", _argsort),
    row("sort", 1, "ArgsortAttrs", _sort),
    row("topk", (1, 2), "TopkAttrs", _topk),
    row("dyn.topk", 2, "TopkAttrs", _topk),
    row("trilu", 2, "TriluAttrs", _trilu),
    row("einsum", 1, "EinsumAttrs", _einsum),
]
