"""Questions and replacements that the rewriters of scheduled functions share. Variables are compared by identity."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tvm_ffi
from tvm import ir, tirx

__all__ = ["binding_of", "constant_extent", "substitute", "uses"]


def substitute(expression: Any, values: Sequence[tuple[Any, Any]]) -> Any:
    """An expression or a statement with other values for some variables."""

    def value_of(var: Any) -> Any:
        return next((value for known, value in values if known.same_as(var)), var)

    return tvm_ffi.structural_map(expression, (ir.Var, value_of))


def uses(expression: Any, *variables: Any) -> bool:
    """Whether any of the variables occurs."""
    used: list[Any] = []
    tvm_ffi.structural_walk(expression, (ir.Var, used.append))
    return any(use.same_as(variable) for use in used for variable in variables)


def binding_of(realize: Any) -> list[tuple[Any, Any]]:
    """The variables of a block, each with what it stands for in the loops around."""
    return [(axis.var, value) for axis, value in zip(realize.block.iter_vars, realize.iter_values, strict=True)]


def constant_extent(axis: tirx.IterVar) -> int:
    """The extent of a block's axis; 1 for one that varies, such as a window of ragged adaptive pooling."""
    return int(axis.dom.extent) if isinstance(axis.dom.extent, tirx.IntImm) else 1
