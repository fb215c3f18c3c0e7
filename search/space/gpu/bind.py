"""Thread bindings for what a sketch leaves over: every stage that is still a plain loop nest becomes a kernel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tvm import ir
from tvm.s_tir.stmt import SBlockRealize

from ..expressions import is_reduced, nodes_of
from ..nest import fuse

__all__ = ["THREADS", "bind_elementwise", "split_kinds"]

THREADS = 256
"""Threads of a block that does one element in each."""


def _unbound_blocks(sch: Any) -> list[Any]:
    """Blocks at the root none of whose loops is bound to threads."""
    blocks = sch.get_child_blocks(sch.get_sblock("root"))
    return [b for b in blocks if all(sch.get(loop).thread_binding is None for loop in sch.get_loops(b))]


def split_kinds(sch: Any, block: Any, loops: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Those of a block's `loops` that no reduction axis depends on, and the others; both outermost first."""
    if not loops:
        return [], []
    wanted = sch.get(block)
    (realize,) = [node for node in nodes_of(sch.get(loops[0]), SBlockRealize) if node.block.same_as(wanted)]
    bound = zip(wanted.iter_vars, realize.iter_values, strict=True)
    reduced = [variable for axis, value in bound if is_reduced(axis) for variable in nodes_of(value, ir.Var)]
    kinds = [any(var.same_as(sch.get(loop).loop_var) for var in reduced) for loop in loops]
    return (
        [loop for loop, kind in zip(loops, kinds, strict=True) if not kind],
        [loop for loop, kind in zip(loops, kinds, strict=True) if kind],
    )


def bind_elementwise(sch: Any, threads: int = THREADS) -> None:
    """One thread an element of every unbound block; its reductions run in the thread."""
    for block in _unbound_blocks(sch):
        loops = sch.get_loops(block)
        spatial, reduced = split_kinds(sch, block, loops)
        if spatial:
            sch.reorder(*spatial, *reduced)
        else:
            spatial = [sch.add_unit_loop(loops[0] if loops else block)]
        fused = fuse(sch, spatial)
        outer, inner = sch.split(fused, [None, min(threads, int(sch.get(fused).extent))])
        sch.bind(outer, "blockIdx.x")
        sch.bind(inner, "threadIdx.x")
