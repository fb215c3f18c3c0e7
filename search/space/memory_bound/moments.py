"""Mean and variance of a row in one pass over it, without the cancellation of E[x^2] - E[x]^2.

A norm's kernel sums x in lanes, then (x - mean)^2 in the same lanes. Here both are summed together, of differences from
an element of each lane, and corrected when the mean is known (T. F. Chan, G. H. Golub, R. J. LeVeque, 1983, "Algorithms
for computing the sample variance"):

    for k, l: sum[l] += x[k, l]                     c[l] = median(x[0, l], x[1, l], x[2, l])
    mean = ...                                      for k, l: sum[l] += x[k, l] - c[l]; squares[l] += (x[k, l] - c[l])^2
    for k, l: squares[l] += (x[k, l] - mean)^2  ->  shifted[l] = sum[l]; sum[l] += n * c[l]
    ...                                             mean = ...
                                                    d[l] = mean - c[l]; squares[l] -= d[l] * (2 * shifted[l] - n * d[l])

As c is one of the n elements of its lane, (mean of the lane - c)^2 is at most n times the lane's variance, so that at
most n units in the last place are lost. Of three, the median is like the other elements even where one is an outlier,
and then two or three units are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import tvm_ffi
from tvm import s_tir, tirx
from tvm.ir.expr import TensorLoad

from ..expressions import binding_of, conjuncts, is_reduced, nodes_of, substitute, uses
from ..statements import block_with

__all__ = ["sum_moments_together"]

_MOST_ELEMENTS = 1024  # of a lane


@dataclass(frozen=True)
class _Sum:
    """`target[indices] += value` in a nest of `loops`, one of which, `reduced`, is summed over."""

    loops: tuple[Any, ...]
    reduced: Any
    target: Any
    indices: tuple[Any, ...]
    value: Any

    @property
    def lanes(self) -> tuple[Any, ...]:
        return tuple(loop for loop in self.loops if not loop.same_as(self.reduced))


def sum_moments_together(func: Any) -> Any:
    """Rewrite the sums of a scheduled PrimFunc; the same object when there are none of the form above.

    Only sums in vectors of float32 are rewritten, of at most 1024 elements a lane, in loops of the same form.
    """
    buffers: list[Any] = []

    def sequence(statements: Any) -> Any:
        return _together(list(statements.seq), buffers) or statements

    body = tvm_ffi.structural_map(func.body, (tirx.SeqStmt, sequence))
    if not buffers:
        return func
    block = block_with(body.block, alloc_buffers=[*body.block.alloc_buffers, *buffers])
    return func.with_body(s_tir.SBlockRealize(body.iter_values, body.predicate, block))


def _together(statements: list[Any], buffers: list[Any]) -> Any | None:
    sums = {place: found for place, statement in enumerate(statements) if (found := _sum(statement)) is not None}
    for first, second in ((i, j) for i in sums for j in sums if i < j):
        mean = _mean(sums[first], sums[second])
        zeros = [i for i in range(first + 1, second) if _zeroes(statements[i], sums[second].target)]
        if mean is not None and len(zeros) == 1:
            start, end = _one_pass(sums[first], sums[second].target, mean, buffers)
            before, between = statements[:first], statements[first + 1 : second]
            between.remove(statements[zeros[0]])
            return tirx.SeqStmt([*before, statements[zeros[0]], *start, *between, end, *statements[second + 1 :]])
    return None


def _one_pass(total: _Sum, squares: Any, mean: Any, buffers: list[Any]) -> tuple[list[Any], Any]:
    """What takes the place of the first sum, and of the second."""
    center, shifted = (tirx.decl_buffer(total.target.shape, "float32", name) for name in ("center", "shifted"))
    buffers += [center, shifted]
    indices, count = list(total.indices), tirx.const(float(int(total.reduced.extent)), "float32")
    of_sum, of_squares, of_center, of_shifted = (
        tirx.BufferLoad(buffer, indices) for buffer in (total.target, squares, center, shifted)
    )
    begin = total.reduced.min
    a, b, c = (substitute(total.value, [(total.reduced.loop_var, begin + place)]) for place in range(3))
    median = tirx.Max(tirx.Min(a, b), tirx.Min(tirx.Max(a, b), c))
    difference, distance = total.value - of_center, mean - of_center
    both = [
        tirx.BufferStore(total.target, of_sum + difference, indices),
        tirx.BufferStore(squares, of_squares + difference * difference, indices),
    ]
    back = [
        tirx.BufferStore(shifted, of_sum, indices),
        tirx.BufferStore(total.target, of_sum + of_center * count, indices),
    ]
    corrected = of_squares - distance * (of_shifted + of_shifted - distance * count)
    # Squares beyond float32 stay infinite: their correction may be so, too, and the difference would be NaN.
    corrected = tirx.Select(of_squares <= tirx.max_value("float32"), corrected, of_squares)
    return (
        [
            _nest(total.lanes, tirx.BufferStore(center, median, indices)),
            _nest(total.loops, tirx.SeqStmt(both)),
            _nest(total.lanes, tirx.SeqStmt(back)),
        ],
        _nest(total.lanes, tirx.BufferStore(squares, corrected, indices)),
    )


def _mean(total: _Sum, squares: _Sum) -> Any | None:
    """What the second sum subtracts, in terms of the first's loops; None where they are not moments of the same."""
    if len(total.loops) != len(squares.loops) or not isinstance(squares.value, tirx.Mul):
        return None
    pairs = list(zip(squares.loops, total.loops, strict=True))
    alike = all(int(a.extent) == int(b.extent) and a.kind == b.kind for a, b in pairs)
    names = [(a.loop_var, b.loop_var) for a, b in pairs]
    once, again = squares.value.a, squares.value.b
    if not alike or not tvm_ffi.structural_equal(once, again) or not isinstance(once, tirx.Sub):
        return None
    value, mean, *indices = (substitute(part, names) for part in (once.a, once.b, *squares.indices))
    same = tvm_ffi.structural_equal(value, total.value) and all(map(tvm_ffi.structural_equal, indices, total.indices))
    known = (squares.target, total.target)
    if not same or uses(mean, total.reduced.loop_var) or any(_loads(value, buffer) for buffer in known):
        return None
    return mean


