"""Pooling windows that move by one element along memory: rows of the image as vectors, one sum a row of the window.

The input is padded into a buffer, for each parallel iteration, so that nothing inside has a condition. The window is
summed row by row (rfactor): with several rows of the output unrolled, neighbours share the sums of rows, and LLVM keeps
one of them. The last vector of a row overlaps the one before (tails.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..base import Knob
from ..marks import OVERLAPPING_TAIL
from ..nest import STACK_BYTES, extent_of, fuse, spatial_and_reduced
from .cost import Work
from .kernel import Kernel
from .sketch import MemoryBoundSketch, Values, compute_padded_at, divisors_up_to, worker_counts

__all__ = ["WindowsSketch"]

_MOST_UNROLLED = 64


class WindowsSketch(MemoryBoundSketch):
    """One pooling over the last two axes, stride one along the last.

    Knobs: `lanes` of the vectors, `rows` of the output a tile, `workers`.
    """

    family = "windows"
    family_index = 17

    @staticmethod
    def fits(kernel: Kernel) -> bool:
        """Whether there is one reduction over a window of two axes, without conditions, and at most an epilogue."""
        stage = next((stage for stage in kernel.stages if stage.is_reduction), None)
        if stage is None or not all(s.regular for s in kernel.stages) or len(kernel.outputs) != 1:
            return False
        if kernel.accumulates:  # the last vector of a row overlaps the one before
            return False
        position, spatial = kernel.stages.index(stage), len(stage.spatial)
        after = kernel.stages[position + 1 :]
        return (
            spatial >= 3
            and stage.reduction == (spatial, spatial + 1)
            and stage.combiners == 1
            and not stage.guards
            and len(stage.reads) == 1
            and stage.reads[0].strides[spatial - 1] == 1 == stage.reads[0].strides[spatial + 1]
            and not any(s.is_reduction for s in kernel.stages if s is not stage)
            and (not after or (len(after) == 1 and after[0].extents == stage.extents[:spatial]))
        )

    def _knobs(self) -> tuple[Knob, ...]:
        self.reduction = next(stage for stage in self.kernel.stages if stage.is_reduction)
        *outer, height, self.width, self.window, columns = self.reduction.extents
        self.images = int(np.prod(outer))
        self.columns, self.height = columns, height
        item = self.reduction.writes[0].item_bytes
        full = self.hardware.lanes(item)
        self.item_bytes = item
        return (
            Knob("lanes", tuple(v for v in (full // 2, full) if 1 < v <= self.width) or (1,)),
            Knob("rows", divisors_up_to(height, 8)),
            Knob("workers", worker_counts(self.hardware, self.images)),
        )

    def legal(self, values: Values) -> NDArray[np.bool_]:
        """Sums of a tile's rows that fit the stack, and thereby registers; a body that compiles in time."""
        knobs = self._integer_columns(values)
        sums = knobs["rows"] * self.window
        small = (sums * knobs["lanes"] * self.item_bytes < STACK_BYTES) & (sums * self.columns <= _MOST_UNROLLED)
        return small & (knobs["lanes"] > 1)

    def _work(self, knobs: Mapping[str, Values]) -> Work:
        lanes, rows = knobs["lanes"].astype(np.float64), knobs["rows"].astype(np.float64)
        tiles = self.images * self.height * np.ceil(self.width / lanes)
        # A row of the window is loaded and summed once for the rows of the tile that share it.
        shared = (rows + self.window - 1.0) / rows
        epilogue = sum(s.operations for s in self.kernel.stages[self.kernel.stages.index(self.reduction) + 1 :])
        padding = self.kernel.stages[: self.kernel.stages.index(self.reduction)]
        vectors = tiles * (shared * 2.0 * self.columns + self.window + 1.0 + 0.5 * epilogue)
        vectors = vectors + sum(3.0 * s.iterations for s in padding) / (0.5 * lanes)
        return Work(
            instructions=vectors,
            lanes=lanes,
            efficiency=np.ones_like(lanes),
            unrolled=rows * self.window * self.columns,
            workers=knobs["workers"].astype(np.float64),
            chunks=np.full_like(lanes, float(self.images)),
            scratch_bytes=np.full_like(lanes, float(sum(2 * s.iterations * self.item_bytes for s in padding))),
            run_bytes=np.full_like(lanes, float(self.width * self.item_bytes)),
            accumulators=rows * (self.window + 1.0),
            variant=np.full_like(lanes, self.variant),
        )

    def _schedule(self, schedule: Any, values: Mapping[str, int]) -> None:
        position = self.kernel.stages.index(self.reduction)
        block = schedule.get_sblock(self.reduction.name)
        spatial = len(self.reduction.spatial)
        if position == len(self.kernel.stages) - 1:
            output = schedule.cache_write(block, 0, "global")
        else:
            output = schedule.get_sblock(self.kernel.stages[-1].name)
        by_row = schedule.rfactor(schedule.get_loops(block)[spatial], 0)
        *images, y, x = schedule.get_loops(output)
        image = fuse(schedule, images)
        if 1 < values["workers"] < self.hardware.threads:
            outer, image = schedule.split(image, [values["workers"], None])
            schedule.parallel(outer)
        elif values["workers"] > 1:
            schedule.parallel(image)
        y, rows = schedule.split(y, [None, values["rows"]])
        x, lanes = schedule.split(x, [None, values["lanes"]])
        schedule.reorder(x, y, rows, lanes)
        if self.width % values["lanes"]:
            schedule.annotate(x, OVERLAPPING_TAIL, values["lanes"])
        depth = len(schedule.get_loops(output)) - 2
        for part in (block, by_row):
            schedule.compute_at(part, y, preserve_unit_loops=True)
        schedule.vectorize(lanes)
        schedule.unroll(rows)
        for stage in reversed(self.kernel.stages[:position]):
            compute_padded_at(schedule, schedule.get_sblock(stage.name), stage, image)
        for part in (block, by_row):
            self._unroll_sums(schedule, part, depth)

    def _unroll_sums(self, schedule: Any, block: Any, depth: int) -> None:
        spatial, (reduced,) = spatial_and_reduced(schedule, block, schedule.get_loops(block)[depth:])
        *others, lanes = spatial
        schedule.reorder(*others, reduced, lanes)
        schedule.vectorize(lanes)
        for loop in (*others, reduced):
            if extent_of(schedule, loop) > 1:
                schedule.unroll(loop)
        schedule.decompose_reduction(block, reduced)
