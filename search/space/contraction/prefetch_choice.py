"""Which lines a tile asks memory for ahead: packed weights of the next steps and panel, rows of the next tile.

`prefetch.py` writes the requests into the loops that are marked here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ..access import Access, dtype_bytes
from ..hardware import Hardware
from ..marks import FETCH_AHEAD, NEXT_PANEL
from .copies import panel_dimensions
from .plan import Plan

__all__ = [
    "LEAST_FAR_BYTES",
    "MANY_REGISTERS",
    "ahead_bytes",
    "ask_for_weights",
    "asks_for_rows",
    "asks_for_weights",
    "readers_of_panel",
]

AHEAD_BYTES, SMALL_AHEAD_BYTES = 8192, 2048
"""Of packed weights, that are asked for ahead: 64 steps of 32 columns. Operands that are read where they are would lose
4 to 12 % (512 x 512 x 512; 1 x 1 convolutions, channels first). Where the first cache has 32 KB, they push each other
out of it: two threads of Zen 3, weights from memory, in turns (ms): 49 rows times 512 x 2048 15.7, with 2 KB 15.0, with
nothing asked 16.2; 196 rows times 256 x 1024 45.3, 43.7 and 43.6."""

SMALL_L1_BYTES = 32 * 1024
"""Of such a cache."""

LEAST_FAR_BYTES = 128 * 1024
"""Smaller weights are read before asking for the next panel pays."""

MANY_REGISTERS = 32
"""Where vectors are half as long and half as many, each multiplication has more instructions around it, and asking for
weights costs more. Two threads of Zen 3 (AVX2), ResNet-50's 3 x 3 convolutions, unasked and asked (us): 14 x 14 x 256
1532, 1602; 28 x 28 x 128 1475, 1574; 7 x 7 x 512, whose weights are 9.4 MB, 1767, 1649. One row times 2048 x 1000 320,
414; products of 4 to 128 rows gain 1 to 50 %. Nor does LLVM run out of registers there."""

WAITING = 0.15
"""Of the time that products take, what their weights take to come from memory, from which asking pays there."""

LEAST_ROW_BYTES = 256
"""Of the rows that are asked for: a tile of shorter ones is a single stream."""


def readers_of_panel(sch: Any, order: list[Any], depth: int, values: Mapping[str, int]) -> int:
    """How many iterations of the loop over panels read the same one, once `depth` of the loops in order are fused."""
    return math.prod(int(sch.get(loop).extent) for loop in order[1:depth]) if values["order"] == 0 else 1


def ahead_bytes(hardware: Hardware) -> int:
    """Bytes of packed weights that are asked for ahead."""
    return SMALL_AHEAD_BYTES if hardware.l1_bytes <= SMALL_L1_BYTES else AHEAD_BYTES


def asks_for_weights(plan: Plan, hardware: Hardware) -> bool:
    """Whether packed weights are asked for ahead: never where each group has panels of its own, few of them, or the
    steps of several groups are written out (`spread_groups`)."""
    if plan.panel is None or plan.groups > 1 or plan.spread is not None or not hardware.weights_are_far:
        return False
    if hardware.last_cache_is_far or hardware.vector_registers >= MANY_REGISTERS:
        return True
    computing_s = plan.contraction.flops / hardware.peak_flops_per_s_all
    rows = plan.contraction.flops // (2 * math.prod(plan.panel.shape))
    return rows > 1 and plan.panel.bytes / hardware.bandwidth_bytes_per_s >= WAITING * computing_s


def asks_for_rows(plan: Plan) -> bool:
    """Whether a tile's rows, which lie one behind the other, are asked for ahead: where they are more than the weights.

    Else those are what tiles wait for, or all columns find the rows in a cache. Two threads of Zen 3 (us): 196 rows
    times 2560 x 512 3252, asked 3307; 64 rows times 3072 x 768 with weights from memory 2120, 2193. Level on Zen 5
    (ResNet-50 15.8 ms, Inception-v3 22.0).
    """
    left, right = plan.contraction.left.access, plan.contraction.right.access
    if not plan.panel_is_weight or plan.groups > 1 or left.bytes < right.bytes or not _lies_in_memory(plan, left):
        return False
    row = plan.reduction_extent
    next_row, next_element = (left.stride(axis.position) for axis in (plan.unrolled[-1], plan.reduction[-1]))
    dense = next_row == row and next_element == 1
    return dense and plan.second is None and row * dtype_bytes(left.dtype) >= LEAST_ROW_BYTES


def _lies_in_memory(plan: Plan, operand: Access) -> bool:
    """Whether an operand is an argument, or a copy of one as it lies, which TVM makes of what needs no padding."""
    for block in plan.kernel.blocks:
        if block.write.buffer == operand.buffer:
            source = block.reads[0] if block.name in plan.inlined and len(block.reads) == 1 else None
            alike = source is not None and all(
                source.stride(axis.position) == block.write.stride(axis.position) for axis in block.axes
            )
            return source is not None and alike and _lies_in_memory(plan, source)
    return True


def ask_for_weights(
    sch: Any, steps: Any, plan: Plan, values: Mapping[str, int], hardware: Hardware, fused: int
) -> bool:
    """Mark the reduction's loop, where it pays: `fused` iterations of the loop over panels read the same one."""
    assert plan.panel is not None
    step_bytes = values["ku"] * values["nr"] * plan.element_bytes
    long_panels = values["nr"] * plan.reduction_extent * plan.element_bytes > hardware.l1_bytes // 2
    many_panels = plan.panel.bytes >= LEAST_FAR_BYTES
    if long_panels:
        sch.annotate(steps, FETCH_AHEAD, max(1, ahead_bytes(hardware) // step_bytes))
    if many_panels:
        sch.annotate(steps, NEXT_PANEL, [len(plan.reduction) - 1, fused, len(panel_dimensions(plan.panel, plan)[0])])
    return long_panels or many_panels
