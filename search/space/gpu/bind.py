"""Thread bindings for what a sketch leaves over: every stage that is still a plain loop nest becomes a kernel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tvm_ffi
from tvm import ir, tirx
from tvm.s_tir.stmt import SBlockRealize

__all__ = ["THREADS", "bind_elementwise", "constant_extent", "fuse_all", "split_kinds", "unbound_blocks"]

THREADS = 256
"""Threads of a block that does one element in each."""

_REDUCTION = 2  # tirx.IterVar.CommReduce


def unbound_blocks(sch: Any) -> list[Any]:
    """Blocks at the root none of whose loops is bound to threads."""
    blocks = sch.get_child_blocks(sch.get_sblock("root"))
    return [b for b in blocks if all(sch.get(loop).thread_binding is None for loop in sch.get_loops(b))]


def split_kinds(sch: Any, block: Any, loops: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Those of a block's `loops` that no reduction axis depends on, and the others; both outermost first."""
    if not loops:
        return [], []
    realized: list[Any] = []
    tvm_ffi.structural_walk(sch.get(loops[0]), (SBlockRealize, realized.append))
    wanted = sch.get(block)
    (realize,) = [node for node in realized if node.block.same_as(wanted)]
    reduced: list[Any] = []
    for variable, value in zip(wanted.iter_vars, realize.iter_values, strict=True):
        if int(variable.iter_type) == _REDUCTION:
            tvm_ffi.structural_walk(value, (ir.Var, reduced.append))
    kinds = [any(var.same_as(sch.get(loop).loop_var) for var in reduced) for loop in loops]
    return (
        [loop for loop, kind in zip(loops, kinds, strict=True) if not kind],
        [loop for loop, kind in zip(loops, kinds, strict=True) if kind],
    )


def constant_extent(sch: Any, loop: Any) -> int:
    """The loop's extent. Raises ValueError when it depends on other loops."""
    extent = sch.get(loop).extent
    if not isinstance(extent, tirx.IntImm):
        raise ValueError(f"the extent {extent} of a loop is not constant")
    return int(extent)


def fuse_all(sch: Any, loops: Sequence[Any]) -> Any:
    """Neighbouring loops as one."""
    return sch.fuse(*loops) if len(loops) > 1 else loops[0]


def bind_elementwise(sch: Any, threads: int = THREADS) -> None:
    """One thread an element of every unbound block; its reductions run in the thread."""
    for block in unbound_blocks(sch):
        loops = sch.get_loops(block)
        spatial, reduced = split_kinds(sch, block, loops)
        if spatial:
            sch.reorder(*spatial, *reduced)
        else:
            spatial = [sch.add_unit_loop(loops[0] if loops else block)]
        fused = fuse_all(sch, spatial)
        outer, inner = sch.split(fused, [None, min(threads, int(sch.get(fused).extent))])
        sch.bind(outer, "blockIdx.x")
        sch.bind(inner, "threadIdx.x")
