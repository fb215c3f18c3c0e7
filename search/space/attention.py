"""Attention in one kernel: some rows of scores at a time through all stages, which its core's cache holds.

    for each head and block of rows (parallel):
        query @ key, scale, mask          -> scores[row, place]
        maxima of the rows, exp           -> exponentials[row, place], and their sums
        exponentials @ value, over sums   -> rows of the result

It is FlashAttention's fusion (Dao et al., 2022) without its running maxima: a block has whole rows. Both products run
in register tiles; key and value may be copied into panels, once or for each block, where their rows lie so far apart
that they share the cache's sets. Where rows, places or columns do not come out even, panels have zeros for the places
that are missing, whose scores are minus infinity, and for the columns, and rows that are missing are computed like the
last one; neither rows nor columns are written.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

import numpy as np
import tvm_ffi
from numpy.typing import NDArray
from tvm import tirx
from tvm.ir.expr import TensorLoad
from tvm.s_tir import ScheduleError

from .base import Knob, Sketch
from .contraction.plan import whole_width
from .features import feature_table
from .hardware import Hardware
from .memory_bound.kernel import block_names
from .memory_bound.nest import extent_of, partition
from .memory_bound.row_reductions import finish_reduction, fitting, sum_as_written, vector_sums
from .register_tiles import tile_efficiency, tile_fits
from .schedule import schedule_of

__all__ = [
    "EXPONENTIALS",
    "KEYS",
    "MAXIMA",
    "PRODUCTS",
    "ROWS_OF_BLOCKS",
    "SCORES",
    "SUMS",
    "VALUES",
    "WEIGHTED",
    "AttentionSketch",
    "attention_sketches",
    "filled_up",
]

PRODUCTS, SCORES, MAXIMA = "attention_products", "attention_scores", "attention_maxima"
EXPONENTIALS, SUMS, VALUES = "attention_exponentials", "attention_sums", "attention_values"
"""Names of the stages; the result is the block that follows them."""

STAGES = (PRODUCTS, SCORES, MAXIMA, EXPONENTIALS, SUMS, VALUES)

KEYS, WEIGHTED, ROWS_OF_BLOCKS = "attention_keys", "attention_weighted", "attention_rows"
"""Stages of a ragged attention: keys and values (those that are weighted) with zeros for what is missing of their
places and columns, and the result with the rows and columns that there are."""

FAMILY_INDEX = 32

VECTOR = 16
"""Places, and columns of the values, are computed in multiples of this: whole vectors on every machine."""

ROWS = tuple(range(4, 257, 4))
"""Rows of a block: divisors of all rows that are among these."""

EXP_INSTRUCTIONS = 16.0
"""Vector instructions of one exponential, with its score's way to it and its sum."""

PANEL_INSTRUCTIONS = 1.0
"""Vector-instruction times in which one element is copied into a panel (Zen 4: a tenth of all with 64 rows a block)."""

FAR_KEYS_BYTES, FAR_KEYS = 4096, 1.15
"""The product with keys whose rows lie a page apart, or more, takes so many times as long as with panels of them.

Two threads of Zen 5, ms, where panels are (none, for each block, once), best tiles: 8 heads, 1024 places, 64 deep,
4.98, 4.81, 4.63; 6 heads, 1500 places, which do not come out even, for each block 8.90, once 7.63.
"""

MOST_FILLING = 1.1
"""Products may be this many times as many where rows and places are filled up."""

MOST_COLUMNS = 4 / 3
"""Columns may be; of the products with values, which are half of all."""

ROWS_ARE_WORTH = 6.4
"""A block of n rows takes (1 + this / n) times as long as a large one: 128 rows win over 32 by 14 %."""


