"""Attention in one kernel: some rows of scores at a time through all stages, which its core's cache holds.

    for each head and block of rows (parallel):
        query @ key, scale, mask          -> scores[row, place]
        maxima of the rows, exp           -> exponentials[row, place], and their sums
        exponentials @ value, over sums   -> rows of the result

It is FlashAttention's fusion (Dao et al., 2022) without its running maxima: a block has whole rows. Both products run
in register tiles; key and value may be copied into panels, once or for each block, where their rows lie so far apart
that they share the cache's sets. Keys that are stored place by place always are, and transposed on the way, in
registers. Where rows, places or columns do not come out even, panels have zeros, or the last place again, for the keys
that are missing, whose scores are minus infinity, and zeros for the columns, and rows that are missing are computed
like the last one; neither rows nor columns are written.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tvm import tirx
from tvm.ir.expr import TensorLoad
from tvm.s_tir import ScheduleError

from .applicable import applies
from .base import Knob, Sketch
from .contraction.plan import whole_width
from .expressions import nodes_of
from .features import feature_table
from .hardware import Hardware
from .marks import LANE_TREE, TRANSPOSE_TILE
from .memory_bound.kernel import block_names
from .memory_bound.row_reductions import finish_reduction, fitting, sum_as_written, vector_sums
from .nest import block_extents, extent_of, partition
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
    "VECTOR",
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
"""Stages of a ragged attention: keys of all places that are computed, values (those that are weighted) with zeros for
missing columns, and the result with the rows and columns that there are."""

FAMILY_INDEX = 32

VECTOR = 16
"""Places, and columns of the values, are computed in multiples of this: whole vectors on every machine."""

ROWS = tuple(sorted({*range(4, 257, 4), *range(6, 257, 6)}))
"""Rows of a block: divisors of all rows that are among these."""

EXP_INSTRUCTIONS = 16.0
"""Vector instructions of one exponential, with its score's way to it and its sum."""

BLOCK, ONCE, HEAD = 1, 2, 3
"""Where panels are copied: for each block; before all, by all threads; for each head, whose blocks one thread computes
one after the other."""

PANEL_INSTRUCTIONS = 1.0
"""Vector-instruction times in which one element is copied into a panel (Zen 4: a tenth of all with 64 rows a block)."""

TURN_INSTRUCTIONS = 0.5
"""More of them for an element that is transposed on the way: loads, shuffles and stores of a square of vectors."""

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

FEW_REGISTERS, TILE_ROWS, OTHER_TILES = 16, 6, 1.1
"""With so few vector registers, products want tiles of so many rows (6 x 16, say). With others, of 4 or 8 rows, they
take so many times as long: 384 rows run at 91 % of the peak, 256 and 512 at 80 (Zen 5 as a CPU with AVX2); with 264 and
528 rows computed, at 84 and 86 %."""


