"""Products of few rows by weights that are stored in 8 bits or fewer, and become floats in registers.

    for some columns (parallel), for some rows:
        totals = 0
        for each group of the reduction:
            products = 0
            for each word of the group:                       # so many codes of one column
                for each code in it:
                    weight = float of (code's bits below those of 1.0) - offset      # (code - zero) / 2^bits
                    products[rows, columns] += left[rows, place] * weight
            totals += scale * products

A code is put below the exponent of 1.0 instead of being converted: a shift, and one instruction for `and` and `or`. The
subtraction makes the weight exact, but for the scale, which is a number for each group. Rows are few: each weight is
decoded once for `mr` rows, and read once from wherever it is stored.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .access import dtype_bytes
from .applicable import applies
from .base import Knob, Sketch
from .features import feature_table
from .hardware import Hardware
from .marks import AHEAD_OF_TIME, FETCH_AHEAD
from .memory_bound.kernel import block_names
from .nest import block_extents, extent_of, fuse, index_map
from .schedule import schedule_of

__all__ = [
    "GROUP_PRODUCTS",
    "MOST_ROWS",
    "TOTALS",
    "NarrowWeightsSketch",
    "narrow_weights_sketches",
]

GROUP_PRODUCTS, TOTALS = "narrow_group_products", "narrow_totals"
"""Names of the stages."""

MOST_ROWS = 16
"""With more rows, weights that were made floats ahead of time are read and multiplied about as fast."""

FAMILY_INDEX = 33

DECODING = 3.0
"""Vector instructions that make weights of a vector of codes: a shift, one for `and` and `or`, a subtraction."""

GROUP_INSTRUCTIONS = 3.0
"""Vector instructions, beside those of its words, of a group's row in a vector of columns."""

LARGEST_BODY = 160
"""Vector instructions in an unrolled body: one word of 8 codes for a row and four vectors of columns is 96."""

WORD_BYTES = 4

AHEAD_BYTES = 2048
"""Of words, that are asked for ahead: 16 products of 4096 x 4096 with 4 bits take 475 us each without, 354 to 371 with
1 to 2 KB, 376 to 406 with more, where the last cache or memory delivers 31 to 35 GB/s (two threads of a Xeon, tiles of
64 columns); a single one, whose weights stay near, 287, and 261 to 282."""

READING = 0.7
"""Share of a copy's bandwidth at which codes arrive, one stream for each thread (a Xeon: 38 of 56 GB/s)."""


def narrow_weights_sketches(mod: Any, hardware: Hardware) -> list[Sketch]:
    """The sketch of `mod["main"]` where it is such a product (`tvm_plugin/narrow_weights`), else none."""
    if not {GROUP_PRODUCTS, TOTALS} <= set(block_names(mod)):
        return []
    sketch = NarrowWeightsSketch(mod, hardware)
    return [sketch] if applies(sketch) else []


