"""From a kernel with symbolic sizes to loops over tiles of known size, each of them a scheduled kernel."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from tvm import s_tir, tirx

from ..schedules.overwritable import OVERWRITABLE
from ..search.space.statements import function_of, in_order, looped
from .blocks import Blocks, blocks_of, packed_in_blocks
from .kernel import Size, Stage, SymbolicKernel, grouped, is_common
from .part import Part, bytes_of, number
from .placed import IMAGE_ROWS, PIXELS, PlacedTiles, longest
from .schedules import TileSchedules
from .steps import covered, shared
from .tile import Tile, sums_parts, tile_of, windows_of
from .written import as_written

__all__ = ["assemble"]

ROWS = (64, 32, 16, 8, 4, 2, 1)
"""Lengths of tiles, where one size is symbolic."""

PLAIN_ROWS = (64, 8, 1)
"""The same without weights: short tiles wait for nothing."""

LEAST_ROWS = 16
"""Fewer rows are filled up to 16, 8, 4 or 2: two shorter tiles would read all weights twice."""

SQUARES = (64, 16, 1)
"""Lengths of tiles, where two are."""

MOST_SEEN = 16
"""Pixels of a tile's windows for each of its own, up to which the tile pads them for itself. A 3 x 3 convolution with
the stride 2 sees 4.6, a 7 x 7 one 7.5; one that reads every twelfth pixel sees 36, time and again."""

SINGLE = (1,)
"""Along all others: tiles of so many lengths along three sizes take minutes to compile."""

SUMS = (256, 64, 16, 4, 1)
"""Lengths of what is summed at once."""

FEW_SUMS = (64, 8, 1)
"""The same where two other sizes are symbolic."""

WORTH_ALL_THREADS = 50e-6
"""Seconds that the longest tile of rows takes one thread, from which on threads compute each tile together: shorter
ones they share. To start a parallel loop takes 3 to 6 us."""

LONG_PLACE = 10e-6
"""Seconds that one place takes one thread, from which on it is worth a tile of its own, be it an image of a batch..."""

ENOUGH_USES = 32
"""... which reads each weight so many times, so that several places at once would hardly be faster."""

HEAVY = 1.5
"""Of how many second-level caches the weights are not read for each such place: lighter ones the third level gives in
time. ResNet-50 takes 4 % longer with 4, 1 to 3 with 0.9, and 3 to 5 with 0.5, at any batch."""

WEIGHTS_IN_NO_TIME = 8
"""How many times as long as reading its weights from memory a tile has to take for longer ones not to be worth it."""


def assemble(
    kernel: SymbolicKernel, schedules: TileSchedules, in_blocks: bool = True
) -> tuple[tirx.PrimFunc, tirx.PrimFunc | None]:
    """The kernel as loops over tiles, ready to be lowered, and what packs its weights, if they are packed.

    What depends on where it is along a symbolic size, or sums over one in an unknown way, is computed as it is written,
    one element after another.

    Raises CannotShareWeights, and with `in_blocks` NotInBlocks.
    """
    assembly = _Assembly(kernel, schedules, in_blocks)
    function = assembly.function()
    split = schedules.split
    if split is None or assembly.blocks is None:
        return function, None if split is None else split.packing
    return function, packed_in_blocks(split.packing, schedules.weights, kernel, assembly.blocks)


class _Assembly:
    """Buffers `inside` of some stages are those that no other stage reads or writes."""

    def __init__(self, kernel: SymbolicKernel, schedules: TileSchedules, in_blocks: bool) -> None:
        self._kernel = kernel
        self._schedules = schedules
        self._tiles = PlacedTiles(kernel, schedules)
        sizes = dict.fromkeys(size for stage in kernel.stages for size in stage.sizes)
        self._names = {size: f"n{place}" for place, size in enumerate(sizes)}
        symbolic = [size for size in sizes if size.symbolic]
        self._outer = {size for place, size in enumerate(symbolic) if self._has_inner(size, symbolic[place + 1 :])}
        known = not any(stage.needs_symbols for stage in kernel.stages)
        common = known and all(is_common(size, kernel.stages) for size in symbolic)
        # Rows that are computed alone, of one symbolic size or of several, one around the other.
        self._rows = common and len(symbolic) - len(self._outer) == 1
        self._may_have_blocks = in_blocks

    @property
    def blocks(self) -> Blocks | None:
        """Of columns, in which the weights are packed, if they are."""
        return self._tiles.blocks

    def _choose_blocks(self, stages: Sequence[Stage]) -> None:
        """From now on, weights are packed in blocks, if these stages have any."""
        self._tiles.blocks = blocks_of(self._kernel, stages, self._schedules.free, self._schedules.hardware)

    def _has_inner(self, size: Size, others: Sequence[Size]) -> bool:
        """Whether another size is along all that a size is along, as the places of a batch are: it is tiled instead."""
        along = [sizes for sizes in self._kernel.dimensions.values() if size in sizes]
        return any(all(other in sizes for sizes in along) for other in others)

    def function(self) -> tirx.PrimFunc:
        """The assembled kernel."""
        given, stages = self._kernel.function, self._kernel.stages
        inside = [buffer for buffer in self._kernel.dimensions if buffer not in given.params]
        part, size = Part.whole(self._kernel), self._shared_size()
        if size is None:
            body = self._computed(stages, part, inside)
        else:
            thread = tirx.Var("thread", "int64")
            part = replace(part, parallel=True).at(size, 1, thread, self._share(size.extent))
            body = self._computed(stages, part, inside)
            body = looped([thread], [number(size.extent)], body, parallel=0)
        parameters = [self._tiles.packed.get(parameter, parameter) for parameter in given.params]
        attributes = {name: value for name, value in given.attrs.items() if name != "layout_free_buffers"}
        if self._tiles.overwritable:
            attributes[OVERWRITABLE] = self._tiles.overwritable
        return function_of(parameters, [body], attributes)

    def _share(self, count: Any) -> Any:
        """Of so many, how many a thread has."""
        threads = self._schedules.hardware.threads
        return tirx.floordiv(number(count) + (threads - 1), number(threads))

    def _shared_size(self) -> Size | None:
        """The known size, if any, of which each thread computes some places: the first one of all stages.

        Not that of vectors, nor one of weights, which are packed as a whole.
        """
        stages, threads = self._kernel.stages, self._schedules.hardware.threads
        if self._rows or threads == 1:
            return None
        common = [size for size in stages[-1].sizes if is_common(size, stages)]
        least = threads if any(size.symbolic for size in common) else 2
        taken: set[Size | None] = {size for one in self._schedules.free for size in self._kernel.dimensions[one]}
        taken.add(self._kernel.columns(stages))
        fitting = (size for size in common if not size.symbolic and size not in taken)
        return next((size for size in fitting if int(size.extent) >= least), None)

    def _computed(self, stages: Sequence[Stage], part: Part, inside: Sequence[Any]) -> Any:
        """Statements that compute a part of these stages."""
        left = part.left(stages)
        known = not any(stage.needs_symbols for stage in stages)
        if not left and known:
            return self._tiles(stages, part, inside)
        common = [size for size in left if is_common(size, stages)]
        seen = {window.size for stage in stages for window in stage.windows.values()}
        if len(common) == len(left) <= 2 and known and seen.issuperset(common):
            return self._images(stages, part, inside, common)
        if common:
            single = common[0] in self._outer or len(common) > 2 or bool(seen)
            cover = self._single if single else self._covered
            return cover(stages, part, inside, common[0])
        if len(stages) > 1:
            return self._one_by_one(part, inside, grouped(stages))
        (stage,) = stages
        if known and len(left) == 1 and left[0] in stage.reduced and left[0] not in stage.whole and sums_parts(stage):
            return self._summed(stage, part, left[0])
        self._tiles.kept |= {*stage.reads}
        if stage is self._kernel.stages[-1]:
            self._tiles.keep_all()
        return as_written(stage, part)

    def _single(self, stages: Sequence[Stage], part: Part, inside: Sequence[Any], size: Size) -> Any:
        """One place after another; of rows whose elements are tiled, threads share the places."""
        threads, left = self._schedules.hardware.threads, part.left(stages)
        if self._rows and not part.parallel and threads > 1 and left == [size, self._kernel.columns(stages)]:
            cover = self._covering(stages, replace(part, parallel=True), inside, size, SINGLE)
            return shared(size.extent, threads, 1, cover, self._names[size])
        return self._covering(stages, part, inside, size, SINGLE)(number(0), size.extent)

    def _covered(self, stages: Sequence[Stage], part: Part, inside: Sequence[Any], size: Size) -> Any:
        """Tiles along a size of which every place is computed alone."""
        if part.parallel:
            return self._covering(stages, part, inside, size, SQUARES)(number(0), size.extent)
        alone, threads, cover = replace(part, parallel=True), self._schedules.hardware.threads, self._covering
        lengths: Sequence[int] = SQUARES
        if self._rows and self._are_long(stages, part, inside, size):
            return self._long_places(stages, part, inside, size)
        if self._rows:
            rows = ROWS if self._schedules.free else PLAIN_ROWS
            tiles = {n: tile_of(self._kernel, stages, {**part.lengths, size: n}, set(inside)) for n in rows}
            lengths = self._row_lengths(tiles)
            if self._schedules.seconds(tiles[lengths[0]]) >= WORTH_ALL_THREADS:
                if self._may_have_blocks:
                    self._choose_blocks(stages)
                if self.blocks is not None:
                    part, lengths = alone, ROWS
                if rows is ROWS and lengths[0] > LEAST_ROWS and self._repeatable(stages, inside):
                    return self._long_rows(stages, part, inside, size, lengths)
                return self._spread(part, lambda own: cover(stages, own, inside, size, lengths)(number(0), size.extent))
        if threads == 1:
            return cover(stages, alone, inside, size, lengths)(number(0), size.extent)
        is_short = size.extent < 2 * lengths[0]
        long = alone.where(tirx.Not(is_short)) if self._rows else alone
        many = shared(size.extent, threads, lengths[0], cover(stages, long, inside, size, SQUARES), self._names[size])
        if not self._rows:
            return many
        few = cover(stages, alone.where(is_short), inside, size, lengths)(number(0), size.extent)
        return tirx.IfThenElse(is_short, few, many)

    def _are_long(self, stages: Sequence[Stage], part: Part, inside: Sequence[Any], size: Size) -> bool:
        """Whether a place takes long, and would hardly take less time together with others, as images of a batch do."""
        sizes = self._kernel.dimensions
        fixed = [one for one in self._kernel.function.params if not any(each.symbolic for each in sizes.get(one, ()))]
        for stage in stages:
            read = max((one for one in fixed if one in stage.reads), key=bytes_of, default=None)
            if read is not None:
                uses = (one for one in stage.sizes if one not in (*stage.reduced, *sizes[read]) and not one.symbolic)
                if math.prod(int(one.extent) for one in uses) < ENOUGH_USES:
                    return False
        tile = tile_of(self._kernel, stages, {**part.lengths, size: 1}, set(inside))
        return self._schedules.seconds(tile) >= LONG_PLACE

    def _long_places(self, stages: Sequence[Stage], part: Part, inside: Sequence[Any], size: Size) -> Any:
        """One place after another: as many as there are threads at once, each by one, and the rest by all of them.

        With weights that do not fit the cache, one block of their columns after another instead.
        """
        alone, threads = replace(part, parallel=True), self._schedules.hardware.threads
        if self._may_have_blocks and self._weigh_more(stages, HEAVY):
            columns = self._kernel.columns(stages)
            first = next(place for place, stage in enumerate(stages) if columns in stage.sizes)
            if first:  # padding, which is for all columns
                return self._one_by_one(part, inside, [stages[:first], stages[first:]])
            self._choose_blocks(stages)
        if self.blocks is not None:
            return self._spread(
                alone, lambda own: self._covering(stages, own, inside, size, SINGLE)(number(0), size.extent)
            )
        each = self._covering(stages, alone, inside, size, SINGLE)
        if threads == 1:
            return each(number(0), size.extent)
        rest = size.extent % number(threads)
        last = self._covering(stages, part, inside, size, SINGLE)(size.extent - rest, rest)
        return tirx.SeqStmt([shared(size.extent - rest, threads, 1, each, self._names[size]), last])

    def _images(self, stages: Sequence[Stage], part: Part, inside: Sequence[Any], common: Sequence[Size]) -> Any:
        """Places of images, which are computed of windows: tiles of some pixels of a row.

        Threads share rows, or blocks of columns (channels) where the weights do not fit the cache.
        """
        cover, size = self._covering, common[0]
        lengths = PIXELS if len(common) == 1 else IMAGE_ROWS
        if part.parallel:
            return cover(stages, part, inside, size, lengths)(number(0), size.extent)
        alone, threads, name = replace(part, parallel=True), self._schedules.hardware.threads, self._names[size]
        if self._may_have_blocks and self._weigh_more(stages, 0.5):
            self._choose_blocks(stages)
        if self.blocks is not None:
            return self._spread(alone, lambda own: cover(stages, own, inside, size, lengths)(number(0), size.extent))
        if threads == 1:
            return cover(stages, alone, inside, size, lengths)(number(0), size.extent)
        return shared(size.extent, threads, lengths[0], cover(stages, alone, inside, size, lengths), name)

    def _weigh_more(self, stages: Sequence[Stage], caches: float) -> bool:
        """Whether weights that can be packed take more than so many second-level caches."""
        read = [weight for weight in self._schedules.free if any(weight in stage.reads for stage in stages)]
        return sum(map(bytes_of, read)) > caches * self._schedules.hardware.l2_bytes

    def _spread(self, part: Part, compute: Callable[[Part], Any]) -> Any:
        """What computes a part, for each block of its columns, if there are blocks: threads share them."""
        if self.blocks is None:
            return compute(part)
        self._tiles.block = tirx.Var("block", "int64")
        start, runs = self._tiles.block * self.blocks.length, self._share(self.blocks.count)
        body = compute(part.at(self.blocks.size, self.blocks.length, start, runs))
        parallel = 0 if self._schedules.hardware.threads > 1 else None
        return looped([self._tiles.block], [number(self.blocks.count)], body, parallel)

    def _long_rows(
        self, stages: Sequence[Stage], part: Part, inside: Sequence[Any], size: Size, lengths: Sequence[int]
    ) -> Any:
        """Rows whose weights take long to read: as few tiles as possible."""
        # Another tile reads all weights again, or those of a block from the cache.
        enough = [length for length in lengths if self.blocks is not None or 2 * length >= LEAST_ROWS]
        are_many = size.extent >= LEAST_ROWS

        def cover(own: Part) -> Any:
            return self._covering(stages, own, inside, size, enough)(number(0), size.extent)

        many = self._spread(part.where(are_many), cover)
        single = part.at(size, 1, number(0)).where(size.extent < 2)
        few = self._spread(single, lambda own: self._tiles(stages, own, inside))
        statement = tirx.IfThenElse(size.extent > 0, few, None)
        for length in reversed([length for length in lengths if 1 < length <= LEAST_ROWS]):
            is_longer = size.extent > length // 2
            filled = part.at(size, length, number(0)).where(tirx.And(is_longer, size.extent <= length))
            statement = tirx.IfThenElse(is_longer, self._filled_up(stages, filled, inside, size), statement)
        return tirx.IfThenElse(are_many, many, statement)

    def _filled_up(self, stages: Sequence[Stage], part: Part, inside: Sequence[Any], size: Size) -> Any:
        """A tile of more places than there are: the last one again and again."""
        reads, writes = ([b for b in buffers if b not in inside] for buffers in _touched(stages))
        along = [buffer for buffer in (*reads, *writes) if size in self._kernel.dimensions[buffer]]
        own, made = part.with_buffers(along)
        copies: tuple[list[Any], list[Any]] = [], []
        for buffer, local in zip(along, made, strict=True):
            region = part.region(buffer)
            loops = [tirx.Var(f"i{place}", "int64") for place in range(len(local.shape))]
            sizes = self._kernel.dimensions[buffer]
            last = [
                tirx.min(loop, size.extent - 1) if one is size else loop for loop, one in zip(loops, sizes, strict=True)
            ]
            there = [one.min + at for one, at in zip(region.region, last, strict=True)]
            if buffer in reads:
                copy = tirx.BufferStore(local, tirx.BufferLoad(region.source, there), loops)
                copies[0].append(looped(loops, local.shape, copy))
            else:
                extents = [
                    size.extent if one is size else extent for extent, one in zip(local.shape, sizes, strict=True)
                ]
                copy = tirx.BufferStore(region.source, tirx.BufferLoad(local, loops), there)
                copies[1].append(looped(loops, extents, copy))
        body = tirx.SeqStmt([*copies[0], self._spread(own, lambda one: self._tiles(stages, one, inside)), *copies[1]])
        return s_tir.SBlockRealize([], True, s_tir.SBlock([], [], [], "filled", body, alloc_buffers=made))

    def _row_lengths(self, tiles: Mapping[int, Tile]) -> Sequence[int]:
        """Lengths of tiles of rows, of those given: none much longer than one that reads its weights in no time."""
        sizes, bandwidth = self._kernel.dimensions, self._schedules.hardware.bandwidth_bytes_per_s
        given = [one for one in self._kernel.function.params if one in sizes]
        fixed = sum(bytes_of(one) for one in given if not any(each.symbolic for each in sizes[one]))
        enough = max(WORTH_ALL_THREADS, WEIGHTS_IN_NO_TIME * fixed / bandwidth)
        lengths = list(tiles)
        place = len(lengths) - 1
        while place and self._schedules.seconds(tiles[lengths[place]]) < enough:
            place -= 1
        return lengths[place:]

    def _covering(
        self, stages: Sequence[Stage], part: Part, inside: Sequence[Any], size: Size, lengths: Sequence[int]
    ) -> Callable[..., Any]:
        """What covers places along a size, of a beginning and an extent (`covered` says what else), by tiles of these
        lengths."""

        def tile(length: int, start: Any, runs: Any) -> Any:
            return self._computed(stages, part.at(size, length, start, runs), inside)

        twice, name = self._repeatable(stages, inside), self._names[size]
        if twice and lengths != SINGLE:
            self._tiles.keep_all()
        return lambda begin, extent, usual=None: covered(begin, extent, lengths, twice, tile, name, usual)

    def _repeatable(self, stages: Sequence[Stage], inside: Sequence[Any]) -> bool:
        """Whether the same places may be computed twice.

        Not where an argument is overwritten, nor from one buffer of the kernel into another: TVM lets them share their
        memory where the first one is read for the last time.
        """
        outside = {*self._kernel.dimensions} - {*self._kernel.function.params, *inside}
        reads = any(buffer in outside for stage in stages for buffer in stage.reads)
        writes = any(buffer in outside for stage in stages for buffer in stage.writes)
        return not self._kernel.overwrites and not (reads and writes)

    def _one_by_one(self, part: Part, inside: Sequence[Any], groups: Sequence[Sequence[Stage]]) -> Any:
        """Groups of stages, each for all of the part before the next one."""
        stages = [stage for group in groups for stage in group]
        by_window = {
            stage.writes[0]: stage
            for group in groups
            for stage in stages
            if stage not in group and self._fits_windows(stage, group, stages, part, inside)
        }
        self._tiles.by_window |= by_window
        inside = [buffer for buffer in inside if buffer not in by_window]
        groups = [[stage for stage in group if stage not in by_window.values()] for group in groups]
        groups = [group for group in groups if group]
        kept = [[buffer for buffer in inside if _is_only_in(buffer, group, stages)] for group in groups]
        part, made = part.with_buffers([one for one in inside if not any(one in own for own in kept)])
        body = [self._computed(group, part, own) for group, own in zip(groups, kept, strict=True)]
        reads, writes = ([b for b in buffers if b not in (*inside, *by_window)] for buffers in _touched(stages))
        regions = [part.region(buffer) for buffer in reads], [part.region(buffer) for buffer in writes]
        block = s_tir.SBlock([], *regions, "stages", in_order(body), alloc_buffers=made)
        return s_tir.SBlockRealize([], True, block)

    def _fits_windows(
        self, stage: Stage, group: Sequence[Stage], stages: Sequence[Stage], part: Part, inside: Sequence[Any]
    ) -> bool:
        """Whether only tiles of a group read what a stage writes, in windows that each may compute for itself."""
        (buffer,), left, windows = stage.writes, part.left(group), windows_of(group)
        if self._kernel.overwrites:  # the image, which later tiles still have to see as it was
            return False
        if buffer not in inside or any(buffer in one.reads for one in stages if one not in group) or stage.reduced:
            return False
        if any(one.needs_symbols for one in group) or not all(is_common(size, group) for size in left):
            return False
        store = stage.block.body
        if not all(index.same_as(axis.var) for index, axis in zip(store.indices, stage.block.iter_vars, strict=True)):
            return False
        sizes = enumerate(self._kernel.dimensions[buffer])
        open_places = {place: size for place, size in sizes if size.symbolic and size not in part.lengths}
        if any(size in one.sizes for one in group for size in open_places.values()):
            return False
        if not open_places or not all((buffer, place) in windows for place in open_places):
            return False
        seen = [windows[buffer, place] for place in open_places]
        shares = (window.extent(length) / length for window, length in zip(seen, longest(seen), strict=False))
        return math.prod(shares) <= MOST_SEEN

    def _summed(self, stage: Stage, part: Part, size: Size) -> Any:
        """A stage that sums over a size, tile by tile."""
        (result,) = stage.writes
        region = part.region(result)
        loops = [tirx.Var(f"i{place}", "int64") for place in range(len(region.region))]
        at = [one.min + loop for one, loop in zip(region.region, loops, strict=True)]
        first = tirx.BufferStore(region.source, stage.block.init.value, at)
        begin = looped(loops, [one.extent for one in region.region], first)

        def tile(length: int, start: Any, runs: Any) -> Any:
            return self._tiles([stage], part.at(size, length, start, runs), [])

        others = [other for other in part.lengths if other.symbolic and other not in self._outer]
        lengths = SUMS if len(others) < 2 else FEW_SUMS
        return tirx.SeqStmt([begin, covered(number(0), size.extent, lengths, False, tile, self._names[size])])


def _is_only_in(buffer: Any, group: Sequence[Stage], stages: Sequence[Stage]) -> bool:
    """Whether no other stage reads or writes a buffer."""
    return not any(buffer in (*stage.reads, *stage.writes) for stage in stages if stage not in group)


def _touched(stages: Sequence[Stage]) -> tuple[list[Any], list[Any]]:
    """The buffers that stages read, and those that they write."""
    reads = dict.fromkeys(buffer for stage in stages for buffer in stage.reads)
    writes = dict.fromkeys(buffer for stage in stages for buffer in stage.writes)
    return list(reads), list(writes)
