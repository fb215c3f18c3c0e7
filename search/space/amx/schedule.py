"""The schedule of tiles of AMX: loops, copies and marks; what they become is in `tiles`.

The nest is that of `contraction.tiled`: chunks of register tiles, the reduction, one register tile, here of up to four
tile registers of sums. The left operand is copied so that neighbouring rows of a tile are neighbours in memory, all
rows of one step of the reduction before those of the next; the right one is packed into panels as wide as a tile.
Both are filled up with zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from tvm.s_tir import ScheduleError

from ..access import Access
from ..contraction.copies import AHEAD, PAD_AT_OUTER, read_of, schedule_padding, zero_of
from ..contraction.dot import spread_outer_loops
from ..contraction.plan import dimension_of, whole_width
from ..contraction.prefetch_choice import LEAST_FAR_BYTES, readers_of_panel
from ..contraction.write_back import local_sums
from ..hardware import Hardware
from ..marks import AHEAD_OF_TIME, AMX_CONFIGURED, AMX_TILES, NEXT_PANEL, SPLIT_IN_HALVES
from ..nest import fuse, index_map
from ..schedule import schedule_of
from .plan import TilePlan
from .products import PRODUCTS, TILE_ROWS

__all__ = ["LANES", "copies_left", "schedule_tiles", "tile_height"]

LANES = 16
"""Sums in a row of a tile, and floats of a vector."""


def tile_height(mr: Any) -> Any:
    """Rows of one tile where `mr` rows share a few; for numbers and arrays."""
    return mr // (-(-mr // TILE_ROWS))


def copies_left(plan: TilePlan, values: Mapping[str, Any]) -> Any:
    """Whether the left operand is copied first; for numbers and arrays."""
    ragged = (plan.unrolled_extent % values["mr"] != 0) | (plan.second_extent % values["m2"] != 0)
    return ragged | (plan.product.halves or not plan.whole_rows)


def schedule_tiles(mod: Any, plan: TilePlan, values: Mapping[str, int], hardware: Hardware) -> Any:
    """Apply the sketch; the knobs are those of `contraction.tiled`.

    Raises
    ------
    tvm.s_tir.ScheduleError
        When TVM finds a step impossible for this kernel.
    """
    sch = schedule_of(mod)
    parallel = hardware.threads > 1 and values["depth"] > 0
    block = sch.get_sblock(plan.contraction.block.name)
    staged = sch.get_sblock(plan.staged) if plan.staged else None
    copied = None
    if copies_left(plan, values):
        copied = (_copy_windows if plan.windowed else _copy_tiles)(sch, block, plan, values)
    for name in (*plan.inlined, *plan.epilogue_inlined):
        sch.compute_inline(sch.get_sblock(name))
    if copied is not None and staged is not None:
        sch.compute_inline(staged)
        staged = None
    panel = _pack_right(sch, block, plan, values)
    (writer,) = local_sums(sch, block, plan, "local")
    loops = _loops(sch, block, plan, values, hardware)
    sch.reverse_compute_at(writer, loops["tile"], preserve_unit_loops=True)
    _write(sch, writer, plan)
    inside = values["pad"] == PAD_AT_OUTER
    if copied is not None:
        if inside:
            sch.compute_at(copied.block, loops["outer"], preserve_unit_loops=True)
        _copy_rows(sch, copied, plan, parallel and not inside)
    if staged is not None and inside:
        sch.compute_at(staged, loops["outer"], preserve_unit_loops=True)
        schedule_padding(sch, staged, plan, LANES * plan.product.group, False)
    elif staged is not None:
        schedule_padding(sch, staged, plan, LANES * plan.product.group, parallel)
    if plan.epilogue and not plan.epilogue_fusable:
        spread_outer_loops(sch, sch.get_sblock(plan.epilogue), parallel)
    _copy_panels(sch, panel, plan, values, parallel and values["pack"] != AHEAD)
    if parallel:
        sch.parallel(loops["outer"])
    sch.annotate(loops["outer"], AMX_CONFIGURED, 1)
    marks = [PRODUCTS.index(plan.product), len(plan.reduction), tile_height(values["mr"])]
    sch.annotate(loops["reduction"], AMX_TILES, marks)
    return sch


def _padded_extents(plan: TilePlan, values: Mapping[str, int]) -> dict[int, int]:
    """Dimensions of the left operand that whole tiles read beyond the end of, and how far."""
    extents = {axis.position: axis.extent for axis in plan.contraction.block.axes}
    rows = -(-plan.unrolled_extent // values["mr"]) * values["mr"]
    first, *inner = plan.unrolled
    for axis in inner:
        rows = -(-rows // axis.extent)
    extents[first.position] = rows
    if plan.second is not None:
        extents[plan.second.position] = -(-plan.second_extent // values["m2"]) * values["m2"]
    found = {}
    for dimension, (index, extent) in enumerate(
        zip(plan.contraction.left.access.indices, plan.contraction.left.access.shape, strict=True)
    ):
        assert index is not None
        end = 1 + index.offset + sum(step * (extents[a] - 1) for a, step in index.coefficients.items())
        if end > extent:
            found[dimension] = end
    return found


class _Copied(NamedTuple):
    """A copy of the left operand in the order in which tiles read it, rows of 64 bytes.

    `rows` is the number of dimensions that lie between the halves of one.
    """

    block: Any
    rows: int


def _cut(plan: TilePlan, index: Any) -> tuple[list[Any], Any]:
    """Of the reduction: the step, with the half where there are such, and the place in a row of a tile."""
    depth = plan.product.depth
    if plan.product.halves:
        return [index // depth, index // LANES % 2], index % LANES
    return [index // depth], index % depth


def _copy_tiles(sch: Any, block: Any, plan: TilePlan, values: Mapping[str, int]) -> _Copied:
    """Each tile reads rows of its own, one run of memory: [others.., tiles, steps, halves, rows of a tile, depth]."""
    access, depth, mr = plan.contraction.left.access, plan.product.depth, values["mr"]
    copy = sch.reindex(block, ("read", read_of(sch, block, plan, access)))
    shape = [int(extent) for extent in sch.get(copy).writes[0].source.shape]
    axes = [axis for axis in plan.contraction.block.axes if axis.position in access.axes()]
    if len(axes) > len(shape):
        axes = [axis for axis in axes if not (axis.reduction and axis.extent == 1)]
    if [axis.extent for axis in axes] != shape:
        raise ScheduleError(f"the left operand is read along {[axis.name for axis in axes]}, and copied as {shape}")
    cut = next(d for d, axis in enumerate(axes) if axis.position == plan.grouped.position)
    rows = [d for d, axis in enumerate(axes) if axis in plan.unrolled]
    others = [d for d in range(len(axes)) if d != cut and d not in rows]
    m2 = values["m2"]
    ragged_lines = plan.second_extent % m2 != 0

    def line(d: int, index: Any) -> list[Any]:
        """Of an image whose last tile has more lines, these are there, too."""
        return [index // m2, index % m2] if ragged_lines and axes[d] == plan.second else [index]

    def tiles(*index: Any) -> list[Any]:
        row = index[rows[0]]
        for d in rows[1:]:
            row = row * shape[d] + index[d]
        steps, place = _cut(plan, index[cut])
        return [*(part for d in others for part in line(d, index[d])), row // mr, *steps, row % mr, place]

    ragged = plan.grouped.extent % depth != 0 or plan.unrolled_extent % mr != 0 or ragged_lines
    _rearrange(sch, copy, access, tiles, ragged, len(axes))
    return _Copied(copy, 1)


def _copy_windows(sch: Any, block: Any, plan: TilePlan, values: Mapping[str, int]) -> _Copied:
    """Tiles share rows, which the nearest cache holds for a step: [others.., steps, halves, rows.., depth]."""
    access, depth = plan.contraction.left.access, plan.product.depth
    cut = dimension_of(access, plan.grouped)
    ends = _padded_extents(plan, values)
    moving = {axis.position for axis in (*plan.row_axes, *plan.reduction)}
    row = dimension_of(access, plan.unrolled[-1])
    rest = [d for d in range(len(access.shape)) if d not in (cut, row)]
    rows = [d for d in rest if (index := access.indices[d]) is not None and moving & index.coefficients.keys()]
    others = [d for d in rest if d not in rows]
    rows.append(row)  # neighbouring rows are neighbours in memory

    def padded(d: int, index: Any) -> list[Any]:
        return [index // ends[d], index % ends[d]] if d in ends else [index]

    def windows(*index: Any) -> list[Any]:
        steps, place = _cut(plan, index[cut])
        return [*(index[d] for d in others), *steps, *(part for d in rows for part in padded(d, index[d])), place]

    copy = sch.cache_read(block, read_of(sch, block, plan, access), "global")
    _rearrange(sch, copy, access, windows, plan.grouped.extent % depth != 0 or bool(ends), len(access.shape))
    return _Copied(copy, len(rows) + len(ends))


def _copy_rows(sch: Any, copied: _Copied, plan: TilePlan, parallel: bool) -> None:
    """Copy row by row; where it is to be, split each in halves at once."""
    *outer, place = sch.get_loops(copied.block)
    if plan.product.halves:
        half = outer.pop(-1 - copied.rows)
        sch.reorder(*outer[-copied.rows :], half)
        sch.annotate(outer[-1], SPLIT_IN_HALVES, 0)
    *outer, _ = outer
    _, lane = sch.split(place, [None, whole_width(plan.grouped.extent, plan.product.depth // plan.product.parts)])
    sch.vectorize(lane)
    if parallel and outer:
        sch.parallel(fuse(sch, outer))


def _pack_right(sch: Any, block: Any, plan: TilePlan, values: Mapping[str, int]) -> Any:
    """Copy the right operand into panels of tiles, or of floats that become such; the copying block."""
    access, nr, product = plan.contraction.right.access, values["nr"], plan.product
    copy = sch.cache_read(block, read_of(sch, block, plan, access), "global")
    column, last = dimension_of(access, plan.vector), dimension_of(access, plan.grouped)
    others = [dimension_of(access, axis) for axis in plan.reduction[1:] if axis.position in access.axes()]
    rest = [d for d in range(len(access.shape)) if d not in (column, last, *others)]
    depth, group = product.depth, 1 if product.halves else product.group

    def layout(*index: Any) -> list[Any]:
        j, k = index[column], index[last]
        tile = [j // LANES % (nr // LANES), k // group % (depth // group), j % LANES]
        pair = [] if product.halves else [k % group]
        return [*(index[d] for d in rest), j // nr, k // depth, *(index[d] for d in others), *tile, *pair]

    ragged = plan.vector_extent % nr != 0 or plan.grouped.extent % depth != 0
    _rearrange(sch, copy, access, layout, ragged, len(access.shape))
    return copy


def _asks_for_weights(plan: TilePlan, values: Mapping[str, int], hardware: Hardware) -> bool:
    """Whether to ask for the next panel: not where tiles of weights outnumber those of rows, since loads from the
    second-level cache take the time then (14 x 64, 196 x 256 x 1024: 98 us, and 122 with prefetches).
    """
    across, down = values["nr"] // LANES, -(-values["mr"] // TILE_ROWS) * values["m2"]
    far = hardware.last_cache_is_far and plan.contraction.right.access.bytes >= LEAST_FAR_BYTES
    return values["pack"] == AHEAD and far and across <= down


def _panels_dimension(plan: TilePlan) -> int:
    """Of packed weights: how many dimensions are before the one that counts panels."""
    access = plan.contraction.right.access
    used = {dimension_of(access, axis) for axis in (plan.vector, plan.grouped)}
    used |= {dimension_of(access, axis) for axis in plan.reduction[1:] if axis.position in access.axes()}
    return len(access.shape) - len(used)


def _rearrange(sch: Any, copy: Any, access: Access, layout: Callable[..., list[Any]], ragged: bool, rank: int) -> None:
    """Write a copy in another layout, zeros where it has places without elements, with loops in the order of memory."""
    new = index_map(sch, copy, layout, rank)
    sch.transform_layout(copy, ("write", 0), new, pad_value=zero_of(access.dtype) if ragged else None)
    if not ragged:
        sch.transform_block_layout(copy, new)


def _copy_panels(sch: Any, panel: Any, plan: TilePlan, values: Mapping[str, int], parallel: bool) -> None:
    """Pack panels ahead of time, or by all threads; where it is to be, split each step's tiles in halves at once."""
    if plan.product.halves:
        *outer, step, _, _, _ = sch.get_loops(panel)
        sch.annotate(step, SPLIT_IN_HALVES, values["nr"] // LANES)
    else:
        *outer, _, _, _, _ = sch.get_loops(panel)
    if values["pack"] == AHEAD:
        sch.annotate(panel, AHEAD_OF_TIME, True)
    elif parallel and outer:
        sch.parallel(fuse(sch, outer))


def _loops(sch: Any, block: Any, plan: TilePlan, values: Mapping[str, int], hardware: Hardware) -> dict[str, Any]:
    """Split, order and fuse; returns the loops that other steps attach to."""
    merged = {axis.position for axis in plan.unrolled[1:]}
    axes = [axis for axis in plan.contraction.block.axes if axis.position not in merged]
    loop = dict(zip((axis.position for axis in axes), sch.get_loops(block), strict=True))
    chunk, rows, row = sch.split(loop[plan.unrolled[0].position], [None, values["chunk"], values["mr"]])
    columns, vectors, lane = sch.split(
        loop[plan.vector.position], [None, values["nr"] // LANES, LANES], disable_predication=True
    )
    windows = [loop[axis.position] for axis in plan.reduction[1:]]
    steps, depth = sch.split(loop[plan.grouped.position], [None, plan.product.depth], disable_predication=True)
    image: list[Any] = []
    if plan.second is not None:
        lines, line = sch.split(loop[plan.second.position], [None, values["m2"]])
        image = [lines]
    else:
        rows, line = sch.split(rows, [None, 1])
    row_loops = [*(loop[axis.position] for axis in plan.outer), *image, chunk]
    order = [columns, *row_loops] if values["order"] == 0 else [*row_loops, columns]
    sch.reorder(*order, rows, steps, *windows, line, row, vectors, lane, depth)
    fused = min(values["depth"], len(order))
    if _asks_for_weights(plan, values, hardware):
        readers = readers_of_panel(sch, order, fused, values)
        sch.annotate(steps, NEXT_PANEL, [0, readers, _panels_dimension(plan)])
    outer = sch.fuse(*order[:fused], preserve_unit_iters=True) if fused > 1 else order[0]
    return {"outer": outer, "tile": rows, "reduction": steps}


def _write(sch: Any, writer: Any, plan: TilePlan) -> None:
    """Write a tile by vectors, a row in each iteration."""
    columns = sch.get_loops(writer)[-1]
    vectors, lane = sch.split(columns, [None, whole_width(plan.vector_extent, LANES)])
    sch.vectorize(lane)
    sch.unroll(vectors)
