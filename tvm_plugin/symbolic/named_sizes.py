"""Sizes of tensors that are expressions, (height - 3) // 2 + 1, as variables of their own.

A kernel deep in a network has the height of its images in terms of the first one's, by one quotient for each stride
before: TVM then spends minutes on simplifying indices (SqueezeNet), although a kernel can ask its tensors how large
they are. The expressions of several kernels differ where these do not.
"""

from __future__ import annotations

from typing import Any

import tvm_ffi
from tvm import ir, sym, tirx

from ..search.space.expressions import uses
from .kernel import symbols_of

__all__ = ["with_sizes_named", "with_sizes_simplified"]


def with_sizes_named(function: tirx.PrimFunc) -> tuple[tirx.PrimFunc, list[tuple[Any, Any]]]:
    """A kernel in which each size of an argument is a variable, or that and a constant.

    Returns
    -------
    function : tvm.tirx.PrimFunc
    named : list of (variable, expression)
        The new variables, in terms of the given kernel's symbols.
    """
    found: list[tuple[Any, Any]] = []
    for parameter in function.params:
        for extent in getattr(parameter.ty, "shape", ()):
            core = _core(extent)
            if core is not None and not any(tvm_ffi.structural_equal(core, known) for _, known in found):
                found.append((extent, core))
    named: list[tuple[Any, Any]] = []
    for extent, core in sorted(found, key=lambda one: -_length(one[1])):  # those that contain others first
        variable = tirx.Var(f"size{len(named)}", str(extent.ty.dtype))
        less = sym.Analyzer().simplify(extent - core)
        function = _with_expression(function, core, variable - less)
        named.append((variable, extent))
    return with_sizes_simplified(function), named


def with_sizes_simplified(function: tirx.PrimFunc) -> tirx.PrimFunc:
    """A kernel in which sums with its symbols are spelled alike, as h + 1 + 1 - 3 + 1 and h are not."""
    analyzer, symbols = sym.Analyzer(), symbols_of(function)

    def simplified(node: Any) -> Any:
        return analyzer.simplify(node) if uses(node, *symbols) else node

    return tvm_ffi.structural_map(function, ((tirx.Add, tirx.Sub), simplified))


def _core(extent: Any) -> Any | None:
    """An expression less its constant; None where that is a variable, or nothing is left."""
    if isinstance(extent, tirx.Add | tirx.Sub) and isinstance(extent.b, tirx.IntImm):
        extent = extent.a
    return None if isinstance(extent, ir.Var | tirx.IntImm) else extent


def _length(expression: Any) -> int:
    nodes: list[Any] = []
    tvm_ffi.structural_walk(expression, (ir.Expr, nodes.append))
    return len(nodes)


def _with_expression(function: tirx.PrimFunc, known: Any, other: Any) -> tirx.PrimFunc:
    def replaced(node: Any) -> Any:
        return other if tvm_ffi.structural_equal(node, known) else node

    return tvm_ffi.structural_map(function, (type(known), replaced))