def filled_up(rows: int, places: int, columns: int) -> tuple[int, int, int] | None:
    """Rows, places and columns of the attention that blocks of rows and vectors compute; None where it does not pay.

    The same numbers where they come out even. Else places fill two vectors, and rows the blocks that cost least.
    """
    more_columns = -(-columns // VECTOR) * VECTOR
    if more_columns > MOST_COLUMNS * columns:
        return None
    more_places = places if places % VECTOR == 0 else -(-places // (2 * VECTOR)) * 2 * VECTOR
    most_rows = int(rows * MOST_FILLING * places / more_places)
    choices = [count for count in range(rows, most_rows + 1) if _block(count)]
    if rows in choices:
        choices = [rows]
    if not choices:
        return None
    best = min(choices, key=lambda count: count * (1 + ROWS_ARE_WORTH / _block(count)))
    return best, more_places, more_columns


def _block(rows: int) -> int:
    """The largest block that divides the rows, of at most 128; 0 if none does."""
    return max((count for count in ROWS if count <= 128 and rows % count == 0), default=0)


def attention_sketches(mod: Any, hardware: Hardware) -> list[Sketch]:
    """The sketch of `mod["main"]` when it is an attention (tasks/attention.py), else none."""
    names = block_names(mod)
    if not set(STAGES) <= set(names[:-1]) <= {*STAGES, KEYS, WEIGHTED, ROWS_OF_BLOCKS}:
        return []
    sketch = AttentionSketch(mod, names[-1], hardware)
    try:
        sketch.apply({knob.name: knob.values[0] for knob in sketch.knobs})
    except ScheduleError:
        return []
    return [sketch]


class AttentionSketch(Sketch):
    """Knobs: `rows` of a block; for the scores and for the values `mr` x `nr` sums in registers and `ku` steps of the
    reduction unrolled; `key_panels` and `value_panels` (0: read as they lie; 1: copied for each block; 2: copied once,
    before, by all threads).

    Parameters
    ----------
    mod : tvm.ir.IRModule
        One function, "main", whose blocks are `STAGES`, perhaps those of a ragged attention, and the result.
    result : str
        Name of the block that writes the result.
    hardware : Hardware
    """

    name = "attention"

    def __init__(self, mod: Any, result: str, hardware: Hardware) -> None:
        self.mod, self.hardware = mod, hardware
        self.stages = (*block_names(mod)[:-1], result)
        self.output = ROWS_OF_BLOCKS if ROWS_OF_BLOCKS in self.stages else result
        schedule = schedule_of(mod)
        products, values = (_extents(schedule, name) for name in (PRODUCTS, VALUES))
        *batch, self.all_rows, self.places, self.depth = products
        self.heads = prod(batch)
        self.columns = values[-2]
        self.all_columns = _extents(schedule, result)[-1]
        self.row_axis = _row_axis(schedule, self.output)
        self.bytes_moved = 4.0 * sum(prod(map(int, getattr(p, "shape", ()))) for p in mod["main"].params)
        self.lanes = hardware.lanes(4)
        rows = tuple(count for count in ROWS if self.all_rows % count == 0)
        tiles = tuple(count for count in range(1, 29) if any(block % count == 0 for block in rows))
        self.knobs = (
            Knob("rows", rows),
            Knob("score_mr", tiles),
            Knob("score_nr", self._widths(self.places)),
            Knob("score_ku", tuple(steps for steps in (1, 2, 4) if self.depth % steps == 0)),
            Knob("value_mr", tiles),
            Knob("value_nr", self._widths(self.columns)),
            Knob("value_ku", (1, 2, 4)),
            Knob("key_panels", (1, 2) if KEYS in self.stages else (0, 1, 2)),
            Knob("value_panels", (1, 2) if WEIGHTED in self.stages else (0, 1, 2)),
        )

    def _widths(self, extent: int) -> tuple[int, ...]:
        return tuple(count * self.lanes for count in (1, 2, 3, 4, 5, 6) if extent % (count * self.lanes) == 0)

    def legal(self, values: NDArray[np.int64]) -> NDArray[np.bool_]:
        """See `Sketch.legal`: tiles divide a block, its sums fit the registers, the bodies stay small."""
        rows, *tiles, _, _ = values.T
        ok = np.ones(len(values), dtype=np.bool_)
        for mr, nr, ku in (tiles[:3], tiles[3:]):
            ok &= (rows % mr == 0) & tile_fits(mr, nr // self.lanes, ku, self.hardware.vector_registers)
        return ok

    def latency_s(self, values: NDArray[np.int64]) -> NDArray[np.float64]:
        """See `Sketch.latency_s`: both products at the efficiency of their tiles, exponentials by vectors, keys and
        values once a block, and scores written and read again.
        """
        machine = self.hardware
        rows, s_mr, s_nr, _, v_mr, v_nr, _, key_panels, value_panels = values.astype(np.float64).T
        blocks = self.heads * self.all_rows / rows
        used = np.minimum(machine.threads, blocks)
        share = np.ceil(blocks / used) / blocks  # of the whole, that the busiest thread computes
        scores = float(self.heads * self.all_rows * self.places)
        serial_s = np.zeros(len(values))
        far = np.where((key_panels == 0) & (4 * self.places >= FAR_KEYS_BYTES), FAR_KEYS, 1.0)
        products = ((s_mr, s_nr, self.depth, self.depth * far), (v_mr, v_nr, self.places, self.columns))
        for mr, nr, steps, width in products:
            efficiency = tile_efficiency(mr, nr / self.lanes, steps)
            serial_s = serial_s + 2.0 * scores * width / machine.peak_flops_per_s / efficiency
        serial_s = serial_s + scores * EXP_INSTRUCTIONS * 2.0 / machine.peak_flops_per_s
        copies = [np.choose(panels.astype(np.intp), (0.0, blocks, self.heads)) for panels in (key_panels, value_panels)]
        copied = self.places * (self.depth * copies[0] + self.columns * copies[1])
        serial_s = serial_s + copied * PANEL_INSTRUCTIONS * 2.0 * self.lanes / machine.peak_flops_per_s
        scratch = 8.0 * rows * self.places
        again = np.where(scratch <= machine.l2_bytes, 1.0, 1.2)
        # Keys and values come from the second-level cache in each block: 128 rows win over 32 by 14 %.
        traffic = 8.0 * scores * again + 2 * 4.0 * blocks * self.places * (self.depth + self.columns) + self.bytes_moved
        regions = 1.0 + (key_panels == 2) + (value_panels == 2)
        overhead_s = machine.parallel_overhead_s * regions if machine.threads > 1 else 0.0
        return np.asarray((serial_s + traffic / machine.cache_bandwidth_bytes_per_s / 2) * share + overhead_s)

    def features(self, values: NDArray[np.int64]) -> NDArray[np.float32]:
        """See `Sketch.features`; tiles are those of the values, the block's columns those of the scores."""
        rows, s_mr, s_nr, _, v_mr, v_nr, v_ku, key_panels, value_panels = values.astype(np.float64).T
        flops = 2.0 * self.heads * self.all_rows * self.places * (self.depth + self.columns)
        known = {
            "log_flops": np.log2(flops),
            "log_bytes": np.log2(self.bytes_moved),
            "family": float(FAMILY_INDEX),
            "log_vector_elements": np.log2(s_nr),
            "accumulators": v_mr * v_nr / self.lanes,
            "register_pressure": (v_mr + 1) * v_nr / self.lanes / self.hardware.vector_registers,
            "log_tile_m": np.log2(v_mr),
            "log_tile_n": np.log2(v_nr),
            "log_tile_k": np.log2(v_ku),
            "log_block_m": np.log2(rows),
            "log_block_k": np.log2(s_mr),
            "log_parallel_chunks": np.log2(self.heads * self.all_rows / rows),
            "l2_footprint": 8.0 * rows * self.places / self.hardware.l2_bytes,
            "log_reduction": np.log2(float(self.places)),
            "log_latency": np.log2(self.latency_s(values)),
            "variant": _choice(key_panels) + 2 * _choice(value_panels),
        }
        return feature_table(len(values), known)

    def apply(self, values: Mapping[str, int]) -> Any:
        """See `Sketch.apply`."""
        schedule = schedule_of(self.mod)
        blocks = {name: schedule.get_sblock(name) for name in self.stages}
        loops = schedule.get_loops(blocks[self.output])
        batch = [loop for axis, loop in enumerate(loops[:-1]) if axis != self.row_axis]
        chunk, row = schedule.split(loops[self.row_axis], [None, values["rows"]])
        schedule.reorder(*batch, chunk, row, loops[-1])
        outer = schedule.fuse(*batch, chunk)
        if self.hardware.threads > 1:
            schedule.parallel(outer)
        finish = [self._product(schedule, blocks[VALUES], row, loops[-1], values, "value")]
        panels = []
        if values["value_panels"]:
            copy = self._panels(schedule, blocks[VALUES], blocks.get(WEIGHTED), values["value_nr"])
            panels.append((copy, WEIGHTED, self.all_columns, values["value_panels"] == 2))
        self._softmax(schedule, blocks, outer)
        schedule.compute_at(blocks[SCORES], outer, preserve_unit_loops=True)
        *_, row, place = schedule.get_loops(blocks[SCORES])
        finish.append(self._product(schedule, blocks[PRODUCTS], row, place, values, "score"))
        if values["key_panels"]:
            copy = self._panels(schedule, blocks[PRODUCTS], blocks.get(KEYS), values["score_nr"])
            panels.append((copy, KEYS, self.places, values["key_panels"] == 2))
        for copy, filled, columns, once in panels:
            if once and self.hardware.threads > 1:
                *shared, _, _ = schedule.get_loops(copy)
                schedule.parallel(schedule.fuse(*shared))
            elif not once:
                schedule.compute_at(copy, outer, preserve_unit_loops=True)
            vectors = self._vectorize(schedule, schedule.get_loops(copy)[-1], columns)
            if filled in self.stages:
                partition(schedule, vectors)
        for block, step in finish:
            schedule.decompose_reduction(block, step)
        if self.stages[-1] != self.output:
            self._write_rows(schedule, blocks[self.stages[-1]], outer)
        return schedule

    def _write_rows(self, schedule: Any, result: Any, outer: Any) -> None:
        """The rows and columns of a block that there are, after the block."""
        schedule.reverse_compute_at(result, outer, preserve_unit_loops=True)
        self._vectorize(schedule, schedule.get_loops(result)[-1], self.all_columns)

    def _product(
        self, schedule: Any, product: Any, row: Any, column: Any, values: Mapping[str, int], name: str
    ) -> tuple[Any, Any]:
        """Tile the nest of what follows the product, and compute it there; it, and the loop over its steps."""
        mr, nr, ku = (values[f"{name}_{knob}"] for knob in ("mr", "nr", "ku"))
        rows, row = schedule.split(row, [None, mr])
        columns, column = schedule.split(column, [None, nr])
        schedule.reorder(columns, rows, row, column)
        schedule.unroll(row)
        schedule.unroll(self._vectorize(schedule, column))
        schedule.compute_at(product, rows, preserve_unit_loops=True)
        own = schedule.get_loops(product)[-len(schedule.get(product).iter_vars) :]
        tile = [loop for loop in own[:-1] if extent_of(schedule, loop) > 1]
        steps, step = schedule.split(own[-1], [None, ku])
        vectors, lane = schedule.split(own[-2], [None, self.lanes])
        row = tile[:1] if mr > 1 else []
        schedule.reorder(steps, step, *row, vectors, lane)
        schedule.vectorize(lane)
        for loop in (step, *row, vectors):
            schedule.unroll(loop)
        return product, steps

    def _softmax(self, schedule: Any, blocks: Mapping[str, Any], outer: Any) -> None:
        """Maxima and exponentials row by row; sums are taken in lanes as exponentials are written."""
        exponentials, maxima, sums = blocks[EXPONENTIALS], blocks[MAXIMA], blocks[SUMS]
        lanes = self.lanes
        rank = len(schedule.get(exponentials).iter_vars) - 1
        width = lanes * fitting(4, lanes, self.places)
        of_maxima = vector_sums(schedule, maxima, schedule.get_loops(maxima)[-1], rank, lanes, width)
        (of_sums,) = vector_sums(schedule, sums, schedule.get_loops(sums)[-1], rank, lanes, lanes)
        for block in (sums, of_sums, exponentials):
            schedule.compute_at(block, outer, preserve_unit_loops=True)
        row = schedule.get_loops(exponentials)[-2]
        for block in (maxima, *reversed(of_maxima)):
            schedule.compute_at(block, row, preserve_unit_loops=True)
        depth = len(schedule.get_loops(exponentials)) - 1
        self._vectorize(schedule, schedule.get_loops(exponentials)[-1])
        for block in of_maxima:
            finish_reduction(schedule, block, depth, lanes, False, True)
        finish_reduction(schedule, maxima, depth, lanes, False, False)
        sum_as_written(schedule, of_sums, exponentials, depth, lanes)
        finish_reduction(schedule, sums, depth, lanes, False, False)

    def _panels(self, schedule: Any, product: Any, filled: Any, nr: int) -> Any:
        """The right operand, [..., step, column] in some order, as [..., column / nr, step, column % nr].

        `filled` is the stage that writes it, if there is one.
        """
        block = schedule.get(product)
        step, column = block.iter_vars[-1].var, block.iter_vars[-2].var
        loads: list[Any] = []
        tvm_ffi.structural_walk(block.body, (TensorLoad, loads.append))
        right = next(
            load
            for load in loads
            if load.indices[-1].same_as(column) and not load.source.same_as(block.writes[0].source)
        )
        own = next(axis for axis, index in enumerate(right.indices) if index.same_as(step))
        rank = len(right.indices)
        position = [read.source.name for read in block.reads].index(right.source.name)
        copy = schedule.cache_read(product, position, "global") if filled is None else filled

        def layout(*at: Any) -> list[Any]:
            rest = [at[axis] for axis in range(rank - 1) if axis != own]
            return [*rest, at[-1] // nr, at[own], at[-1] % nr]

        index_map = tirx.IndexMap.from_func(layout, ndim=rank, index_dtype=str(column.ty.dtype))
        schedule.transform_layout(copy, ("write", 0), index_map)
        return copy

    def _vectorize(self, schedule: Any, loop: Any, extent: int = VECTOR) -> Any:
        """Vectors along a loop, the widest of which `extent` has a whole number; returns the loop over them."""
        vectors, lane = schedule.split(loop, [None, whole_width(extent, self.lanes)])
        schedule.vectorize(lane)
        return vectors


def _choice(panels: NDArray[np.float64]) -> NDArray[np.float64]:
    """0, 1 and, where panels are copied once, 5, so that the sum with twice another one tells both."""
    return panels + 3.0 * (panels == 2)


def _extents(schedule: Any, name: str) -> list[int]:
    return [int(axis.dom.extent) for axis in schedule.get(schedule.get_sblock(name)).iter_vars]


def _row_axis(schedule: Any, output: str) -> int:
    """Which axis of the result is its rows: the last one that the sums have."""
    block = schedule.get(schedule.get_sblock(output))
    loads: list[Any] = []
    tvm_ffi.structural_walk(block.body, (TensorLoad, loads.append))
    row = next(load.indices[-1] for load in loads if str(load.source.name) == SUMS)
    return next(axis for axis, variable in enumerate(block.iter_vars) if variable.var.same_as(row))
