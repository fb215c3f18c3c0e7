"""Tiles of dot-product instructions: products of 8-bit integers, and of bfloat16.

The loop nest is that of `tiled`, with one more level: the innermost reduction axis is cut into the groups that one
instruction multiplies. The right operand is packed to `[.., columns / nr, reduction.., groups, nr, group]`, so that a
vector of it is one group for each of its columns; the left one must have its groups side by side, and is copied where
it has not. Both are filled up with zeros, which add nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from ..access import Access, Axis
from ..marks import AHEAD_OF_TIME
from ..nest import fuse, index_map, partition
from ..schedule import schedule_of
from .copies import AHEAD, PAD_AT_OUTER, read_of, schedule_padding, zero_of
from .dot_intrinsics import DotProduct
from .plan import Plan, dimension_of
from .write_back import local_sums

__all__ = [
    "DotPlan",
    "dot_plan",
    "schedule_dots",
    "spread_outer_loops",
    "whole_dimension",
]

BFLOAT16_SPREAD = 1.25
"""Vector-instruction times (Zen 4: tiles one vector wide run at 73 % of peak whatever their height, others at 98 %)."""

NARROWEST_WRITE = 4
"""Elements of a vector; where no vector of so many divides the columns, the last tile is written by code of its own."""


@dataclass(frozen=True)
class DotPlan(Plan):
    """A plan in units of groups: its innermost reduction axis counts groups, and an operand's element is a group.

    Attributes
    ----------
    dot : DotProduct
        What multiplies.
    grouped : Axis
        The reduction axis that is cut into groups, with its own extent.
    """

    dot: DotProduct
    grouped: Axis

    def vector_width(self, nr: int, lanes: int) -> tuple[int, bool]:
        """Tiles are whole vectors: the packed operand is filled up to them."""
        return lanes, False

    def pads_columns(self, nr: int, lanes: int) -> bool:
        """Whether the last tile is ragged."""
        return self.vector_extent % nr != 0

    @property
    def overlaps(self) -> bool:
        """Never: ragged tiles have code of their own."""
        return False

    def transposed_tile(self, mr: int, nr: int) -> int:
        """None: elements are written one by one."""
        return 0

    @property
    def copies_left(self) -> bool:
        """Whether the left operand's groups are not whole, or not side by side."""
        return (
            self.contraction.left.access.stride(self.grouped.position) != 1 or self.grouped.extent % self.dot.depth > 0
        )

    @property
    def spread_cost(self) -> float:
        """Four bytes are spread by the instruction that multiplies them, two bfloat16 by one of their own."""
        return super().spread_cost if self.dot.sums == "int32" else BFLOAT16_SPREAD

    @property
    def row_corrections(self) -> int:
        """A sign is corrected once for all vectors of a row, so of two signed operands wide tiles are the best."""
        return self.dot.corrections

    @property
    def copied_elements(self) -> int:
        """Of operands that are put into groups in each call."""
        left, right = self.contraction.left.access, self.contraction.right.access
        copied = ((left, self.copies_left), (right, not self.panel_is_weight))
        return sum(math.prod(access.shape) for access, moves in copied if moves)

    @property
    def write_width(self) -> int:
        """Elements of the vectors that write a result: no vector may cross the end of the columns."""
        width = self.dot.lanes
        while self.vector_extent % width:
            width //= 2
        return width


