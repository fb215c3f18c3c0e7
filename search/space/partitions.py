"""Loops that are to be split where a condition changes, which TVM 0.27 does beyond their ends: they stay whole.

    for i in range(4):                             for i in range(4):
        for j in range(8): (marked)                    for j in range(max(20 - i * 8, 0)):       # 20 of 8, for i = 0
            y[i, j] = (b[i * 8 + j - 20]   (TVM:)          y[i, j] = ... + z[j]
                       if 20 <= i * 8 + j              for j in range(max(20 - i * 8, 0), 8):
                       else a[i * 8 + j]) + z[j]           y[i, j] = b[i * 8 + j - 20] + z[j]

Of where a condition begins to hold and where the loop begins it takes the larger, but not the smaller of that and the
loop's end; nor the larger of where a condition ends to hold and the loop's beginning. Numbers it compares; what depends
on loops around, as rows of a padded image that are copied one by one do, may be anywhere.
"""

from __future__ import annotations

from typing import Any

import tvm_ffi
from tvm import ir, s_tir, sym, tirx
from tvm.ir.expr import TensorLoad

from .expressions import COMPARISONS, binding_of, nodes_of
from .marks import PARTITION
from .statements import rewrite_marked_loops, with_body

__all__ = ["keep_within_loops"]


def keep_within_loops(function: Any) -> Any:
    """A scheduled PrimFunc in which no loop is split beyond its ends; the same object where none would be."""
    loops = nodes_of(function.body, tirx.For)
    marked = [loop for loop in loops if PARTITION in loop.annotations and not _is_single(loop)]
    if not marked:
        return function
    analyzer = sym.Analyzer()
    for variable, loop in {loop.loop_var: loop for loop in loops}.items():
        analyzer.bind(variable, ir.Range.from_min_extent(loop.min, loop.extent))
    bindings = dict(pair for realize in nodes_of(function.body, s_tir.SBlockRealize) for pair in binding_of(realize))

    loops_of = {loop.loop_var: {loop.loop_var} for loop in loops}

    def variables_of(value: Any) -> set[Any]:
        """Of the loops."""
        return set().union(*(known(variable) for variable in nodes_of(value, ir.Var)))

    def known(variable: Any) -> set[Any]:
        if variable not in loops_of:
            loops_of[variable] = variables_of(bindings[variable]) if variable in bindings else set()
        return loops_of[variable]

    def by_loops(value: Any) -> Any:
        def value_of(variable: Any) -> Any:
            return by_loops(bindings[variable]) if variable in bindings else variable

        return tvm_ffi.structural_map(value, (ir.Var, value_of))

    def changes_within(condition: Any, loop: Any, inside: set[Any]) -> bool:
        """Whether a condition on a loop that is split, and on others around it, holds from or up to a place of it."""
        variables = variables_of(condition)
        if loop.loop_var not in variables or variables <= inside or nodes_of(condition, TensorLoad):
            return True
        margin = _margin(by_loops(condition))
        linear = None if margin is None else sym.detect_linear_equation(analyzer.simplify(margin), [loop.loop_var])
        if not linear or not isinstance(linear[0], tirx.IntImm):
            return False
        step = int(linear[0])
        beyond = loop.min + loop.extent if step > 0 else loop.min - 1  # where it must hold, if not before
        return not step or int(analyzer.const_int_bound(analyzer.simplify(linear[1] + beyond * step)).min_value) >= 0

    def is_whole(loop: Any) -> bool:
        inside = {loop.loop_var, *(inner.loop_var for inner in nodes_of(loop.body, tirx.For))}
        return not all(changes_within(condition, loop, inside) for condition in nodes_of(loop.body, COMPARISONS))

    whole = {loop.loop_var for loop in marked if is_whole(loop)}
    if not whole:
        return function
    return rewrite_marked_loops(
        function, PARTITION, lambda loop: with_body(loop, loop.body, PARTITION) if loop.loop_var in whole else loop
    )


def _is_single(loop: Any) -> bool:
    """Whether it has one iteration: TVM drops such loops, with what is annotated."""
    return isinstance(loop.extent, tirx.IntImm) and int(loop.extent) == 1


def _margin(condition: Any) -> Any:
    """What is at least zero where a comparison of integers holds; None of another one."""
    if "int" not in str(condition.a.ty.dtype):
        return None
    if isinstance(condition, tirx.LT | tirx.LE):
        return condition.b - condition.a - isinstance(condition, tirx.LT)
    if isinstance(condition, tirx.GT | tirx.GE):
        return condition.a - condition.b - isinstance(condition, tirx.GT)
    return None
