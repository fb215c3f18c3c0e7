"""Divisions in indices, where TVM 0.27 would simplify them wrongly: they are written as C divides instead.

    y[v] = x[(47 - v) % 4 // 2]   ->   y[v] = x[truncmod(47 - v, 4) // 2]     (TVM: x[v % -4 // -2], for v < 48)

`FlattenBuffer` takes indices for maps of loop variables (`IterMapSimplify`). Where a dividend falls as a variable
grows, it divides by negative numbers and forgets the offset; of offsets in nested divisions it forgets some, too:
((v + 2) % 12 + 1) // 12 becomes (v + 3) % 12 // 12. Tensors that are reversed or rolled and then reshaped become such
indices where kernels are joined. C's division is nothing that `IterMapSimplify` looks at: the index stays as it is.
"""

from __future__ import annotations

from typing import Any

import tvm_ffi
from tvm import ir, s_tir, sym, tirx
from tvm.ir.expr import TensorLoad

from .expressions import binding_of, nodes_of
from .guarded_indices import DIVISIONS, simplify_guarded_indices, with_divisions

__all__ = ["keep_index_divisions"]

_ACCESSES = (TensorLoad, tirx.BufferStore, s_tir.SBlockRealize)

_OF_INDICES = ("int32", "int64")

_MOST = 2**31
"""A dividend that may be less than minus this is one of which nothing is known."""


def keep_index_divisions(function: Any) -> Any:
    """A PrimFunc, scheduled or not, whose indices TVM computes as written; the same object where it would anyhow.

    Divisions stay where the dividend is a sum of rising terms without an offset: those TVM simplifies rightly.
    """
    divisions = nodes_of(function.body, DIVISIONS)
    if not divisions:
        return function
    division = _Division(function.body)
    if not any(map(division.is_risky, divisions)):  # nor those of values and conditions, which stay in any case
        return function
    body = simplify_guarded_indices(function.body, division.analyzer)

    def access(node: Any) -> Any:
        indices = [with_divisions(value, division.kept) for value in _indices(node)]
        if all(new.same_as(old) for new, old in zip(indices, _indices(node), strict=True)):
            return node
        if isinstance(node, s_tir.SBlockRealize):
            return s_tir.SBlockRealize(indices, node.predicate, node.block)
        if isinstance(node, tirx.BufferStore):
            return tirx.BufferStore(node.buffer, node.value, indices)
        return tirx.BufferLoad(node.source, indices)

    body = tvm_ffi.structural_map(body, (_ACCESSES, access))
    return function if body.same_as(function.body) else function.with_body(body)


def _indices(access: Any) -> Any:
    """Also what a block's variables stand for: TVM puts it into the indices."""
    return access.iter_values if isinstance(access, s_tir.SBlockRealize) else access.indices


class _Division:
    """What there is to know of the variables in a function's body, to decide about its divisions."""

    def __init__(self, body: Any) -> None:
        self._bindings: dict[Any, Any] = {}
        self.analyzer = sym.Analyzer()

        def loop(node: Any) -> None:
            self.analyzer.bind(node.loop_var, ir.Range.from_min_extent(node.min, node.extent))

        def block(node: Any) -> None:
            self._bindings |= dict(binding_of(node))
            for axis in node.block.iter_vars:
                self.analyzer.bind(axis.var, axis.dom)

        tvm_ffi.structural_walk(body, [(tirx.For, loop), (s_tir.SBlockRealize, block)])

    def kept(self, node: Any) -> Any:
        """The division or remainder, so that TVM does not change it."""
        if not isinstance(node.b, tirx.IntImm) or int(node.b) <= 0 or not self.is_risky(node):
            return node
        dividend, divisor = node.a, node.b
        least = int(self.analyzer.const_int_bound(dividend).min_value)
        if least <= -_MOST:
            remainder = tirx.truncmod(tirx.truncmod(dividend, divisor) + divisor, divisor)
            return remainder if isinstance(node, tirx.FloorMod) else tirx.truncdiv(dividend - remainder, divisor)
        # C rounds towards zero: shifted by whole divisors, the dividend is never negative.
        shift = max(0, -(least // int(divisor)))
        dividend = dividend + shift * int(divisor) if shift else dividend
        if isinstance(node, tirx.FloorMod):
            return tirx.truncmod(dividend, divisor)
        quotient = tirx.truncdiv(dividend, divisor)
        return quotient - shift if shift else quotient

    def is_risky(self, node: Any) -> bool:
        """Whether TVM may change a division: whether the dividend, by loop variables, has an offset or a falling term.

        What is narrower than an index is a value, such as a byte by which a table is asked: TVM computes it as written.
        """
        dividend = node.a
        is_loop = isinstance(dividend, ir.Var) and dividend not in self._bindings
        if is_loop or str(dividend.ty.dtype) not in _OF_INDICES:
            return False
        expanded = self.analyzer.simplify(tvm_ffi.structural_map(dividend, (ir.Var, self._value_of)))
        factors = [factor for node in nodes_of(expanded, tirx.Mul) for factor in (node.a, node.b)]
        falls = any(not isinstance(node.b, tirx.IntImm) for node in nodes_of(expanded, tirx.Sub))
        falls |= any(isinstance(factor, tirx.IntImm) and int(factor) < 0 for factor in factors)
        return falls or _offset(expanded) != 0

    def _value_of(self, variable: Any) -> Any:
        value = self._bindings.get(variable)
        return variable if value is None else tvm_ffi.structural_map(value, (ir.Var, self._value_of))


def _offset(expression: Any) -> int:
    if isinstance(expression, tirx.IntImm):
        return int(expression)
    if isinstance(expression, tirx.Add):
        return _offset(expression.a) + _offset(expression.b)
    if isinstance(expression, tirx.Sub):
        return _offset(expression.a) - _offset(expression.b)
    return 0
