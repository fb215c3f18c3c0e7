"""Selections by an index, where TVM 0.27 would load what is not chosen, from places that are not there.

    y[v, 0:16] = select(v // 2 == 0, x[v % 2, 0:16], z[v])
    ->  y[v, 0:16] = x[v % 2, 0:16] if v // 2 == 0 else z[v]       (TVM: select(v // 2 == 0, x[v, 0:16], z[v]))

It takes the condition for granted in what it chooses, and evaluates all values of a `select` of vectors; from those of
scalars it makes conditions itself (`RewriteUnsafeSelect`). The transforms of Winograd's tiles are such selections.
Where loops are written out, one value is left, and LLVM shares more of its sums if nothing was a condition before.
"""

from __future__ import annotations

from typing import Any

from tvm import ir, s_tir, tirx
from tvm.ir.expr import TensorLoad

from .expressions import binding_of, nodes_of
from .statements import rewritten

__all__ = ["load_chosen_values"]


def load_chosen_values(function: Any) -> Any:
    """A scheduled PrimFunc that loads only what an index chooses; the same object where it would anyhow."""
    if not any(map(_chooses_loads, nodes_of(function.body, tirx.Select))):
        return function
    constants = {
        loop.loop_var
        for loop in nodes_of(function.body, tirx.For)
        if loop.kind == tirx.ForKind.UNROLLED or (isinstance(loop.extent, tirx.IntImm) and int(loop.extent) == 1)
    }
    bindings = dict(pair for realize in nodes_of(function.body, s_tir.SBlockRealize) for pair in binding_of(realize))

    def is_constant(value: Any) -> bool:
        return all(
            variable in constants or (variable in bindings and is_constant(bindings[variable]))
            for variable in nodes_of(value, ir.Var)
        )

    def condition(select: Any) -> Any:
        if not _chooses_loads(select) or is_constant(select.condition):
            return select
        return tirx.if_then_else(select.condition, select.true_value, select.false_value)

    return rewritten(function, (tirx.Select, condition))


def _chooses_loads(select: Any) -> bool:
    """Whether an index, and nothing that is loaded, selects one of several values that are."""
    by_index = isinstance(select.condition, tirx.EQ) and not nodes_of(select.condition, TensorLoad)
    return by_index and bool(nodes_of(select, TensorLoad))
