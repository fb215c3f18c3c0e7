"""The tiled contraction: register tiles over any layout, packed panels, parallel chunks, epilogue in registers.

The loop nest, outermost first: parallel chunks of tiles, tiles, the reduction, and an unrolled register tile of
`second x mr x nr` sums. It is the BLIS macro-kernel (Van Zee and van de Geijn, 2015) without a fixed micro-kernel:
LLVM keeps the sums in registers when the reduction's initialisation is taken out of the loop.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tvm import tirx
from tvm.s_tir import Schedule

from .plan import Plan

__all__ = ["schedule_tiles"]

AHEAD, UNPACKED, AT_CHUNK, AT_ROOT = 3, 0, 1, 2
"""Values of the `pack` knob: by a separate kernel that runs once, not at all, in each chunk, once in each call."""

PAD_AT_ROOT, PAD_AT_CHUNK, PAD_INLINE = 0, 1, 2
"""Values of the `pad` knob: where the padded left operand is computed."""


def schedule_tiles(mod: Any, plan: Plan, lanes: int, values: Mapping[str, int]) -> Any:
    """Apply the sketch.

    Parameters
    ----------
    mod : tvm.ir.IRModule
    plan : Plan
    lanes : int
        Elements of a full vector register.
    values : mapping
        Every knob's value: mr, m2, nr, ku, chunk, order, parallel, pack, pad.

    Raises
    ------
    tvm.s_tir.ScheduleError
        When TVM finds a step impossible for this kernel.
    """
    sch = Schedule(mod, error_render_level="none")
    block = sch.get_sblock(plan.contraction.block.name)
    for name in plan.inlined:
        sch.compute_inline(sch.get_sblock(name))
    for name in plan.epilogue_inlined:
        sch.compute_inline(sch.get_sblock(name))
    staged = sch.get_sblock(plan.staged) if plan.staged else None
    if staged is not None and values["pad"] == PAD_INLINE:
        sch.compute_inline(staged)
        staged = None
    panel = _pack(sch, block, plan, values)
    if plan.epilogue and plan.epilogue_fusable:
        sch.set_scope(block, 0, "local")
        result = sch.get_sblock(plan.epilogue)
    else:
        result = sch.cache_write(block, 0, "local")
    _make_vector_innermost(sch, block, plan)

    loops = _tile_loops(sch, block, plan, lanes, values)
    sch.reverse_compute_at(result, loops["tile"], preserve_unit_loops=True)
    _schedule_result(sch, result, lanes)
    if panel is not None and values["pack"] == AT_CHUNK:
        sch.compute_at(panel, loops["chunk"], preserve_unit_loops=True)
        sch.vectorize(_lane_loop(sch, sch.get_loops(panel)[-1], values["nr"], lanes))
    if staged is not None and values["pad"] == PAD_AT_CHUNK:
        sch.compute_at(staged, loops["chunk"], preserve_unit_loops=True)
        sch.vectorize(_split_lanes(sch, sch.get_loops(staged)[-1], lanes))
    elif staged is not None:
        _schedule_copy(sch, staged, lanes, values["parallel"] > 0)
    if panel is not None and values["pack"] == AT_ROOT:
        _schedule_copy(sch, panel, lanes, values["parallel"] > 0)
    if plan.epilogue and not plan.epilogue_fusable:
        _schedule_copy(sch, sch.get_sblock(plan.epilogue), lanes, values["parallel"] > 0)
    if values["parallel"]:
        sch.parallel(loops["chunk"])
    sch.decompose_reduction(block, loops["reduction"])
    return sch


def _pack(sch: Any, block: Any, plan: Plan, values: Mapping[str, int]) -> Any:
    """Copy the vectorised operand into panels `[.., columns / nr, reduction.., nr]`; the copying block, or None."""
    if plan.panel is None or values["pack"] == UNPACKED:
        return None
    nr, panel = values["nr"], plan.panel
    name = plan.kernel.buffers[panel.buffer]
    region = [read.source.name for read in sch.get(block).reads].index(name)
    copy = sch.cache_read(block, region, "global")
    axis_of = [next(iter(index.coefficients), None) for index in panel.indices if index is not None]
    column = axis_of.index(plan.vector.position)
    reduced = [axis_of.index(a.position) for a in plan.reduction if a.position in axis_of]
    rest = [d for d in range(len(axis_of)) if d != column and d not in reduced]
    extent = panel.shape[column]
    group = plan.vector_extent

    def layout(*index: Any) -> list[Any]:
        j = index[column]
        groups = [j // group] if plan.groups > 1 else []
        if plan.groups > 1:
            j = j % group
        return [*(index[d] for d in rest), *groups, j // nr, *(index[d] for d in reduced), j % nr]

    ragged = (group if plan.groups > 1 else extent) % nr != 0
    index_map = tirx.IndexMap.from_func(layout, ndim=len(axis_of), index_dtype="int64")
    pad_value = (0.0 if panel.dtype.startswith(("float", "bfloat")) else 0) if ragged else None
    sch.transform_layout(copy, ("write", 0), index_map, pad_value=pad_value)
    if values["pack"] == AHEAD:
        sch.annotate(copy, "meta_schedule.layout_rewrite_preproc", True)
    return copy


def _make_vector_innermost(sch: Any, block: Any, plan: Plan) -> None:
    """Give the local sums a layout in which vectors are contiguous."""
    write = plan.contraction.block.write
    dimension = next(
        d for d, index in enumerate(write.indices) if index is not None and plan.vector.position in index.coefficients
    )
    last = len(write.shape) - 1
    if dimension == last:
        return
    order = [d for d in range(len(write.shape)) if d != dimension] + [dimension]
    index_map = tirx.IndexMap.from_func(lambda *index: [index[d] for d in order], ndim=len(order), index_dtype="int64")
    sch.transform_layout(block, ("write", 0), index_map)


def _tile_loops(sch: Any, block: Any, plan: Plan, lanes: int, values: Mapping[str, int]) -> dict[str, Any]:
    """Split, order, fuse, unroll and vectorise; returns the loops that other steps attach to."""
    found = sch.get_loops(block)
    if len(found) != len(plan.contraction.block.axes):
        raise ValueError("the contraction's loops do not correspond to its axes")
    loop = dict(zip((axis.position for axis in plan.contraction.block.axes), found, strict=True))
    outer = [loop[axis.position] for axis in plan.outer]
    vector = loop[plan.vector.position]
    if plan.groups > 1:
        grouped = plan.contraction.columns[0]
        run, within = sch.split(loop[grouped.position], [plan.groups, None])
        outer.append(run)
        loop[grouped.position] = within
        vector = loop[plan.vector.position]
    unrolled = [loop[axis.position] for axis in plan.unrolled]
    second = loop[plan.second.position] if plan.second else None
    reduction = [loop[axis.position] for axis in plan.reduction]
    sch.reorder(*outer, *([second] if second is not None else []), *unrolled, vector, *reduction)
    fused = sch.fuse(*unrolled, preserve_unit_iters=True) if len(unrolled) > 1 else unrolled[0]
    rows, row = sch.split(fused, [None, values["mr"]])
    chunk, rows = sch.split(rows, [None, values["chunk"]])
    columns, column = sch.split(vector, [None, values["nr"]])
    image: list[Any] = []
    inner: list[Any] = []
    if second is not None:
        lines, line = sch.split(second, [None, values["m2"]])
        image, inner = [lines], [line]
    steps, step = sch.split(reduction[-1], [None, values["ku"]])
    row_loops = [*outer, *image, chunk]
    order = [columns, *row_loops] if values["order"] == 0 else [*row_loops, columns]
    sch.reorder(*order, rows, *reduction[:-1], steps, step, *inner, row, column)
    for partitioned in (*image, chunk, rows, columns):
        sch.annotate(partitioned, "pragma_loop_partition_hint", 1)
    lane = _lane_loop(sch, column, values["nr"], lanes)
    vectors = sch.get_loops(block)[-2] if values["nr"] > 1 else None
    sch.vectorize(lane)
    for unroll in (step, *inner, row):
        sch.unroll(unroll)
    if vectors is not None:
        sch.unroll(vectors)
    first = reduction[0] if len(reduction) > 1 else steps
    parallel = min(values["parallel"], len(order))
    chunk_loop = order[0] if parallel <= 1 else sch.fuse(*order[:parallel], preserve_unit_iters=True)
    return {"chunk": chunk_loop, "tile": rows, "reduction": first}


def _lane_loop(sch: Any, loop: Any, extent: int, lanes: int) -> Any:
    """Split a loop of known extent into whole vectors; returns the loop over the lanes of one."""
    width = lanes
    while extent % width:
        width //= 2
    return sch.split(loop, [None, width])[1]


def _split_lanes(sch: Any, loop: Any, lanes: int) -> Any:
    """The innermost loop of a copy, split into vectors that divide its extent."""
    return _lane_loop(sch, loop, int(sch.get(loop).extent), lanes)


def _schedule_copy(sch: Any, block: Any, lanes: int, parallel: bool) -> None:
    """An element-wise block on its own: outer loops parallel, innermost vectorised."""
    loops = sch.get_loops(block)
    lane = _split_lanes(sch, loops[-1], lanes)
    if parallel and len(loops) > 1:
        sch.parallel(sch.fuse(*loops[:-1]) if len(loops) > 2 else loops[0])
    sch.vectorize(lane)


def _schedule_result(sch: Any, result: Any, lanes: int) -> None:
    """Write a tile of sums back, by vectors where the output is contiguous along them."""
    loops = sch.get_loops(result)
    lane = _split_lanes(sch, loops[-1], lanes)
    sch.vectorize(lane)
