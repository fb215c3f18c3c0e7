"""What a tiled contraction costs, before anything is lowered: a roofline with register tiles, caches and threads.

All functions work on columns of knob values, arrays of shape [n]. The model follows the analysis of the BLIS
micro-kernel (Low et al., "Analytical Modeling Is Enough for High-Performance BLIS", 2016): a register tile runs at
the rate of its slowest resource, and each cache level adds the traffic that its capacity cannot keep.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..access import Access, dtype_bytes
from ..features import feature_table
from ..hardware import PAGE_BYTES, Hardware
from .channel_windows import WINDOW_SUMS, apart, fetching_s, gathered
from .copies import PAD_AT_CHUNK, PAD_AT_OUTER, PAD_AT_ROOT, PAD_INLINE, UNPACKED
from .plan import Plan
from .prefetch import LINE_BYTES
from .tile_counts import Column, Tiles, tiles
from .traffic import moving_s, operand_bytes, packed_bytes, read_by_elements, traffic_of, waiting_s

__all__ = ["columns_of_features", "latency_s"]

FMA_LATENCY = 4.0
"""Cycles: as many independent sums keep a unit of multiply-adds busy, and one more in practice (Zen 5, AVX2, two units,
512^3: 4 x 16 tiles, 8 sums, take 2440 us; 5 x 16 take 2225, 6 x 16 2170)."""
SCALAR_TAIL = 1.0
"""Vector-instruction times that one element of a ragged vector costs, because its lanes are computed one by one."""
RELOADED_PIXEL = 0.035
"""Extra time of a tile of grouped pixels for each vector of them that the registers do not hold beside its sums (Zen 5,
56 x 56 x 128 in groups of 4: 8 too many take 164 to 171 us instead of 131)."""
LOOP_OVERHEAD = 0.3
"""Vector-instruction times of one trip of the innermost loop."""
WAYS = 8
"""Lines that one such set holds."""
EVICTED_ROW = 0.12
"""Vector-instruction times by which each row that does not fit those sets delays every row of the tile, in each
reduction step (Zen 4, rows 12288 bytes apart: 16 x 16 tiles run at 43 % of peak, 24 x 16 at 28 %; 12 x 32 at 85 %)."""
COPIED_ELEMENT = 2.5
"""Vector-instruction times in which one element is moved to another place."""
STREAMED_PANEL = 0.15
"""Extra time of one-vector tiles whose panels come from beyond the second-level cache; wider ones hide most of it
(64 x 3072 x 768 on Zen 4: 96 GFLOPS one vector wide, 109 two or more)."""

LOAD_BESIDE = 0.3
"""Vector-instruction times that a load takes beside multiply-adds of whole vectors. A Xeon: 24 multiply-adds alone take
12 cycles, with 10 loads 13.3 to 13.9, with 24 loads 14.9. Of sampled candidates of 43 kernels on two threads, the best
of the four that the estimate likes best is 4.5 % slower than the best of all, without this 7 %. Where wide vectors are
computed in halves, loads are free."""

SCATTERED_PANEL = 0.5
"""Extra time of rows of an operand that lie apart, for each doubling of a panel beyond twice the first-level cache (a
Xeon with 48 KB, two threads, 64 rows times 2048 x 256: panels of 128 KB take 1.45 times as long as packed ones, of
256 KB 1.8 times)."""
FAR_APART = 1024
"""Bytes between rows from which that holds."""


@dataclass(frozen=True)
class Cost:
    """Seconds and bytes of each candidate, arrays of shape [n]."""

    compute_s: Column
    memory_s: Column
    latency_s: Column
    tail_waste: Column
    imbalance: Column
    panel_bytes: Column
    block_bytes: Column
    l2_bytes: Column
    memory_bytes: Column
    pack_bytes: Column


def _transposes(plan: Plan, v: Mapping[str, Column], t: Tiles) -> NDArray[np.bool_]:
    """Whether tiles are written across the output's rows by squares that are transposed in registers."""
    if not plan.scattered:
        return np.zeros(len(v["mr"]), dtype=np.bool_)
    shapes, which = np.unique(np.stack([v["mr"], v["nr"]]), axis=1, return_inverse=True)
    squares = np.array([plan.transposed_tile(int(mr), int(nr)) for mr, nr in shapes.T])[which.reshape(-1)]
    padded = plan.vector_extent % v["nr"] != 0
    return (squares > 0) & t.whole_rows & ~t.ragged_lines & (~padded | t.whole_columns & t.ragged_columns)


