"""Winograd's convolutions of images whose number, height or width is known only when they run.

The tiles of all images are one list, however large the images are. Threads share it, and each takes a block of tiles at
a time through all stages, which its core's cache holds:

    for each block of tiles:
        for each of them: what it sees of the image, transformed   -> data[e, tile, channel]
        for each e: data[e] @ weight[e]                            -> products[e, tile, channel]
        for each of them: its products, transformed, bias, ..      -> image

Where weights are large, threads share the stages of one block instead: the tiles of the first and last, the matrices e
of the second, so that each weight is read once. Each stage is a scheduled kernel of known sizes. Tiles at the border
see the image through a copy with zeros around it, and write it through another.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from tvm import ir, s_tir, te, tirx

from ..schedules.overwritable import OVERWRITABLE
from ..schedules.pack_weights import SplitKernel
from ..search.graph.attributes import WinogradData, WinogradResult
from ..search.graph.winograd_kernels import data_kernel, result_kernel, weight_kernel
from ..search.space.base import Decision
from ..search.space.expressions import substitute
from ..search.space.hardware import Hardware
from ..search.space.statements import function_of, in_order, looped
from .kernel import Size, Stage, SymbolicKernel
from .part import Part, alike, number
from .placed import computed_over
from .schedules import ScheduledTile, TileSchedules, UsedTile
from .slices import is_slice
from .tile import Tile, tile_of
from .unpadded import unpadded_windows

__all__ = ["Convolution", "read_convolution", "winograd_kernel"]

Pair = tuple[int, int]

LANES = 16
"""Channels are a multiple of so many."""

ROWS = (64, 48, 32, 24, 16, 8, 4)
"""Tiles of a block."""


@dataclass(frozen=True, eq=False)
class Convolution:
    """A kernel that is a convolution with a kernel that slides by one, and what follows, place by place.

    Attributes
    ----------
    kernel : SymbolicKernel
    padding : Stage or None
        Writes the image with something around it.
    sums : Stage
        The convolution.
    after : tuple of Stage
        What follows, of each place alone.
    image, weight : Buffer
        What it reads, the image padded; (N, H, W, C) and (rows, columns, C, O).
    places : tuple of Size
        Images, rows and columns of the result.
    """

    kernel: SymbolicKernel
    padding: Stage | None
    sums: Stage
    after: tuple[Stage, ...]
    image: Any
    weight: Any
    places: tuple[Size, Size, Size]

    @property
    def taps(self) -> Pair:
        """Rows and columns of the weight."""
        rows, columns, _, _ = (int(extent) for extent in self.weight.shape)
        return rows, columns

    @property
    def channels(self) -> Pair:
        """Of the image and of the result."""
        _, _, inputs, outputs = (int(extent) for extent in self.weight.shape)
        return inputs, outputs

    def grid(self, outputs: Pair) -> tuple[Any, Any, Any]:
        """Images, and tiles down and across each; in terms of the kernel's symbols."""
        images, rows, columns = (number(size.extent) for size in self.places)
        return images, *(_quotient(extent, m) for extent, m in zip((rows, columns), outputs, strict=True))


def read_convolution(kernel: SymbolicKernel) -> Convolution | None:
    """The kernel as a convolution of vectors of channels in float32; None where it is something else."""
    places = [place for place, stage in enumerate(kernel.stages) if stage.reduced]
    if len(places) != 1 or places[0] > 1 or kernel.overwrites:
        return None
    sums, after = kernel.stages[places[0]], kernel.stages[places[0] + 1 :]
    padding = kernel.stages[0] if places[0] else None
    operands = _operands(sums)
    if operands is None:
        return None
    image, weight = operands
    parameters = list(kernel.function.params)
    free = [parameters[int(place)] for place in kernel.function.attrs.get("layout_free_buffers", ())]
    if weight not in free or (image not in parameters if padding is None else padding.writes != [image]):
        return None
    sizes = kernel.dimensions[sums.writes[0]][:3]
    if len({*sizes}) < 3 or any(size not in stage.free for stage in after for size in sizes):
        return None
    if any(stage.needs_symbols or weight in stage.reads or image in stage.reads for stage in after):
        return None
    written = [buffer for stage in kernel.stages for buffer in stage.writes if buffer in parameters]
    if len(written) != 1 or kernel.stages[-1].writes != written or len(kernel.dimensions[written[0]]) != 4:
        return None
    return Convolution(kernel, padding, sums, tuple(after), image, weight, (sizes[0], sizes[1], sizes[2]))


