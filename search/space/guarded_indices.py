"""Indices of what a condition guards, without the divisions whose quotient follows from the condition.

    y[w, v] = x[w + (v - 32) // 32, v % 32] if v >= 32 else z[w, v]     (v < 64)
    ->  y[w, v] = x[w, v - 32] if v >= 32 else z[w, v]

Where images are joined that were reshaped before, kernels have such indices: TVM takes a dividend for what it may be
for every v, not only for those that are loaded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tvm_ffi
from tvm import ir, tirx
from tvm.ir.expr import TensorLoad

from .expressions import is_conditional, nodes_of

__all__ = ["DIVISIONS", "simplify_guarded_indices", "with_divisions"]

DIVISIONS = (tirx.FloorDiv, tirx.FloorMod)
"""What divides in an index: quotients, and remainders."""


def with_divisions(index: Any, rewrite: Callable[[Any], Any]) -> Any:
    """An index whose divisions were rewritten, inner ones first; most are a number or a variable, and have none."""
    return index if isinstance(index, tirx.IntImm | ir.Var) else tvm_ffi.structural_map(index, (DIVISIONS, rewrite))


def simplify_guarded_indices(statement: Any, analyzer: Any) -> Any:
    """`statement`, where `analyzer` knows the extents of variables; the same object if nothing changes."""

    def quotient_known(node: Any) -> Any:
        if not isinstance(node.b, tirx.IntImm) or int(node.b) <= 0:
            return node
        bound, divisor = analyzer.const_int_bound(node.a), int(node.b)
        quotient = int(bound.min_value) // divisor
        if quotient != int(bound.max_value) // divisor:
            return node
        if isinstance(node, tirx.FloorDiv):
            return tirx.const(quotient, node.ty.dtype)
        return node.a - quotient * divisor if quotient else node.a

    def conditional(node: Any, mutator: Any) -> Any:
        if not is_conditional(node) or nodes_of(node.args[0], TensorLoad):
            return mutator.default_mutate(node)
        condition, *values = node.args
        chosen = []
        for value, known in zip(values, (condition, analyzer.simplify(tirx.Not(condition))), strict=True):
            with analyzer.constraint_scope(known):
                chosen.append(mutator.mutate(value))
        unchanged = all(new.same_as(old) for new, old in zip(chosen, values, strict=True))
        return node if unchanged else tirx.if_then_else(condition, *chosen)

    def load(node: Any, mutator: Any) -> Any:
        loaded = mutator.default_mutate(node)
        indices = [with_divisions(index, quotient_known) for index in loaded.indices]
        if all(new.same_as(old) for new, old in zip(indices, loaded.indices, strict=True)):
            return loaded
        return tirx.BufferLoad(loaded.source, [analyzer.simplify(index) for index in indices])

    return tvm_ffi.structural_mutate(statement, [(ir.Call, conditional), (TensorLoad, load)])
