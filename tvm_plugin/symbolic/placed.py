"""The scheduled kernels of tiles, put where a kernel computes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from tvm import ir, s_tir, tirx

from ..search.space.expressions import substitute
from .blocks import Blocks
from .kernel import Stage, SymbolicKernel, Window
from .part import Part, alike, number
from .schedules import ScheduledTile, TileSchedules
from .slices import is_slice
from .tile import Tile, tile_of, windows_of
from .unpadded import unpadded_windows
from .written import as_written

__all__ = ["IMAGE_ROWS", "PIXELS", "PlacedTiles", "computed_over", "longest"]

IMAGE_ROWS = (4, 1)
"""Lengths of tiles along the rows of images, where what is computed reads windows of them..."""

PIXELS = (16, 4, 1)
"""... and along the pixels of a row."""


class PlacedTiles:
    """Called with a part of a kernel whose sizes are known, gives the statement that computes it.

    Parameters
    ----------
    kernel : SymbolicKernel
    schedules : TileSchedules

    Attributes
    ----------
    blocks : Blocks or None
        Of columns, where the weights are packed in such...
    block : tirx.Var
        ... and which one is at hand.
    by_window : dict
        By buffer, the stages of which a tile computes the window that it reads, as padding.
    packed : dict
        By weight, the parameter that takes it packed.
    kept : set of Buffer
        What may not be overwritten.
    """

    def __init__(self, kernel: SymbolicKernel, schedules: TileSchedules) -> None:
        self.blocks: Blocks | None = None
        self.block: Any = None
        self.by_window: dict[Any, Stage] = {}
        self.packed: dict[Any, Any] = {}
        self.kept: set[Any] = set()
        self._overwritten: set[Any] | None = None
        self._kernel = kernel
        self._schedules = schedules

    def keep_all(self) -> None:
        """Nothing may be overwritten."""
        self.kept |= {*self._kernel.function.params}

    @property
    def overwritable(self) -> list[int]:
        """In the memory of which parameters the kernel may write its result, the last one, if no place is computed
        twice: each element is read for the one that is stored in its place alone, by all tiles that store some."""
        found = (self._overwritten or set()) - self.kept
        return [place for place, parameter in enumerate(self._kernel.function.params) if parameter in found]

    def __call__(self, stages: Sequence[Stage], part: Part, inside: Sequence[Any]) -> Any:
        """The scheduled kernel of a part whose sizes are known."""
        windows = windows_of(stages)
        own = [stage for buffer, stage in self.by_window.items() if any(buffer in one.reads for one in stages)]
        for stage in own:
            part = self._windowed(stage, part, windows)
        part, made = part.with_buffers([stage.writes[0] for stage in own]) if own else (part, [])
        columns = None if self.blocks is None else self.blocks.size
        tile = tile_of(self._kernel, stages, part.lengths, set(inside), columns)
        scheduled = self._schedules(tile, not part.parallel, part.runs)
        self._note_overwritable(tile, scheduled)
        self.kept |= {buffer for stage in own for buffer in stage.reads}
        computed = self._scheduled(tile, scheduled, part, windows, {})
        if not own:
            return computed
        first = [as_written(stage, replace(part, parallel=True)) for stage in own]
        block = s_tir.SBlock([], [], [], "windowed", tirx.SeqStmt([*first, computed]), alloc_buffers=made)
        windowed = s_tir.SBlockRealize([], True, block)
        unpadded = unpadded_windows(own, part) if self._sees_most(stages, part, windows) else None
        if unpadded is None:
            return windowed
        inner = self._scheduled(tile, scheduled.renewed(), part, windows, unpadded.regions)
        return tirx.IfThenElse(unpadded.condition, inner, windowed)

    def _note_overwritable(self, tile: Tile, scheduled: ScheduledTile) -> None:
        *read, written = tile.buffers
        if tile.outputs > 1 or is_slice(written) or not written.same_as(self._kernel.function.params[-1]):
            self.kept |= {*tile.buffers}
            return
        own = {tile.buffers[place] for place in scheduled.overwritable}
        if any(one.same_as(written) for one in read):  # which adds to what tiles before have stored there
            own = set()
        self._overwritten = own if self._overwritten is None else self._overwritten & own

    def _sees_most(self, stages: Sequence[Stage], part: Part, windows: Mapping[tuple[Any, int], Window]) -> bool:
        """Whether it is worth compiling a tile again to read its window in the image: of the longest, most lie inside,
        and where channels are not mixed, padding takes as long as what follows."""
        seen = list(dict.fromkeys(window.size for window in windows.values()))
        is_longest = all(part.lengths[size] == length for size, length in zip(seen, longest(seen), strict=False))
        return is_longest and all(self._kernel.columns(stages) in self._kernel.dimensions[one] for one, _ in windows)

    def _scheduled(
        self,
        tile: Tile,
        scheduled: ScheduledTile,
        part: Part,
        windows: Mapping[tuple[Any, int], Window],
        regions: Mapping[Any, Any],
    ) -> Any:
        """The scheduled kernel of a tile, over a part of the kernel's buffers, or these regions of others."""
        there: list[Any] = []
        for place, (parameter, origin) in enumerate(zip(scheduled.function.params, tile.buffers, strict=True)):
            if place not in scheduled.packed:
                there.append(regions.get(origin) or part.region(origin, windows))
            elif self.blocks is None:
                there.append(self.packed.setdefault(origin, alike(parameter)))
            else:
                there.append(self._block_of(self.blocks, origin, parameter))
        return computed_over(scheduled, there, tile.outputs)

    def _windowed(self, stage: Stage, part: Part, windows: Mapping[tuple[Any, int], Window]) -> Part:
        """The part with that of a stage which windows show."""
        (buffer,) = stage.writes
        for place, size in enumerate(self._kernel.dimensions[buffer]):
            window = windows.get((buffer, place))
            if window is not None:
                start = part.starts[window.size] * window.stride
                part = part.at(size, window.extent(part.lengths[window.size]), start)
        return part

    def _block_of(self, blocks: Blocks, weight: Any, packed: Any) -> Any:
        """Where the packed weights of the block at hand are among those of all."""
        whole = self.packed.setdefault(weight, alike(packed, blocks.count))
        return tirx.BufferRegion(whole, [ir.Range.from_min_extent(self.block, number(1)), *_ranges(packed)])


