"""A tile's sums in registers, and how they are written back: by vectors, or by squares that are transposed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tvm.ir.expr import TensorLoad

from ..expressions import nodes_of
from ..marks import JOIN_VECTORS, OVERLAPPING_TAIL, TRANSPOSE_TILE
from ..nest import index_map, partition
from .last_tile import overlapping_columns, pads_last_columns
from .plan import Plan, dimension_of, whole_width

__all__ = ["local_sums", "write_squares", "write_vectors"]

UNROLLED_EPILOGUE = 8
"""Operations of an element's epilogue up to which writing a tile back is unrolled: bias, residual, activation."""


def local_sums(sch: Any, block: Any, plan: Plan, scope: str) -> list[Any]:
    """Let the contraction sum into a local buffer with contiguous vectors; the blocks that write a tile back, in order.

    The buffer has one row for each of the axes that are merged. Where vectors are written across the output's rows, a
    tile goes through a second one first: LLVM would otherwise take the sums out of their registers, element by element,
    in the middle of the loop.
    """
    if plan.epilogue and plan.epilogue_fusable:
        sch.set_scope(block, 0, scope)
        writers = [sch.get_sblock(plan.epilogue)]
    else:
        writers = [sch.cache_write(block, 0, scope)]
    contraction = plan.kernel.contraction
    assert contraction is not None
    rank, run, vector = len(contraction.block.write.shape), plan.merged, plan.vector_dimension
    merged_dimensions = tuple(dimension_of(contraction.block.write, axis) for axis in run)

    def merge(index: tuple[Any, ...], positions: tuple[int, ...]) -> list[tuple[int, Any]]:
        """The indices with those at `positions` made one, each with its first position."""
        if not positions:
            return list(enumerate(index))
        flat = index[positions[0]]
        for d, axis in zip(positions[1:], run[1:], strict=True):
            flat = flat * axis.extent + index[d]
        kept = [(d, index[d]) for d in range(len(index)) if d not in positions[1:]]
        return [(d, flat if d == positions[0] else i) for d, i in kept]

    if run:
        axes = tuple(axis.position for axis in run)
        count = len(contraction.block.axes)
        sch.transform_block_layout(block, index_map(sch, block, lambda *i: [x for _, x in merge(i, axes)], count))
        written = index_map(sch, block, lambda *i: [x for _, x in merge(i, merged_dimensions)], rank)
        sch.transform_block_layout(writers[0], written)

    def sums_layout(*index: Any) -> list[Any]:
        merged = merge(index, merged_dimensions)
        return [x for d, x in merged if d != vector] + [x for d, x in merged if d == vector]

    if run or vector != rank - 1:
        sch.transform_layout(block, ("write", 0), index_map(sch, block, sums_layout, rank))
    if plan.scattered:
        writers.insert(0, sch.cache_write(block, 0, scope))
    return writers


def write_vectors(sch: Any, writer: Any, plan: Plan, lanes: int, values: Mapping[str, int]) -> None:
    """Write a tile back by vectors, unrolled where that is short.

    Then LLVM sees from the start that no sum is addressed by a variable, and keeps all of them in registers: a fifth
    less compile time, and up to a sixth less run time where the reduction is short.
    """
    *rows, columns = sch.get_loops(writer)[-len(sch.get(writer).iter_vars) :]
    overlapping = overlapping_columns(plan, values)
    width = whole_width(values["nr"], lanes) if overlapping else plan.vector_width(values["nr"], lanes)[0]
    vectors, lane = sch.split(columns, [None, width])
    sch.vectorize(lane)
    joined = plan.joins_vectors(values["nr"], lanes)
    if joined:
        sch.annotate(vectors, JOIN_VECTORS, lanes)
    elif not overlapping and not pads_last_columns(plan, lanes, values):
        partition(sch, vectors)
    operations = 0 if plan.scattered else sum(block.operations for block in plan.kernel.epilogue)
    if operations <= UNROLLED_EPILOGUE:
        for loop in (*rows, vectors):
            sch.unroll(loop)


def write_squares(sch: Any, writer: Any, plan: Plan, values: Mapping[str, int]) -> None:
    """Write a tile across the output's rows, by squares that are transposed in registers where it consists of such."""
    size = plan.transposed_tile(values["mr"], values["nr"])
    loads = nodes_of(sch.get(writer).body, TensorLoad)
    sums = sch.get(sch.get_producers(writer)[0]).writes[0].source
    of_sums = [position for position, load in enumerate(loads) if load.source.same_as(sums)]
    if not size or len(of_sums) != 1:
        return
    loops = sch.get_loops(writer)[-len(sch.get(writer).iter_vars) :]
    merged = set(plan.fused_dimensions[1:])
    kept = [d for d in range(len(loops) + len(merged)) if d not in merged]
    column = loops[kept.index(plan.vector_dimension)]
    row = loops[kept.index(plan.fused_dimensions[0])]
    columns, column = sch.split(column, [None, size])
    rows, row = sch.split(row, [None, size])
    sch.reorder(columns, rows, column, row)
    if values["mr"] % size:
        sch.annotate(rows, OVERLAPPING_TAIL, size)
        sch.unroll(rows)
    sch.annotate(column, TRANSPOSE_TILE, of_sums[0])
