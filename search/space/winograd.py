"""The transforms of Winograd's minimal filtering: a tile at a time, in registers, vectors along the channels.

    data:    for each row of a tile: transform down its columns -> along it, and write each element to its matrix
    result:  for each row of a tile of the image: the same with its products, then whatever was fused behind

All matrices are small constants: once the loops over a tile are unrolled, only additions and a few products are left.
A transformed row takes six vectors, which stay in registers; LLVM shares loads and sums between rows. A whole tile in
a buffer takes twice as long: 36 vectors are more than there are registers.

What remains above the speed of a copy is mostly due to the (m + 2)**2 matrices lying a multiple of 4 KB apart, in the
same places of the first cache: 36 x 16 x 256 floats become an image in 23 us, 36 x 16 x 272 in 10 us.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .applicable import applies
from .base import Knob, Sketch
from .features import feature_table
from .hardware import Hardware
from .marks import TILE_GRID
from .memory_bound.inlining import inlined
from .memory_bound.kernel import block_names
from .nest import partition

__all__ = ["WinogradSketch", "keep_rows_in_registers", "winograd_sketches"]

ROWS, DATA, PRODUCTS = "winograd_rows", "winograd_data", "winograd_products"
"""Names of blocks (search/graph/winograd_kernels.py), which TVM keeps when it fuses functions."""

FAMILY_INDEX = 30


def winograd_sketches(mod: Any, hardware: Hardware) -> list[Sketch]:
    """The sketch of `mod["main"]` when it is such a transform, else none."""
    present = block_names(mod)
    if ROWS not in present or PRODUCTS in present:  # inlining the transforms of a whole convolution takes seconds
        return []
    schedule = inlined(mod, (ROWS,))
    blocks = [schedule.get(block) for block in schedule.get_child_blocks(schedule.get_sblock("root"))]
    names = [str(block.name_hint) for block in blocks]
    if names[0] != ROWS or len(names) != 2:
        return []
    rows, last = blocks
    is_data = names[1] == DATA
    extents = tuple(int(axis.dom.extent) for axis in last.iter_vars)
    if len(extents) != (3 if is_data else 4) or (is_data and TILE_GRID not in last.annotations):
        return []
    size = int(rows.iter_vars[1].dom.extent)
    if is_data:
        grid = tuple(int(count) for count in last.annotations[TILE_GRID])
    else:
        grid = (extents[0], -(-extents[1] // size), -(-extents[2] // size))
    sketch = WinogradSketch(mod, is_data, size, grid, extents, names[-1], hardware)
    return [sketch] if applies(sketch) else []


def keep_rows_in_registers(schedule: Any, name: str, loop: Any) -> None:
    """Compute the transformed row of a tile, which the block of that name writes, at a loop."""
    rows = schedule.get_sblock(name)
    schedule.compute_at(rows, loop, preserve_unit_loops=True)
    *_, elements, lane = schedule.get_loops(rows)
    schedule.unroll(elements)
    schedule.vectorize(lane)
    schedule.set_scope(rows, 0, "global")  # on the stack, and thereby in registers; "local" would be allocated


class WinogradSketch(Sketch):
    """One transform.

    Knobs: `lanes` of a vector of channels, `channels_outside` (vectors of channels are the outer, tiles the inner
    loop), `parallel` (0: serial, 1: rows of tiles, 2: tiles and channels), `partition` (tiles at the border, where data
    are padded or an image ends inside a tile, are code of their own).

    Parameters
    ----------
    mod : tvm.ir.IRModule
        One function, "main".
    is_data : bool
        Whether it transforms data, else results.
    tile : int
        Rows and columns of a tile that it writes.
    grid : tuple of int
        Images, rows of tiles in one, tiles in a row.
    extents : tuple of int
        (tile**2, tiles, channels) of the data, (batch, height, width, channels) of an image.
    output : str
        Name of the block that writes.
    hardware : Hardware
    """

    name = "winograd"

    def __init__(
        self,
        mod: Any,
        is_data: bool,
        tile: int,
        grid: tuple[int, ...],
        extents: tuple[int, ...],
        output: str,
        hardware: Hardware,
    ) -> None:
        self.mod, self.is_data, self.tile, self.output, self.hardware = mod, is_data, tile, output, hardware
        self.grid, self.tiles, self.channels = grid, prod(grid), extents[-1]
        self.bytes_moved = 4.0 * sum(prod(map(int, getattr(p, "shape", ()))) for p in mod["main"].params)
        full = hardware.lanes(4)
        lanes = [width for width in (full, full // 2, full // 4) if width > 1 and self.channels % width == 0]
        border = is_data or extents[1] % tile or extents[2] % tile
        self.knobs = (
            Knob("lanes", tuple(sorted(lanes)) or (1,)),
            Knob("channels_outside", (0, 1)),
            Knob("parallel", (0, 1, 2) if hardware.threads > 1 else (0,)),
            Knob("partition", (0, 1) if border else (0,)),
        )

    def legal(self, values: NDArray[np.int64]) -> NDArray[np.bool_]:
        """See `Sketch.legal`. With channels outside, only they and the tiles together are parallel.

        A loop over tiles that is fused into a parallel one cannot be partitioned.
        """
        outside, parallel, partitioned = values[:, 1] == 1, values[:, 2], values[:, 3] == 1
        return (~outside | (parallel != 1)) & (~partitioned | (parallel != 2))

    def latency_s(self, values: NDArray[np.int64]) -> NDArray[np.float64]:
        """See `Sketch.latency_s`: memory traffic, and instructions of partly filled vectors."""
        machine = self.hardware
        threads = np.where(values[:, 2] > 0, machine.threads, 1)
        cached = machine.cache_bandwidth_bytes_per_s * threads / (1.0 if self.bytes_moved <= machine.l2_bytes else 2.0)
        bandwidth = cached if self.bytes_moved <= machine.l3_bytes else machine.bandwidth_bytes_per_s
        # Each element takes part in about two operations of rows and two of columns.
        size = self.tile if self.is_data else self.tile + 2
        operations = 4.0 * self.tiles * size**2 * self.channels
        compute_s = operations / values[:, 0] / (machine.peak_flops_per_s / (2 * machine.lanes(4))) / threads
        overhead_s = np.where(values[:, 2] > 0, machine.parallel_overhead_s, 0.0)
        far = 1.0 + 0.1 * values[:, 1]  # reads of neighbouring channels come late
        # Conditions of loads cost no more than the longer code; those of stores do.
        far = far * np.where(values[:, 3] == 1, 1.02 if self.is_data else 0.9, 1.0)
        return np.asarray((np.maximum(compute_s, self.bytes_moved / bandwidth) + compute_s / 2) * far + overhead_s)

    def features(self, values: NDArray[np.int64]) -> NDArray[np.float32]:
        """See `Sketch.features`."""
        known = {
            "log_bytes": np.log2(self.bytes_moved),
            "family": float(FAMILY_INDEX),
            "log_vector_elements": np.log2(values[:, 0]),
            "log_unrolled_body": np.log2(float(self.tile**2)),
            "log_parallel_chunks": np.where(values[:, 2] > 0, np.log2(float(self.grid[0] * self.grid[1])), 0.0),
            "log_latency": np.log2(self.latency_s(values)),
            "variant": values[:, 1] + 2.0 * values[:, 2] + 0.5 * values[:, 3],
        }
        return feature_table(len(values), known)

    def apply(self, values: Mapping[str, int]) -> Any:
        """See `Sketch.apply`."""
        schedule = inlined(self.mod, (ROWS,))
        output = schedule.get_sblock(self.output)
        loops = schedule.get_loops(output)
        channels, vector = schedule.split(loops[-1], [None, values["lanes"]])
        if self.is_data:
            outside = schedule.split(loops[1], list(self.grid))
            row, column = schedule.split(loops[0], [self.tile, self.tile])
        else:
            down, row = schedule.split(loops[1], [None, self.tile])
            across, column = schedule.split(loops[2], [None, self.tile])
            outside = [loops[0], down, across]
        nest = [channels, *outside] if values["channels_outside"] else [*outside, channels]
        schedule.reorder(*nest, row, column, vector)
        schedule.unroll(row)
        schedule.unroll(column)
        schedule.vectorize(vector)
        keep_rows_in_registers(schedule, ROWS, row)
        if values["partition"]:
            first = 2 if self.is_data or values["parallel"] else 1  # a loop that is partitioned cannot be fused
            for loop in outside[first:]:
                partition(schedule, loop)
        if values["parallel"] == 1:
            schedule.parallel(schedule.fuse(*outside[:2]))
        elif values["parallel"] == 2:
            schedule.parallel(schedule.fuse(*nest))
        return schedule