def computed_over(scheduled: ScheduledTile | tirx.PrimFunc, regions: Sequence[Any], outputs: int) -> Any:
    """A kernel over a region of another buffer, or a buffer like it, for each of its parameters, of which the last so
    many are written.

    Packed weights and what packs them are whole in their regions; of others, rows may lie apart.
    """
    packed: Sequence[int] = range(len(regions))
    if isinstance(scheduled, ScheduledTile):
        packed, scheduled = scheduled.packed, scheduled.function
    views, matched = list(regions), []
    for place, (parameter, region) in enumerate(zip(scheduled.params, regions, strict=True)):
        if not isinstance(region, ir.Var):
            views[place] = _compact_view(parameter) if place in packed else _view(parameter)
            matched.append(s_tir.MatchBufferRegion(views[place], region))
    body = substitute(scheduled.body, list(zip(scheduled.params, views, strict=True)))
    reads, writes = (
        [region for region in some if not isinstance(region, ir.Var)]
        for some in (regions[:-outputs], regions[-outputs:])
    )
    return s_tir.SBlockRealize([], True, s_tir.SBlock([], reads, writes, "tile", body, match_buffers=matched))


def longest(sizes: Sequence[Any]) -> tuple[int, ...]:
    """Of the longest tile, along the rows of an image and the pixels of a row, or these alone."""
    return (IMAGE_ROWS[0], PIXELS[0])[-len(sizes) :]


def _ranges(buffer: Any) -> list[Any]:
    """All of a buffer."""
    return [ir.Range.from_min_extent(number(0), number(extent)) for extent in buffer.shape]


def _compact_view(buffer: Any) -> Any:
    """A buffer that may begin anywhere."""
    begin = tirx.Var(f"{buffer.name}_begin", "int64")
    return tirx.decl_buffer(buffer.shape, str(buffer.dtype), str(buffer.name), elem_offset=begin)


def _view(buffer: Any) -> Any:
    """A buffer that may begin anywhere, with rows that lie apart."""
    strides = [tirx.Var(f"{buffer.name}_stride{place}", "int64") for place in range(len(buffer.shape))]
    begin = tirx.Var(f"{buffer.name}_begin", "int64")
    return tirx.decl_buffer(buffer.shape, str(buffer.dtype), str(buffer.name), strides=strides, elem_offset=begin)
