"""The tiled contraction as a sketch: its knobs, adapted to the extents, and which of their values are legal."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..access import dtype_bytes
from ..base import Knob, Sketch
from ..hardware import FAR_WEIGHTS, Hardware
from ..register_tiles import LARGEST_BODY
from ..schedule import schedule_of
from .copies import AHEAD, AT_CHUNK, AT_ROOT, PAD_AT_CHUNK, PAD_AT_OUTER, PAD_AT_ROOT, PAD_INLINE, UNPACKED
from .estimate import columns_of_features, latency_s
from .plan import Plan
from .prefetch_choice import asks_for_weights
from .tile_counts import tiles
from .tiled import schedule_tiles

__all__ = ["TiledContraction", "spans_groups"]

FAMILIES = {"columns": 0, "rows": 1, "pixels": 1, "channels": 2, "groups": 3}
"""Forms and their `family` feature."""

LARGEST_SCALAR_BODY = 64
"""As `LARGEST_BODY`, where vectors are computed element by element, counting the copies for other ragged tails."""

ROWS_PER_COLUMN = 2
"""An image so many times as large as the weights is better read by one thread each (ResNet-50 on a Xeon, 784 x 128 x
512: 271 us alone, 380 to 417 in the model when threads share columns)."""

SMALL_WEIGHT_BYTES = 2**14
"""Larger weights are always packed ahead of time. Read where they lie, a few vectors of each row, they may be as fast
in a loop over one kernel, which keeps them in L2, but not after other kernels' weights (two threads of Zen 4, 8 MB in
between: 64 x 256 times 256 x 1024 184 us instead of 157, 128 x 768 x 768 692 to 734 instead of 660)."""


class TiledContraction(Sketch):
    """Register tiles of one form over one kernel.

    Parameters
    ----------
    mod : tvm.ir.IRModule
        The kernel, as "main".
    plan : Plan
        The form.
    hardware : Hardware
        Bounds the register tile; read by the estimates.
    """

    def __init__(self, mod: Any, plan: Plan, hardware: Hardware) -> None:
        self.name = f"tiled_{plan.name}"
        self.plan = plan
        self._mod = mod
        self._hardware = hardware
        self._lanes = _lanes(plan, hardware)
        self.knobs = self._make_knobs()

    @property
    def skipped_share(self) -> float:
        """See `Sketch.skipped_share`."""
        return self.plan.skipped_share(1) if self.plan.staged else 0.0

    def legal(self, values: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Registers suffice, the body is small, tiles are not larger than the kernel, ragged tails can be split off."""
        plan, v = self.plan, self._columns(values)
        t = tiles(plan, self._lanes, v)
        ok = t.registers <= self._hardware.vector_registers
        ok &= (t.sums * v["ku"] <= LARGEST_BODY) | (v["ku"] == 1)
        ok &= ~t.ragged_parallel & ~t.redundant_depth
        ok &= v["chunk"] <= t.row_tiles
        ok &= t.row_tiles % v["chunk"] == 0
        ok &= (t.width * 4 >= self._lanes) | (plan.vector_extent < self._lanes)
        copies = 2.0 ** (t.ragged_rows.astype(float) + t.ragged_lines)
        ok &= ~t.scalar_tail | (v["mr"] * v["m2"] * v["nr"] * v["ku"] * copies <= LARGEST_SCALAR_BODY)
        ok &= ~t.ragged_rows | (v["chunk"] == 1) | (v["chunk"] == t.row_tiles)
        if plan.spread is not None:  # all of a tile is written out, without conditions on single products
            ok &= t.whole_rows & ~t.ragged_lines
        if plan.groups > 1:  # beyond a ragged tile of a group's columns are those of the next one: nothing guards them
            ok &= ~(t.ragged_columns if plan.vector in plan.contraction.columns else t.ragged_rows)
        if self._hardware.threads > 1:
            ok &= (v["depth"] == 0) | (t.chunks > 1)
            ok &= self._shares_operands(v, t.chunks, t.column_tiles)
        result: NDArray[np.bool_] = ok
        return result

    def features(self, values: NDArray[np.int64]) -> NDArray[np.float32]:
        """See `features.FEATURES`."""
        family = FAMILIES[self.plan.name]
        return columns_of_features(self.plan, self._hardware, self._lanes, self._columns(values), family)

    def latency_s(self, values: NDArray[np.int64]) -> NDArray[np.float64]:
        """The analytic estimate, shape [n]."""
        return latency_s(self.plan, self._hardware, self._lanes, self._columns(values))

    def apply(self, values: Mapping[str, int]) -> Any:
        """A `tvm.s_tir.Schedule`; raises what TVM raises when a step is impossible."""
        sch = schedule_of(self._mod)
        schedule_tiles(sch, self.plan, self._lanes, values, self._hardware)
        return sch

    def _shares_operands(
        self, v: Mapping[str, NDArray[Any]], chunks: NDArray[Any], column_tiles: NDArray[Any]
    ) -> NDArray[np.bool_]:
        """Where threads take rows, or an image that is no larger than the weights allows for columns, shape [n].

        Threads that share columns all read all of the left operand, which the kernel before wrote from every core,
        through a cache as slow as memory. Alone, a kernel finds it in each core's own. `chunks` counts the parallel
        iterations: with a single chunk of rows, they are columns even where rows come first. Where vectors run over the
        image, columns are parts of it, and chunks are weights.
        """
        plan, threads = self.plan, self._hardware.threads
        left, right = plan.contraction.left.access, plan.contraction.right.access
        if plan.vectors_over_image:
            images = plan.outer_extent * plan.second_extent
            parts = np.where(v["order"] == 0, column_tiles, images)
            by_rows = (parts >= np.minimum(threads, np.maximum(column_tiles, images))) | (v["depth"] == 0)
        else:
            row_chunks = chunks / np.where(v["depth"] == self._loops, column_tiles, 1)
            by_rows = (v["order"] == 1) & (row_chunks >= np.minimum(threads, chunks))
            by_rows |= (v["depth"] == 0) | (column_tiles < threads)
        small = not self._hardware.last_cache_is_far or left.bytes <= ROWS_PER_COLUMN * right.bytes
        result: NDArray[np.bool_] = by_rows | small
        return result

    @property
    def _loops(self) -> int:
        """Loops that may be fused: over columns, chunks of rows, and whatever else is outside a tile."""
        plan = self.plan
        return 2 + len(plan.outer) + (plan.groups > 1) + (plan.second is not None)

    def _make_knobs(self) -> tuple[Knob, ...]:
        plan, registers = self.plan, self._hardware.vector_registers
        rows = plan.unrolled_extent
        most_rows = min(registers - 3, rows)
        row_tiles = [rows] if rows <= most_rows else []
        row_tiles += [mr for mr in (*range(1, 15), 16, 18, 20, 24, 28) if mr <= most_rows]
        lines = [m for m in (1, 2, 3, 4, 7) if m <= plan.second_extent and m <= registers // 4]
        steps = [k for k in (1, 2, 3, 4, 5, 7, 8) if plan.reduction[-1].extent % k == 0]
        if plan.spread is not None:  # written out for each input of a group
            steps = [plan.reduction[-1].extent]
        blocks = [1, *_divisors_of_tiles(rows, row_tiles)]
        depths = list(range(self._loops + 1))
        if self._hardware.threads == 1:  # fused loops only move where the padding is computed
            depths = [0, *depths[2:]] if plan.staged else [0]
        if plan.panel is None or plan.kernel.writer(plan.panel.buffer) is not None:  # what is inlined is not copied
            packs = [UNPACKED]
        elif plan.panel_is_weight:
            packs = [UNPACKED, AHEAD] if plan.contraction.right.access.bytes <= SMALL_WEIGHT_BYTES else [AHEAD]
        else:
            packs = [UNPACKED, AT_CHUNK, AT_ROOT]
        if plan.spread is not None and plan.contraction.right.access.stride(plan.vector.position) != 1:
            packs = [pack for pack in packs if pack != UNPACKED]
        pads = [PAD_AT_ROOT]
        if plan.staged:
            pads += [PAD_AT_OUTER, PAD_AT_CHUNK, *([PAD_INLINE] if plan.name in ("channels", "groups") else [])]
        return tuple(
            Knob(name, tuple(sorted(set(options))))
            for name, options in (
                ("mr", row_tiles),
                ("m2", lines),
                ("nr", self._vector_tiles()),
                ("ku", steps),
                ("chunk", blocks),
                ("order", [0, 1]),
                ("depth", depths),
                ("pack", packs),
                ("pad", pads),
                (FAR_WEIGHTS, [int(AHEAD in packs and asks_for_weights(plan, self._hardware))]),
            )
        )

    def _vector_tiles(self) -> list[int]:
        """Whole vectors up to eight (more when there is one row), and divisors of the extent that vectors can hold."""
        extent, lanes = self.plan.vector_extent, self._lanes
        if self.plan.spread is not None:
            return [count * lanes for count in (1, 2, 3, 4) if extent % (count * lanes) == 0]
        most = 8 if self.plan.unrolled_extent > 1 else self._hardware.vector_registers - 2
        counts = [c for c in (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28) if c <= most]
        found = {c * lanes for c in counts if c * lanes <= extent}
        half = max(1, lanes // 2)
        found |= {d for d in range(half, min(extent, most * lanes) + 1, half) if extent % d == 0}
        if extent < 4 * lanes and extent % max(1, lanes // 4) == 0:
            found.add(extent)
        if extent <= most * lanes and self.plan.joins_vectors(extent, lanes):
            found.add(extent)
        if extent < lanes:
            found |= {d for d in (1, 2, 4, 8, extent) if d <= extent}
        return sorted(found)


def _divisors_of_tiles(rows: int, tiles_: Iterable[int]) -> list[int]:
    """How many register tiles a chunk may hold: numbers that divide the tile count of some `mr`."""
    found = set()
    for mr in tiles_:
        count = -(-rows // mr)
        found |= {d for d in (2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32, 48, 56, 64) if count % d == 0}
        found.add(count)
    return sorted(found)


def spans_groups(plan: Plan, hardware: Hardware) -> bool:
    """Whether whole groups fill the machine's vectors, several each, and whole vectors the columns."""
    lanes = _lanes(plan, hardware)
    group = plan.spread.extent if plan.spread is not None else lanes
    return group < lanes and lanes % group == 0 and plan.vector_extent % lanes == 0


def _lanes(plan: Plan, hardware: Hardware) -> int:
    """Elements of a full vector, of sums or of weights, whichever are wider."""
    return hardware.lanes(max(plan.element_bytes, dtype_bytes(plan.contraction.right.access.dtype)))
