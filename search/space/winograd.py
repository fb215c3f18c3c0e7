"""The transforms of Winograd's minimal filtering: a tile at a time, in registers, vectors along the channels.

    data:    cut a tile -> transform its rows -> its columns, and write each element to its matrix
    result:  transform the rows of a tile's products -> its columns, and whatever was fused behind, into the image

All matrices are small constants: once the loops over a tile are unrolled, only additions and a few products are left,
and the kernel is bound by memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tvm.s_tir import ScheduleError

from .base import Knob, Sketch
from .features import FEATURES
from .hardware import Hardware
from .memory_bound.kernel import inlined

__all__ = ["WinogradSketch", "winograd_sketches"]

CUT, ROWS, DATA = "winograd_tile", "winograd_rows", "winograd_data"
"""Names of the blocks (search/graph/winograd_ops.py), which TVM keeps when it fuses functions."""

FAMILY_INDEX = 30


def winograd_sketches(mod: Any, hardware: Hardware) -> list[Sketch]:
    """The sketch of `mod["main"]` when it is such a transform, else none."""
    try:
        schedule = inlined(mod, (CUT, ROWS))
    except ScheduleError:  # no blocks
        return []
    blocks = [schedule.get(block) for block in schedule.get_child_blocks(schedule.get_sblock("root"))]
    names = [str(block.name_hint) for block in blocks]
    is_data = names == [CUT, ROWS, DATA]
    if not is_data and (names[0] != ROWS or len(names) != 2):
        return []
    rows, last = blocks[-2], blocks[-1]
    extents = tuple(int(axis.dom.extent) for axis in last.iter_vars)
    if len(extents) != (3 if is_data else 4):
        return []
    sketch = WinogradSketch(mod, is_data, int(rows.iter_vars[1].dom.extent), extents, names[-1], hardware)
    try:
        sketch.apply({knob.name: knob.values[0] for knob in sketch.knobs})
    except ScheduleError:
        return []
    return [sketch]


class WinogradSketch(Sketch):
    """One transform.

    Knobs: `lanes` of a vector of channels, `channels_outside` (vectors of channels are the outer, tiles the inner
    loop), `parallel` (0: serial, 1: rows of tiles, or tiles, 2: channels as well).

    Parameters
    ----------
    mod : tvm.ir.IRModule
        One function, "main".
    is_data : bool
        Whether it transforms data, else results.
    tile : int
        Rows and columns of a tile that it writes.
    extents : tuple of int
        (tile**2, tiles, channels) of the data, (batch, height, width, channels) of an image.
    output : str
        Name of the block that writes.
    hardware : Hardware
    """

    name = "winograd"

    def __init__(
        self, mod: Any, is_data: bool, tile: int, extents: tuple[int, ...], output: str, hardware: Hardware
    ) -> None:
        self.mod, self.is_data, self.tile, self.output, self.hardware = mod, is_data, tile, output, hardware
        self.channels = extents[-1]
        self.tiles = extents[1] if is_data else extents[0] * -(-extents[1] // tile) * -(-extents[2] // tile)
        self.outer = extents[1] if is_data else extents[0] * -(-extents[1] // tile)
        self.bytes_moved = 4.0 * sum(prod(map(int, getattr(p, "shape", ()))) for p in mod["main"].params)
        full = hardware.lanes(4)
        lanes = [width for width in (full, full // 2, full // 4) if width > 1 and self.channels % width == 0]
        self.knobs = (
            Knob("lanes", tuple(sorted(lanes)) or (1,)),
            Knob("channels_outside", (0, 1)),
            Knob("parallel", (0, 1, 2) if hardware.threads > 1 else (0,)),
        )

    def legal(self, values: NDArray[np.int64]) -> NDArray[np.bool_]:
        """See `Sketch.legal`. With channels outside, only they and the tiles together are parallel."""
        return (values[:, 1] == 0) | (values[:, 2] != 1)

    def latency_s(self, values: NDArray[np.int64]) -> NDArray[np.float64]:
        """See `Sketch.latency_s`: memory traffic, and instructions of partly filled vectors."""
        machine = self.hardware
        threads = np.where(values[:, 2] > 0, machine.threads, 1)
        in_cache = self.bytes_moved <= machine.l3_bytes
        bandwidth = machine.cache_bandwidth_bytes_per_s / 4 * threads if in_cache else machine.bandwidth_bytes_per_s
        # Each element takes part in about four additions of rows and four of columns.
        size = self.tile if self.is_data else self.tile + 2
        additions = 8.0 * self.tiles * size**2 * self.channels
        compute_s = additions / values[:, 0] / (machine.peak_flops_per_s / (2 * machine.lanes(4))) / threads
        overhead_s = np.where(values[:, 2] > 0, machine.parallel_overhead_s, 0.0)
        far = 1.0 + 0.1 * values[:, 1]  # reads of neighbouring channels come late
        return np.asarray((np.maximum(compute_s, self.bytes_moved / bandwidth) + compute_s / 2) * far + overhead_s)

    def features(self, values: NDArray[np.int64]) -> NDArray[np.float32]:
        """See `Sketch.features`."""
        known = {
            "log_bytes": np.log2(self.bytes_moved),
            "family": float(FAMILY_INDEX),
            "log_vector_elements": np.log2(values[:, 0]),
            "log_unrolled_body": np.log2(float(self.tile**2)),
            "log_parallel_chunks": np.where(values[:, 2] > 0, np.log2(float(max(self.outer, 1))), 0.0),
            "log_latency": np.log2(self.latency_s(values)),
            "variant": values[:, 1] + 2.0 * values[:, 2],
        }
        result = np.full((len(values), len(FEATURES)), np.nan, dtype=np.float32)
        for column, feature in enumerate(FEATURES):
            if feature in known:
                result[:, column] = known[feature]
        return result

    def apply(self, values: Mapping[str, int]) -> Any:
        """See `Sketch.apply`."""
        schedule = inlined(self.mod, (CUT, ROWS))
        output = schedule.get_sblock(self.output)
        loops = schedule.get_loops(output)
        blocks, vector = schedule.split(loops[-1], [None, values["lanes"]])
        if self.is_data:
            outside, inside = [loops[1]], [loops[0]]
        else:
            rows, row = schedule.split(loops[1], [None, self.tile])
            columns, column = schedule.split(loops[2], [None, self.tile])
            outside, inside = [loops[0], rows, columns], [row, column]
        nest = [blocks, *outside] if values["channels_outside"] else [*outside, blocks]
        schedule.reorder(*nest, *inside, vector)
        for loop in inside:
            schedule.unroll(loop)
        schedule.vectorize(vector)
        for name in (ROWS, CUT) if self.is_data else (ROWS,):
            stage = schedule.get_sblock(name)
            schedule.compute_at(stage, nest[-1], preserve_unit_loops=True)
            # Cutting, and transforming rows, of one tile: two loops over it, one over a vector of channels.
            *_, row, column, lanes = schedule.get_loops(stage)
            schedule.unroll(row)
            schedule.unroll(column)
            schedule.vectorize(lanes)
            schedule.set_scope(stage, 0, "local")
        if values["parallel"]:
            together = outside[:2] if values["parallel"] == 1 else nest
            schedule.parallel(schedule.fuse(*together) if len(together) > 1 else together[0])
        return schedule