class NarrowWeightsSketch(Sketch):
    """Knobs: `mr` rows and `nr` columns of a tile, `ku` words of a column that are unrolled.

    Parameters
    ----------
    mod : tvm.ir.IRModule
        One function, "main", with the stages and element-wise blocks behind them.
    hardware : Hardware
    """

    name = "narrow_weights"

    def __init__(self, mod: Any, hardware: Hardware) -> None:
        self.mod, self.hardware = mod, hardware
        names = block_names(mod)
        self.epilogue = names[names.index(TOTALS) + 1 :]
        schedule = schedule_of(mod)
        *batch, self.groups, self.columns, self.words = block_extents(schedule, GROUP_PRODUCTS)
        self.rows = prod(batch)
        self.depth = int(mod["main"].params[0].shape[-1])
        self.codes = self.depth // (self.groups * self.words)
        self.lanes = hardware.lanes(4)
        parameters = mod["main"].params
        self.bytes_moved = float(sum(prod(map(int, p.shape)) * dtype_bytes(str(p.dtype)) for p in parameters))
        vectors = (1, 2, 3, 4, 5, 6, 8, 12, 16)
        self.knobs = (
            Knob("mr", tuple(n for n in range(1, self.rows + 1) if _is_block_of(n, batch))),
            Knob("nr", tuple(n * self.lanes for n in vectors if self.columns % (n * self.lanes) == 0)),
            Knob("ku", tuple(n for n in (1, 2, 4, 8) if self.words % n == 0)),
        )

    def legal(self, values: NDArray[np.int64]) -> NDArray[np.bool_]:
        """See `Sketch.legal`: a tile's products, with a decoded vector for each of its rows' factors, fit registers."""
        mr, nr, ku = values.T
        vectors = nr // self.lanes
        ok = mr * vectors + 4 <= self.hardware.vector_registers
        ok &= (vectors * ku * self.codes * (mr + DECODING) <= LARGEST_BODY) | (ku == 1) & (vectors * mr <= 8)
        return np.asarray(ok)

    def latency_s(self, values: NDArray[np.int64]) -> NDArray[np.float64]:
        """See `Sketch.latency_s`: the slower of instructions and codes that arrive."""
        machine = self.hardware
        mr, nr, ku = values.astype(np.float64).T
        vectors = nr / self.lanes
        tiles = self.columns / nr
        used = np.minimum(machine.threads, tiles)
        share = np.ceil(tiles / used) / tiles
        issue_s = 2.0 * self.lanes / machine.peak_flops_per_s  # of one vector instruction
        times = self.rows / mr * self.columns / self.lanes
        of_codes = self.depth * (DECODING + mr + mr / self.codes / vectors)
        # A sum can be added to again after four cycles, in which two units add to eight.
        waiting = np.maximum(1.0, 8.0 / (mr * vectors * (1.0 + DECODING / mr)))
        of_groups = self.groups * (GROUP_INSTRUCTIONS * mr + self.words / ku)
        serial_s = times * (of_codes * waiting + of_groups) * issue_s
        in_cache = self.bytes_moved <= machine.near_bytes
        bandwidth = machine.cache_bandwidth_bytes_per_s * machine.threads if in_cache else machine.bandwidth_bytes_per_s
        overhead_s = machine.parallel_overhead_s if machine.threads > 1 else 0.0
        return np.asarray(np.maximum(serial_s * share, READING * self.bytes_moved / bandwidth) + overhead_s)

    def features(self, values: NDArray[np.int64]) -> NDArray[np.float32]:
        """See `Sketch.features`."""
        mr, nr, ku = values.astype(np.float64).T
        latency_s = self.latency_s(values)
        known = {
            "log_flops": np.log2(2.0 * self.rows * self.columns * self.depth),
            "log_bytes": np.log2(self.bytes_moved),
            "family": float(FAMILY_INDEX),
            "log_vector_elements": np.log2(nr),
            "accumulators": mr * nr / self.lanes,
            "register_pressure": (2.0 * mr * nr / self.lanes + 4) / self.hardware.vector_registers,
            "log_tile_m": np.log2(mr),
            "log_tile_n": np.log2(nr),
            "log_tile_k": np.log2(ku),
            "log_unrolled_body": np.log2(nr / self.lanes * ku * self.codes * (mr + DECODING)),
            "log_parallel_chunks": np.log2(self.columns / nr),
            "log_reduction": np.log2(float(self.depth)),
            "log_latency": np.log2(latency_s),
        }
        return feature_table(len(values), known)

    def apply(self, values: Mapping[str, int]) -> Any:
        """See `Sketch.apply`."""
        schedule = schedule_of(self.mod)
        products, totals = (schedule.get_sblock(name) for name in (GROUP_PRODUCTS, TOTALS))
        for name in self.epilogue[:-1]:
            schedule.compute_inline(schedule.get_sblock(name))
        self._pack(schedule, values["nr"])
        if self.epilogue:
            schedule.set_scope(totals, 0, "local")
            writer = schedule.get_sblock(self.epilogue[-1])
        else:
            writer = schedule.cache_write(totals, 0, "local")
        schedule.set_scope(products, 0, "local")
        *batch, column = schedule.get_loops(writer)
        row = fuse(schedule, batch)
        rows, row = schedule.split(row, [None, values["mr"]])
        columns, column = schedule.split(column, [None, values["nr"]])
        schedule.reorder(columns, rows, row, column)
        self._tile(schedule, [row], column)
        if self.hardware.threads > 1:
            schedule.parallel(columns)
        schedule.compute_at(totals, rows, preserve_unit_loops=True)
        *tile, column, group = schedule.get_loops(totals)[2:]
        schedule.reorder(group, *tile, column)
        self._tile(schedule, tile, column)
        schedule.compute_at(products, group, preserve_unit_loops=True)
        *tile, column, word = schedule.get_loops(products)[3:]
        words, word = schedule.split(word, [None, values["ku"]])
        schedule.reorder(words, word, *tile, column)
        schedule.unroll(word)
        schedule.annotate(words, FETCH_AHEAD, max(1, AHEAD_BYTES // (values["ku"] * values["nr"] * WORD_BYTES)))
        self._tile(schedule, tile, column)
        schedule.decompose_reduction(products, words)
        schedule.decompose_reduction(totals, group)
        return schedule

    def _tile(self, schedule: Any, rows: list[Any], column: Any) -> None:
        """Unroll the rows and vectors of a tile."""
        vectors, lane = schedule.split(column, [None, self.lanes])
        schedule.vectorize(lane)
        for loop in (*rows, vectors):
            if extent_of(schedule, loop) > 1:
                schedule.unroll(loop)

    def _pack(self, schedule: Any, nr: int) -> None:
        """The weights' words, scales and offsets, [column, ...], as [column / nr, ..., column % nr], ahead of time."""
        function = self.mod["main"]
        weights = [function.params[int(position)] for position in function.attrs.get("layout_free_buffers", ())]
        for stage in (GROUP_PRODUCTS, TOTALS):
            block = schedule.get_sblock(stage)
            for position, read in enumerate(list(schedule.get(block).reads)):
                if not any(read.source.same_as(weight) for weight in weights):
                    continue
                copy = schedule.cache_read(block, position, "global")
                layout = index_map(schedule, block, lambda n, k: [n // nr, k, n % nr], 2)
                schedule.transform_layout(copy, ("write", 0), layout)
                schedule.annotate(copy, AHEAD_OF_TIME, True)


def _is_block_of(rows: int, batch: list[int]) -> bool:
    """Whether so many rows in order are a box of the axes."""
    for extent in reversed(batch):
        if extent % rows == 0:
            return True
        if rows % extent:
            return False
        rows //= extent
    return rows == 1
