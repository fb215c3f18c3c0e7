"""Sizes that a model computes of its data, as how many boxes it chooses: symbols that its main function defines.

Shapes behind a choice are made of such a symbol, as those of open sizes are of sizes of inputs. What is in front of it
has the sizes that it has.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

import tvm
from tvm import relax, tirx
from tvm.relax import op

from ..relax_ir.functions import substituted, top_level_bindings
from ..relax_ir.tensors import as_shape, symbols_of
from ..repairs.open_slices import CHOSEN

__all__ = ["chosen_rows", "computes_sizes", "with_choices_apart"]


def chosen_rows(bb: Any, rows: relax.Expr, count: relax.Expr) -> relax.Expr:
    """The first rows of a table: as many as a tensor of one integer tells when the model runs."""
    size = tirx.Var(bb.get_unique_name(CHOSEN), "int64")
    bb.match_cast(bb.emit(as_shape(count)), relax.ShapeType([size]))
    return bb.emit(op.strided_slice(rows, [0], [0], [size], [1], assume_inbound=True))


def computes_sizes(mod: tvm.IRModule) -> bool:
    """Whether "main" defines sizes of its own."""
    return any(isinstance(binding, relax.MatchCast) for binding in top_level_bindings(mod["main"]))


def with_choices_apart(mod: tvm.IRModule) -> tvm.IRModule:
    """Blocks of "main" that end where it defines a size, with what needs no such size in the first one.

    The graph search takes a block whole, or leaves it.
    """
    if not computes_sizes(mod):
        return mod
    main = mod["main"]
    known, behind = _apart(main)
    groups = [known, *(list(group) for _, group in groupby(behind, _defines_size))]
    variables = _variables(groups, main)
    blocks = []
    for group in groups:
        bindings = [
            relax.MatchCast(variables[one.var], substituted(one.value, variables), one.ty)
            if _defines_size(one)
            else relax.VarBinding(variables[one.var], substituted(one.value, variables))
            for one in group
        ]
        blocks.append((relax.BindingBlock if _defines_size(group[0]) else relax.DataflowBlock)(bindings))
    body = relax.SeqExpr(blocks, substituted(main.body.body, variables))
    result = mod.clone()
    result.update_func(
        mod.get_global_var("main"), relax.Function(main.params, body, main.ret_ty, main.is_pure, main.attrs)
    )
    return result


def _defines_size(binding: Any) -> bool:
    return isinstance(binding, relax.MatchCast)


def _apart(main: relax.Function) -> tuple[list[Any], list[Any]]:
    """The bindings that need none of the sizes that the function defines, and those that do, each in order."""
    known: list[Any] = []
    behind: list[Any] = []
    found: set[relax.Var] = set()
    given = set(symbols_of(main))
    for binding in top_level_bindings(main):
        needs = _defines_size(binding) or not found.isdisjoint(relax.analysis.free_vars(binding.value))
        if needs or not given.issuperset(relax.analysis.tir_vars_in_type(binding.var.ty)):
            behind.append(binding)
            found.add(binding.var)
        else:
            known.append(binding)
    return known, behind


def _variables(groups: Sequence[Sequence[Any]], main: relax.Function) -> dict[relax.Var, relax.Var]:
    """New variables: those that only their own block reads are its own."""
    block_of = {binding.var: place for place, group in enumerate(groups) for binding in group}
    shared = set(relax.analysis.free_vars(main.body.body))
    for place, group in enumerate(groups):
        for binding in group:
            shared.update(var for var in relax.analysis.free_vars(binding.value) if block_of.get(var) != place)
    return {
        binding.var: (relax.Var if binding.var in shared or _defines_size(binding) else relax.DataflowVar)(
            binding.var.name, binding.var.ty
        )
        for group in groups
        for binding in group
    }
