"""Windows over images with channels first: pooling, depthwise and grouped convolutions, rows of the image as vectors.

Nothing is copied and no row is cut: what lies beside the image, and behind the end of a ragged row, is masked
(masked_lanes.py). A tile is some rows of one vector, unrolled with its window, so that LLVM loads every vector once for
all the rows that it counts in. Rows above and below the image are split off by TVM. Of a group, a tile has several
outputs, too, and loops over inputs and rows of the window: each of them has products enough to hide its loads.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..base import Knob
from ..hardware import Hardware
from ..marks import MASKED_LANES
from ..nest import STACK_BYTES, extent_of, parallelize, partition, spatial_and_reduced
from .cost import Work
from .kernel import Access, Kernel, Stage
from .sketch import MemoryBoundSketch, Values, divisors_up_to, worker_counts

__all__ = ["MaskedWindowsSketch"]

_MOST_UNROLLED = 128
_MOST_INPUTS = 16  # of a group: more are for tiles of channels
_MOST_ROWS = 14
_CROSSING_LOAD = 1.7  # a vector that lies in two lines of the cache, in multiply-adds (Zen 4)
_LONE_LOAD = 2.6  # the same where no other row of a tile wants the vector
_TILE = 12.0  # instructions of a tile's addresses and stores
_MASK = 4.0  # and of one mask
_CHAINS = 8.0  # multiply-adds that depend on nothing keep both units busy for their four cycles
_MOST_EASY_ROWS = 7  # of the image; with more, a tile's loads and sums crowd the registers
_CROWDED = 0.03


class MaskedWindowsSketch(MemoryBoundSketch):
    """One reduction over a window of the last two axes, vectors along the last.

    Knobs: `lanes` of the vectors, `rows` of the output a tile, `outputs` of a group a tile, `down` (0: tiles side by
    side first, 1: one below the other), `workers`.
    """

    family = "masked_windows"
    family_index = 15

    def __init__(
        self, mod: Any, keep: frozenset[str], kernel: Kernel, hardware: Hardware, suffix: str = "", outputs: int = 1
    ) -> None:
        self.outputs = outputs
        super().__init__(mod, keep, kernel, hardware, suffix)

    @staticmethod
    def fits(kernel: Kernel, outputs: int = 1) -> bool:
        """Whether there is one windowed reduction of one image, padded or not, and at most a plain epilogue.

        With several `outputs` in a group, the last axis but two has them, and windows have some inputs, too.
        """
        stage, *after = kernel.stages or (None,)
        if stage is None or len(after) > 1 or not all(s.regular for s in kernel.stages) or len(kernel.outputs) != 1:
            return False
        spatial = len(stage.spatial)
        window = stage.extents[spatial:]
        if spatial < 3 or stage.spatial != tuple(range(spatial)) or len(window) < 2 or stage.combiners != 1:
            return False
        *others, height, width = window
        column = spatial - 1
        images = [read for read in stage.reads if read.strides[column] != 0]
        return (
            (set(others) <= {1} or (outputs > 1 and int(np.prod(others)) <= _MOST_INPUTS))
            and 1 < height * width <= _MOST_UNROLLED
            and len(images) == 1
            and _is_float(images[0])
            and images[0].strides[column] in (1, 2)
            and all((images[0].strides[axis] or 0) > 0 for axis in (column - 1, -2, -1))
            and stage.writes[0].strides[column] == 1
            and stage.extents[column] > 1
            and set(stage.guards) <= {column - 1, column, len(stage.extents) - 2, len(stage.extents) - 1}
            and all(_follows(epilogue, stage) for epilogue in after)
        )

    def _knobs(self) -> tuple[Knob, ...]:
        self.reduction = self.kernel.stages[0]
        self.spatial = len(self.reduction.spatial)
        *outer, self.height, self.width = self.reduction.extents[: self.spatial]
        self.window = self.reduction.extents[-2:]
        self.images, self.inputs = int(np.prod(outer)), int(np.prod(self.reduction.extents[self.spatial : -2]))
        self.image = next(read for read in self.reduction.reads if read.strides[self.spatial - 1] != 0)
        self.separable = len(self.reduction.reads) == 1 and len(self.reduction.extents) == self.spatial + 2
        full = self.hardware.lanes(self.image.item_bytes)
        rows = divisors_up_to(self.height, _MOST_ROWS)
        if self.outputs > 1:  # products of several outputs hide their loads in tiles of three rows
            rows = tuple(sorted({*rows, *(n for n in (3, 5) if n < self.height)}))
        return (
            Knob("lanes", tuple(v for v in (full // 2, full) if 1 < v < 2 * self.width) or (2,)),
            Knob("rows", rows),
            *([Knob("outputs", divisors_up_to(self.outputs, _MOST_ROWS))] if self.outputs > 1 else []),
            Knob("down", (0, 1)),
            Knob("workers", worker_counts(self.hardware, self.images)),
        )

    def legal(self, values: Values) -> NDArray[np.bool_]:
        """Sums of a tile that fit registers; a body that compiles in time."""
        knobs = self._integer_columns(values)
        high, wide = self.window
        unrolled, sums = knobs["rows"] * wide * (high if self.outputs == 1 else knobs["outputs"]), knobs["rows"]
        if self.outputs > 1:
            sums = sums * knobs["outputs"]
        elif self.separable:
            sums = sums * high
        return (sums * knobs["lanes"] * self.image.item_bytes < STACK_BYTES) & (unrolled <= _MOST_UNROLLED)

    def _work(self, knobs: Mapping[str, Values]) -> Work:
        lanes, rows = knobs["lanes"].astype(np.float64), knobs["rows"].astype(np.float64)
        outputs = knobs["outputs"].astype(np.float64) if self.outputs > 1 else np.ones_like(rows)
        tiles = self.images / outputs * np.ceil(self.height / rows) * np.ceil(self.width / lanes)
        high, wide = self.window
        across = self.image.strides[self.spatial - 1] or 1
        if self.outputs > 1:
            sums = np.maximum(rows * outputs, _CHAINS) * high * wide
            loads = 0.5 * high * wide * (rows * _LONE_LOAD * across + outputs)  # of images and of weights
            crowding = np.ones_like(rows)
        else:
            image_rows = np.minimum((rows - 1.0) * self._row_step() + high, rows * high)
            loads = image_rows * self._loads_of_row()
            sums = image_rows * (wide - 1) + rows * (high - 1) if self.separable else rows * high * wide
            crowding = 1.0 + _CROWDED * np.maximum(rows * across - _MOST_EASY_ROWS, 0.0)
        vectors = 2.0 * self.inputs * np.maximum(sums, loads) * self._narrowness(lanes) * crowding
        vectors = vectors + rows * outputs * self._stores() + _TILE
        # LLVM unrolls a few vectors, and then knows their masks; down a column they stay as they are.
        remade = (knobs["down"] == 0) & (np.ceil(self.width / lanes) > 3)
        vectors = vectors + np.where(remade, _MASK * wide, 0.0)
        return Work(
            instructions=tiles * vectors,
            lanes=lanes,
            efficiency=np.ones_like(lanes),
            unrolled=rows * outputs * wide * (high if self.outputs == 1 else 1),
            workers=knobs["workers"].astype(np.float64),
            chunks=self.images / outputs,
            scratch_bytes=np.zeros_like(lanes),
            run_bytes=np.full_like(lanes, float(self.width * self.image.item_bytes)),
            accumulators=rows * outputs,
            variant=np.asarray(self.variant + 0.5 * knobs["down"], dtype=np.float64),
        )

    def _loads_of_row(self) -> float:
        """Loads of a row of the image for a vector, in multiply-adds.

        Elements between two lanes come with the loads of the first; shuffles part them.
        """
        across, wide = self.image.strides[self.spatial - 1] or 1, self.window[1]
        return float(_CROSSING_LOAD * across * np.ceil(wide / across) + (wide if across > 1 else 0.0))

    def _stores(self) -> float:
        """Instructions of a vector's epilogue and store."""
        return 2.0 + 0.5 * sum(stage.operations for stage in self.kernel.stages[1:])

    def _narrowness(self, lanes: NDArray[np.float64]) -> NDArray[np.float64]:
        """Multiply-adds take both of the issued instructions, and half vectors pair up where wide ones are halves."""
        gained = 0.4 * (self.hardware.half_vector_rate - 1.0)
        return np.where(lanes < self.hardware.lanes(self.image.item_bytes), 1.0 - gained, 1.0)

    def _row_step(self) -> float:
        """Rows of the image that a step down the output, relative to one down the window, moves by."""
        row, window_row = self.image.strides[self.spatial - 2], self.image.strides[-2]
        return row / window_row if row and window_row else float(self.window[0])

    def _schedule(self, schedule: Any, values: Mapping[str, int]) -> None:
        block, output = self._sum_and_output(schedule)
        parts = [block]
        if self.separable:
            parts.append(schedule.rfactor(schedule.get_loops(block)[self.spatial], 0))
        *images, y, x = schedule.get_loops(output)
        tile = []
        if self.outputs > 1:
            images[-1], of_group = schedule.split(images[-1], [None, values["outputs"]])
            schedule.reorder(*images, y, x, of_group)
            schedule.unroll(of_group)
            tile = [of_group]
        parallelize(schedule, images, values["workers"], self.hardware.threads)
        y, rows = schedule.split(y, [None, values["rows"]])
        x, lanes = schedule.split(x, [None, values["lanes"]])
        tiles = (x, y) if values["down"] else (y, x)
        schedule.reorder(*tiles, *tile, rows, lanes)
        if self.spatial - 2 in self.reduction.guards or self.height % values["rows"]:
            partition(schedule, y)
        depth = len(schedule.get_loops(output)) - 2 - len(tile)
        for part in parts:
            schedule.compute_at(part, tiles[1], preserve_unit_loops=True)
        schedule.unroll(rows)
        schedule.annotate(lanes, MASKED_LANES, values["lanes"])
        for part in parts:
            self._unroll(schedule, part, depth, values["lanes"])

    def _sum_and_output(self, schedule: Any) -> tuple[Any, Any]:
        """The block that sums windows, and the one that writes the result."""
        block = schedule.get_sblock(self.reduction.name)
        if len(self.kernel.stages) == 1:
            return block, schedule.cache_write(block, 0, "global")
        return block, schedule.get_sblock(self.kernel.stages[-1].name)

    def _unroll(self, schedule: Any, block: Any, depth: int, vector: int) -> None:
        spatial, reduced = spatial_and_reduced(schedule, block, schedule.get_loops(block)[depth:])
        *others, lanes = spatial
        schedule.reorder(*reduced, *others, lanes)
        unrolled = reduced[-1:] if self.outputs > 1 else reduced
        for loop in (*unrolled, *others):
            if extent_of(schedule, loop) > 1:
                schedule.unroll(loop)
        schedule.annotate(lanes, MASKED_LANES, vector)
        schedule.decompose_reduction(block, reduced[0])


def _follows(epilogue: Stage, stage: Stage) -> bool:
    """Whether an epilogue keeps the reduction's axes, and its vectors along the last one are vectors in memory."""
    spatial = len(stage.spatial)
    return (
        epilogue.extents == stage.extents[:spatial]
        and not epilogue.guards
        and not epilogue.calls
        and not epilogue.forms
        and epilogue.writes[0].strides[-1] == 1
        and all(read.strides[-1] in (0, 1) for read in epilogue.reads)
    )


def _is_float(image: Access) -> bool:
    return image.item_bytes in (4, 8)
