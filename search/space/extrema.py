"""Largest and smallest elements as numpy finds them, where TVM begins with the lowest finite number.

    m = -3.4e38                           m = -inf
    for k: m = max(m, x[k])          ->   for k: m = max(m, x[k])

TVM's maximum of nothing but -inf is -3.4e38, and its position -1, an index outside of the row, as it is of bytes that
are all zero; it pads windows with -3.4e38, too. What a model pads with that number keeps it (tasks/pad.py). Positions
begin with the largest integer, so that the first of equal elements is found. Of rows with NaN the position stays any in
the row: to look for NaN takes 2.5 times as long, and TVM simplifies `x != x` to False.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import tvm_ffi
from tvm import s_tir, tirx
from tvm.ir.expr import TensorLoad

from .expressions import is_conditional, is_reduced, nodes_of, uses
from .statements import rewritten

__all__ = ["begin_with_infinity"]


def begin_with_infinity(function: Any) -> Any:
    """The PrimFunc, scheduled or not, with infinities where maxima and minima of floats begin, and in their padding.

    But for reductions across a GPU's threads, which TVM knows by what they begin with. The same object where there are
    none.
    """
    stores = nodes_of(function.body, tirx.BufferStore)
    first = {store.buffer: sign for store in stores if (sign := _sign_of_reduction(store))}
    positions = set()
    for select in nodes_of(function.body, tirx.Select):
        found = _tracked(select)
        if found is not None:
            sign, extremum, chosen = found
            if chosen.same_as(extremum):
                first[extremum] = sign
            else:
                positions.add(chosen)
    for buffer in _across_threads(function) if first else ():
        first.pop(buffer, None)
        positions.discard(buffer)
    if not first:
        return function
    images = _images(stores, first)

    def store(node: Any) -> Any:
        value = node.value
        if node.buffer in first:
            value = _infinite(value, first[node.buffer])
            if _sign_of_reduction(node):
                value = _with_padding(value, first[node.buffer])
        elif node.buffer in images:
            value = _padding(value, images[node.buffer])
        elif node.buffer in positions and isinstance(value, tirx.IntImm) and int(value) == -1:
            value = tirx.max_value(value.ty)
        return node if value.same_as(node.value) else tirx.BufferStore(node.buffer, value, node.indices)

    return rewritten(function, (tirx.BufferStore, store))


def _across_threads(function: Any) -> set[Any]:
    """Buffers of what is reduced across a GPU's threads."""
    bound: list[Any] = []
    found: set[Any] = set()

    def loop(node: Any) -> None:
        if node.thread_binding is not None:
            bound.append(node.loop_var)

    def realize(node: Any) -> None:
        for axis, value in zip(node.block.iter_vars, node.iter_values, strict=True):
            if uses(value, *bound):
                bound.append(axis.var)
                if is_reduced(axis):
                    found.update(store.buffer for store in nodes_of(node.block.body, tirx.BufferStore))

    tvm_ffi.structural_walk(function.body, [(tirx.For, loop), (s_tir.SBlockRealize, realize)], order="pre")
    return found


def _sign_of_reduction(store: Any) -> int:
    """1 of a store `m = max(m, ...)` of floats, -1 of a minimum, else 0."""
    if not isinstance(store.value, tirx.Max | tirx.Min) or not _is_float(store.value):
        return 0
    own = any(isinstance(part, TensorLoad) and part.source.same_as(store.buffer) for part in _operands(store.value))
    return (1 if isinstance(store.value, tirx.Max) else -1) if own else 0


def _tracked(select: Any) -> tuple[int, Any, Any] | None:
    """Of `select(v > x, v, x)` and `select(v > x or v == x and i < k, i, k)`: the sign, and the buffers of v and i."""
    condition, chosen = select.condition, select.true_value
    compared = condition.a if isinstance(condition, tirx.Or) else condition
    if not isinstance(compared, tirx.GT | tirx.LT) or not isinstance(chosen, TensorLoad):
        return None
    extremum = compared.a
    if not isinstance(extremum, TensorLoad) or not str(extremum.ty.dtype).startswith(("float", "int", "uint")):
        return None
    is_extremum = chosen.source.same_as(extremum.source)
    if not is_extremum and not _prefers_the_first(condition, chosen.source):
        return None  # -1 serves positions of the last of equal elements
    return (1 if isinstance(compared, tirx.GT) else -1), extremum.source, chosen.source


def _prefers_the_first(condition: Any, positions: Any) -> bool:
    """Whether, of equal elements, the smaller position stays."""
    smaller = nodes_of(condition, tirx.LT)
    return any(isinstance(one.a, TensorLoad) and one.a.source.same_as(positions) for one in smaller)


def _images(stores: list[Any], first: dict[Any, int]) -> dict[Any, int]:
    """Padded images that nothing but maxima read, or nothing but minima."""
    images: dict[Any, set[int]] = {}
    for store in stores:
        sign = _sign_of_reduction(store) if store.buffer in first else 0
        for load in nodes_of(store.value, TensorLoad):
            images.setdefault(load.source, set()).add(sign)
    return {image: next(iter(signs)) for image, signs in images.items() if signs in ({1}, {-1}) and image not in first}


def _with_padding(value: Any, sign: int) -> Any:
    parts = [_padding(part, sign) for part in _operands(value)]
    if all(new.same_as(old) for new, old in zip(parts, _operands(value), strict=True)):
        return value
    return type(value)(*parts)


def _padding(value: Any, sign: int) -> Any:
    """`if_then_else(inside, x, lowest)` with an infinity."""
    if not is_conditional(value):
        return value
    condition, inside, outside = value.args
    beside = _infinite(outside, sign)
    return value if beside.same_as(outside) else tirx.if_then_else(condition, inside, beside)


def _infinite(value: Any, sign: int) -> Any:
    """The infinity that no element is beyond, for the last finite number before it; any other value itself."""
    if not isinstance(value, tirx.FloatImm):
        return value
    limit: Callable[[Any], Any] = tirx.min_value if sign > 0 else tirx.max_value
    dtype = str(value.ty.dtype)
    if not dtype.startswith("float") or float(value.value) != float(limit(dtype).value):
        return value
    return tirx.const(-sign * math.inf, dtype)


def _operands(value: Any) -> tuple[Any, Any]:
    return value.a, value.b


def _is_float(value: Any) -> bool:
    return str(value.ty.dtype).startswith("float")
