"""Reductions across memory: pooling, sums over leading axes, softmax over channels; vectors along the output.

The reduction runs in registers for a tile of the output's last axis, the epilogue follows at the tile. Padding is
inlined, or, when kept, copied into a padded buffer for each parallel iteration.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..base import Knob
from ..nest import extent_of, parallelize, partition, spatial_and_reduced
from .cost import Work, instructions
from .kernel import Kernel, Stage
from .sketch import MemoryBoundSketch, Values, compute_padded_at, worker_counts

__all__ = ["ColumnsSketch"]

_MOST_UNROLLED = 25


class ColumnsSketch(MemoryBoundSketch):
    """One reduction, vectorised along its last spatial axis.

    Knobs: `lanes` (1 leaves the tile, then the whole axis, to LLVM), `unroll` vectors a tile, `window` (0: loops over
    what is reduced, 1: unrolled outside the tile, 2: unrolled for one element, for LLVM to vectorise), `workers`, and
    `partition` of the innermost outer loop where padding puts conditions.
    """

    family = "columns"
    family_index = 12

    @staticmethod
    def fits(kernel: Kernel) -> bool:
        """Whether there is one reduction, and an output (it, or an element-wise epilogue) of the same shape."""
        reductions = [stage for stage in kernel.stages if stage.is_reduction]
        if len(reductions) != 1 or not all(stage.regular for stage in kernel.stages) or len(kernel.outputs) != 1:
            return False
        reduction, output = reductions[0], kernel.stages[-1]
        spatial = tuple(reduction.extents[i] for i in reduction.spatial)
        after = kernel.stages[kernel.stages.index(reduction) + 1 :]
        column = _column(reduction)
        return (
            column is not None
            and reduction.combiners == 1
            and len(after) <= 1
            and (output is reduction or output.extents == spatial)
            and reduction.writes[0].strides[column] == 1
            and reduction.spatial == tuple(range(len(reduction.spatial)))
        )

    def _knobs(self) -> tuple[Knob, ...]:
        self.reduction = next(stage for stage in self.kernel.stages if stage.is_reduction)
        self.column = _column(self.reduction) or 0
        self.extent = self.reduction.extents[self.column]
        self.outer = self.reduction.rows // self.extent
        self.steps = self.reduction.iterations // self.reduction.rows
        full = self.hardware.lanes(max(a.item_bytes for a in (*self.reduction.reads, *self.reduction.writes)))
        self.full = full
        guarded = self.column in self.reduction.guards
        lanes = [v for v in (full // 2, full) if self.extent % v == 0 and v > 1 and not guarded]
        conditions = any(g < self.column for g in self.reduction.guards) and self.column > 0
        return (
            Knob("lanes", (1, *lanes)),
            Knob("unroll", tuple(u for u in (1, 2, 4, 8) if u == 1 or (lanes and self.extent % (u * lanes[0]) == 0))),
            Knob("window", (0, 1, 2) if 1 < self.steps <= _MOST_UNROLLED else (0,)),
            Knob("workers", worker_counts(self.hardware, self.reduction.rows)),
            Knob("partition", (0, 1) if conditions else (0,)),
        )

    def legal(self, values: Values) -> NDArray[np.bool_]:
        """Whole tiles only; enough parallel iterations."""
        knobs = self._integer_columns(values)
        body = knobs["lanes"] * knobs["unroll"]
        ok = (self.extent % body == 0) & ((knobs["lanes"] > 1) | (knobs["unroll"] == 1))
        ok &= (knobs["window"] < 2) | (knobs["lanes"] == 1)
        return ok & (self._chunks(knobs) >= knobs["workers"])

    def _chunks(self, knobs: Mapping[str, Values]) -> NDArray[np.int64]:
        tiles = np.where(knobs["lanes"] > 1, self.extent // (knobs["lanes"] * knobs["unroll"]), 1)
        kept = np.where(knobs["partition"] == 1, self.reduction.extents[self.column - 1], 1)
        few = self.outer < 4 * self.hardware.threads
        return np.asarray(np.where((knobs["partition"] == 0) & few, self.outer * tiles, self.outer // kept))

    def _work(self, knobs: Mapping[str, Values]) -> Work:
        lanes, unroll = knobs["lanes"].astype(np.float64), knobs["unroll"].astype(np.float64)
        own = lanes == 1
        guarded = self.column in self.reduction.guards
        affine = all(access.strides[self.column] in (0, 1) for access in self.reduction.reads)
        # With the window unrolled for one element LLVM gathers short strides from whole vectors, and masks padding.
        own_width = 0.6 * min(self.full, self.extent) if affine and not guarded else 2.0
        whole = knobs["window"] == 2
        width = np.where(own, np.where(whole, 0.6 * min(self.full, self.extent), own_width), lanes)
        width = np.maximum(width, 1.0)
        total = np.zeros_like(lanes)
        for stage in self.kernel.stages:
            axis = self.column if len(stage.extents) > self.column else len(stage.extents) - 1
            kept = not stage.is_reduction and stage is not self.kernel.stages[-1]
            cost = instructions(stage, axis, np.where(kept, 2.0, width), np.where(own, 1.0, unroll))
            gathered = stage.iterations * (stage.operations + 2.0 * len(stage.reads)) / width
            total = total + np.where(whole, np.minimum(cost, gathered), cost)
        steps = self.reduction.iterations / width
        total = total + steps * np.maximum(0.0, 4.0 / np.where(own, 4.0, unroll) - 1.0)
        total = total + steps * np.where(knobs["window"] >= 1, 0.0, 2.0 / np.where(own, 4.0, unroll))
        if self.reduction.guards:
            total = total + steps / unroll * np.where(knobs["partition"] == 1, 1.0, 4.0)
        scratch = sum(
            2.0 * stage.iterations * stage.writes[0].item_bytes
            for stage in self.kernel.stages
            if not stage.is_reduction and stage is not self.kernel.stages[-1]
        )
        return Work(
            instructions=total,
            lanes=width,
            efficiency=np.ones_like(lanes),
            unrolled=unroll * np.where(knobs["window"] >= 1, self.steps, 1),
            workers=knobs["workers"].astype(np.float64),
            chunks=np.maximum(self._chunks(knobs), 1).astype(np.float64),
            scratch_bytes=np.full_like(lanes, scratch),
            run_bytes=np.where(own, self.extent, lanes * unroll) * 4.0,
            accumulators=unroll,
            variant=np.asarray(self.variant + 0.5 * knobs["partition"], dtype=np.float64),
        )

    def _schedule(self, schedule: Any, values: Mapping[str, int]) -> None:
        reduction = schedule.get_sblock(self.reduction.name)
        if self.kernel.stages[-1] is self.reduction:
            output = schedule.cache_write(reduction, 0, "global")
        else:
            output = schedule.get_sblock(self.kernel.stages[-1].name)
        loops = list(schedule.get_loops(output))
        outer, rest = loops[: self.column], loops[self.column + 1 :]
        lanes, unroll = values["lanes"], values["unroll"]
        if lanes > 1:
            tile, body, inner = schedule.split(loops[self.column], [None, unroll, lanes])
        else:
            tile, inner = schedule.split(loops[self.column], [1, None])
            body = None
        parallel = [*outer, tile] if self.outer < 4 * self.hardware.threads and not values["partition"] else outer
        if values["partition"]:
            partition(schedule, outer[-1])
            parallel = outer[:-1]
        if rest:
            schedule.reorder(*rest, *([body] if body is not None else []), inner)
        place = parallelize(schedule, parallel, values["workers"], self.hardware.threads)
        if parallel and parallel[-1] is tile and values["workers"] > 1:
            tile = place if values["workers"] == self.hardware.threads else _inner_loop(schedule, output, place)
        depth = [schedule.get(x) for x in schedule.get_loops(output)].index(schedule.get(tile)) + 1
        if values["window"] == 2:
            schedule.compute_at(reduction, inner, preserve_unit_loops=True)
            depth += 1 + len(rest)
        else:
            schedule.compute_at(reduction, tile, preserve_unit_loops=True)
        if lanes > 1:
            schedule.vectorize(inner)
            if unroll > 1:
                schedule.unroll(body)
        self._place_kept(schedule, output)
        self._finish(schedule, reduction, depth, values)

    def _place_kept(self, schedule: Any, output: Any) -> None:
        """Producers that keep a buffer: computed for each iteration of the outermost loop that has more than one."""
        for stage in reversed(self.kernel.stages):
            if not stage.is_reduction and stage is not self.kernel.stages[-1]:
                block = schedule.get_sblock(stage.name)
                loops = [x for x in schedule.get_loops(output) if extent_of(schedule, x) > 1]
                compute_padded_at(schedule, block, stage, loops[0])

    def _finish(self, schedule: Any, reduction: Any, depth: int, values: Mapping[str, int]) -> None:
        spatial, reduced = spatial_and_reduced(schedule, reduction, schedule.get_loops(reduction)[depth:])
        column = spatial.pop(self.column)
        schedule.reorder(*spatial, *reduced, column)
        if values["lanes"] > 1:
            body, inner = schedule.split(column, [None, values["lanes"]])
            schedule.vectorize(inner)
            schedule.unroll(body)
        if values["window"]:
            for loop in reduced:
                schedule.unroll(loop)
        schedule.decompose_reduction(reduction, reduced[0])


def _column(stage: Stage) -> int | None:
    """The last spatial axis with more than one element."""
    return next((i for i in reversed(stage.spatial) if stage.extents[i] > 1), None)


def _inner_loop(schedule: Any, output: Any, outer: Any) -> Any:
    loops = schedule.get_loops(output)
    return loops[[schedule.get(x) for x in loops].index(schedule.get(outer)) + 1]
