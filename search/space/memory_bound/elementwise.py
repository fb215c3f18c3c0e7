"""Kernels without reductions: one pass over the output, in vectors along the longest run that all accesses share.

Covers arithmetic, reshape, slices, broadcasts, concatenation and padding (conditions on the outer loops stay there),
gather along outer axes, resize.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..base import Knob
from ..nest import fuse, parallelize, partition, vectorize
from .cost import Work, instructions
from .kernel import Kernel, Stage
from .sketch import MemoryBoundSketch, Values, divisors_up_to, ragged_efficiency, worker_counts

__all__ = ["ElementwiseSketch", "side_stage"]

_MOST_PIECES = 64
_LONG = 8
"""Vectors of a run that LLVM makes vectors of."""

_CONDITIONS = 3.0
"""How much longer a vector takes where a condition chooses what it is: twice to five times, when measured."""


class ElementwiseSketch(MemoryBoundSketch):
    """The last stage in vectors; earlier ones (small, kept because recomputing costs more) before it, serial.

    Knobs: `lanes` (1 leaves the innermost loop to LLVM), `unroll` vectors, `pieces` that each contiguous run is cut
    into to get parallel iterations, `workers`, `partition` of a loop with conditions.
    """

    family = "elementwise"
    family_index = 10

    @staticmethod
    def fits(kernel: Kernel) -> bool:
        """Whether nothing is reduced."""
        return all(stage.regular and not stage.is_reduction for stage in kernel.stages)

    @property
    def _parallel_iterations(self) -> NDArray[np.int64]:
        """Iterations of the loops outside the run, without and with `partition`."""
        last = len(self.main.extents) - self.run_axes - 1
        kept = self.main.extents[last] if not self.guard and last in self.main.guards else 1
        return np.array([self.outer, self.outer // kept], dtype=np.int64)

    @property
    def main(self) -> Stage:
        """The output's stage."""
        return self.kernel.stages[-1]

    def _knobs(self) -> tuple[Knob, ...]:
        axes = tuple(range(len(self.main.extents)))
        self.run_axes = self.main.run(axes) if axes else 0
        self.run = math.prod(self.main.extents[len(axes) - self.run_axes :])
        self.outer = self.main.iterations // self.run
        self.guard = self.main.guards.get(len(axes) - 1, ()) if axes else ()
        full = self.hardware.lanes(self.main.writes[0].item_bytes)
        # Conditions along the run must be the same for all lanes of a vector.
        self.common = common = math.gcd(self.run, *self.guard)
        widest = full if self.main.guards else 2 * full
        fitting = [d for d in divisors_up_to(common, widest) if d > 1]
        widths = {v for v in (full // 2, full, widest) if 1 < v <= self.run and not any(g % v for g in self.guard)}
        lanes = [1, *sorted({*widths, *fitting[-1:]})]
        pieces = [p for p in divisors_up_to(self.run, _MOST_PIECES) if self.run // p >= full]
        conditions = bool(self.main.guards.keys() & {len(axes) - 1, len(axes) - self.run_axes - 1})
        return (
            Knob("lanes", tuple(lanes)),
            Knob("unroll", tuple(u for u in (1, 2, 4, 8) if u == 1 or u * lanes[-1] <= self.run)),
            Knob("pieces", tuple(pieces) or (1,)),
            Knob("workers", worker_counts(self.hardware, max(self.outer * max(pieces or [1]), 1))),
            Knob("partition", (0, 1) if conditions else (0,)),
        )

    def legal(self, values: Values) -> NDArray[np.bool_]:
        """No unrolling of a loop left to LLVM, no pieces of a serial loop, a body no longer than a piece."""
        knobs = self._integer_columns(values)
        lanes, unroll, pieces, workers = (knobs[k] for k in ("lanes", "unroll", "pieces", "workers"))
        body = lanes * unroll
        short = self.run // pieces
        ok = (body == 1) | ((lanes > 1) & (body <= short))
        # Conditions along the vectors must be the same for all lanes.
        ok &= (lanes == 1) | (short % (lanes * unroll) == 0) | (not self.guard)
        if self.guard:  # a loop that is partitioned is not cut in pieces as well
            ok &= (knobs["partition"] == 0) | (pieces == 1)
        return (
            ok & ((workers > 1) | (pieces == 1)) & (self._parallel_iterations[knobs["partition"]] * pieces >= workers)
        )

    def _work(self, knobs: Mapping[str, Values]) -> Work:
        lanes, unroll = knobs["lanes"].astype(np.float64), knobs["unroll"].astype(np.float64)
        axis = len(self.main.extents) - 1 if self.run_axes else None
        full = self.hardware.lanes(self.main.writes[0].item_bytes)
        strided = axis is not None and any((a.strides[axis] or 0) > 1 for a in self.main.reads)
        # LLVM vectorises what has no conditions, and leaves a remainder; it moves strided elements one by one. Short
        # pieces stay scalar where it would have to check whether what is read is written: 16 channels concatenated, 77
        # us instead of 11, pixels times 32 factors, 105 instead of 14.
        own = (lanes == 1) & ((not self.guard) | (knobs["partition"] == 1)) & (self.common >= _LONG * full)
        width = np.where(own, 0.5 if strided else 0.9 * full, lanes)
        size = np.zeros_like(lanes)
        total = instructions(self.main, axis, np.minimum(width, full), np.where(own, 4.0, unroll), lanes) + size
        if self.guard:  # asked at each vector
            total = total * np.where((lanes > 1) & (knobs["partition"] == 0), _CONDITIONS, 1.0)
        for stage in self.kernel.stages[:-1]:
            total = total + instructions(
                stage, len(stage.extents) - 1 if stage.extents else None, 1.0 + size, 1.0 + size
            )
        short = self.run // knobs["pieces"]
        step = knobs["lanes"] * knobs["unroll"]
        efficiency = np.where(step > 1, _efficiency(short, step, lanes), 1.0)
        # Every start of a run costs address arithmetic with divisions.
        total = total + 6.0 * self.outer * knobs["pieces"]
        item = float(self.main.writes[0].item_bytes)
        run_bytes = item * (1.0 + size if strided else short)
        return Work(
            instructions=total,
            lanes=np.minimum(width, full),
            efficiency=efficiency,
            unrolled=lanes * 0 + unroll,
            workers=knobs["workers"].astype(np.float64),
            chunks=np.maximum(self._parallel_iterations[knobs["partition"]] * knobs["pieces"], 1).astype(np.float64),
            scratch_bytes=size + sum(2.0 * s.rows * s.writes[0].item_bytes for s in self.kernel.stages[:-1]),
            run_bytes=np.asarray(run_bytes, dtype=np.float64),
            accumulators=size,
            variant=size + self.variant + 0.5 * knobs["partition"],
        )

    def _schedule(self, schedule: Any, values: Mapping[str, int]) -> None:
        for stage in self.kernel.stages[:-1]:
            side_stage(schedule, stage, self.hardware.lanes(stage.writes[0].item_bytes))
        loops = schedule.get_loops(schedule.get_sblock(self.main.name))
        if not loops:
            return
        outer, run = loops[: len(loops) - self.run_axes], fuse(schedule, loops[len(loops) - self.run_axes :])
        last = len(outer) - 1
        if values["pieces"] > 1:
            piece, run = schedule.split(run, [values["pieces"], None])
            outer = [*outer, piece]
        run = vectorize(schedule, run, values["lanes"], values["unroll"], self.run_axes)
        if values["partition"]:
            if self.guard:
                partition(schedule, run)
            elif last >= 0 and last in self.main.guards:
                partition(schedule, outer[last])
                outer = outer[:last]  # what is partitioned stays a loop of its own
        parallelize(schedule, outer, values["workers"], self.hardware.threads)


def _efficiency(extents: Values, step: Values, lanes: NDArray[np.float64]) -> NDArray[np.float64]:
    result = np.ones(len(step))
    for extent in np.unique(extents):
        rows = extents == extent
        result[rows] = ragged_efficiency(int(extent), step[rows], lanes[rows])
    return result


def side_stage(schedule: Any, stage: Stage, lanes: int) -> None:
    """A small element-wise stage of its own, vectorised where its last axis allows."""
    loops = schedule.get_loops(schedule.get_sblock(stage.name))
    last = len(stage.extents) - 1
    if (
        loops
        and stage.regular
        and not stage.is_reduction
        and stage.extents[last] % lanes == 0
        and last not in stage.guards
    ):
        vectorize(schedule, loops[-1], lanes)
