"""Differences from the maximum of a row are never positive, so that their `exp` cannot overflow.

    m[i] = max(m[i], x[i, k])                      for every k
    e[i, j] = exp(x[i, j] - m[i])              ->  e[i, j] = exp_below_zero(x[i, j] - m[i])

Softmax's exp is two instructions of nineteen a vector shorter without the case of a large argument.
"""

from __future__ import annotations

import math
from typing import Any

import tvm_ffi
from tvm import ir, s_tir, sym, tirx
from tvm.ir.expr import TensorLoad

from ..expressions import nodes_of
from ..statements import rewritten
from .math_forms import exp_below_zero

__all__ = ["exp_of_differences_from_maxima"]

_MOST_FACTORS = 3
"""Partial maxima of partial maxima that are followed."""


def exp_of_differences_from_maxima(func: Any) -> Any:
    """Replace float32 `exp(x[i, j] - m[i])` where every store to m, but for constants, is of such a maximum over x[i].

    Not where it is over a part of x[i]: what is left out may be larger. Partial maxima in buffers of their own
    (rfactor) are followed. The same object when there is nothing to replace.
    """
    stores = nodes_of(func.body, tirx.BufferStore)
    maxima = [store for store in stores if isinstance(store.value, tirx.Max)]
    if not maxima:
        return func
    analyzer = sym.Analyzer()
    for block in nodes_of(func.body, s_tir.SBlock):
        for axis in block.iter_vars:
            analyzer.bind(axis.var, axis.dom)

    def covers(row: Any, buffer: Any, element: Any, depth: int = 0) -> bool:
        """Whether `buffer`, whose first indices are a row's, holds maxima over rows of what `element` loads."""
        own = [store for store in stores if store.buffer.same_as(buffer)]
        updates = [store for store in maxima if store.buffer.same_as(buffer)]
        constants = sum(isinstance(store.value, tirx.FloatImm) for store in own)
        if not updates or len(updates) + constants != len(own) or depth > _MOST_FACTORS:
            return False
        return any(
            _of_one_row(store, len(row), analyzer) and source_covers(row, store.value, element, depth)
            for store in updates
        )

    def source_covers(row: Any, maximum: Any, element: Any, depth: int) -> bool:
        sources = [load.source for load in (maximum.a, maximum.b)]
        return any(source.same_as(element) or covers(row, source, element, depth + 1) for source in sources)

    def replace(call: Any) -> Any:
        difference = call.args[0] if getattr(call.op, "name", "") == "tirx.exp" else None
        if not isinstance(difference, tirx.Sub) or str(call.ty.dtype) != "float32":
            return call
        element, maximum = difference.a, difference.b
        if not isinstance(element, TensorLoad) or not isinstance(maximum, TensorLoad):
            return call
        row = list(maximum.indices)
        same_row = _starts_with(element.indices, row)
        return exp_below_zero(difference) if same_row and covers(row, maximum.source, element.source) else call

    return rewritten(func, (ir.Call, replace))


def _of_one_row(store: Any, axes: int, analyzer: Any) -> bool:
    """Whether a maximum is taken of the whole row that it is stored in: the first `axes` indices, and no others."""
    row = list(store.indices)[:axes]
    loads = (store.value.a, store.value.b)
    return all(
        isinstance(load, TensorLoad) and _starts_with(load.indices, row) and _runs_over_all(load, axes, analyzer)
        for load in loads
    )


def _runs_over_all(load: Any, axes: int, analyzer: Any) -> bool:
    """Whether all indices of `load` but the first `axes` begin at zero and end where their axis does, and take as many
    places as there are: neither every third one nor a diagonal."""
    row, indices = list(load.indices)[:axes], list(load.indices)[axes:]
    extents = [int(extent) for extent in list(load.source.shape)[axes:]]
    whole = all(_bounds(index, analyzer) == (0, extent - 1) for index, extent in zip(indices, extents, strict=True))
    fixed = {variable for index in row for variable in nodes_of(index, ir.Var)}
    moving = {variable for index in indices for variable in nodes_of(index, ir.Var)} - fixed
    taken = (_bounds(variable, analyzer) for variable in moving)
    return whole and math.prod(last - first + 1 for first, last in taken) >= math.prod(extents)


def _bounds(value: Any, analyzer: Any) -> tuple[int, int]:
    bound = analyzer.const_int_bound(value)
    return int(bound.min_value), int(bound.max_value)


def _starts_with(indices: Any, row: list[Any]) -> bool:
    return len(indices) >= len(row) and all(map(tvm_ffi.structural_equal, row, list(indices)))
