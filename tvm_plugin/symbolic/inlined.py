"""What kernels compute cheaper again than they keep it: places and masks, made of indices, and plain copies."""

from __future__ import annotations

from typing import Any

import tvm_ffi
from tvm import ir, s_tir, tirx

from ..search.space.schedule import schedule_of

__all__ = ["with_cheap_stages_inlined"]

MOST_AGAIN = 256
"""Nodes of expressions, at most, that are computed again where a stage is read more than once. Each step of a hash
reads the one before twice: twenty of them in one expression are a million."""


def with_cheap_stages_inlined(function: tirx.PrimFunc) -> tirx.PrimFunc:
    """A kernel without buffers of its own of integers and booleans, nor of copies: what reads them computes them.

    Five stages of a mask, of which no two can be tiled together, are one; 1 x 1 convolutions read their image, not the
    copy that TVM's operators make as if they had to pad it.
    """
    root = function.body
    if not isinstance(root, s_tir.SBlockRealize):
        return function
    own = {str(buffer.name): buffer for buffer in root.block.alloc_buffers}
    if not own:
        return function
    schedule = schedule_of(ir.IRModule({"main": function}))
    for block in schedule.get_child_blocks(schedule.get_sblock("root")):
        if _is_cheap(schedule.get(block), own) and _is_short(schedule.get(block), schedule.mod["main"]):
            try:
                schedule.compute_inline(block)
            except s_tir.ScheduleError:  # a sum, say, or a loop that does something else, too
                continue
    return schedule.mod["main"]


def _is_cheap(block: Any, own: dict[str, Any]) -> bool:
    written = [own[str(region.source.name)] for region in block.writes if str(region.source.name) in own]
    if not written:
        return False
    is_copy = isinstance(block.body, tirx.BufferStore) and isinstance(block.body.value, ir.TensorLoad)
    return is_copy or all(str(buffer.dtype).startswith(("int", "bool")) for buffer in written)


def _is_short(block: Any, function: tirx.PrimFunc) -> bool:
    """Whether little is computed again if what reads a block's result computes it.

    Booleans count as short: of buffers of them that TVM allocates, it builds no vectors.
    """
    if not isinstance(block.body, tirx.BufferStore) or str(block.body.buffer.dtype) == "bool":
        return True
    reads: list[Any] = []
    nodes: list[Any] = []
    tvm_ffi.structural_walk(function, (ir.TensorLoad, reads.append))
    tvm_ffi.structural_walk(block.body.value, (ir.Expr, nodes.append))
    times = sum(load.source.same_as(block.body.buffer) for load in reads)
    return (times - 1) * len(nodes) <= MOST_AGAIN