def _row_instructions(
    rows: Column, vectors: Column, plan: Plan, hardware: Hardware, by_elements: NDArray[np.bool_], split: Column
) -> Column:
    """Vector-instruction times of one reduction step of a tile of `rows` rows: multiply-adds or loads, the slower.

    `split`: share of the vectors loaded that take two loads.
    """
    sums = rows * vectors
    windows = plan.slides_over_channels
    units = 1.0 if windows or hardware.half_vector_rate > 1.5 else 2.0  # windows are loaded as fast as one unit works
    spread = sums if plan.spread is not None else rows
    vector_loads = vectors * (1.0 + split)
    loads = sums * gathered(plan) if windows else plan.spread_cost * spread + vector_loads
    crowding: Column | float = 1.0
    if windows:
        crowding = 1.0 + 0.04 * np.maximum(sums - WINDOW_SUMS, 0.0)
    else:
        crowding += by_elements * (0.03 * np.maximum(rows - 12.0, 0.0) + 0.07 * np.maximum(rows - 20.0, 0.0))
    beside = 0.0 if units == 1.0 else LOAD_BESIDE * loads
    loading = loads
    if units > 1.0 and plan.spread is None:  # an element takes a load as a vector does, unless shuffles spread it
        loading = hardware.fmas_per_load * (max(plan.spread_cost, 1.0) * rows + vector_loads)
    instructions: Column = crowding * np.maximum(
        np.maximum(sums + plan.row_corrections * rows, FMA_LATENCY * units + 1.0) + beside, loading
    )
    return instructions + EVICTED_ROW * rows * np.maximum(rows - _rows_in_l1(plan), 0.0)


def _split_loads(plan: Plan, v: Mapping[str, Column], t: Tiles) -> Column:
    """Share of the vectors loaded that lie across two lines of the cache: each takes two loads."""
    operand = _vectorised(plan)
    if operand is None:
        return np.zeros_like(v["mr"])
    item_bytes = dtype_bytes(operand.dtype)
    steps = (item_bytes * (operand.stride(axis.position) or 0) for axis in plan.reduction)
    apart = np.where(v["pack"] == UNPACKED, math.gcd(*map(int, steps)), v["nr"] * item_bytes).astype(np.int64)
    aligned = np.gcd(apart, LINE_BYTES)
    return np.maximum(t.width * item_bytes - aligned, 0.0) / LINE_BYTES


def _vectorised(plan: Plan) -> Access | None:
    """The operand whose vectors are read, where it is one that may be packed."""
    return plan.contraction.left.access if plan.vectors_over_image else plan.panel


