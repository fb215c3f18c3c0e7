"""What kernels compute cheaper again than they keep it: places and masks, made of indices, and plain copies."""

from __future__ import annotations

from typing import Any

from tvm import ir, s_tir, tirx

from ..search.space.schedule import schedule_of

__all__ = ["with_cheap_stages_inlined"]


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
        if _is_cheap(schedule.get(block), own):
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
