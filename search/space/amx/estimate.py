"""What tiles of AMX cost, before anything is lowered. Arrays have shape [n], one element for each candidate."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..access import dtype_bytes
from ..contraction.copies import AHEAD, PAD_AT_ROOT
from ..contraction.tile_counts import Column, fused_loops
from ..hardware import Hardware
from .plan import TilePlan
from .products import TILE_ROWS
from .schedule import LANES, copies_left, tile_height

__all__ = ["TileCost", "tile_cost"]

FEWEST_ROWS = 9.5
"""A product of lower tiles takes as long as one of so many rows (Xeon with AMX: 2.44 ns up to 8 rows, 4.23 with 16)."""
LATENCY = 3.25
"""Times that a product of whole tiles takes until the next one may add to the same sums."""
LOAD = 0.16, 0.34
"""Times that loading a tile takes: without rows, and a whole one in addition."""
FROM_L2 = 0.8
"""The same in addition for a tile that comes from the second-level cache: products hide little of it (512 x 512 x 512:
81 ns for twelve products and eight loads; 54 where all stays in the first-level cache)."""
STORE = 1.0
"""The same for storing a tile of sums."""
WRITTEN_VECTOR = 0.15
"""The same for writing a vector of results, and again for each operation of an epilogue."""
CONFIGURE_S = 50e-9
"""Seconds that configuring and releasing the registers takes."""
SPLIT_S_PER_BYTE = 0.03e-9
"""Of splitting float32 in halves, beside reading and writing it."""
FAR = 3.0
"""Times longer that bytes take from the last cache than from the second one."""


@dataclass(frozen=True)
class TileCost:
    """Seconds and bytes; `chunks` is the number of parallel iterations, `waste` the share of rows that are zeros."""

    compute_s: Column
    memory_s: Column
    latency_s: Column
    chunks: Column
    redundant_depth: NDArray[np.bool_]
    imbalance: Column
    waste: Column
    block_bytes: Column
    far_bytes: Column
    copied_bytes: Column


def tile_cost(plan: TilePlan, hardware: Hardware, v: Mapping[str, Column]) -> TileCost:
    """The estimate and its parts."""
    product = plan.product
    whole_s = 2.0 * TILE_ROWS * TILE_ROWS * 32 / max(hardware.tile_flops_per_s, 1.0)
    height = tile_height(v["mr"])
    down = np.ceil(v["mr"] / TILE_ROWS) * v["m2"]
    across = v["nr"] / LANES
    row_tiles = np.ceil(plan.unrolled_extent / v["mr"])
    lines = np.ceil(plan.second_extent / v["m2"])
    column_tiles = np.ceil(plan.vector_extent / v["nr"])

    products = product.products * down * across * np.maximum(height, FEWEST_ROWS) / TILE_ROWS
    loads = product.parts * (down * (LOAD[0] + LOAD[1] * height / TILE_ROWS) + across * sum(LOAD))
    row_bytes = float(plan.reduction_extent * product.depth * dtype_bytes(plan.contraction.left.access.dtype))
    panel_bytes = v["nr"] * row_bytes
    near = 0.5 * hardware.l1_bytes
    right_far = np.where(panel_bytes > near, 1.0, 0.0)
    left_far = 0.5 if plan.windowed else np.where(v["mr"] * row_bytes > near, 1.0, 0.5)
    from_l2 = FROM_L2 * product.parts * (down * left_far + across * right_far)
    step_s = whole_s * (np.maximum(np.maximum(products, product.products * LATENCY), loads) + from_l2)
    operations = sum(block.operations for block in plan.kernel.epilogue)
    write_s = whole_s * down * across * (STORE + height * WRITTEN_VECTOR * (1.0 + operations))
    tiles = row_tiles * lines * column_tiles * plan.outer_extent
    work_s = tiles * (step_s * plan.reduction_extent + write_s)

    never = np.zeros(len(row_tiles), np.bool_)  # is a tile ragged: zeros fill up the last ones
    rows = [(axis.extent * np.ones(len(row_tiles)), never) for axis in plan.outer]
    if plan.second is not None:
        rows.append((lines, never))
    rows.append((np.ceil(row_tiles / v["chunk"]), never))
    chunks, _, redundant = fused_loops(v, (column_tiles, never), rows)
    threads = hardware.threads
    used = np.where(v["depth"] > 0, np.minimum(chunks, threads), 1.0) if threads > 1 else np.ones_like(chunks)
    imbalance = np.where(chunks > 1, np.ceil(chunks / threads) * used / chunks, 1.0)
    speedup = np.maximum(used / imbalance, 1.0)
    compute_s = work_s / speedup + CONFIGURE_S * np.ceil(chunks / used)

    left, right = plan.contraction.left.access, plan.contraction.right.access
    window = math.prod(axis.extent for axis in plan.reduction[1:])
    block_bytes = panel_bytes + v["mr"] * v["chunk"] * v["m2"] * row_bytes / window
    room = 0.7 * hardware.l2_bytes
    columns_first = v["order"] == 0
    row_blocks = row_tiles / v["chunk"] * lines * plan.outer_extent
    right_again = np.where(columns_first | (right.bytes < room), 1.0, row_blocks)
    right_again = np.where(columns_first & (panel_bytes > room), row_tiles * lines, right_again)
    left_again = np.where(columns_first & (left.bytes > room), column_tiles, 1.0)
    far_bytes = right.bytes * right_again + left.bytes * left_again
    cache = hardware.cache_bandwidth_bytes_per_s
    memory_s = FAR * far_bytes / cache / speedup
    memory = np.where(plan.kernel.bytes_moved > hardware.l3_bytes, far_bytes, 0.0)
    memory_s = np.maximum(memory_s, memory / hardware.bandwidth_bytes_per_s)

    copied = copies_left(plan, v) | np.zeros(len(chunks), np.bool_)
    again = np.where((v["pad"] != PAD_AT_ROOT) & columns_first, column_tiles, 1.0)
    copied_bytes = np.where(copied | bool(plan.staged), left.bytes * again, 0.0)
    if not plan.panel_is_weight:
        copied_bytes = copied_bytes + right.bytes
    per_byte_s = 2.0 / cache + (SPLIT_S_PER_BYTE if product.halves else 0.0)
    copy_s = copied_bytes * per_byte_s / speedup
    regions = 1.0 + (v["pad"] == PAD_AT_ROOT) * (copied_bytes > 0) + (v["pack"] != AHEAD)
    overhead_s = np.where(used > 1, regions * hardware.parallel_overhead_s, 0.0)
    latency_s = np.maximum(compute_s, memory_s) + 0.1 * np.minimum(compute_s, memory_s) + copy_s + overhead_s
    return TileCost(
        compute_s=compute_s,
        memory_s=memory_s,
        latency_s=latency_s,
        chunks=chunks,
        redundant_depth=redundant,
        imbalance=imbalance,
        waste=1.0 - plan.unrolled_extent * plan.second_extent / (row_tiles * v["mr"] * lines * v["m2"]),
        block_bytes=block_bytes,
        far_bytes=far_bytes,
        copied_bytes=copied_bytes,
    )