def filled_up(rows: int, places: int, columns: int, registers: int) -> tuple[int, int, int] | None:
    """Rows, places and columns of the attention that blocks of rows and vectors compute; None where it does not pay.

    The same numbers where they come out even. Else places fill two vectors, or one where that is much less, and rows
    the blocks that cost least; with few vector registers, rows fill their tiles. Products alone fill vectors, too: what
    more they compute is not counted.
    """
    more_columns = -(-columns // VECTOR) * VECTOR
    if more_columns > MOST_COLUMNS * columns:
        return None
    whole, pairs = (-(-places // width) * width for width in (VECTOR, 2 * VECTOR))
    more_places = whole if whole == places or pairs > MOST_FILLING * whole else pairs
    most = MOST_FILLING * rows * whole / more_places

    def in_tiles(count: int) -> float:
        return count * (OTHER_TILES if registers <= FEW_REGISTERS and count % TILE_ROWS else 1.0)

    choices = [count for count in range(rows, int(most) + 1) if _block(count) and in_tiles(count) <= most]
    if rows in choices and in_tiles(rows) == rows:
        choices = [rows]
    if not choices:
        return None
    best = min(choices, key=lambda count: in_tiles(count) * (1 + ROWS_ARE_WORTH / _block(count)))
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
    return [sketch] if applies(sketch) else []


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
        *batch, self.all_rows, self.places, self.depth = block_extents(schedule, PRODUCTS)
        self.heads = prod(batch)
        *_, self.columns, self.weights = block_extents(schedule, VALUES)
        self.all_columns = block_extents(schedule, result)[-1]
        self.row_axis = _row_axis(schedule, self.output)
        self.turned = self._right_operand(schedule, PRODUCTS, KEYS).turned
        self.bytes_moved = 4.0 * sum(prod(map(int, getattr(p, "shape", ()))) for p in mod["main"].params)
        self.lanes = hardware.lanes(4)
        rows = tuple(count for count in ROWS if self.all_rows % count == 0)
        tiles = tuple(count for count in range(1, 29) if any(block % count == 0 for block in rows))
        panels = (BLOCK, ONCE, HEAD) if self.heads > 1 else (BLOCK, ONCE)
        self.knobs = (
            Knob("rows", rows),
            Knob("score_mr", tiles),
            Knob("score_nr", self._widths(self.places)),
            Knob("score_ku", _divisors(self.depth)),
            Knob("value_mr", tiles),
            Knob("value_nr", self._widths(self.columns)),
            Knob("value_ku", _divisors(self.weights)),
            Knob("key_panels", panels if KEYS in self.stages or self.turned else (0, *panels)),
            Knob("value_panels", panels if WEIGHTED in self.stages else (0, *panels)),
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
        blocks, parts = self.heads * self.all_rows / rows, self._parallel_chunks(values)
        share = np.ceil(parts / np.minimum(machine.threads, parts)) / parts  # of all, that the busiest thread computes
        scores = float(self.heads * self.all_rows * self.places)
        serial_s = np.zeros(len(values))
        far = np.where((key_panels == 0) & (4 * self.places >= FAR_KEYS_BYTES), FAR_KEYS, 1.0)
        products = ((s_mr, s_nr, self.depth, self.places * far), (v_mr, v_nr, self.weights, self.columns))
        for mr, nr, steps, width in products:
            flops = 2.0 * self.heads * self.all_rows * width * steps
            efficiency = tile_efficiency(mr, nr / self.lanes, steps, machine.fmas_per_load)
            serial_s = serial_s + flops / machine.peak_flops_per_s / efficiency
        serial_s = serial_s + scores * EXP_INSTRUCTIONS * 2.0 / machine.peak_flops_per_s
        of_keys, of_values = (
            np.choose(panels.astype(np.intp), (0.0, blocks, self.heads, self.heads))
            for panels in (key_panels, value_panels)
        )
        of_keys = of_keys * (PANEL_INSTRUCTIONS + TURN_INSTRUCTIONS * self.turned)
        copied = self.places * self.depth * of_keys + self.weights * self.columns * of_values * PANEL_INSTRUCTIONS
        serial_s = serial_s + copied * 2.0 * self.lanes / machine.peak_flops_per_s
        scratch = 8.0 * rows * self.places
        again = np.where(scratch <= machine.l2_bytes, 1.0, 1.2)
        # Keys and values come from the second-level cache in each block: 128 rows win over 32 by 14 %.
        traffic = 8.0 * scores * again + 2 * 4.0 * blocks * self.places * (self.depth + self.columns) + self.bytes_moved
        regions = 1.0 + (key_panels == ONCE) + (value_panels == ONCE)
        overhead_s = machine.parallel_overhead_s * regions if machine.threads > 1 else 0.0
        return np.asarray((serial_s + traffic / machine.cache_bandwidth_bytes_per_s / 2) * share + overhead_s)

    def _parallel_chunks(self, values: NDArray[np.int64]) -> NDArray[np.float64]:
        """Blocks, or heads, where one thread computes all blocks of a head."""
        by_heads = (values[:, -2:] == HEAD).any(1)
        return np.where(by_heads, self.heads, self.heads * self.all_rows / values[:, 0])

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
            "log_parallel_chunks": np.log2(self._parallel_chunks(values)),
            "l2_footprint": 8.0 * rows * self.places / self.hardware.l2_bytes,
            "log_reduction": np.log2(float(self.places)),
            "log_latency": np.log2(self.latency_s(values)),
            "variant": key_panels + 4 * value_panels,
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
        by_heads = HEAD in (values["key_panels"], values["value_panels"])
        head = schedule.fuse(*batch) if by_heads else None
        outer = chunk if by_heads else schedule.fuse(*batch, chunk)
        if self.hardware.threads > 1:
            schedule.parallel(head if by_heads else outer)
        finish = [self._product(schedule, blocks[VALUES], row, loops[-1], values, "value")]
        panels = []
        if values["value_panels"]:
            copy = self._panels(schedule, VALUES, WEIGHTED, values["value_nr"])
            panels.append((*copy, self.all_columns, values["value_panels"]))
        self._softmax(schedule, blocks, outer)
        schedule.compute_at(blocks[SCORES], outer, preserve_unit_loops=True)
        *_, row, place = schedule.get_loops(blocks[SCORES])
        finish.append(self._product(schedule, blocks[PRODUCTS], row, place, values, "score"))
        if values["key_panels"]:
            copy = self._panels(schedule, PRODUCTS, KEYS, values["score_nr"])
            panels.append((*copy, self.places, values["key_panels"]))
        for copy, operand, columns, where in panels:
            if where != ONCE:
                schedule.compute_at(copy, head if where == HEAD else outer, preserve_unit_loops=True)
            shared = self._copy(schedule, copy, operand, columns)
            if where == ONCE and shared and self.hardware.threads > 1:
                schedule.parallel(schedule.fuse(*shared))
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
        """The maxima of all rows of a block, exponentials, which are added up in lanes as they are written, and sums.

        A row's steps wait for each other, and the scheduler of a core holds those of one or two rows. One thread of Zen
        5, us, with all steps of a row together, and step by step: 12 heads of 64 places 57.1 and 55.3, of 128 219 and
        214, of 512 level.
        """
        exponentials, maxima, sums = blocks[EXPONENTIALS], blocks[MAXIMA], blocks[SUMS]
        lanes = self.lanes
        rank = len(schedule.get(exponentials).iter_vars) - 1
        width = lanes * fitting(4, lanes, self.places)
        of_maxima = vector_sums(schedule, maxima, schedule.get_loops(maxima)[-1], rank, lanes, width)
        (of_sums,) = vector_sums(schedule, sums, schedule.get_loops(sums)[-1], rank, lanes, lanes)
        for block in (sums, of_sums, exponentials, maxima):
            schedule.compute_at(block, outer, preserve_unit_loops=True)
        self._vectorize(schedule, schedule.get_loops(exponentials)[-1])
        sum_as_written(schedule, of_sums, exponentials, len(schedule.get_loops(exponentials)) - 2, lanes)
        for block, parts in ((maxima, of_maxima), (sums, [])):
            row, lane = self._row_by_row(schedule, block)
            for part in reversed(parts):
                schedule.compute_at(part, row, preserve_unit_loops=True)
                finish_reduction(schedule, part, len(schedule.get_loops(block)) - 1, lanes, False, True)
            schedule.annotate(lane, LANE_TREE, lanes)
            schedule.decompose_reduction(block, lane)

    def _row_by_row(self, schedule: Any, block: Any) -> tuple[Any, Any]:
        """Put the loop over what a block reduces into the one over rows; both."""
        lane, *spatial = schedule.get_loops(block)[-len(schedule.get(block).iter_vars) :]
        schedule.reorder(*spatial, lane)
        return spatial[-1], lane

    def _panels(self, schedule: Any, product: str, filled: str, nr: int) -> tuple[Any, _RightOperand]:
        """The right operand as [..., column / nr, step, column % nr]; what copies it, and how it is stored.

        Where there is a stage of the name `filled`, that is what copies it.
        """
        operand = self._right_operand(schedule, product, filled)
        if filled in self.stages:
            copy = schedule.get_sblock(filled)
        else:
            copy = schedule.cache_read(schedule.get_sblock(product), operand.read, "global")

        def layout(*at: Any) -> list[Any]:
            rest = [index for axis, index in enumerate(at) if axis not in (operand.steps, operand.columns)]
            column = at[operand.columns]
            return [*rest, column // nr, at[operand.steps], column % nr]

        index_map = tirx.IndexMap.from_func(layout, ndim=operand.rank, index_dtype=operand.index_dtype)
        schedule.transform_layout(copy, ("write", 0), index_map)
        return copy, operand

    def _right_operand(self, schedule: Any, product: str, filled: str) -> _RightOperand:
        """Of a product, whose operand is perhaps what a stage of the name `filled` writes."""
        operand = _operand_read(schedule, product)
        return replace(operand, turned=_turns(schedule, filled)) if filled in self.stages else operand

    def _copy(self, schedule: Any, copy: Any, operand: _RightOperand, count: int) -> list[Any]:
        """Vectors of what copies an operand, of which there are so many columns; its loops around them."""
        loops = list(schedule.get_loops(copy)[-operand.rank :])
        if not operand.turned:
            vectors = self._vectorize(schedule, loops[-1], count)
            if schedule.get(copy).name_hint in (KEYS, WEIGHTED):
                partition(schedule, vectors)
            return loops[:-2]
        steps, step = schedule.split(loops[operand.steps], [None, self.lanes])
        columns, column = schedule.split(loops[operand.columns], [None, self.lanes])
        others = [loop for axis, loop in enumerate(loops) if axis not in (operand.steps, operand.columns)]
        schedule.reorder(*others, columns, steps, step, column)
        schedule.annotate(step, TRANSPOSE_TILE, 0)
        return [*others, columns]

    def _vectorize(self, schedule: Any, loop: Any, extent: int = VECTOR) -> Any:
        """Vectors along a loop, the widest of which `extent` has a whole number; returns the loop over them."""
        vectors, lane = schedule.split(loop, [None, whole_width(extent, self.lanes)])
        schedule.vectorize(lane)
        return vectors


def _divisors(steps: int) -> tuple[int, ...]:
    """How many steps of a sum may be unrolled."""
    return tuple(count for count in (1, 2, 4) if steps % count == 0)


@dataclass(frozen=True)
class _RightOperand:
    """How a product's right operand is stored: its place among what is read, its axes, and whether a column's steps lie
    side by side there, or in what it is copied from, and not a step's columns."""

    read: int
    rank: int
    steps: int
    columns: int
    turned: bool
    index_dtype: str


def _operand_read(schedule: Any, product: str) -> _RightOperand:
    block, loads = _block_and_loads(schedule, product)
    step, column = block.iter_vars[-1].var, block.iter_vars[-2].var

    def axis_of(load: Any, variable: Any) -> int | None:
        return next((axis for axis, index in enumerate(load.indices) if index.same_as(variable)), None)

    for load in loads:
        steps, columns = axis_of(load, step), axis_of(load, column)
        if steps is not None and columns is not None:
            read = next(place for place, region in enumerate(block.reads) if region.source.same_as(load.source))
            rank = len(load.indices)
            return _RightOperand(read, rank, steps, columns, columns != rank - 1, str(column.ty.dtype))
    raise ScheduleError(f"no operand of {product} is read along its columns")


def _turns(schedule: Any, copy: str) -> bool:
    """Whether what a stage copies lies side by side along its axis before the last."""
    block, (load,) = _block_and_loads(schedule, copy)
    return bool(load.indices[-1].same_as(block.iter_vars[-2].var))


def _block_and_loads(schedule: Any, name: str) -> tuple[Any, list[Any]]:
    block = schedule.get(schedule.get_sblock(name))
    return block, nodes_of(block.body, TensorLoad)


def _row_axis(schedule: Any, output: str) -> int:
    """Which axis of the result is its rows: the last one that the sums have."""
    block, loads = _block_and_loads(schedule, output)
    row = next(load.indices[-1] for load in loads if str(load.source.name) == SUMS)
    return next(axis for axis, variable in enumerate(block.iter_vars) if variable.var.same_as(row))
