"""Blocks of columns: the parts of a product's weights that stay in a cache while all rows are computed with them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import tvm_ffi
from tvm import ir, s_tir, tirx

from ..search.space.hardware import Hardware
from ..search.space.statements import function_of, looped
from .kernel import Size, Stage, SymbolicKernel, is_common
from .part import alike, bytes_of, number

__all__ = ["Blocks", "NotInBlocks", "blocks_of", "packed_in_blocks"]

COLUMNS = 16
"""A block has a multiple of so many."""

CACHE_SHARE = 0.8
"""Of the second-level cache, which the rows need, too. Of 0.3, 0.5, 0.8 and 1.2, the fastest at nearly all lengths."""


class NotInBlocks(ValueError):
    """Blocks of weights are packed by something else than copies."""


@dataclass(frozen=True, eq=False)
class Blocks:
    """Columns of equal blocks.

    Attributes
    ----------
    size : Size
        The columns: known, and computed alone in all stages.
    length : int
        Of a block.
    count : int
        How many there are.
    """

    size: Size
    length: int
    count: int


def blocks_of(
    kernel: SymbolicKernel, stages: Sequence[Stage], weights: Collection[Any], hardware: Hardware
) -> Blocks | None:
    """The longest blocks of columns whose weights fit the cache, as many for each thread; None where there are none.

    Parameters
    ----------
    kernel : SymbolicKernel
    stages : sequence of Stage
        Those that are computed together.
    weights : collection of Buffer
        What can be packed.
    hardware : Hardware
    """
    size = kernel.columns(stages)
    own = [weight for weight in weights if kernel.dimensions[weight].count(size) == 1]
    if size is None or size.symbolic or not own or not is_common(size, stages):
        return None
    extent = int(size.extent)
    column_bytes = sum(bytes_of(weight) for weight in own) / extent
    most = CACHE_SHARE * hardware.l2_bytes / column_bytes
    for count in range(hardware.threads, extent // COLUMNS + 1, hardware.threads):
        if count > 1 and extent % (count * COLUMNS) == 0 and extent // count <= most:
            return Blocks(size, extent // count, count)
    return None


def packed_in_blocks(packing: tirx.PrimFunc, weights: Sequence[Any], kernel: SymbolicKernel, blocks: Blocks) -> Any:
    """What packs the weights of all blocks, [blocks, ...], from what packs those of one.

    Parameters
    ----------
    packing : tvm.tirx.PrimFunc
        Copies; its first parameters are blocks of the weights.
    weights : sequence of Buffer
        Of the kernel.
    kernel : SymbolicKernel
    blocks : Blocks

    Raises NotInBlocks where it does something else.
    """
    given, packed = packing.params[: len(weights)], packing.params[len(weights) :]
    sources = {one: alike(weight) for one, weight in zip(given, weights, strict=True)}
    targets = {one: alike(one, blocks.count) for one in packed}
    places = {one: kernel.dimensions[w].index(blocks.size) for one, w in zip(given, weights, strict=True)}
    axis = tirx.Var("block", "int64")

    def moved(indices: Sequence[Any], place: int) -> list[Any]:
        return [index + axis * blocks.length if at == place else index for at, index in enumerate(indices)]

    def moved_region(given: Any) -> list[Any]:
        begins = moved([one.min for one in given.region], places[given.source])
        return [ir.Range.from_min_extent(begin, one.extent) for begin, one in zip(begins, given.region, strict=True)]

    def load(node: Any) -> Any:
        return tirx.BufferLoad(sources[node.source], moved(node.indices, places[node.source]))

    def store(node: Any) -> Any:
        return tirx.BufferStore(targets[node.buffer], node.value, [axis, *node.indices])

    def in_all(statement: Any) -> Any:
        """One copy, of all blocks."""
        loops = []
        while isinstance(statement, tirx.For):
            loops.append(statement)
            statement = statement.body
        if not isinstance(statement, s_tir.SBlockRealize) or not isinstance(statement.block.body, tirx.BufferStore):
            raise NotInBlocks("blocks of weights are not packed by copies")
        block, (region,) = statement.block, statement.block.writes
        domain = ir.Range.from_min_extent(number(0), number(blocks.count))
        body = tvm_ffi.structural_map(block.body, [(ir.TensorLoad, load), (tirx.BufferStore, store)])
        written = tirx.BufferRegion(targets[region.source], [ir.Range.from_min_extent(axis, number(1)), *region.region])
        read = [tirx.BufferRegion(sources[one.source], moved_region(one)) for one in block.reads]
        inner = s_tir.SBlock(
            [tirx.IterVar(domain, axis, tirx.IterVar.DataPar), *block.iter_vars], read, [written], block.name_hint, body
        )
        outer = tirx.Var("i", "int64")
        realize = s_tir.SBlockRealize([outer, *statement.iter_values], statement.predicate, inner)
        extents = [number(blocks.count), *(loop.extent for loop in loops)]
        return looped([outer, *(loop.loop_var for loop in loops)], extents, realize)

    root = packing.body.block
    if len(root.alloc_buffers):
        raise NotInBlocks("blocks of weights are packed in several steps")
    body = root.body
    copies = [in_all(one) for one in (body.seq if isinstance(body, tirx.SeqStmt) else [body])]
    return function_of([*sources.values(), *targets.values()], copies, packing.attrs)
