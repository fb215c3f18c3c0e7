"""Square tiles that are transposed in vector registers.

A schedule marks the outer of two innermost loops TRANSPOSE_TILE: a tile of `n` by `n` elements, a power of two,
read along the first loop and written along the second. LLVM would move its elements one by one. Before lowering, the
tile becomes `n` vector loads, log2(n) rounds of shuffles on pairs of vectors, and `n` vector stores:

    for i in range(4):                                       t0..t3 = x[0..3, 0:4]; log2(4) rounds of shuffles
        for j in range(4):                               ->  y[i, 0:4] = t_i for each i
            y[i, j] = x[j, i]
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tvm_ffi
from tvm import ir, s_tir, tirx
from tvm.ir.expr import TensorLoad

from ..expressions import binding_of, conjuncts, guarded_loads, nodes_of, substitute, uses
from ..marks import TRANSPOSE_TILE
from ..statements import rewrite_marked_loops

__all__ = ["transpose_in_registers"]


def transpose_in_registers(func: Any) -> Any:
    """Rewrite the tiles of a scheduled PrimFunc that are marked TRANSPOSE_TILE; the same object when there is none.

    A tile stays two loops where its size is no power of two, its block has a condition, or anything but one store, or
    where a condition decides what is loaded: an index from data may be out of bounds.
    """
    return rewrite_marked_loops(func, TRANSPOSE_TILE, lambda loop: _shuffled(loop) or loop)


def _shuffled(along_read: Any) -> Any | None:
    along_write = along_read.body
    if not isinstance(along_write, tirx.For) or not isinstance(along_write.body, s_tir.SBlockRealize):
        return None
    realize, size = along_write.body, int(along_read.extent)
    store = realize.block.body
    is_square = int(along_write.extent) == size and size.bit_count() == 1
    if conjuncts(realize.predicate) or not isinstance(store, tirx.BufferStore) or not is_square:
        return None
    binding = binding_of(realize)
    source = nodes_of(store.value, TensorLoad)[int(along_read.annotations[TRANSPOSE_TILE])]
    if any(source.same_as(load) for load in guarded_loads(store.value)):
        return None
    statements: list[Any] = []

    def register() -> Any:
        buffer = tirx.decl_buffer([size], str(source.ty.dtype), "tile")
        statements.append(tirx.AllocBuffer(buffer))
        return buffer

    def vector_loop(loop: Any, other: Any, place: int, target: Any, indices: Any, value: Any) -> None:
        """`target[indices] = value` for all of `loop` in one vector, at one `place` of the `other` loop."""
        lane = tirx.Var("lane", str(loop.loop_var.ty.dtype))
        at = [(loop.loop_var, lane), (other.loop_var, tirx.IntImm(str(lane.ty.dtype), place))]

        def bound(expression: Any) -> Any:
            return substitute(substitute(expression, binding), at)

        body = tirx.BufferStore(target, bound(value), [bound(index) for index in indices])
        statements.append(
            tirx.For(lane, tirx.IntImm(str(lane.ty.dtype), 0), loop.extent, tirx.ForKind.VECTORIZED, body)
        )

    rows = [register() for _ in range(size)]
    for place, row in enumerate(rows):
        vector_loop(along_read, along_write, place, row, [along_read.loop_var], source)
    whole = tirx.Ramp(0, 1, size)
    for distance in (size >> n for n in range(1, size.bit_length())):
        rows, before = [register() for _ in rows], rows
        for place in (place for place in range(size) if not place & distance):
            pair = [tirx.BufferLoad(row, [whole]) for row in (before[place], before[place + distance])]
            # Squares of `distance` off the diagonal change places; lanes of the second vector count from `size`.
            kept = [lane + (size - distance) * bool(lane & distance) for lane in range(size)]
            for row, lanes in ((rows[place], kept), (rows[place + distance], [lane + distance for lane in kept])):
                statements.append(tirx.BufferStore(row, tirx.Shuffle(pair, lanes), [whole]))
    for place, row in enumerate(rows):
        shuffled = tirx.BufferLoad(row, [along_write.loop_var])
        value = tvm_ffi.structural_map(store.value, (TensorLoad, lambda x, y=shuffled: y if x.same_as(source) else x))
        vector_loop(along_write, along_read, place, store.buffer, store.indices, value)
    tile = tirx.SeqStmt(statements)
    if not realize.block.annotations:  # such as how the rows of a buffer are padded
        return tile
    loops = (along_read.loop_var, along_write.loop_var)
    regions = [_tile_of(regions, binding, loops, size) for regions in (realize.block.reads, realize.block.writes)]
    block = s_tir.SBlock([], *regions, realize.block.name_hint, tile, annotations=realize.block.annotations)
    return s_tir.SBlockRealize([], True, block)


def _tile_of(regions: Any, binding: Any, loops: Sequence[Any], size: int) -> list[Any]:
    """What the whole tile reads or writes: `regions` of one element, widened along the loops."""

    def widened(part: Any) -> Any:
        index = substitute(part.min, binding)
        first = substitute(index, [(loop, tirx.IntImm(str(loop.ty.dtype), 0)) for loop in loops])
        extent = size if uses(index, *loops) else 1
        return ir.Range.from_min_extent(first, tirx.IntImm(str(first.ty.dtype), extent))

    return [tirx.BufferRegion(region.source, [widened(part) for part in region.region]) for region in regions]
