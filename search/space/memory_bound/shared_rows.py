"""Fewer long rows than keep all threads busy: each row is shared among them, in one parallel pass a stage.

    sum[part]     = sum of x in that part of the row               parallel over the parts
    sum           = sum of sum[part]
    squares[part] = sum of (x - sum / n)^2 in that part            parallel over the parts
    ...
    y             = (x - sum / n) * ...                            parallel over the elements

As for a norm over a whole image (Conv-TasNet's global norms) or softmax over a vocabulary. What a thread reads again in
the next pass is still in its own cache, and where the kernel before was parallel, so is what it reads at first: one
thread would fetch half of it from the other's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..base import Knob
from ..nest import STACK_BYTES, fuse, parallelize, vectorize
from .cost import Work, instructions
from .kernel import Kernel, Stage
from .row_reductions import finish_reduction, fitting, vector_sums
from .rows import contiguous, run_axes
from .sketch import MemoryBoundSketch, Values

__all__ = ["SharedRowsSketch"]

_MOST_ROWS = 4
"""For each thread; more keep the threads busy without sharing."""


class SharedRowsSketch(MemoryBoundSketch):
    """All threads in every stage.

    Knobs: `parts` that each row is cut into, `accumulators` of a part, `unroll` of the element-wise stages.
    """

    family = "shared_rows"
    family_index = 18

    @staticmethod
    def fits(kernel: Kernel) -> bool:
        """Whether the reductions have the same rows, lie contiguously, and something is computed of their results."""
        reductions = [stage for stage in kernel.stages if stage.is_reduction]
        return (
            bool(reductions)
            and not kernel.stages[-1].is_reduction
            and len(kernel.outputs) == 1
            and len({stage.rows for stage in reductions}) == 1
            and all(stage.regular and stage.extents for stage in kernel.stages)
            and all(contiguous(stage) and run_axes(stage) == len(stage.reduction) for stage in reductions)
        )

    def _knobs(self) -> tuple[Knob, ...]:
        self.reductions = [stage for stage in self.kernel.stages if stage.is_reduction]
        self.lengths = [stage.iterations // stage.rows for stage in self.reductions]
        self.rows, threads = self.reductions[0].rows, self.hardware.threads
        self.lanes = self.hardware.lanes(max(access.item_bytes for s in self.reductions for access in s.reads))
        parts = [
            p
            for p in (threads, 2 * threads, 4 * threads)
            if all(length % (p * self.lanes) == 0 for length in self.lengths)
        ]
        self.item_bytes = max(stage.writes[0].item_bytes for stage in self.reductions)
        accumulators = [a for a in (1, 2, 4, 8) if a * self.lanes * self.item_bytes < STACK_BYTES]
        return (
            Knob("parts", tuple(parts) or (1,)),
            Knob("accumulators", tuple(accumulators)),
            Knob("unroll", (1, 2, 4)),
        )

    def legal(self, values: Values) -> NDArray[np.bool_]:
        """Of few rows, each of which has a part for every thread."""
        knobs, threads = self._integer_columns(values), self.hardware.threads
        ok = (knobs["parts"] > 1) & (threads > 1) & (self.rows < _MOST_ROWS * threads) & (self.rows % threads != 0)
        each = [length // knobs["parts"] % (self.lanes * knobs["accumulators"]) == 0 for length in self.lengths]
        return np.logical_and.reduce([ok, *each])

    def _work(self, knobs: Mapping[str, Values]) -> Work:
        lanes = np.full(len(knobs["parts"]), float(self.lanes))
        accumulators, unroll = knobs["accumulators"].astype(np.float64), knobs["unroll"].astype(np.float64)
        total = np.zeros_like(lanes)
        for stage in self.kernel.stages:
            total = total + instructions(stage, len(stage.extents) - 1, lanes, unroll)
            if stage.is_reduction:
                # Each of a chain of dependent additions waits four cycles, unless there are more chains.
                total = total + stage.iterations / lanes * np.maximum(0.0, 4.0 / accumulators - 1.0)
                total = total + stage.rows * knobs["parts"] * (2.0 * lanes + 2.0 * accumulators)
        kept = (stage for stage in self.kernel.stages[:-1] if not stage.is_reduction)
        return Work(
            instructions=total,
            lanes=lanes,
            efficiency=np.ones_like(lanes),
            unrolled=accumulators * unroll,
            workers=np.full_like(lanes, float(self.hardware.threads)),
            chunks=(self.rows * knobs["parts"]).astype(np.float64),
            scratch_bytes=np.full_like(lanes, sum(2.0 * s.iterations * s.writes[0].item_bytes for s in kept)),
            run_bytes=np.full_like(lanes, float(min(self.lengths) * self.item_bytes)),
            accumulators=accumulators,
            variant=np.full_like(lanes, self.variant),
        )

    def latency_s(self, values: Values) -> NDArray[np.float64]:
        """See `Sketch.latency_s`: every stage starts the threads."""
        return super().latency_s(values) + (len(self.kernel.stages) - 1) * self.hardware.parallel_overhead_s

    def _schedule(self, schedule: Any, values: Mapping[str, int]) -> None:
        for stage in self.kernel.stages:
            if stage.is_reduction:
                self._reduce(schedule, stage, values)
            else:
                self._compute(schedule, stage, values)

    def _reduce(self, schedule: Any, stage: Stage, values: Mapping[str, int]) -> None:
        """Sums of the parts, in vectors, then of those, one by one."""
        loops = schedule.get_loops(schedule.get_sblock(stage.name))
        part, _ = schedule.split(fuse(schedule, loops[len(stage.spatial) :]), [values["parts"], None])
        sums = schedule.rfactor(part, len(stage.spatial))
        *rows, inside = schedule.get_loops(sums)
        length = stage.iterations // stage.rows // values["parts"]
        width = self.lanes * fitting(values["accumulators"], self.lanes, length)
        vectors = vector_sums(schedule, sums, inside, len(stage.spatial) + 1, self.lanes, width)
        row = parallelize(schedule, schedule.get_loops(sums)[: len(rows)], self.hardware.threads, self.hardware.threads)
        for block in reversed(vectors):
            schedule.compute_at(block, row, preserve_unit_loops=True)
        for block in vectors:
            finish_reduction(schedule, block, 1, self.lanes, short=False, vector=True)

    def _compute(self, schedule: Any, stage: Stage, values: Mapping[str, int]) -> None:
        if stage.iterations < values["parts"] * self.lanes:
            return
        loops = schedule.get_loops(schedule.get_sblock(stage.name))
        axes = stage.run(tuple(range(len(stage.extents))))
        outer, run = loops[: len(loops) - axes], fuse(schedule, loops[len(loops) - axes :])
        if math.prod(stage.extents[: len(outer)]) < _MOST_ROWS * self.hardware.threads:
            part, run = schedule.split(run, [values["parts"], None])
            outer = [*outer, part]
        vectorize(schedule, run, self.lanes, values["unroll"], axes)
        parallelize(schedule, outer, self.hardware.threads, self.hardware.threads)