def dot_plan(plan: Plan, dot: DotProduct) -> DotPlan | None:
    """The plan with its reduction in groups; None where that is not possible."""
    contraction = plan.contraction
    left, right = contraction.left.access, contraction.right.access
    if plan.name != "columns" or plan.panel is None or plan.groups > 1 or plan.left_vectorised:
        return None
    if left.buffer == right.buffer:  # a copy of one is one of both
        return None
    if any(plan.kernel.block(name).write.buffer == right.buffer for name in plan.inlined):
        return None
    grouped = max(
        (a for a in plan.reduction if whole_dimension(left, a) and whole_dimension(right, a)),
        key=lambda axis: (left.stride(axis.position) == 1 and axis.extent % dot.depth == 0, axis.extent),
        default=None,
    )
    if grouped is None:
        return None
    groups = replace(grouped, extent=-(-grouped.extent // dot.depth))
    own = {field.name: getattr(plan, field.name) for field in fields(Plan)}
    own["reduction"] = (*(a for a in plan.reduction if a != grouped), groups)
    if plan.second is not None:
        own |= {"second": None, "outer": (*plan.outer, plan.second)}
    return DotPlan(**own, dot=dot, grouped=grouped)


def whole_dimension(access: Access, axis: Axis) -> bool:
    """Whether the axis is one whole dimension of the buffer."""
    return any(
        index is not None and index.coefficients == {axis.position: 1} and extent == axis.extent and not index.quotients
        for index, extent in zip(access.indices, access.shape, strict=True)
    )


def schedule_dots(mod: Any, plan: DotPlan, values: Mapping[str, int], parallel: bool) -> Any:
    """Apply the sketch; the knobs are those of `tiled`, with `m2` always 1.

    Raises
    ------
    tvm.s_tir.ScheduleError
        When TVM finds a step impossible for this kernel.
    """
    sch = schedule_of(mod)
    parallel = parallel and values["depth"] > 0
    block = sch.get_sblock(plan.contraction.block.name)
    staged = sch.get_sblock(plan.staged) if plan.staged else None
    copied = _group_left(sch, block, plan) if plan.copies_left else None
    for name in (*plan.inlined, *plan.epilogue_inlined):
        sch.compute_inline(sch.get_sblock(name))
    if copied is not None and staged is not None:
        sch.compute_inline(staged)
        staged = None
    panel = _pack_right(sch, block, plan, values)
    writers = local_sums(sch, block, plan, "local")
    _widen_sums(sch, block, plan, values["nr"])
    loops = _tile_loops(sch, block, plan, values)
    for writer in writers:
        sch.reverse_compute_at(writer, loops["tile"], preserve_unit_loops=True)
        _write(sch, writer, plan)
    apart = [copied, panel if values["pack"] != AHEAD else None]
    if staged is not None and values["pad"] == PAD_AT_OUTER:
        sch.compute_at(staged, loops["outer"], preserve_unit_loops=True)
    elif staged is not None:
        schedule_padding(sch, staged, plan, plan.dot.lanes * plan.dot.depth, parallel)
    if plan.epilogue and not plan.epilogue_fusable:
        apart.append(sch.get_sblock(plan.epilogue))
    for alone in apart:
        if alone is not None:
            spread_outer_loops(sch, alone, parallel)
    if parallel:
        sch.parallel(loops["outer"])
    start = sch.decompose_reduction(sch.blockize(loops["columns"]), loops["reduction"])
    sch.vectorize(sch.get_loops(sch.get_child_blocks(start)[0])[-1])
    sch.tensorize(sch.get_loops(block)[-2], plan.dot.name)
    return sch


def spread_outer_loops(sch: Any, block: Any, parallel: bool) -> None:
    """Share the outermost loops of a block of its own among threads."""
    outer = sch.get_loops(block)[:-2]
    if outer and parallel:
        sch.parallel(fuse(sch, outer))


def _group_left(sch: Any, block: Any, plan: DotPlan) -> Any:
    """Copy the left operand so that its groups are whole and side by side; the copying block."""
    access, depth = plan.contraction.left.access, plan.dot.depth
    dimension = dimension_of(access, plan.grouped)

    def layout(*index: Any) -> list[Any]:
        rest = [i for d, i in enumerate(index) if d != dimension]
        return [*rest, index[dimension] // depth, index[dimension] % depth]

    copy = sch.cache_read(block, read_of(sch, block, plan, access), "global")
    fill = zero_of(access.dtype) if plan.grouped.extent % depth else None
    sch.transform_layout(copy, ("write", 0), index_map(sch, block, layout, len(access.shape)), pad_value=fill)
    return copy


def _pack_right(sch: Any, block: Any, plan: DotPlan, values: Mapping[str, int]) -> Any:
    """Copy the right operand into panels of groups; the copying block."""
    access, depth, nr = plan.contraction.right.access, plan.dot.depth, values["nr"]
    copy = sch.cache_read(block, read_of(sch, block, plan, access), "global")
    column, last = dimension_of(access, plan.vector), dimension_of(access, plan.grouped)
    others = [dimension_of(access, axis) for axis in plan.reduction[:-1] if axis.position in access.axes()]
    rest = [d for d in range(len(access.shape)) if d not in (column, last, *others)]

    def layout(*index: Any) -> list[Any]:
        j, k = index[column], index[last]
        return [*(index[d] for d in rest), j // nr, *(index[d] for d in others), k // depth, j % nr, k % depth]

    ragged = plan.vector_extent % nr or plan.grouped.extent % depth
    panels = index_map(sch, block, layout, len(access.shape))
    sch.transform_layout(copy, ("write", 0), panels, pad_value=zero_of(access.dtype) if ragged else None)
    if values["pack"] == AHEAD:
        sch.annotate(copy, AHEAD_OF_TIME, True)
    return copy


def _widen_sums(sch: Any, block: Any, plan: DotPlan, nr: int) -> None:
    """Give the sums whole vectors where a tile is wider than the columns: TVM cuts their buffer to the columns.

    The last vector of a row would lie across the first of the next one, or end behind the buffer.
    """
    if nr <= plan.vector_extent:
        return

    def layout(*index: Any) -> list[Any]:
        return [*index[:-1], index[-1] // nr, index[-1] % nr]

    rank = len(plan.contraction.block.write.shape) - len(plan.fused_dimensions) + 1
    wider = index_map(sch, block, layout, rank)
    sch.transform_layout(block, ("write", 0), wider, assume_injective_transform=True)  # nothing reads what is added


def _tile_loops(sch: Any, block: Any, plan: DotPlan, values: Mapping[str, int]) -> dict[str, Any]:
    """Split, order, fuse and unroll; returns the loops that other steps attach to."""
    merged = {axis.position for axis in plan.unrolled[1:]}
    axes = [axis for axis in plan.contraction.block.axes if axis.position not in merged]
    loop = dict(zip((axis.position for axis in axes), sch.get_loops(block), strict=True))
    chunk, rows, row = sch.split(loop[plan.unrolled[0].position], [None, values["chunk"], values["mr"]])
    lanes = plan.dot.lanes
    columns, vectors, lane = sch.split(
        loop[plan.vector.position], [None, values["nr"] // lanes, lanes], disable_predication=True
    )
    reduction = [loop[axis.position] for axis in plan.reduction]
    steps, step, group = sch.split(
        reduction[-1], [None, values["ku"], plan.dot.depth], disable_predication=plan.copies_left
    )
    row_loops = [*(loop[axis.position] for axis in plan.outer), chunk]
    order = [columns, *row_loops] if values["order"] == 0 else [*row_loops, columns]
    sch.reorder(*order, rows, *reduction[:-1], steps, step, row, vectors, lane, group)
    for unrolled in (step, row, vectors):
        sch.unroll(unrolled)
    depth = min(values["depth"], len(order))
    fused = depth if depth > 1 else 0
    ragged_rows = plan.unrolled_extent % values["mr"] != 0
    ragged_write = plan.write_width < NARROWEST_WRITE and plan.vector_extent % values["nr"] != 0
    for partitioned, ragged in ((chunk, ragged_rows), (rows, ragged_rows), (columns, ragged_write)):
        if ragged and partitioned not in order[:fused]:
            partition(sch, partitioned)
    outer = sch.fuse(*order[:fused], preserve_unit_iters=True) if fused else order[0]
    first = reduction[0] if len(reduction) > 1 else steps
    return {"outer": outer, "tile": rows, "reduction": first, "columns": lane}


def _write(sch: Any, writer: Any, plan: DotPlan) -> None:
    """Write a tile by vectors, unrolled; across the output's rows, element by element."""
    *rows, columns = sch.get_loops(writer)[-len(sch.get(writer).iter_vars) :]
    width = plan.write_width if plan.write_width >= NARROWEST_WRITE else plan.dot.lanes
    vectors, lane = sch.split(columns, [None, width])
    sch.vectorize(lane)
    for loop in (*rows, vectors):
        sch.unroll(loop)
