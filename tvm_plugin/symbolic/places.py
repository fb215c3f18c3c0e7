"""Places and masks: what kernels compute of indices, cheaper to compute again than to keep."""

from __future__ import annotations

from typing import Any

from tvm import ir, s_tir, tirx

__all__ = ["with_places_inlined"]


def with_places_inlined(function: tirx.PrimFunc) -> tirx.PrimFunc:
    """A kernel without the buffers of integers and booleans that it computes element by element for itself.

    What reads them computes them: five stages of a mask, of which no two can be tiled together, are one.
    """
    root = function.body
    if not isinstance(root, s_tir.SBlockRealize):
        return function
    own = [buffer for buffer in root.block.alloc_buffers if str(buffer.dtype).startswith(("int", "bool"))]
    if not own:
        return function
    schedule = s_tir.Schedule(ir.IRModule({"main": function}))
    for block in schedule.get_child_blocks(schedule.get_sblock("root")):
        if _is_written_by(schedule.get(block), own):
            try:
                schedule.compute_inline(block)
            except s_tir.ScheduleError:  # a sum, say, or a loop that does something else, too
                continue
    return schedule.mod["main"]


def _is_written_by(block: Any, buffers: list[Any]) -> bool:
    return any(str(region.source.name) in {str(buffer.name) for buffer in buffers} for region in block.writes)
