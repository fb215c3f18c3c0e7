"""The lanes of a vector reduced to one value in log2(n) steps, and divisions that a vector loop repeats.

A schedule marks the loop over the lanes of a partial result LANE_TREE. One after another, 16 dependent additions take
48 cycles and more; halves are combined instead:

    for i in range(16):                       t8 = part[0:8] + part[8:16]
        total = total + part[i]           ->  t4 = t8[0:4] + t8[4:8]; t2 = ...; t1 = ...
                                              total = total + t1

Of a longer loop whole vectors are added first, and what is left of it one by one.

A division by something that is computed before, and that all vectors of a row share, becomes one reciprocal and
multiplications, which LLVM may not do by itself: the last bit can differ. Kernels that round or compare quotients keep
them, since floor(49 * (1 / 49)) is 0, and so do those that divide by what they are given: others may round the result.

    for j in vectorized(16):                  for j in vectorized(16):
        y[i, j] = e[i, j] / total[i]      ->      y[i, j] = e[i, j] * (1 / total[i])

So does one by the size of a window at the border, rows times columns: the reciprocal of either factor leaves a loop.
"""

from __future__ import annotations

from typing import Any

import tvm_ffi
from tvm import ir, s_tir, tirx
from tvm.ir.expr import TensorLoad

from ..analysis import accumulates
from ..expressions import COMPARISONS, binding_of, conjuncts, is_zero, nodes_of, substitute, uses
from ..marks import LANE_TREE
from ..statements import rewrite_marked_loops, rewritten, with_body

__all__ = ["multiply_by_reciprocals", "reduce_lanes_as_trees"]

_COMBINERS = (tirx.Add, tirx.Mul, tirx.Max, tirx.Min)
_ROUNDINGS = ("tirx.ceil", "tirx.floor", "tirx.nearbyint", "tirx.round", "tirx.trunc")


def reduce_lanes_as_trees(func: Any) -> Any:
    """Rewrite the loops of a scheduled PrimFunc that are marked LANE_TREE; the same object when there is none.

    A loop stays as it is where its block has a condition, or anything but one store of the form above. So does one over
    several rows in a kernel that sums a part of each: when it is placed in the whole, they lie apart.
    """
    is_part = accumulates(func)
    return rewrite_marked_loops(func, LANE_TREE, lambda loop: _tree(loop, is_part) or loop)


def multiply_by_reciprocals(func: Any) -> Any:
    """In vectorised loops, `x / d` becomes `x * (1 / d)` where all lanes share d, or d is a product of integers.

    Not where a last bit could make a difference of 1, nor where d is made of arguments of the kernel. Reciprocals of
    less than 2^-128 are infinite: to scale such divisors would cost rows of softmax 5 to 10 %.
    """
    if not nodes_of(func.body, tirx.Div) or _rounds_quotients(func.body):
        return func
    given = set(func.params)

    def vector_loop(loop: Any) -> Any:
        if loop.kind != tirx.ForKind.VECTORIZED:
            return loop
        varying = [loop.loop_var]

        def bind(realize: Any) -> None:
            varying.extend(variable for variable, value in binding_of(realize) if uses(value, *varying))

        tvm_ffi.structural_walk(loop.body, (s_tir.SBlockRealize, bind))

        def product(division: Any) -> Any:
            divisor = division.b
            if str(divisor.ty.dtype) != "float32":
                return division
            loads = nodes_of(divisor, TensorLoad)
            if not uses(divisor, *varying) and any(load.source not in given for load in loads):
                return division.a * _reciprocal(divisor)
            if isinstance(divisor, tirx.Cast) and isinstance(divisor.value, tirx.Mul) and not loads:
                across, along = divisor.value.a, divisor.value.b  # elements of a window at the border: rows x columns
                return division.a * (_reciprocal(across) * _reciprocal(along))
            return division

        def store(statement: Any) -> Any:
            value = tvm_ffi.structural_map(statement.value, (tirx.Div, product))
            unchanged = value.same_as(statement.value)
            return statement if unchanged else tirx.BufferStore(statement.buffer, value, statement.indices)

        body = tvm_ffi.structural_map(loop.body, (tirx.BufferStore, store))
        return loop if body.same_as(loop.body) else with_body(loop, body)

    return rewritten(func, (tirx.For, vector_loop))


