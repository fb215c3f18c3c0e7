"""Data movement that reads along one axis and writes along another: both are tiled, so that whole lines are used."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..base import Knob
from ..hardware import PAGE_BYTES
from ..marks import TRANSPOSE_TILE
from ..nest import fuse, parallelize, vectorize
from .cost import CALL_INSTRUCTIONS, FORM_INSTRUCTIONS, Work
from .kernel import Kernel, Stage
from .sketch import MemoryBoundSketch, Values, worker_counts

__all__ = ["TransposeSketch", "read_and_write_axes"]

_WAYS = 8
_CROWDED_BYTES = 2048  # rows of the output a multiple of it apart have two places in a cache's page, or one
_BLOCKS = (16, 32, 64, 128)
_PADDING = 16  # elements behind a block's row, so that its rows do not share places


class TransposeSketch(MemoryBoundSketch):
    """Tiles of `read_tile` elements along the axis that is contiguous in the input, `write_tile` in the output.

    Knobs: the two tile sizes, `inner` (0: the innermost loop runs along the output, 1: along the input), `vector` (0:
    it is left to LLVM, 1: it becomes one vector statement, 2: the tile is square and transposed in registers, and
    `inner` is the innermost loop over tiles, or blocks), `workers`, and `write_block` by `read_block` elements, whose
    tiles are put together in a buffer and written row by row (1 by 1: at once).

    Lines of the output a multiple of the page apart share few places of each cache, and no prefetcher follows sixteen
    such rows; whole runs of a block do better. One thread of Zen 5, in C with the best tiles and blocks, us:

        rows x columns   a copy   at once   in blocks      rows x columns   a copy   at once   in blocks
        1024 x 1024          64       193          99      512 x 512            18        37          23
        2048 x 512           80       173          90      1024 x 320           24        53          26
        4096 x 64            18        38          23      3136 x 64            13        14          14
    """

    family = "transpose"
    family_index = 13

    @staticmethod
    def fits(kernel: Kernel) -> bool:
        """Whether the one stage reads something along an axis that is not the output's last."""
        if len(kernel.stages) != 1:
            return False
        stage = kernel.stages[0]
        return stage.regular and not stage.is_reduction and read_and_write_axes(stage) is not None

    def _knobs(self) -> tuple[Knob, ...]:
        self.stage = self.kernel.stages[0]
        self.read_axis, self.write_axis = read_and_write_axes(self.stage) or (0, 0)
        self.fused = _fused(self.stage, self.read_axis, self.write_axis)
        step = (self.stage.writes[0].strides[self.read_axis] or 0) * self.stage.writes[0].item_bytes
        self.crowded = step > 0 and step % _CROWDED_BYTES == 0
        read, write = self.stage.extents[self.read_axis], self.stage.extents[self.write_axis]
        read *= math.prod(self.stage.extents[self.read_axis - self.fused : self.read_axis])
        # A tile is loaded whole before any condition is looked at, also one on another axis.
        vectors: tuple[int, ...] = (0, 1) if self.stage.guards else (0, 1, 2)
        if {self.read_axis, self.write_axis} & self.stage.guards.keys():
            vectors = (0,)
        return (
            Knob("read_tile", _tiles(read)),
            Knob("write_tile", _tiles(write)),
            Knob("inner", (0, 1)),
            Knob("vector", vectors),
            Knob("workers", worker_counts(self.hardware, self.stage.iterations // 64)),
            *self._blocks(vectors),
        )

    def _blocks(self, vectors: Sequence[int]) -> tuple[Knob, Knob]:
        stage = self.stage
        write, read = stage.extents[self.write_axis], stage.extents[self.read_axis]
        blocks = _BLOCKS if self.crowded and 2 in vectors and not self.fused and _in_order(stage) else ()
        # Several rows of an image, say, are one run of the output.
        several = stage.extents[self.write_axis - 1] if self.write_axis > self.read_axis + 1 else 1
        long = [b for b in blocks if b > _PADDING]
        runs = [b for b in long if write % b == 0 or (b % write == 0 and several * write % b == 0)]
        return Knob("write_block", (1, *runs)), Knob("read_block", (1, *(b for b in blocks if read % b == 0)))

    def legal(self, values: Values) -> NDArray[np.bool_]:
        """A vector fits the registers; a tile fits the first cache; enough tiles for the workers."""
        knobs = self._integer_columns(values)
        inner = np.where(knobs["inner"] == 0, knobs["write_tile"], knobs["read_tile"])
        lanes = self.hardware.lanes(self.stage.writes[0].item_bytes)
        tile = knobs["read_tile"] * knobs["write_tile"]
        square = (knobs["read_tile"] == knobs["write_tile"]) & (tile & (tile - 1) == 0) & (tile > 1) & (inner <= lanes)
        ok = np.where(knobs["vector"] == 2, square, (knobs["vector"] == 0) | (inner <= 2 * lanes))
        ok &= 2 * tile * self.stage.writes[0].item_bytes <= self.hardware.l1_bytes
        write, read = knobs["write_block"], knobs["read_block"]
        blocks = (knobs["vector"] == 2) & (knobs["write_tile"] == lanes) & (write % lanes == 0) & (read % lanes == 0)
        blocks &= (write + _PADDING) * read * self.stage.writes[0].item_bytes <= self.hardware.l1_bytes
        ok &= blocks | ((write == 1) & (read == 1))
        return ok & (self.stage.iterations // np.maximum(tile, read * write) >= knobs["workers"])

    def _work(self, knobs: Mapping[str, Values]) -> Work:
        read, write = knobs["read_tile"].astype(np.float64), knobs["write_tile"].astype(np.float64)
        lanes = float(self.hardware.lanes(self.stage.writes[0].item_bytes))
        item = self.stage.writes[0].item_bytes
        inner = np.where(knobs["inner"] == 0, write, read)
        # A vector is put together from shuffled lines; LLVM alone moves single elements.
        per_element = self.stage.operations / lanes + 1.0 / np.minimum(inner, lanes) + 6.0 / (read * write)
        width = np.where(knobs["vector"] >= 1, np.minimum(inner, lanes), 1.0)
        per_element = per_element + self.stage.forms * FORM_INSTRUCTIONS / width + self.stage.calls * CALL_INSTRUCTIONS
        # Of a vector and a part of one, LLVM stores elements one by one, by way of the stack: 224 x 224 pixels of 21
        # channels take 1700 us, along the output 72 in vectors of 32 and 120 in those of 28. Nor does it like to write
        # three at once: 320 x 320 pixels 25 us, eight of a channel 10.
        broken = (inner > lanes) & (inner % lanes != 0)
        odd = (knobs["inner"] == 0) & (inner < lanes) & (np.log2(inner) % 1.0 > 0.0)
        gathered = 1.2 * np.where(broken, np.where(knobs["inner"] == 1, 20.0, 2.0), np.where(odd, 2.0, 1.0))
        moves = [np.full_like(read, 6.0), gathered, (2.0 + np.log2(read)) / read]
        per_element = per_element + np.choose(knobs["vector"], moves)
        # The innermost loop touches a line an element on one side; lines a multiple of the page apart share eight
        # places of the first cache (1024 x 1024: 400 us with 8 lines, 2000 to 3000 us with 16 or more).
        blocks = knobs["write_block"] > 1
        per_element = per_element + np.where(blocks, 2.0 / lanes, 0.0)
        step = max(abs(a.strides[self.write_axis] or 0) * a.item_bytes for a in self.stage.reads)
        thrash = 16.0 if step % PAGE_BYTES == 0 else 1.0
        run = item * np.maximum(np.minimum(read, write), 4.0 * knobs["vector"]) * 2.0
        run = np.where(knobs["vector"] == 2, item * read, np.where(inner > _WAYS, run / thrash, run))
        if self.crowded:
            longest = np.where(blocks, knobs["write_block"] / _BLOCKS[-1], 0.25)
            run = np.where(knobs["vector"] == 2, run * longest, run)
        ones = np.ones_like(read)
        return Work(
            instructions=self.stage.iterations * per_element,
            lanes=np.where(knobs["vector"] >= 1, np.minimum(inner, lanes), ones),
            efficiency=ones,
            unrolled=ones,
            workers=knobs["workers"].astype(np.float64),
            chunks=np.maximum(np.floor(self.stage.iterations / (read * write)), 1.0),
            scratch_bytes=0.0 * ones,
            run_bytes=run,
            accumulators=0.0 * ones,
            variant=knobs["inner"] + 0.5 * knobs["vector"] + 0.25 * blocks,
        )

    def _schedule(self, schedule: Any, values: Mapping[str, int]) -> None:
        if values["write_block"] > 1:
            self._in_blocks(schedule, values)
            return
        loops = list(schedule.get_loops(schedule.get_sblock(self.stage.name)))
        run = fuse(schedule, loops[self.read_axis - self.fused : self.read_axis + 1])
        read_outer, read_inner = schedule.split(run, [None, values["read_tile"]])
        write_outer, write_inner = schedule.split(loops[self.write_axis], [None, values["write_tile"]])
        loops[self.read_axis], loops[self.write_axis] = read_outer, write_outer
        place = self.read_axis - self.fused
        del loops[place : self.read_axis]
        inner = [read_inner, write_inner]
        if values["inner"] == 1 and values["vector"] == 2:
            loops.append(loops.pop(place))
        elif values["inner"] == 1:
            inner.reverse()
        schedule.reorder(*loops, *inner)
        if values["vector"] == 2:
            schedule.annotate(read_inner, TRANSPOSE_TILE, _source(self.stage, self.read_axis))
        elif values["vector"] == 1:
            schedule.vectorize(inner[-1])
        parallelize(schedule, loops, values["workers"], self.hardware.threads)

    def _in_blocks(self, schedule: Any, values: Mapping[str, int]) -> None:
        tiles = schedule.get_sblock(self.stage.name)
        loops = list(schedule.get_loops(schedule.cache_write(tiles, 0, "global")))
        loops[self.read_axis], row = schedule.split(loops[self.read_axis], [None, values["read_block"]])
        several = values["write_block"] // self.stage.extents[self.write_axis]
        if several > 1:
            run = loops.pop(self.write_axis)
            loops[self.write_axis - 1], part = schedule.split(loops[self.write_axis - 1], [None, several])
            block = [row, part, run]
        else:
            loops[self.write_axis], run = schedule.split(loops[self.write_axis], [None, values["write_block"]])
            block = [row, run]
        if values["inner"] == 1:
            loops.append(loops.pop(self.read_axis))
        schedule.reorder(*loops, *block)
        vectorize(schedule, run, values["write_tile"])
        schedule.compute_at(tiles, loops[-1], preserve_unit_loops=True)
        schedule.storage_align(tiles, 0, axis=self.read_axis, factor=values["write_block"], offset=_PADDING)
        inside = list(schedule.get_loops(tiles)[len(loops) :])
        read, read_inner = schedule.split(inside[self.read_axis], [None, values["read_tile"]])
        write, write_inner = schedule.split(inside[self.write_axis], [None, values["write_tile"]])
        others = [loop for axis, loop in enumerate(inside) if axis not in (self.read_axis, self.write_axis)]
        schedule.reorder(*others, write, read, read_inner, write_inner)
        schedule.annotate(read_inner, TRANSPOSE_TILE, _source(self.stage, self.read_axis))
        parallelize(schedule, loops, values["workers"], self.hardware.threads)


def _in_order(stage: Stage) -> bool:
    """Whether its axes are those of the output, all of which it writes."""
    extents = stage.extents
    dense = [math.prod(extents[axis + 1 :]) for axis in range(len(extents))]
    strides = zip(stage.writes[0].strides, dense, extents, strict=True)
    return all(stride == expected or extent == 1 for stride, expected, extent in strides)


def read_and_write_axes(stage: Stage) -> tuple[int, int] | None:
    """The axis along which most is read, and the axis along which the output is written, where they differ."""
    write = next((i for i, stride in enumerate(stage.writes[0].strides) if stride == 1 and stage.extents[i] > 1), None)
    candidates: dict[int, int] = {}
    for access in stage.reads:
        for axis, stride in enumerate(access.strides):
            if stride == 1 and stage.extents[axis] > 1:
                candidates[axis] = max(candidates.get(axis, 0), access.buffer_bytes)
    if write is None or not candidates:
        return None
    read = max(candidates, key=lambda axis: candidates[axis])
    return None if read == write else (read, write)


def _fused(stage: Stage, read: int, write: int) -> int:
    """How many axes before the one that is read along continue it in every access: rows of an image."""
    first = write + 1 if write < read else 0
    return stage.run(tuple(range(first, read + 1))) - 1


def _source(stage: Stage, axis: int) -> int:
    """Position of the largest of the loads that are contiguous along `axis`."""
    sizes = [access.buffer_bytes if access.strides[axis] == 1 else 0 for access in stage.reads]
    return sizes.index(max(sizes))


def _tiles(extent: int) -> tuple[int, ...]:
    """Even tiles of 4 to 64 elements, or the whole axis."""
    tiles = [t for t in range(4, 65) if extent % t == 0 and (t % 4 == 0 or math.gcd(extent, 4) == 1)]
    return tuple(tiles) or (extent if extent <= 64 else 1,)
