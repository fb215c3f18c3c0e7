"""How much work a kernel is, read from its TensorIR."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import tvm_ffi
from tvm import ir, s_tir, tirx
from tvm.ir.expr import TensorLoad

from ..dtypes import numpy_dtype
from ..search.space.expressions import constant_extent

__all__ = ["NEEDED", "count_bytes", "count_flops", "count_integer_operations"]

NEEDED = "eqtune.needed"
"""Annotation of a block: the share of its points that are asked for; others only fill up vectors, and are no work."""

_ARITHMETIC = (tirx.Add, tirx.Sub, tirx.Mul, tirx.Div, tirx.Max, tirx.Min)
_FREE_CALLS = frozenset({"prim.if_then_else", "tirx.likely", "tirx.reinterpret"})


def count_flops(function: tirx.PrimFunc) -> float:
    """Floating-point operations of one call of an unscheduled kernel.

    Each floating-point addition, multiplication, division, minimum, maximum and function (exp, erf, ...) counts
    one, so an FMA counts two; selects, casts, comparisons and index arithmetic count nothing. (TVM's
    `estimate_tir_flops` counts the index arithmetic of average pooling, and functions not at all.) An axis whose
    extent varies (the windows of a ragged adaptive pooling) counts as one.
    """
    return _count(function, _operations)


def count_integer_operations(function: tirx.PrimFunc) -> float:
    """The same of integers that are computed to be stored or converted: what quantised layers sum."""
    return _count(function, lambda body: _integer_operations(getattr(body, "value", None)))


def _count(function: tirx.PrimFunc, operations: Callable[[Any], float]) -> float:
    """`operations` of the body of each block, times the points of its axes."""
    root = function.body.block
    total = 0.0

    def add(block: s_tir.SBlock) -> None:
        nonlocal total
        if not block.same_as(root):
            points = math.prod(constant_extent(axis) for axis in block.iter_vars)
            total += points * float(block.annotations.get(NEEDED, 1.0)) * operations(block.body)

    tvm_ffi.structural_walk(function.body, (s_tir.SBlock, add))
    return total


def count_bytes(function: tirx.PrimFunc) -> float:
    """Bytes of all tensor arguments of one call, inputs and outputs, each once.

    Of an output that is written in part (its slice of a concatenation), only that part; of an input, no more elements
    than are read (the rows of a table that indices pick). An extent that is symbolic counts as one.
    """
    touched: list[tuple[Any, int]] = []

    def collect(block: s_tir.SBlock) -> None:
        extents = [(constant_extent(axis), int(axis.iter_type) == tirx.IterVar.DataPar) for axis in block.iter_vars]
        points = math.prod(extent for extent, is_spatial in extents if is_spatial)
        touched.extend((region.source, points) for region in block.writes)
        if isinstance(block.body, tirx.BufferStore):  # else a routine, with loops of its own
            points = math.prod(extent for extent, _ in extents)
            touched.extend((region.source, points) for region in block.reads)

    tvm_ffi.structural_walk(function.body, (s_tir.SBlock, collect))
    total = 0.0
    for parameter in function.params:
        if hasattr(parameter, "shape"):
            elements = _elements(parameter)
            points = [count for buffer, count in touched if buffer.same_as(parameter)]
            total += min([elements, *([sum(points)] if points else [])]) * numpy_dtype(str(parameter.dtype)).itemsize
    return total


def count_weight_bytes(function: tirx.PrimFunc) -> float:
    """Bytes of the arguments that are constants of the model (`layout_free_buffers`)."""
    weights = [function.params[int(position)] for position in function.attrs.get("layout_free_buffers", ())]
    return float(sum(_elements(w) * numpy_dtype(str(w.dtype)).itemsize for w in weights))


def _elements(buffer: Any) -> int:
    """How many a buffer has; a symbolic extent counts as one."""
    return math.prod(int(extent) for extent in buffer.shape if isinstance(extent, tirx.IntImm))


def _operations(body: Any) -> float:
    """Floating-point operations of one execution of a block's body.

    Where an index alone selects one of several values, as in Winograd's transforms, the mean of theirs.
    """
    choices = _choices(body.value) if isinstance(body, tirx.BufferStore) else [body]
    if len(choices) > 1:
        return sum(map(_operations, choices)) / len(choices)
    count = 0

    def add(expr: Any) -> None:
        nonlocal count
        if "float" in str(expr.ty) and not (isinstance(expr, ir.Call) and expr.op.name in _FREE_CALLS):
            count += 1

    tvm_ffi.structural_walk(body, ((*_ARITHMETIC, ir.Call), add))
    return count


def _integer_operations(value: Any) -> int:
    """Those of a value that do not compute an index or a condition."""
    if isinstance(value, _ARITHMETIC):
        return int("int" in str(value.ty)) + _integer_operations(value.a) + _integer_operations(value.b)
    if isinstance(value, tirx.Cast):
        return _integer_operations(value.value)
    if isinstance(value, tirx.Select):
        return _integer_operations(value.true_value)
    if isinstance(value, ir.Call):
        return sum(map(_integer_operations, value.args[value.op.name == "prim.if_then_else" :]))
    return 0


def _choices(value: Any) -> list[Any]:
    """The values of a chain of selections by an index; the value itself where it is no such chain."""
    found = []
    while isinstance(value, tirx.Select) and isinstance(value.condition, tirx.EQ) and _is_index(value.condition.a):
        found.append(value.true_value)
        value = value.false_value
    return [*found, value]


def _is_index(value: Any) -> bool:
    """Whether it is computed from loop variables: an integer that is loaded from nowhere."""
    loads: list[Any] = []
    tvm_ffi.structural_walk(value, (TensorLoad, loads.append))
    return "int" in str(value.ty) and not loads
