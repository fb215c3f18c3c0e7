"""Winograd's convolution in one kernel: a block of tiles at a time through all stages, which its core's cache holds.

    for each block of tiles (parallel):
        copy what it sees of the image, and zeros around it
        transform its tiles                       -> data[e, tile, channel]
        for each e: data[e] @ weight[e]           -> products[e, tile, channel]
        transform the products, bias, activation  -> image

In three kernels, data and products cross the cache once more each, and from core to core. The weight is read once for
each block, so a block needs tiles enough to pay for it. The (m + 2)**2 matrices of a block are an odd number of cache
lines apart: a multiple of 4 KB would put a tile's values all in the same places of the first-level cache.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .applicable import applies
from .base import Knob, Sketch
from .contraction.prefetch_choice import ahead_bytes
from .features import feature_table
from .hardware import FAR_WEIGHTS, Hardware
from .marks import AHEAD_OF_TIME, FETCH_AHEAD, NEXT_PANEL, OUTPUTS_OF_TILE
from .memory_bound.inlining import inlined
from .memory_bound.kernel import block_names
from .nest import STACK_BYTES, index_map
from .register_tiles import tile_efficiency, tile_fits
from .winograd import DATA, PRODUCTS, ROWS, keep_rows_in_registers

__all__ = ["WinogradConv2dSketch", "winograd_conv2d_sketches"]

PADDED, DATA_ROWS = "winograd_padded", "winograd_data_rows"
"""Names of more blocks; see `winograd`."""

KEPT = (PADDED, DATA_ROWS, DATA, ROWS)
"""Blocks whose results are stored, besides products."""

FAMILY_INDEX = 31

FAR_TRAFFIC = 4.0
"""Further times that what the second cache does not hold takes to come from the last one."""

L3_SHARE = 0.75
"""Of the last cache, that weights or blocks of tiles may fill before they come from memory."""


def winograd_conv2d_sketches(mod: Any, hardware: Hardware) -> list[Sketch]:
    """The sketch of `mod["main"]` when it is such a convolution with channels that fill vectors, else none."""
    if PRODUCTS not in block_names(mod):
        return []
    schedule = inlined(mod, KEPT)
    blocks = [schedule.get(block) for block in schedule.get_child_blocks(schedule.get_sblock("root"))]
    if [str(block.name_hint) for block in blocks[:-1]] != [PADDED, DATA_ROWS, DATA, PRODUCTS, ROWS]:
        return []
    _, rows, data, products, _, image = blocks
    extents = [int(axis.dom.extent) for axis in products.iter_vars]
    lanes = hardware.lanes(4)
    if len(image.iter_vars) != 4 or extents[4] % lanes or extents[5] % lanes or OUTPUTS_OF_TILE not in data.annotations:
        return []
    tile = tuple(int(count) for count in data.annotations[OUTPUTS_OF_TILE])
    size = tuple(int(axis.dom.extent) for axis in rows.iter_vars[3:5])
    sketch = WinogradConv2dSketch(mod, extents, size, tile, str(image.name_hint), hardware)
    return [sketch] if applies(sketch) else []


class WinogradConv2dSketch(Sketch):
    """Knobs: `down` and `across` (tiles of a block), `mr` x `nr` (sums in registers: tiles, channels), `ku` (steps of
    the reduction unrolled), `order` (0: for each panel of weights all tiles; 1: for each run of tiles all panels),
    `chunks` (of the outputs; each transforms the data for itself, so that threads share few tiles and many channels),
    `far_weights` (1: they are asked for ahead).

    Parameters
    ----------
    mod : tvm.ir.IRModule
        One function, "main".
    extents : sequence of int
        Of the products: matrices, images, tiles down and across, outputs, inputs.
    size, tile : tuple of int
        Rows and columns that a tile has, and that it gives.
    output : str
        Name of the block that writes the image.
    hardware : Hardware
    """

    name = "winograd_conv2d"

    def __init__(
        self,
        mod: Any,
        extents: Sequence[int],
        size: tuple[int, ...],
        tile: tuple[int, ...],
        output: str,
        hardware: Hardware,
    ) -> None:
        self.mod, self.output, self.hardware = mod, output, hardware
        self.matrices, self.batch, self.down, self.across, self.outputs, self.inputs = extents
        self.size, self.tile = size, tile
        self.bytes_moved = 4.0 * sum(prod(map(int, getattr(p, "shape", ()))) for p in mod["main"].params)
        self.lanes = hardware.lanes(4)
        widths = [count * self.lanes for count in (1, 2, 3, 4) if self.outputs % (count * self.lanes) == 0]
        downs, acrosses = _divisors(self.down), _divisors(self.across)
        tiles = sorted({rows for block in (a * b for a in downs for b in acrosses) for rows in _divisors(block)})
        self.knobs = (
            Knob("down", downs),
            Knob("across", acrosses),
            Knob("mr", tuple(rows for rows in tiles if rows <= 28)),
            Knob("nr", tuple(widths)),
            Knob("ku", tuple(steps for steps in (1, 2, 4) if self.inputs % steps == 0)),
            Knob("order", (0, 1)),
            Knob("chunks", tuple(n for n in _divisors(hardware.threads) if self.outputs % (n * self.lanes) == 0)),
            Knob(FAR_WEIGHTS, (int(hardware.weights_are_far),)),
        )

    def legal(self, values: NDArray[np.int64]) -> NDArray[np.bool_]:
        """See `Sketch.legal`: a block is whole runs of tiles, its sums fit the registers, the body stays small."""
        down, across, mr, nr, ku, _, chunks, _ = values.T
        vectors = nr // self.lanes
        fits = tile_fits(mr, vectors, ku, self.hardware.vector_registers)
        whole = (across == self.across) | (down == 1)
        # The tiles of a run are whole rows of a block, or part of one: else they are no box.
        boxes = (down * across % mr == 0) & ((across % mr == 0) | (mr % across == 0))
        result: NDArray[np.bool_] = fits & whole & boxes & (self.outputs // chunks % nr == 0)
        return result

    def latency_s(self, values: NDArray[np.int64]) -> NDArray[np.float64]:
        """See `Sketch.latency_s`: products at the efficiency of their tile, weights streamed for each block, transforms
        by vectors, and what a block writes and reads again.
        """
        machine, tiles = self.hardware, self.batch * self.down * self.across
        down, across, mr, nr, _, order, chunks, _ = values.astype(np.float64).T
        block = down * across
        blocks = tiles / block * chunks
        used = np.minimum(machine.threads, blocks)
        share = np.ceil(blocks / used) / blocks  # of the whole, that the busiest thread computes
        efficiency = tile_efficiency(mr, nr / self.lanes, self.inputs, machine.fmas_per_load)
        product_s = 2.0 * self.matrices * tiles * self.inputs * self.outputs / machine.peak_flops_per_s / efficiency
        product_s = product_s * np.where(order == 1, 1.02, 1.0)
        weight_bytes = 4.0 * self.matrices * self.inputs * self.outputs / chunks
        shared = weight_bytes <= machine.l2_bytes / 2
        memory = machine.bandwidth_bytes_per_s / used  # of one thread, while all want it
        rate = machine.cache_bandwidth_bytes_per_s / np.where(shared, 1, 3)
        stream_s = blocks * weight_bytes / np.where(weight_bytes * chunks > L3_SHARE * machine.l3_bytes, memory, rate)
        operations = 4.0 * tiles * (self.matrices * self.inputs * chunks + prod(self.tile) * self.outputs)
        transform_s = operations / (machine.peak_flops_per_s / 2)
        scratch = 4.0 * self.matrices * block * (self.inputs + self.outputs / chunks)
        again = 1.0 + FAR_TRAFFIC * np.maximum(1.0 - 0.5 * machine.l2_bytes / scratch, 0.0)
        beyond = scratch * used > L3_SHARE * machine.l3_bytes
        again = np.where(beyond, np.maximum(again, machine.cache_bandwidth_bytes_per_s / memory), again)
        # A block's tiles overlap by r - 1 rows and columns; together they are copied once.
        high, wide = (count * m + n - m for count, m, n in zip((down, across), self.tile, self.size, strict=True))
        image = 4.0 * (2 * high * wide * blocks * self.inputs + prod(self.tile) * tiles * self.outputs)
        traffic_s = (2 * scratch * blocks * again + image) / machine.cache_bandwidth_bytes_per_s
        serial_s = np.maximum(product_s, stream_s) + transform_s + traffic_s / 2
        overhead_s = machine.parallel_overhead_s if machine.threads > 1 else 0.0
        return np.asarray(serial_s * share + overhead_s)

    def features(self, values: NDArray[np.int64]) -> NDArray[np.float32]:
        """See `Sketch.features`."""
        down, across, mr, nr, ku, order, chunks, _ = values.astype(np.float64).T
        scratch = 4.0 * self.matrices * down * across * (self.inputs + self.outputs / chunks)
        flops = 2.0 * self.matrices * self.batch * self.down * self.across * self.inputs * self.outputs
        known = {
            "log_flops": np.log2(flops),
            "log_bytes": np.log2(self.bytes_moved),
            "family": float(FAMILY_INDEX),
            "log_vector_elements": np.log2(nr),
            "accumulators": mr * nr / self.lanes,
            "register_pressure": (mr + 1) * nr / self.lanes / self.hardware.vector_registers,
            "log_tile_m": np.log2(mr),
            "log_tile_n": np.log2(nr),
            "log_tile_k": np.log2(ku),
            "log_block_m": np.log2(down * across),
            "log_parallel_chunks": np.log2(self.batch * self.down * self.across / (down * across) * chunks),
            "l2_footprint": scratch / self.hardware.l2_bytes,
            "log_reduction": np.log2(float(self.inputs)),
            "log_latency": np.log2(self.latency_s(values)),
            "variant": order,
        }
        return feature_table(len(values), known)

    def apply(self, values: Mapping[str, int]) -> Any:
        """See `Sketch.apply`."""
        schedule = inlined(self.mod, KEPT)
        products = schedule.get_sblock(PRODUCTS)
        self._pack(schedule, products, values["nr"])
        block = self._image(schedule, values)
        schedule.compute_at(products, block, preserve_unit_loops=True)
        self._data(schedule, block)
        self._products(schedule, products, values)
        return schedule

    def _pack(self, schedule: Any, products: Any, nr: int) -> None:
        """The weight as (e, outputs / nr, inputs, nr), ahead of time."""
        packed = schedule.cache_read(products, 1, "global")
        panels = index_map(schedule, products, lambda e, k, n: [e, n // nr, k, n % nr], 3)
        schedule.transform_layout(packed, ("write", 0), panels)
        schedule.annotate(packed, AHEAD_OF_TIME, True)

    def _image(self, schedule: Any, values: Mapping[str, int]) -> Any:
        """The nest over blocks and over what each writes of the image; returns the loop over blocks."""
        image, y, z, channel = schedule.get_loops(schedule.get_sblock(self.output))
        tile_y, row = schedule.split(y, [None, self.tile[0]])
        tile_z, column = schedule.split(z, [None, self.tile[1]])
        block_y, tile_y = schedule.split(tile_y, [None, values["down"]])
        block_z, tile_z = schedule.split(tile_z, [None, values["across"]])
        chunk, channels, lane = schedule.split(channel, [values["chunks"], None, self.lanes])
        schedule.reorder(image, block_y, block_z, chunk, tile_y, tile_z, channels, row, column, lane)
        schedule.unroll(row)
        schedule.unroll(column)
        schedule.vectorize(lane)
        keep_rows_in_registers(schedule, ROWS, row)
        block = schedule.fuse(image, block_y, block_z, chunk)
        if self.hardware.threads > 1:
            schedule.parallel(block)
        return block

    def _data(self, schedule: Any, block: Any) -> None:
        data = schedule.get_sblock(DATA)
        schedule.compute_at(data, block, preserve_unit_loops=True)
        matrix, *tiles, channel = schedule.get_loops(data)[-5:]
        row, column = schedule.split(matrix, self.size)
        channels, lane = schedule.split(channel, [None, self.lanes])
        schedule.reorder(*tiles, channels, row, column, lane)
        schedule.unroll(row)
        schedule.unroll(column)
        schedule.vectorize(lane)
        keep_rows_in_registers(schedule, DATA_ROWS, row)
        self._spread(schedule, data)
        padded = schedule.get_sblock(PADDED)
        schedule.compute_at(padded, block, preserve_unit_loops=True)
        _, lane = schedule.split(schedule.get_loops(padded)[-1], [None, self.lanes])
        schedule.vectorize(lane)

    def _spread(self, schedule: Any, writer: Any) -> None:
        """Put the matrices that a block writes an odd number of cache lines apart."""
        line = self.hardware.cache_line_bytes // 4
        schedule.storage_align(writer, 0, 0, 2 * line, line)

    def _products(self, schedule: Any, products: Any, values: Mapping[str, int]) -> None:
        mr, nr = values["mr"], values["nr"]
        writer = schedule.cache_write(products, 0, "global" if 4 * mr * nr < STACK_BYTES else "local")
        self._spread(schedule, writer)
        matrix, image, tile_y, tile_z, channel, depth = schedule.get_loops(products)[-6:]
        tiles, tile = schedule.split(schedule.fuse(tile_y, tile_z), [None, mr])
        panels, vectors, lane = schedule.split(channel, [None, nr // self.lanes, self.lanes])
        steps, step = schedule.split(depth, [None, values["ku"]])
        outer = [tiles, panels] if values["order"] else [panels, tiles]
        schedule.reorder(matrix, image, *outer, steps, step, tile, vectors, lane)
        schedule.vectorize(lane)
        for loop in (step, tile, vectors):
            schedule.unroll(loop)
        if values[FAR_WEIGHTS]:
            schedule.annotate(steps, FETCH_AHEAD, max(1, ahead_bytes(self.hardware) // (4 * values["ku"] * nr)))
            schedule.annotate(steps, NEXT_PANEL, [0, 1, 1])
        schedule.reverse_compute_at(writer, outer[1], preserve_unit_loops=True)
        *rows, columns = schedule.get_loops(writer)[-5:]
        vectors, lane = schedule.split(columns, [None, self.lanes])
        schedule.vectorize(lane)
        for loop in (*rows, vectors):
            schedule.unroll(loop)
        schedule.decompose_reduction(products, steps)


def _divisors(extent: int) -> tuple[int, ...]:
    return tuple(count for count in range(1, extent + 1) if extent % count == 0)