def _rounds_quotients(body: Any) -> bool:
    """Whether quotients, or what is computed of them, are rounded, cast to integers, divided with a remainder, or
    compared with more than 0."""
    divided: set[Any] = set()

    def of_quotients(value: Any) -> bool:
        loads = nodes_of(value, TensorLoad)
        return bool(nodes_of(value, tirx.Div)) or any(load.source in divided for load in loads)

    stores, before = nodes_of(body, tirx.BufferStore), -1
    while before < len(divided):
        before = len(divided)
        divided.update(store.buffer for store in stores if of_quotients(store.value))
    rounded = [call for call in nodes_of(body, ir.Call) if getattr(call.op, "name", "") in _ROUNDINGS]
    rounded += [cast for cast in nodes_of(body, tirx.Cast) if _is_float(cast.value) and not _is_float(cast)]
    rounded += [remainder for remainder in nodes_of(body, tirx.Mod) if _is_float(remainder)]
    rounded += [
        node
        for node in nodes_of(body, COMPARISONS)
        if _is_float(node.a) and not is_zero(node.a) and not is_zero(node.b)
    ]
    return any(map(of_quotients, rounded))


def _is_float(value: Any) -> bool:
    return "float" in str(value.ty.dtype)


def _reciprocal(value: Any) -> Any:
    return tirx.const(1.0, "float32") / value.astype("float32")


def _tree(loop: Any, rows_lie_apart: bool) -> Any | None:
    realize, extent, lanes = loop.body, int(loop.extent), int(loop.annotations[LANE_TREE])
    if not isinstance(realize, s_tir.SBlockRealize) or lanes & (lanes - 1) or lanes > extent:
        return None
    store = realize.block.body
    combines = isinstance(store, tirx.BufferStore) and isinstance(store.value, _COMBINERS)
    if conjuncts(realize.predicate) or not combines:
        return None
    binding = binding_of(realize)
    total, part = store.value.a, substitute(store.value.b, binding)
    combine = type(store.value)
    if not isinstance(part, TensorLoad) or not isinstance(total, TensorLoad) or uses(total, part.source.data):
        return None
    if not total.source.same_as(store.buffer):  # the loop is of what is added, not of the sum
        return None
    if rows_lie_apart and any(uses(index, loop.loop_var) for index in part.indices[:-1]):
        return None
    *outer, begin = [substitute(index, [(loop.loop_var, loop.min)]) for index in part.indices]

    def load(start: int, count: int) -> Any:
        place = begin + start if count == 1 else tirx.Ramp(begin + start, 1, count)
        return tirx.BufferLoad(part.source, [*outer, place])

    statements: list[Any] = []
    vector = load(0, lanes)
    for start in range(lanes, extent - lanes + 1, lanes):
        vector = combine(vector, load(start, lanes))
    for size in (lanes >> n for n in range(1, lanes.bit_length())):
        halves = [tirx.Shuffle([vector], list(range(first, first + size))) for first in (0, size)]
        buffer = tirx.decl_buffer([size], str(part.ty.dtype), "tree")
        place = tirx.Ramp(0, 1, size) if size > 1 else 0
        statements += [tirx.AllocBuffer(buffer), tirx.BufferStore(buffer, combine(*halves), [place])]
        vector = tirx.BufferLoad(buffer, [place])
    for rest in range(extent - extent % lanes, extent):
        vector = combine(vector, load(rest, 1))
    indices = [substitute(index, binding) for index in store.indices]
    result = combine(substitute(total, binding), vector)
    return tirx.SeqStmt([*statements, tirx.BufferStore(store.buffer, result, indices)])
