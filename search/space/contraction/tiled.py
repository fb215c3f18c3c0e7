"""The tiled contraction: register tiles over any layout, packed panels, parallel chunks, epilogue in registers.

The loop nest, outermost first: parallel chunks of tiles, tiles, the reduction, and an unrolled register tile of
`second x mr x nr` sums. It is the BLIS macro-kernel (Van Zee and van de Geijn, 2015) without a fixed micro-kernel:
LLVM keeps the sums in registers when the reduction's initialisation is taken out of the loop.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import astuple
from typing import Any

from ..hardware import FAR_WEIGHTS, Hardware
from ..marks import IMAGE_ROWS, JOIN_VECTORS, NEXT_TILE, OVERLAPPING_TAIL, SEPARATE_STEPS, SPREAD_GROUPS
from ..nest import STACK_BYTES, partition
from .copies import (
    AHEAD,
    AT_CHUNK,
    AT_ROOT,
    PAD_AT_CHUNK,
    PAD_AT_OUTER,
    PAD_INLINE,
    pack_panels,
    schedule_copy,
    schedule_padding,
    split_lanes,
)
from .last_tile import overlapping_columns, overlapping_rows, pads_last_columns
from .padding import image_rows
from .plan import Plan
from .prefetch_choice import MANY_REGISTERS, ask_for_weights, asks_for_rows, readers_of_panel
from .write_back import local_sums, write_squares, write_vectors

__all__ = ["schedule_tiles"]

CROWDED_SUMS = 22 / 32
"""Share of the registers for a tile's sums from which LLVM spills them where it writes out a row of taps (of 32, with
3 x 3 over 28 x 28 and 5 x 5 over 35 x 35, channels first: no tile of 21 sums or less, nearly all others)."""

MOST_TAPS = 7
"""Of a row of a window that LLVM might write out as a whole: three and five it does."""


def schedule_tiles(sch: Any, plan: Plan, lanes: int, values: Mapping[str, int], hardware: Hardware) -> None:
    """Apply the sketch.

    Parameters
    ----------
    sch : tvm.s_tir.Schedule
        Of the kernel, in which the contraction has one loop for each of its axes, in their order.
    plan : Plan
    lanes : int
        Elements of a full vector register.
    values : mapping
        Every knob's value: mr, m2, nr, ku, chunk, order, depth, pack, pad, far_weights.
    hardware : Hardware
        With more than one thread, fused outer loops are spread over them.

    Raises
    ------
    tvm.s_tir.ScheduleError
        When TVM finds a step impossible for this kernel.
    """
    parallel = hardware.threads > 1 and values["depth"] > 0
    block = sch.get_sblock(plan.contraction.block.name)
    for name in (*plan.inlined, *plan.epilogue_inlined):
        sch.compute_inline(sch.get_sblock(name))
    staged = sch.get_sblock(plan.staged) if plan.staged else None
    images = image_rows(sch, plan)
    if staged is not None and values["pad"] == PAD_INLINE:
        sch.compute_inline(staged)
        staged = None
    panel = pack_panels(sch, block, plan, values)
    tile_bytes = values["mr"] * values["m2"] * values["nr"] * plan.element_bytes
    writers = local_sums(sch, block, plan, "global" if tile_bytes < STACK_BYTES else "local")
    loops = _tile_loops(sch, block, plan, lanes, values, hardware)
    for writer in writers:
        sch.reverse_compute_at(writer, loops["tile"], preserve_unit_loops=True)
        if not plan.scattered or writer is not writers[-1]:
            write_vectors(sch, writer, plan, lanes, values)
        else:
            write_squares(sch, writer, plan, values)
    if panel is not None and values["pack"] == AT_CHUNK:
        sch.compute_at(panel, loops["outer"], preserve_unit_loops=True)
        sch.vectorize(split_lanes(sch, sch.get_loops(panel)[-1], lanes, values["nr"])[1])
    if staged is not None and values["pad"] in (PAD_AT_OUTER, PAD_AT_CHUNK):
        sch.compute_at(staged, loops["outer" if values["pad"] == PAD_AT_OUTER else "chunk"], preserve_unit_loops=True)
        schedule_padding(sch, staged, plan, lanes, False)
    elif staged is not None:
        schedule_padding(sch, staged, plan, lanes, parallel)
    if panel is not None and values["pack"] == AT_ROOT:
        schedule_copy(sch, panel, lanes, parallel)
    if plan.epilogue and not plan.epilogue_fusable:
        schedule_copy(sch, sch.get_sblock(plan.epilogue), lanes, parallel)
    if parallel:
        sch.parallel(loops["outer"])
    for axis, loop in zip(plan.reduction, loops["window"], strict=False):
        rows = images.get(axis.position)
        if rows is not None and staged is not None and values["m2"] == 1:
            sch.annotate(loop, IMAGE_ROWS, list(astuple(rows)))
    sch.decompose_reduction(block, loops["reduction"])


def _tile_loops(
    sch: Any, block: Any, plan: Plan, lanes: int, values: Mapping[str, int], hardware: Hardware
) -> dict[str, Any]:
    """Split, order, fuse, unroll and vectorise; returns the loops that other steps attach to."""
    merged = {axis.position for axis in plan.unrolled[1:]}
    axes = [axis for axis in plan.contraction.block.axes if axis.position not in merged]
    found = sch.get_loops(block)
    if len(found) != len(axes):
        raise ValueError(f"the contraction has {len(found)} loops for {len(axes)} axes; expected one for each")
    loop = dict(zip((axis.position for axis in axes), found, strict=True))
    outer = [loop[axis.position] for axis in plan.outer]
    vector = loop[plan.vector.position]
    if plan.groups > 1:
        grouped = plan.contraction.columns[0]
        run, within = sch.split(loop[grouped.position], [plan.groups, None])
        outer.append(run)
        loop[grouped.position] = within
        vector = loop[plan.vector.position]
    unrolled = loop[plan.unrolled[0].position]
    second = loop[plan.second.position] if plan.second else None
    reduction = [loop[axis.position] for axis in plan.reduction]
    sch.reorder(*outer, *([second] if second is not None else []), unrolled, vector, *reduction)
    rows, row = sch.split(unrolled, [None, values["mr"]])
    chunk, rows = sch.split(rows, [None, values["chunk"]])
    padded = pads_last_columns(plan, lanes, values)
    overlapping = overlapping_columns(plan, values)
    columns, column = sch.split(vector, [None, values["nr"]], disable_predication=padded)
    image: list[Any] = []
    inner: list[Any] = []
    if second is not None:
        lines, line = sch.split(second, [None, values["m2"]])
        image, inner = [lines], [line]
    steps, step = sch.split(reduction[-1], [None, values["ku"]])
    row_loops = [*outer, *image, chunk]
    order = [columns, *row_loops] if values["order"] == 0 else [*row_loops, columns]
    sch.reorder(*order, rows, *reduction[:-1], steps, step, *inner, row, column)
    if padded or overlapping:
        vectors, lane = split_lanes(sch, column, lanes)
    else:
        width, _ = plan.vector_width(values["nr"], lanes)
        vectors, lane = sch.split(column, [None, width])
    if plan.joins_vectors(values["nr"], lanes):
        sch.annotate(vectors, JOIN_VECTORS, lanes)
    sch.vectorize(lane)
    for unroll in (step, *inner, row, vectors):
        sch.unroll(unroll)
    if plan.spread is not None:
        sch.annotate(loop[plan.spread.position], SPREAD_GROUPS, 1)
    if plan.vector_extent % values["nr"] and not padded and not overlapping:
        partition(sch, vectors)
    first = reduction[0] if len(reduction) > 1 else steps
    count = int(sch.get(vectors).extent)
    sums = values["mr"] * values["m2"] * count
    crowded = sums >= CROWDED_SUMS * hardware.vector_registers
    if plan.rows_share_taps and crowded and 1 < int(sch.get(steps).extent) <= MOST_TAPS:
        sch.annotate(steps, SEPARATE_STEPS, 1)
    depth = min(values["depth"], len(order))
    if values["pack"] == AHEAD and values[FAR_WEIGHTS]:
        asked = ask_for_weights(sch, steps, plan, values, hardware, readers_of_panel(sch, order, depth, values))
        full = sums + 2 * count + 1 > hardware.vector_registers >= MANY_REGISTERS
        if asked and full and values["ku"] > 1:
            sch.annotate(step, SEPARATE_STEPS, 1)
    if values["nr"] > lanes and asks_for_rows(plan):
        sch.annotate(steps, NEXT_TILE, [len(plan.reduction) - 1, values["mr"] * plan.reduction_extent])
    outermost = order[0] if depth <= 1 else sch.fuse(*order[:depth], preserve_unit_iters=True)
    inside = order.index(chunk) < depth
    if overlapping:
        sch.annotate(columns, OVERLAPPING_TAIL, values["nr"])
    whole_rows = overlapping_rows(plan, values)
    if whole_rows:
        sch.annotate(chunk if values["chunk"] == 1 else rows, OVERLAPPING_TAIL, values["mr"])
    tiled = [*([] if whole_rows else [chunk, rows]), *([] if padded or overlapping else [columns])]
    for partitioned in (*image, *tiled):
        if partitioned not in order[: max(depth, 1)] or depth <= 1:
            partition(sch, partitioned)
    return {
        "outer": outermost,
        "chunk": outermost if inside else chunk,
        "tile": rows,
        "window": reduction[:-1],
        "reduction": first,
    }