def _operands(stage: Stage) -> tuple[Any, Any] | None:
    """The image and the weight, where a stage is r[n, y, x, f] += image[n, y + i, x + j, c] * weight[i, j, c, f]."""
    store = stage.block.body
    if str(store.buffer.dtype) != "float32" or len(store.indices) != 4 or not isinstance(store.value, tirx.Add):
        return None
    product = store.value.b
    if not isinstance(product, tirx.Mul) or not isinstance(store.value.a, ir.TensorLoad):
        return None
    image, weight = product.a, product.b
    if not all(isinstance(one, ir.TensorLoad) and len(one.indices) == 4 for one in (image, weight)):
        return None
    n, y, x, f = store.indices
    i, j, c, o = weight.indices
    windows = [(image.indices[1], y, i), (image.indices[2], x, j)]
    slides = all(isinstance(at, tirx.Add) and at.a.same_as(one) and at.b.same_as(tap) for at, one, tap in windows)
    if not slides or not image.indices[0].same_as(n) or not image.indices[3].same_as(c) or not o.same_as(f):
        return None
    extents = [axis.dom.extent for axis in stage.block.iter_vars]
    known = all(isinstance(extent, tirx.IntImm) for extent in (*weight.source.shape, *extents[3:]))
    if not known or any(int(extent) % LANES for extent in weight.source.shape[2:]):
        return None
    return image.source, weight.source


def winograd_kernel(
    given: Convolution,
    outputs: Pair,
    rows: int,
    shared: bool,
    hardware: Hardware,
    decisions: Mapping[str, Decision] | None = None,
) -> tuple[SplitKernel, tuple[UsedTile, ...]]:
    """The convolution as loops over blocks of tiles, what transforms and packs its weights, and its scheduled tiles.

    Parameters
    ----------
    given : Convolution
    outputs : (int, int)
        Rows and columns of the result that a tile gives.
    rows : int
        Most tiles of a block.
    shared : bool
        Whether threads share each block.
    hardware, decisions
        As `TileSchedules` has them.

    Raises ValueError where no schedule applies to a stage.
    """
    inputs, channels = given.channels
    matrix = tirx.decl_buffer([number(inputs), number(channels)], "float32", "weight")
    schedules = TileSchedules(hardware, frozenset([matrix]), decisions)
    return _Winograd(given, outputs, rows, shared, matrix, schedules).split(), tuple(schedules.used)


