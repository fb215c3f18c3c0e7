"""Weight packing done by numpy: run the copy that a schedule split off, without compiling it.

A packing function holds blocks that copy one weight into one packed buffer, `packed[g(v)] = weight[f(v)]`, perhaps with
a constant where f(v) lies outside the weight. Where f and g are sums of terms of one axis each (tiles, panels, any
order of axes), the copy is a few strided copies, which numpy does at memory speed.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tvm_ffi
from numpy.typing import NDArray
from tvm import ir, s_tir, sym, tirx

from ..arrays import Array, aligned_empty, copy_into
from ..search.space.expressions import evaluate

__all__ = ["pack"]

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class _Copy:
    """`target[target_indices] = source[source_indices]` over `axes`; `pad` where the source index is outside."""

    axes: dict[Any, int]
    source: Any
    source_indices: list[Any]
    target: Any
    target_indices: list[Any]
    pad: float | None
    is_padding: Any


@dataclass(frozen=True)
class _Piece:
    """Part of one axis as digits: element offsets where it starts, and (extent, source stride, target stride) each."""

    source: int
    target: int
    digits: tuple[tuple[int, int, int], ...]


def pack(function: tirx.PrimFunc, weights: Sequence[Array]) -> list[Array] | None:
    """Compute what a packing function writes.

    Parameters
    ----------
    function : tvm.tirx.PrimFunc
        Its first parameters are the weights, the rest the packed buffers.
    weights : sequence of arrays

    Returns
    -------
    list of arrays, or None
        The packed weights in new, aligned memory; elements that nothing is copied to are zero. None when the function
        is something else than strided copies: compile it then.
    """
    copies = _copies(function)
    if copies is None or len(copies) != len(function.params) - len(weights):
        return None
    parameters = list(function.params)
    packed: list[Array] = []
    for position, parameter in enumerate(parameters[len(weights) :]):
        copy = next((copy for copy in copies if copy.target.same_as(parameter)), None)
        source = next((i for i, p in enumerate(parameters) if copy is not None and copy.source.same_as(p)), None)
        if copy is None or source is None or source >= len(weights):
            return None
        result = _run(copy, weights[source], parameters[len(weights) + position])
        if result is None:
            return None
        packed.append(result)
    return packed


def _run(copy: _Copy, weight: Array, parameter: Any) -> Array | None:
    shape = tuple(int(extent) for extent in parameter.shape)
    if not _separable(copy.source_indices) or not _separable(copy.target_indices):
        return None
    reach = [_reach(index, copy.axes) for index in copy.source_indices]
    if any(low < 0 for low, _ in reach):
        return None
    if copy.pad is not None:
        if not _evaluable(copy.is_padding) or not _pads_the_outside(copy, weight.shape):
            return None
        beyond = [(0, max(0, high + 1 - extent)) for (_, high), extent in zip(reach, weight.shape, strict=True)]
        weight = np.pad(weight, beyond, constant_values=copy.pad) if any(after for _, after in beyond) else weight
    elif any(high >= extent for (_, high), extent in zip(reach, weight.shape, strict=True)):
        return None
    weight = np.ascontiguousarray(weight)
    axes = []
    for axis in copy.axes:
        pieces = _decompose(
            _offsets(copy.source_indices, weight.shape, axis, copy.axes),
            _offsets(copy.target_indices, shape, axis, copy.axes),
        )
        if pieces is None:
            return None
        axes.append(pieces)
    origin = dict.fromkeys(copy.axes, 0)
    source_origin = _flat(copy.source_indices, weight.shape, origin)
    target_origin = _flat(copy.target_indices, shape, origin)
    packed = aligned_empty(shape, weight.dtype)
    if math.prod(copy.axes.values()) < packed.size:
        packed[...] = 0  # what no element is copied to
    for combination in itertools.product(*axes):
        digits = [digit for piece in combination for digit in piece.digits]
        copy_into(
            _view(packed, int(target_origin) + sum(p.target for p in combination), [(n, t) for n, _, t in digits]),
            _view(weight, int(source_origin) + sum(p.source for p in combination), [(n, s) for n, s, _ in digits]),
        )
    return packed


def _view(array: Array, offset: int, digits: Sequence[tuple[int, int]]) -> Array:
    return np.lib.stride_tricks.as_strided(
        array.reshape(-1)[offset:],
        [extent for extent, _ in digits],
        [stride * array.itemsize for _, stride in digits],
    )


def _decompose(source: Ints, target: Ints) -> list[_Piece] | None:
    """Split an axis into pieces whose digits have constant strides on both sides; None when there are too many."""
    pieces = []
    begin = 0
    while begin < len(source):
        digits, length = _digits(source[begin:], target[begin:])
        pieces.append(_Piece(int(source[begin]), int(target[begin]), digits))
        begin += length
        if len(pieces) > 4:
            return None
    return pieces


def _digits(source: Ints, target: Ints) -> tuple[tuple[tuple[int, int, int], ...], int]:
    """The digits of the longest regular run from the start, outermost first, and its length."""
    if len(source) == 1:
        return ((1, 0, 0),), 1
    strides = int(source[1] - source[0]), int(target[1] - target[0])
    steps = np.arange(len(source))
    regular = (source == source[0] + steps * strides[0]) & (target == target[0] + steps * strides[1])
    run = len(source) if regular.all() else int(np.argmin(regular))
    blocks = len(source) // run
    if blocks > 1:
        inside = np.arange(run)
        starts = np.arange(blocks) * run
        expected_source = source[starts][:, None] + inside * strides[0]
        expected_target = target[starts][:, None] + inside * strides[1]
        same = (source[: blocks * run].reshape(blocks, run) == expected_source).all(axis=1)
        same &= (target[: blocks * run].reshape(blocks, run) == expected_target).all(axis=1)
        blocks = blocks if same.all() else int(np.argmin(same))
        outer, length = _digits(source[: blocks * run : run], target[: blocks * run : run])
        return (*outer, (run, *strides)), length * run
    return ((run, *strides),), run


# Index expressions.


def _copies(function: tirx.PrimFunc) -> list[_Copy] | None:
    blocks: list[Any] = []
    tvm_ffi.structural_walk(function.body, (s_tir.SBlock, blocks.append))
    copies = []
    for block in blocks:
        if block.same_as(function.body.block):
            continue
        store = block.body
        if not isinstance(store, tirx.BufferStore) or any(axis.iter_type != 0 for axis in block.iter_vars):
            return None
        value, pad, is_padding = _load_of(store.value)
        if value is None:
            return None
        axes = {axis.var: int(axis.dom.extent) for axis in block.iter_vars}
        analyzer = sym.Analyzer()
        for axis in block.iter_vars:
            analyzer.bind(axis.var, axis.dom)
        source, target = ([analyzer.simplify(index) for index in access.indices] for access in (value, store))
        copies.append(_Copy(axes, value.source, source, store.buffer, target, pad, is_padding))
    return copies


def _load_of(value: Any) -> tuple[Any, float | None, Any]:
    """The load, the constant that pads it, and where: if_then_else(padding, constant, load)."""
    if isinstance(value, ir.TensorLoad):
        return value, None, None
    if isinstance(value, ir.Call) and getattr(value.op, "name", "") == "prim.if_then_else":
        condition, pad, load = value.args
        if isinstance(load, ir.TensorLoad) and isinstance(pad, tirx.FloatImm | tirx.IntImm):
            return load, float(pad.value), condition
    return None, None, None


def _pads_the_outside(copy: _Copy, shape: Sequence[int]) -> bool:
    """Whether the padding condition holds exactly where the source index is outside of the weight."""
    used = _variables(copy.is_padding)
    for index, extent in zip(copy.source_indices, shape, strict=True):
        if _reach(index, copy.axes)[1] >= extent:
            used |= _variables(index)
    order = [axis for axis in copy.axes if axis in used]
    grids = np.meshgrid(*(np.arange(copy.axes[axis]) for axis in order), indexing="ij", sparse=True)
    values = {axis: 0 for axis in copy.axes} | dict(zip(order, grids, strict=True))
    outside: Any = np.zeros((), np.bool_)
    for index, extent in zip(copy.source_indices, shape, strict=True):
        if _reach(index, copy.axes)[1] >= extent:
            outside = outside | (evaluate(index, values) >= extent)
    padding = np.broadcast_to(evaluate(copy.is_padding, values), np.broadcast_shapes(*(g.shape for g in grids)))
    return bool(np.array_equal(padding, np.broadcast_to(outside, padding.shape)))


def _separable(indices: Sequence[Any]) -> bool:
    """Whether each index is a sum of terms that read one axis each."""

    def check(expr: Any) -> bool:
        if isinstance(expr, tirx.Add | tirx.Sub):
            return check(expr.a) and check(expr.b)
        if isinstance(expr, tirx.Mul) and isinstance(expr.b, tirx.IntImm):
            return check(expr.a)
        return len(_variables(expr)) <= 1 and _evaluable(expr)

    return all(check(index) for index in indices)


def _reach(index: Any, axes: Mapping[Any, int]) -> tuple[int, int]:
    """Smallest and largest value of a separable index."""
    origin = dict.fromkeys(axes, 0)
    base = int(evaluate(index, origin))
    low = high = base
    for axis in axes:
        if axis in _variables(index):
            change = evaluate(index, origin | {axis: np.arange(axes[axis])}) - base
            low, high = low + int(change.min()), high + int(change.max())
    return low, high


def _offsets(indices: Sequence[Any], shape: Sequence[int], axis: Any, axes: Mapping[Any, int]) -> Ints:
    """How far each value of one axis moves the flat position, in elements; shape [extent]."""
    origin = dict.fromkeys(axes, 0)
    moved = _flat(indices, shape, origin | {axis: np.arange(axes[axis])})
    return np.broadcast_to(moved - _flat(indices, shape, origin), (axes[axis],))


def _flat(indices: Sequence[Any], shape: Sequence[int], values: Mapping[Any, Any]) -> Any:
    flat: Any = 0
    for index, extent in zip(indices, shape, strict=True):
        flat = flat * extent + evaluate(index, values).astype(np.int64)
    return flat


def _evaluable(expr: Any) -> bool:
    try:
        evaluate(expr, dict.fromkeys(_variables(expr), np.zeros((), np.int64)))
    except TypeError:
        return False
    return True


def _variables(expr: Any) -> set[Any]:
    found: list[Any] = []
    tvm_ffi.structural_walk(expr, (ir.Var, found.append))
    return set(found)
