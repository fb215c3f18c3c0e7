"""Bytes that a tiled contraction reads again because a cache cannot keep them, and the seconds that they take.

All functions work on columns of knob values, arrays of shape [n], as in estimate.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from ..access import Access
from ..hardware import Hardware
from .copies import AT_CHUNK, AT_ROOT
from .plan import Plan
from .tile_counts import Column, Tiles

__all__ = ["Traffic", "moving_s", "operand_bytes", "packed_bytes", "read_by_elements", "traffic_of", "waiting_s"]

HIDDEN = 0.9
"""Share of the first pass over weights in which they are read: of two that wait, the faster one is better."""

ONE_STREAM = 0.5
"""Share of the memory bandwidth that a core gets when it reads one run after the other (eight side by side get all)."""


class Traffic(NamedTuple):
    """Bytes of each candidate, arrays of shape [n]: of the vectorised operand's panel, of a chunk of the other one, and
    what comes from the second-level cache and from beyond it; and the number of chunks."""

    panel_bytes: Column
    block_bytes: Column
    from_l2: Column
    from_l3: Column
    row_blocks: Column


def traffic_of(plan: Plan, hardware: Hardware, v: Mapping[str, Column], t: Tiles) -> Traffic:
    """What the loops read again and again, because a cache cannot keep it."""
    if plan.vectors_over_image:  # taps of a window read the same pixels
        panel_bytes = _footprint(plan, plan.contraction.left.access, v["mr"], v["m2"], v["nr"])
    else:
        panel_bytes = v["nr"] * float(plan.reduction_extent) * float(plan.element_bytes)
    by_elements = read_by_elements(plan)
    tile_bytes = _footprint(plan, by_elements, v["mr"], v["m2"], v["nr"])
    block_rows = np.minimum(v["mr"] * v["chunk"], plan.unrolled_extent)
    block_bytes = _footprint(plan, by_elements, block_rows, v["m2"], v["nr"])
    left_bytes, right_bytes = operand_bytes(plan)
    tile_count = t.row_tiles * t.column_tiles * t.lines * plan.outer_extent
    from_l2 = tile_count * (tile_bytes + np.where(panel_bytes > 0.5 * hardware.l1_bytes, panel_bytes, 0.0))
    row_blocks = np.ceil(t.row_tiles / v["chunk"]) * t.lines * plan.outer_extent / plan.groups
    columns_first = v["order"] == 0
    room = 0.7 * hardware.l2_bytes
    if plan.vectors_over_image:
        images = float(plan.outer_extent) / plan.groups
        image_bytes = left_bytes / plan.outer_extent  # of one group
        left_again = np.where(columns_first | (image_bytes < room), 1.0, np.ceil(t.row_tiles / v["chunk"]))
        by_columns = columns_first | (block_bytes >= room)
        right_again = np.where(right_bytes < room, 1.0, images * np.where(by_columns, t.column_tiles, 1.0))
    else:
        right_again = np.where(columns_first | (right_bytes < room), 1.0, row_blocks)
        left_again = np.where(
            columns_first,
            np.where(left_bytes < room, 1.0, t.column_tiles),
            np.where(block_bytes < room, 1.0, t.column_tiles),
        )
    from_l3 = right_bytes * plan.groups * right_again + left_bytes * left_again
    return Traffic(panel_bytes, block_bytes, from_l2, from_l3, row_blocks)


def packed_bytes(plan: Plan, v: Mapping[str, Column], t: Tiles, traffic: Traffic) -> Column:
    """Bytes of the vectorised operand that each call copies into panels, again for each chunk where panels are its."""
    if plan.panel is None:
        return np.zeros_like(v["mr"])
    columns_first, in_chunks = v["order"] == 0, v["pack"] == AT_CHUNK
    repeats = np.where(columns_first, 1.0, np.where(in_chunks, traffic.row_blocks, 1.0))
    repeats = np.where(columns_first & in_chunks, np.maximum(t.chunks / t.column_tiles, 1.0), repeats)
    _, right_bytes = operand_bytes(plan)
    return np.where(in_chunks | (v["pack"] == AT_ROOT), right_bytes * plan.groups, 0.0) * repeats


def moving_s(plan: Plan, hardware: Hardware, v: Mapping[str, Column], traffic: Traffic, speedup: Column) -> Column:
    """Seconds of what caches and memory deliver, the slowest of them."""
    # Nothing comes from memory up to what is near, all of it from twice as much on.
    from_memory = traffic.from_l3 * min(max(plan.kernel.bytes_moved / hardware.near_bytes - 1.0, 0.0), 1.0)
    cache = hardware.cache_bandwidth_bytes_per_s
    left_bytes, right_bytes = operand_bytes(plan)
    once = np.minimum(traffic.from_l3, left_bytes + right_bytes * plan.groups)
    from_l3_s = once / cache + (traffic.from_l3 - once) / _l3_bandwidth(hardware)
    memory_s = np.maximum(traffic.from_l2 / cache, from_l3_s) / speedup
    return np.maximum(memory_s, from_memory / hardware.bandwidth_bytes_per_s / _stream_share(plan, v))


def waiting_s(
    plan: Plan, hardware: Hardware, v: Mapping[str, Column], row_blocks: Column, used: Column, busy_s: Column
) -> Column | float:
    """Seconds in which threads wait for weights from memory, beside the `busy_s` that all passes over them take.

    The first pass reads them. Threads that share rows read all weights each. Two of Zen 3, weights of 4 MB from memory
    (20 GB/s), 64 rows: 0.90 ms where they share columns, in one pass, and 1.17 where they take 8 rows after the other.
    """
    panel = plan.panel
    if not (hardware.weights_in_memory and plan.panel_is_weight) or panel is None or plan.groups > 1:
        return 0.0
    if any(axis.position in panel.axes() for axis in plan.outer):  # weights of their own, for each of a batch
        return 0.0
    rows_first = v["order"] == 1
    passes = np.where(rows_first, np.maximum(row_blocks / used, 1.0), 1.0)
    readers = np.where(rows_first, np.minimum(row_blocks, used), 1.0)
    bandwidth = hardware.bandwidth_bytes_per_s * np.sqrt(used / hardware.threads)
    return np.maximum(readers * panel.bytes / bandwidth - HIDDEN * busy_s / passes, 0.0)


def _l3_bandwidth(hardware: Hardware) -> float:
    """Bytes a second that a core reads from a last cache nearby: between the second-level cache and memory.

    Two cores of Zen 3: 77 GB/s from L2 each, 35 to 45 from L3, 22 from memory for both. ResNet-50's 14 x 14 x 256, 3 x
    3, with weights of 2.4 MB, takes 1.37 ms in the model where each tile of rows reads them all, 1.29 where each panel
    is read once; alone, both take the same.
    """
    near = hardware.cache_bandwidth_bytes_per_s
    return near if hardware.last_cache_is_far else math.sqrt(near * min(near, hardware.bandwidth_bytes_per_s))


def _stream_share(plan: Plan, v: Mapping[str, Column]) -> Column:
    """Share of the memory bandwidth that a product of one row gets by the streams that it reads its matrix in."""
    if plan.unrolled[-1].position in plan.contraction.right.access.axes():
        return np.minimum(1.0, ONE_STREAM * np.cbrt(v["mr"]))
    return np.full_like(v["mr"], ONE_STREAM if plan.unrolled_extent == 1 and not plan.row_loops else 1.0)


def operand_bytes(plan: Plan) -> tuple[float, float]:
    """Of the left operand, and of one group's part of the right one."""
    left, right = plan.contraction.left.access, plan.contraction.right.access
    return float(left.bytes), float(right.bytes) / plan.groups


def read_by_elements(plan: Plan) -> Access:
    """The operand that is read element by element; the left one where both are read by vectors."""
    return plan.contraction.right.access if plan.vectors_over_image else plan.contraction.left.access


def _footprint(plan: Plan, access: Access, rows: Column, lines: Column, columns: Column) -> Column:
    """Bytes of an operand that a block of rows, lines and vectorised elements touches over the whole reduction."""
    reduced = {axis.position: float(axis.extent) for axis in plan.reduction}
    bytes_ = np.full(len(rows), float(plan.element_bytes))
    for index in access.indices:
        span = np.ones(len(rows))
        if index is None:
            continue
        for position, coefficient in index.coefficients.items():
            if position in reduced:
                count = np.full(len(rows), reduced[position])
            elif position == plan.unrolled[-1].position:
                count = rows
            elif plan.second is not None and position == plan.second.position:
                count = lines
            elif position == plan.vector.position:
                count = columns
            else:
                continue
            span = span + abs(coefficient) * (count - 1.0)
        bytes_ = bytes_ * span
    return bytes_