def _sum(statement: Any) -> _Sum | None:
    loops: list[Any] = []
    while isinstance(statement, tirx.For):
        loops.append(statement)
        statement = statement.body
    if not isinstance(statement, s_tir.SBlockRealize) or not loops or loops[-1].kind != tirx.ForKind.VECTORIZED:
        return None
    store, binding = statement.block.body, binding_of(statement)
    kinds = list(map(is_reduced, statement.block.iter_vars))
    if not isinstance(store, tirx.BufferStore) or not isinstance(store.value, tirx.Add) or sum(kinds) != 1:
        return None
    reduced = [loop for loop in loops if loop.loop_var.same_as(binding[kinds.index(True)][1])]
    own = store.value.a
    known = isinstance(own, TensorLoad) and own.source.same_as(store.buffer)
    plain = not conjuncts(statement.predicate) and str(store.value.ty.dtype) == "float32"
    if not plain or not known or not reduced or not 2 < int(reduced[0].extent) <= _MOST_ELEMENTS:
        return None
    indices = tuple(substitute(index, binding) for index in store.indices)
    return _Sum(tuple(loops), reduced[0], store.buffer, indices, substitute(store.value.b, binding))


def _zeroes(statement: Any, buffer: Any) -> bool:
    """Whether it does nothing but set all of a buffer's elements to a constant."""
    stores = nodes_of(statement, tirx.BufferStore)
    return len(stores) == 1 and stores[0].buffer.same_as(buffer) and isinstance(stores[0].value, tirx.FloatImm)


def _nest(loops: tuple[Any, ...], body: Any) -> Any:
    """`body` in loops like these, of variables of their own."""
    for loop in reversed(loops):
        variable = tirx.Var(loop.loop_var.name, loop.loop_var.ty.dtype)
        body = substitute(body, [(loop.loop_var, variable)])
        body = tirx.For(variable, loop.min, loop.extent, loop.kind, body, annotations=loop.annotations)
    return body


def _loads(expression: Any, buffer: Any) -> bool:
    return any(buffer.same_as(load.source) for load in nodes_of(expression, TensorLoad))