class _Winograd:
    def __init__(
        self, given: Convolution, outputs: Pair, rows: int, shared: bool, matrix: Any, schedules: TileSchedules
    ) -> None:
        self._given, self._kernel, self._outputs, self._shared = given, given.kernel, outputs, shared
        self._matrix, self._schedules, self._threads = matrix, schedules, schedules.hardware.threads
        self._lengths = [length for length in ROWS if length <= rows]
        self._attributes = WinogradData(outputs, given.taps)
        self._matrices = prod(self._attributes.size)
        self._grid = given.grid(outputs)
        self._packed: Any = None
        self._overwritable: list[int] = []
        self._data, self._products = (_scratch(self._matrices, self._lengths[0], width) for width in given.channels)

    def split(self) -> SplitKernel:
        """All of it."""
        tiles = tirx.Var("tiles", "int64")
        body = self._blocks_shared(tiles) if self._shared else self._blocks_apart(tiles)
        bound = tirx.Bind(tiles, prod(self._grid))
        function, weight = self._kernel.function, self._given.weight
        parameters = [self._packed if one.same_as(weight) else one for one in function.params]
        attributes = {name: value for name, value in function.attrs.items() if name != "layout_free_buffers"}
        if self._overwritable:
            attributes[OVERWRITABLE] = self._overwritable
        kernel = function_of(parameters, [bound, body], attributes)
        place = next(place for place, one in enumerate(function.params) if one.same_as(weight))
        return SplitKernel(self._packing(), kernel, (place,))

    def _blocks_apart(self, tiles: Any) -> Any:
        """Each thread has a part of the tiles."""
        thread, begin, own = (tirx.Var(name, "int64") for name in ("thread", "begin", "own"))
        share = _quotient(tiles, self._threads)
        part = [
            tirx.Bind(begin, thread * share),
            tirx.Bind(own, tirx.max(tirx.min(share, tiles - begin), number(0))),
            self._stages(begin, own, _quotient(prod(self._grid), self._threads), parallel=False),
        ]
        kind = 0 if self._threads > 1 else None
        return looped([thread], [number(self._threads)], _allocating([self._data, self._products], part), kind)

    def _blocks_shared(self, tiles: Any) -> Any:
        """Threads share each block."""
        stages = self._stages(number(0), tiles, prod(self._grid), parallel=True)
        return _allocating([self._data, self._products], [stages])

    def _stages(self, begin: Any, own: Any, usual: Any, parallel: bool) -> Any:
        """All stages of `own` tiles, in blocks of about equal length; `usual`: how many, in terms of the kernel's
        symbols."""
        most = self._lengths[0]
        blocks, usual_blocks = _quotient(own, most), _quotient(usual, most)
        length, usual_length = _divided_up(own, blocks), _divided_up(usual, usual_blocks)
        block, first, each, count, matrix = (tirx.Var(name, "int64") for name in ("block", "first", "each", "n", "e"))
        seen, written = tirx.Var("seen", "int64"), tirx.Var("written", "int64")
        by = self._threads if parallel else 1
        runs = _quotient(usual, by)
        products = self._multiplied(matrix, count, usual_length, usual_blocks * (self._matrices // by))
        kind = 0 if parallel and self._threads > 1 else None
        body = [
            tirx.Bind(first, begin + block * each),
            tirx.Bind(count, tirx.max(tirx.min(each, own - block * each), number(0))),
            looped([seen], [count], self._transformed(seen, first + seen, runs), kind),
            looped([matrix], [number(self._matrices)], products, kind),
            looped([written], [count], self._written(written, first + written, runs), kind),
        ]
        loop = tirx.For(block, number(0), blocks, tirx.ForKind.SERIAL, tirx.SeqStmt(body))
        return tirx.SeqStmt([tirx.Bind(each, length), loop])

    def _at(self, tile: Any, compute: Callable[[Any, Any, Any], Any]) -> Any:
        """What computes the tile of an image, a row and a column of tiles.

        These are kept in memory, that is, in registers: TVM puts the values of variables into all indices that they are
        in, and takes seconds to simplify those of an unrolled transform.
        """
        images, *grid = self._grid
        rows, across = (tirx.max(count, number(1)) for count in grid)
        single = isinstance(images, tirx.IntImm) and int(images) == 1
        kept = tirx.decl_buffer([number(3)], "int64", "place")
        values = [
            number(0) if single else tirx.floordiv(tile, rows * across),
            tirx.floordiv(tile, across) if single else tirx.floordiv(tile, across) % rows,
            tile % across,
        ]
        stores = [tirx.BufferStore(kept, value, [number(at)]) for at, value in enumerate(values)]
        n, y, x = (tirx.BufferLoad(kept, [number(at)]) for at in range(3))
        return _allocating([kept], [*stores, compute(number(0) if single else n, y, x)])

    def _transformed(self, row: Any, tile: Any, runs: Any) -> Any:
        """What a tile sees, transformed."""
        return self._at(tile, lambda n, y, x: self._transformed_at(row, n, y, x, runs))

    def _transformed_at(self, row: Any, n: Any, y: Any, x: Any, runs: Any) -> Any:
        given, (high, wide), (inputs, _) = self._given, self._attributes.size, self._given.channels
        sizes = self._kernel.dimensions[given.image]
        part = Part.whole(self._kernel).at(sizes[0], 1, n)
        part = part.at(sizes[1], high, y * self._outputs[0]).at(sizes[2], wide, x * self._outputs[1])
        image = te.placeholder([number(extent) for extent in (1, high, wide, inputs)], "float32", "image")
        function = te.create_prim_func([image, data_kernel(image, self._attributes)])
        scheduled = self._scheduled("data", function, (given.image, self._data), part.lengths, runs)
        target = _region(self._data, (0, self._matrices), (row, 1), (0, inputs))
        inside, seen = self._seen_inside(part)
        window = tirx.decl_buffer(list(image.shape), "float32", "window")
        copied = [self._copied(window, part), computed_over(scheduled, [_whole(window), target], 1)]
        statement = _allocating([window], copied)
        if inside is not None:
            again = computed_over(scheduled.renewed(), [seen, target], 1)
            statement = tirx.IfThenElse(inside, again, statement)
        return statement

    def _seen_inside(self, part: Part) -> tuple[Any, Any]:
        """When a tile may read the image itself, if ever, and where."""
        given = self._given
        if given.padding is not None:
            unpadded = unpadded_windows([given.padding], part)
            return (None, None) if unpadded is None else (unpadded.condition, unpadded.regions[given.image])
        sizes = self._kernel.dimensions[given.image][1:3]
        fits = [part.starts[size] + part.lengths[size] <= number(size.extent) for size in sizes]
        return tirx.And(*fits), part.region(given.image)

    def _copied(self, window: Any, part: Part) -> Any:
        """What a tile sees, with what is around the image; beyond that, anything."""
        given, sizes = self._given, self._kernel.dimensions[self._given.image]
        loops = [tirx.Var(name, "int64") for name in ("i", "j", "c", "lane")]
        channel = loops[2] * LANES + loops[3]
        here = [part.starts[sizes[0]], *(part.starts[size] + at for size, at in zip(sizes[1:3], loops, strict=False))]
        there = [tirx.min(at, number(size.extent) - 1) for at, size in zip(here, sizes, strict=False)]
        at = [there[0] if sizes[0].symbolic else here[0], *there[1:], channel]
        if given.padding is None:
            value = tirx.BufferLoad(given.image, at)
        else:
            axes = [axis.var for axis in given.padding.block.iter_vars]
            value = substitute(given.padding.block.body.value, list(zip(axes, at, strict=True)))
        store = tirx.BufferStore(window, value, [number(0), loops[0], loops[1], channel])
        vector = tirx.For(loops[3], number(0), number(LANES), tirx.ForKind.VECTORIZED, store)
        high, wide = self._attributes.size
        extents = [number(extent) for extent in (high, wide, given.channels[0] // LANES)]
        return looped(loops[:3], extents, vector)

    def _multiplied(self, matrix: Any, count: Any, usual: Any, runs: Any) -> Any:
        """One matrix of a block's products, of as few rows as there are schedules for."""
        inputs, channels = self._given.channels
        statement = None
        for length, shorter in zip(self._lengths, [*self._lengths[1:], 0], strict=True):
            used = tirx.Select(tirx.And(usual <= length, usual > shorter), number(1), number(0))
            scheduled = self._product(length, runs * used)
            packed = scheduled.function.params[1]
            if self._packed is None:
                self._packed = alike(packed, self._matrices)
            regions = [
                _region(self._data, (matrix, 1), (0, length), (0, inputs)),
                _region(self._packed, (matrix, 1), *((0, int(extent)) for extent in packed.shape)),
                _region(self._products, (matrix, 1), (0, length), (0, channels)),
            ]
            computed = computed_over(scheduled, regions, 1)
            if statement is not None:
                computed = tirx.IfThenElse(count > length, statement, computed)
            statement = computed
        return statement

    def _product(self, length: int, runs: Any) -> ScheduledTile:
        """So many rows of data times one matrix of the weight."""
        inputs, channels = self._given.channels
        data = te.placeholder([number(length), number(inputs)], "float32", "data")
        weight = te.placeholder([number(inputs), number(channels)], "float32", "weight")
        k = te.reduce_axis((number(0), number(inputs)), "k")
        product = te.compute(
            (number(length), number(channels)), lambda i, j: te.sum(data[i, k] * weight[k, j], axis=k), "products"
        )
        function = te.create_prim_func([data, weight, product])
        buffers = self._data, self._matrix, self._products
        return self._scheduled("products", function, buffers, {self._data: length}, runs)

    def _written(self, row: Any, tile: Any, runs: Any) -> Any:
        """The products of a tile, transformed, and what follows, in the image."""
        return self._at(tile, lambda n, y, x: self._written_at(row, n, y, x, runs))

    def _written_at(self, row: Any, n: Any, y: Any, x: Any, runs: Any) -> Any:
        (high, wide), (_, channels) = self._outputs, self._given.channels
        part = Part.whole(self._kernel).at(self._given.places[0], 1, n)
        part = part.at(self._given.places[1], high, y * high).at(self._given.places[2], wide, x * wide)
        result = self._result_tile(part)
        scheduled = self._schedules(result, False, runs)
        self._note_overwritable(result, scheduled)
        products = _region(self._products, (0, self._matrices), (row, 1), (0, channels))
        regions = [products, *map(part.region, result.buffers[1:])]
        statement = computed_over(scheduled, regions, result.outputs)
        ends = [size for size in self._given.places[1:] if size.symbolic or int(size.extent) % part.lengths[size]]
        if ends:
            fits = [part.starts[size] + part.lengths[size] <= number(size.extent) for size in ends]
            beyond = self._clipped(result, scheduled.renewed(), part, products)
            statement = tirx.IfThenElse(tirx.all(*fits), statement, beyond)
        return statement

    def _result_tile(self, part: Part) -> Tile:
        """The kernel that transforms the products of one tile, and computes what follows."""
        given, (high, wide) = self._given, self._outputs
        products = te.placeholder([number(self._matrices), number(1), number(given.channels[1])], "float32", "products")
        image = result_kernel(products, WinogradResult(self._outputs, given.taps, high, wide))
        transform = te.create_prim_func([products, image])
        (summed,) = given.sums.writes
        if not given.after:
            buffers = self._products, summed
            return Tile(transform, buffers, 1, frozenset(buffers), part.lengths, "results")
        inside = {buffer for stage in given.after for buffer in stage.writes} - {*self._kernel.function.params}
        behind = tile_of(self._kernel, given.after, part.lengths, inside)
        source = behind.function.params[behind.buffers.index(summed)]
        first, root = (one.body.block for one in (transform, behind.function))
        body = substitute(first.body, [(transform.params[1], source)])
        others = [place for place, buffer in enumerate(behind.buffers) if not buffer.same_as(summed)]
        parameters = [transform.params[0], *(behind.function.params[place] for place in others)]
        own = [source, *first.alloc_buffers, *root.alloc_buffers]
        function = function_of(parameters, [body, root.body], behind.function.attrs, own)
        operands = (self._products, *(behind.buffers[place] for place in others))
        return Tile(function, operands, behind.outputs, frozenset(operands), part.lengths, "results")

    def _clipped(self, result: Tile, scheduled: ScheduledTile, part: Part, products: Any) -> Any:
        """A tile that reaches beyond the image: what is there of its operands, and of its result, is copied."""
        ends = self._given.places[1:]
        along = [one for one in result.buffers[1:] if any(size in self._kernel.dimensions[one] for size in ends)]
        own, made = part.with_buffers(along)
        *_, written = result.buffers
        before, after = [], []
        for buffer, local in zip(along, made, strict=True):
            sizes = self._kernel.dimensions[buffer]
            loops = [tirx.Var(f"i{place}", "int64") for place in range(len(sizes))]
            there = [part.starts[one] + at if one in part.starts else at for one, at in zip(sizes, loops, strict=True)]
            if buffer is not written:
                last = [tirx.min(at, number(one.extent) - 1) for one, at in zip(sizes, there, strict=True)]
                copy = tirx.BufferStore(local, tirx.BufferLoad(buffer, last), loops)
                before.append(looped(loops, local.shape, copy))
                continue
            extents = [
                tirx.min(extent, number(one.extent) - part.starts[one]) if one in ends else extent
                for extent, one in zip(local.shape, sizes, strict=True)
            ]
            copy = tirx.BufferStore(buffer, tirx.BufferLoad(local, loops), there)
            after.append(looped(loops, extents, copy))
        regions = [products, *map(own.region, result.buffers[1:])]
        return _allocating(made, [*before, computed_over(scheduled, regions, result.outputs), *after])

    def _scheduled(
        self, name: str, function: tirx.PrimFunc, buffers: tuple[Any, ...], extents: Mapping[Any, int], runs: Any
    ) -> ScheduledTile:
        parts = frozenset(buffer for buffer in buffers if buffer is not self._matrix)
        return self._schedules(Tile(function, buffers, 1, parts, extents, name), False, runs)

    def _note_overwritable(self, result: Tile, scheduled: ScheduledTile) -> None:
        """Which operand's memory may be that of the result: not the image's, of which other tiles still see parts."""
        given, parameters = self._given, list(self._kernel.function.params)
        seen = [given.image] if given.padding is None else given.padding.reads
        own = [result.buffers[place] for place in scheduled.overwritable]
        if not is_slice(parameters[-1]) and parameters[-1].same_as(result.buffers[-1]):
            self._overwritable = [parameters.index(one) for one in own if one in parameters and one not in seen]

    def _packing(self) -> tirx.PrimFunc:
        """The weight transformed, each of its matrices packed, if they are."""
        split = self._schedules.split
        weight = te.placeholder(self._given.weight.shape, "float32", "weight")
        transform = te.create_prim_func([weight, weight_kernel(weight, self._outputs)])
        if split is None:
            return transform
        raw, transformed = transform.params
        packed, matrix = alike(self._packed), tirx.Var("e", "int64")
        regions = [
            _region(buffer, (matrix, 1), *((0, int(extent)) for extent in buffer.shape[1:]))
            for buffer in (transformed, packed)
        ]
        loop = looped([matrix], [number(self._matrices)], computed_over(split.packing, regions, 1))
        first = transform.body.block
        own = [transformed, *first.alloc_buffers]
        return function_of([raw, packed], [first.body, loop], split.packing.attrs, own)


def _quotient(count: Any, by: int) -> Any:
    """Rounded up."""
    return tirx.floordiv(count + (by - 1), number(by)) if by > 1 else count


def _divided_up(count: Any, by: Any) -> Any:
    """Rounded up; `by` may be 0."""
    return tirx.floordiv(count + by - 1, tirx.max(by, number(1)))


def _scratch(matrices: int, rows: int, columns: int) -> Any:
    """Room for (matrices, rows, columns), each row and matrix an odd number of cache lines after the last one: a
    multiple of 4 KB would put a tile's values all in the same places of the first-level cache."""
    lines = columns // LANES
    padded = [number(matrices), number(rows + 1 - rows % 2), number((lines + 1 - lines % 2) * LANES)]
    return tirx.decl_buffer(padded, "float32", "scratch")


def _region(buffer: Any, *ranges: tuple[Any, int]) -> Any:
    found = [ir.Range.from_min_extent(number(begin), number(extent)) for begin, extent in ranges]
    return tirx.BufferRegion(buffer, found)


def _whole(buffer: Any) -> Any:
    return _region(buffer, *((0, int(extent)) for extent in buffer.shape))


def _allocating(buffers: Sequence[Any], body: Sequence[Any]) -> Any:
    """Statements with buffers of their own."""
    block = s_tir.SBlock([], [], [], "winograd", in_order(body), alloc_buffers=list(buffers))
    return s_tir.SBlockRealize([], True, block)