def _rows_in_l1(plan: Plan) -> float:
    """Rows of the operand read element by element whose lines stay in the first-level cache together."""
    if plan.slides_over_channels:
        return math.inf
    by_elements = read_by_elements(plan)
    row_bytes = (by_elements.stride(plan.unrolled[-1].position) or 0) * dtype_bytes(by_elements.dtype)
    return float(WAYS * PAGE_BYTES // math.gcd(PAGE_BYTES, row_bytes)) if row_bytes else math.inf


def cost(plan: Plan, hardware: Hardware, lanes: int, v: Mapping[str, Column], t: Tiles) -> Cost:
    """The estimate and its parts."""
    work = _work(plan, hardware, lanes, v, t)
    sharing = _sharing(plan, hardware, v, t)
    speedup = sharing.speedup
    compute_s = work.one_thread_s * (sharing.serial_share + (1.0 - sharing.serial_share) / speedup)
    traffic = traffic_of(plan, hardware, v, t)
    memory_s = moving_s(plan, hardware, v, traffic, speedup)
    pack_bytes = packed_bytes(plan, v, t, traffic)
    cache = hardware.cache_bandwidth_bytes_per_s
    extra_s = 2.0 * pack_bytes / (0.5 * cache) / speedup
    padding_s, region_s = _padding_s(plan, hardware, v, t, sharing, compute_s)
    extra_s = extra_s + padding_s + region_s
    extra_s = extra_s + COPIED_ELEMENT * 2.0 * lanes / hardware.peak_flops_per_s * plan.copied_elements / speedup
    if plan.epilogue and not plan.epilogue_fusable:
        extra_s = extra_s + 2.0 * plan.contraction.block.write.bytes / cache
    unpacked = _unpacked_share(plan, v["mr"] * v["m2"], traffic.panel_bytes / hardware.l1_bytes)
    extra_s = extra_s + np.where(v["pack"] == UNPACKED, unpacked * compute_s, 0.0)
    extra_s = extra_s + np.where(sharing.used > 1, hardware.parallel_overhead_s, 0.0)
    if plan.slides_over_channels:
        tile_count = t.row_tiles * t.column_tiles * t.lines * plan.outer_extent
        extra_s = extra_s + fetching_s(plan, hardware, v) * apart(v, t) * tile_count / speedup
    busy_s = np.maximum(compute_s, memory_s)
    extra_s = extra_s + waiting_s(plan, hardware, v, traffic.row_blocks, sharing.used, busy_s)
    columns, rows = work.whole_columns * v["nr"] / plan.vector_extent, work.whole_rows * v["mr"] / plan.unrolled_extent
    return Cost(
        compute_s=compute_s,
        memory_s=memory_s,
        latency_s=busy_s + 0.1 * np.minimum(compute_s, memory_s) + extra_s,
        tail_waste=1.0 - _share(columns) * rows,
        imbalance=sharing.imbalance,
        panel_bytes=traffic.panel_bytes,
        block_bytes=traffic.block_bytes,
        l2_bytes=traffic.from_l2,
        memory_bytes=traffic.from_l3,
        pack_bytes=pack_bytes,
    )


class _Work(NamedTuple):
    """Seconds in which one thread computes all tiles, arrays of shape [n], and how many rows and columns of tiles are
    whole."""

    one_thread_s: Column
    whole_rows: Column
    whole_columns: Column


def _work(plan: Plan, hardware: Hardware, lanes: int, v: Mapping[str, Column], t: Tiles) -> _Work:
    """Whole tiles, ragged ones below them and beside them, without the products with zeros that are left out."""
    reduction = float(plan.reduction_extent)
    rows = v["mr"] * v["m2"]
    per_instruction_s = 2.0 * lanes / hardware.peak_flops_per_s * _narrowness(plan, hardware, t, lanes)
    trips = reduction / v["ku"]

    by_elements = plan.scattered & ~_transposes(plan, v, t)
    split = _split_loads(plan, v, t)
    per_element = np.where(by_elements, 1.2, 0.35 if plan.scattered else 2.0 / lanes)

    def tile_s(rows: Column, vectors: Column, scalars: Column) -> Column:
        steps = reduction * (
            _row_instructions(rows, vectors, plan, hardware, by_elements, split) + SCALAR_TAIL * rows * scalars
        )
        written = rows * (vectors * t.width + scalars)
        store = written * per_element + 4.0
        return per_instruction_s * (steps + LOOP_OVERHEAD * trips + store)

    zero = np.zeros_like(rows)
    full = tile_s(rows, t.vectors, zero)
    crowded = t.registers > np.where(by_elements, 24, 27) * hardware.vector_registers / 32
    full *= np.where(crowded, np.where(by_elements, 1.3, 1.02), 1.0)
    if plan.spread is not None:
        wanted = t.sums + _pixels(plan, v) * t.vectors
        full *= 1.0 + RELOADED_PIXEL * np.maximum(wanted - hardware.vector_registers, 0.0)
    if plan.slides_over_channels:
        full *= apart(v, t)
    tail_rows = (plan.unrolled_extent % v["mr"]) * v["m2"]
    tail = np.where(t.whole_rows, 0.0, tile_s(np.maximum(tail_rows, 1.0), t.vectors, zero))
    column_rest = plan.vector_extent % v["nr"]
    narrow = tile_s(rows, column_rest // t.width, column_rest % t.width)
    whole_columns = np.where(t.whole_columns, t.column_tiles, np.floor(plan.vector_extent / v["nr"]))
    whole_rows = np.where(t.whole_rows, t.row_tiles, np.floor(plan.unrolled_extent / v["mr"]))
    per_column = whole_rows * full + tail
    share = np.where(whole_rows * v["mr"] > 0, plan.unrolled_extent / np.maximum(whole_rows * v["mr"], 1), 1.0)
    work_s = whole_columns * per_column + np.where(t.whole_columns, 0.0, whole_rows * narrow * share)
    work_s *= plan.second_extent / v["m2"] * plan.outer_extent
    skipped = np.zeros_like(rows)
    for mr in np.unique(v["mr"]) if plan.windows else ():
        skipped[v["mr"] == mr] = plan.skipped_share(int(mr))
    work_s *= np.where((v["m2"] == 1) & (v["pad"] != PAD_INLINE), 1.0 - skipped, 1.0)
    if plan.panel is not None and plan.contraction.right.access.bytes > hardware.l2_bytes:
        work_s *= 1.0 + STREAMED_PANEL / t.vectors**1.7
    return _Work(work_s, whole_rows, whole_columns)


class _Sharing(NamedTuple):
    """How threads share the work, arrays of shape [n]: how many are used, the work of the busiest one over the mean,
    the share that one does alone, and how many times as fast all are together as one."""

    used: Column
    imbalance: Column
    serial_share: Column
    speedup: Column


def _sharing(plan: Plan, hardware: Hardware, v: Mapping[str, Column], t: Tiles) -> _Sharing:
    """Threads have whole iterations each. The last tile of a ragged parallel loop is computed behind it, by one."""
    threads = hardware.threads
    used = np.where(v["depth"] > 0, np.minimum(t.chunks, threads), 1.0)
    imbalance = np.where(t.chunks > 1, np.ceil(t.chunks / threads) * used / t.chunks, 1.0)
    first_ragged = (
        (threads > 1)
        & ((v["order"] == 0) & t.ragged_columns | (v["order"] == 1) & t.ragged_rows & _rows_first(plan))
        & (v["depth"] == 1)
    )
    serial_share = np.where(first_ragged, 1.0 / np.maximum(t.chunks, 1.0), 0.0)
    speedup = np.maximum(used / imbalance, 1.0) if threads > 1 else np.ones_like(used)
    scale = np.minimum(1.0, hardware.peak_flops_per_s_all / (hardware.peak_flops_per_s * threads))
    speedup = np.where(used > 1, np.maximum(speedup * scale, 1.0), 1.0)
    return _Sharing(used, imbalance, serial_share, speedup)


def _padding_s(
    plan: Plan, hardware: Hardware, v: Mapping[str, Column], t: Tiles, sharing: _Sharing, compute_s: Column
) -> tuple[Column | float, Column | float]:
    """Seconds in which the padded operand is copied, or its pixels are chosen where they are read; and those that a
    parallel region of its own costs."""
    if not plan.staged:
        return 0.0, 0.0
    columns_first = v["order"] == 0
    # A tile of channels copies its own channels only.
    whole = columns_first & (not plan.left_vectorised)
    again = np.where((v["pad"] != PAD_AT_ROOT) & whole, t.column_tiles, 1.0)
    lines = 1.0 + (_window_extent(plan) - 1.0) / v["m2"]
    again = again * np.where(v["pad"] == PAD_AT_CHUNK, lines, 1.0)
    # Where a thread's iterations are single lines of the image, each copies all the lines of its window: most of
    # them have just been read, and 3 are as fast as a copy of the whole image, which others read; 41 are not.
    by_lines = (v["pad"] == PAD_AT_OUTER) & (v["depth"] > len(plan.outer) + (plan.groups > 1) + columns_first)
    again = again * np.where(by_lines, 1.0 + 0.25 * (lines - 1.0), 1.0)
    again = again * np.where(v["pad"] == PAD_AT_ROOT, 1.5, 1.0)
    inline = 0.3 if plan.spread is None else 0.05  # pixels at the border are chosen once for all products
    left_bytes, _ = operand_bytes(plan)
    copied_s = 2.0 * left_bytes * again / hardware.cache_bandwidth_bytes_per_s / sharing.speedup
    padding_s = np.where(v["pad"] == PAD_INLINE, inline * compute_s, copied_s)
    apart_from_others = (v["pad"] == PAD_AT_ROOT) & (sharing.used > 1)
    return padding_s, np.where(apart_from_others, hardware.parallel_overhead_s, 0.0)


def _share(ratio: Column) -> Column:
    """What two extents have in common, relative to the larger one."""
    return np.minimum(ratio, 1.0 / np.maximum(ratio, 1e-12))


def _rows_first(plan: Plan) -> bool:
    """Whether the chunk loop is outermost when rows come first."""
    return not plan.row_loops


def _unpacked_share(plan: Plan, rows: Column, l1_share: Column) -> Column | float:
    """Extra time, relative to computing, of reading the vectorised operand where it lies: by elements, or by pages.

    Elements of a small operand stay in the first-level cache, and each vector of them serves all rows of a tile.
    `l1_share` is the size of a panel relative to that cache.
    """
    operand = _vectorised(plan)
    if operand is None:
        return 0.0
    small = plan.reduction_extent * plan.vector.extent <= 4096
    if operand.stride(plan.vector.position) != 1:
        return 5.0 / rows if small else 7.0
    if small:
        return 0.0
    step = max((operand.stride(axis.position) or 0 for axis in plan.reduction), default=0) * dtype_bytes(operand.dtype)
    scattered = SCATTERED_PANEL * np.maximum(np.log2(0.5 * l1_share), 0.0) if step >= FAR_APART else 0.0
    return scattered + (0.12 if step % PAGE_BYTES == 0 else 0.02)


def _window_extent(plan: Plan) -> float:
    """Lines of the left operand that one line of the output reads."""
    if plan.second is None:
        return 1.0
    extents = {axis.position: axis.extent for axis in plan.reduction}
    for index in plan.contraction.left.access.indices:
        if index is not None and plan.second.position in index.coefficients:
            return float(max((extents[a] for a in index.coefficients if a in extents), default=1))
    return 1.0


def _pixels(plan: Plan, v: Mapping[str, Column]) -> Column:
    """Pixels that the products of a tile read for one row of the window, those that several read counted once."""
    taps = plan.reduction[-1]
    index = next(i for i in plan.contraction.left.access.indices if i is not None and taps.position in i.coefficients)
    step = index.coefficients.get(plan.unrolled[-1].position, 0)
    reach = (v["mr"] - 1.0) * step + (taps.extent - 1.0) * index.coefficients[taps.position] + 1.0
    pixels: Column = v["m2"] * np.minimum(reach, v["mr"] * taps.extent)
    return pixels


def _narrowness(plan: Plan, hardware: Hardware, t: Tiles, lanes: int) -> Column:
    """Time of a narrow vector instruction relative to a full one: half vectors may pair up, smaller ones do not.

    Windows gain less: every multiply-add loads its data. So do tiles of one half vector, where each has a load of its
    own (196 x 72 x 432 on Zen 4: 136 us with tiles 8 wide, 119 with 16, 106 with 24).
    """
    windows = plan.slides_over_channels
    gained = 1.0 - (np.full_like(t.width, 0.7) if windows else np.where(t.vectors == 1, 0.63, 0.52))
    pairs = hardware.half_vector_rate - 1.0
    half = 1.0 - pairs * gained
    return np.where(t.width >= lanes, 1.0, np.where(t.width * 2 == lanes, half, half - 0.05 * pairs))


def latency_s(plan: Plan, hardware: Hardware, lanes: int, v: Mapping[str, Column]) -> Column:
    """The analytic estimate in seconds."""
    return cost(plan, hardware, lanes, v, tiles(plan, lanes, v)).latency_s


def columns_of_features(
    plan: Plan, hardware: Hardware, lanes: int, v: Mapping[str, Column], family: int
) -> NDArray[np.float32]:
    """The features of features.py, shape [n, len(FEATURES)]."""
    t = tiles(plan, lanes, v)
    c = cost(plan, hardware, lanes, v, t)
    count = len(v["mr"])
    flops = plan.contraction.flops

    def log(values: Column | float) -> Column:
        return np.log2(np.maximum(np.asarray(values, dtype=np.float64), 1e-12))

    known: dict[str, Column | float] = {
        "log_flops": log(flops),
        "log_bytes": log(plan.kernel.bytes_moved),
        "family": float(family),
        "log_vector_elements": log(t.width),
        "vector_efficiency": plan.vector_extent / (np.ceil(plan.vector_extent / t.width) * lanes),
        "accumulators": t.sums,
        "register_pressure": t.registers / hardware.vector_registers,
        "log_tile_m": log(v["mr"] * v["m2"]),
        "log_tile_n": log(v["nr"]),
        "log_tile_k": log(v["ku"]),
        "log_block_m": log(v["mr"] * v["chunk"]),
        "log_block_n": log(np.where(v["order"] == 0, v["nr"], plan.vector_extent)),
        "log_block_k": log(plan.reduction_extent),
        "log_unrolled_body": log(t.sums * v["ku"]),
        "tail_waste": c.tail_waste,
        "log_parallel_chunks": log(t.chunks),
        "imbalance": c.imbalance,
        "log_chunk_flops": log(flops / t.chunks),
        "l1_footprint": c.panel_bytes / hardware.l1_bytes,
        "l2_footprint": (c.panel_bytes + c.block_bytes) / hardware.l2_bytes,
        "l3_footprint": plan.kernel.bytes_moved / hardware.l3_bytes,
        "log_l2_traffic": log(c.l2_bytes),
        "log_memory_traffic": log(c.memory_bytes),
        "log_pack_bytes": log(c.pack_bytes + 1.0),
        "log_contiguous_run": log(v["nr"] * plan.element_bytes),
        "log_reduction": log(plan.reduction_extent),
        "compute_share": c.compute_s / c.latency_s,
        "memory_share": c.memory_s / c.latency_s,
        "log_latency": log(c.latency_s),
        "variant": v["pad"] * 8 + v["pack"] * 2 + v["order"],
    }
    return feature_table(count, known)
