"""Fallbacks: every stage a loop nest of its own, and the program as it is."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..base import Knob, Sketch
from ..features import FEATURES
from ..nest import fuse, parallelize, serial_vectors
from ..schedule import schedule_of
from .cost import Work, instructions
from .kernel import Kernel, Stage
from .sketch import MemoryBoundSketch, Values, divisors_up_to, worker_counts

__all__ = ["StagesSketch", "UntouchedSketch"]

_SMALL_STAGE = 4096
_WINDOW = 25


class StagesSketch(MemoryBoundSketch):
    """Several reductions that do not share rows, or kernels of unknown form: one nest after the other.

    Knobs: `lanes` of the element-wise stages and of reductions whose last spatial axis is contiguous (1: as LLVM
    likes), `workers` of all stages that are not small.
    """

    family = "stages"
    family_index = 14

    @staticmethod
    def fits(kernel: Kernel) -> bool:
        """Whether there is a stage to schedule."""
        return any(stage.regular and stage.extents for stage in kernel.stages)

    def _knobs(self) -> tuple[Knob, ...]:
        full = self.hardware.lanes(max((s.writes[0].item_bytes for s in self.kernel.stages if s.writes), default=4))
        self.full = full
        large = [stage for stage in self.kernel.stages if stage.regular and stage.iterations >= _SMALL_STAGE]
        most = max((stage.rows for stage in large if _parallel_loops(stage)), default=1)
        return (
            Knob("lanes", (1, full) if any(_run(stage, full)[1] > 1 for stage in self.kernel.stages) else (1,)),
            Knob("workers", worker_counts(self.hardware, most)),
        )

    def _work(self, knobs: Mapping[str, Values]) -> Work:
        lanes = knobs["lanes"].astype(np.float64)
        ones = np.ones_like(lanes)
        total = 0.0 * ones
        scratch = 0.0
        for stage in self.kernel.stages:
            axis = stage.spatial[-1] if stage.spatial else None
            vector = _run(stage, self.full)[1]
            # LLVM vectorises most loops without a reduction, and unrolled windows.
            alone = self.full / 3.0 if not stage.guards and stage.iterations // stage.rows <= _WINDOW else 1.0
            total = total + instructions(stage, axis, np.where(lanes > 1, float(max(vector, 1)), alone), ones)
            if stage is not self.kernel.stages[-1] and stage.writes:
                scratch += 2.0 * stage.writes[0].buffer_bytes
        rows = max((float(stage.rows) for stage in self.kernel.stages), default=1.0)
        workers = knobs["workers"].astype(np.float64)
        return Work(
            instructions=total,
            lanes=lanes,
            efficiency=ones,
            unrolled=ones,
            workers=workers,
            chunks=np.maximum(workers, rows),
            scratch_bytes=scratch * ones,
            run_bytes=64.0 * ones,
            accumulators=ones,
            variant=self.variant * ones,
        )

    def _schedule(self, schedule: Any, values: Mapping[str, int]) -> None:
        for stage in self.kernel.stages:
            if stage.regular and stage.extents:
                self._nest(schedule, stage, values)

    def _nest(self, schedule: Any, stage: Stage, values: Mapping[str, int]) -> None:
        block = schedule.get_sblock(stage.name)
        loops = list(schedule.get_loops(block))
        axes, lanes = _run(stage, self.full) if values["lanes"] > 1 else (0, 1)
        spatial = [loops[i] for i in stage.spatial]
        reduced = [loops[i] for i in stage.reduction]
        outer, run = spatial[: len(spatial) - axes], spatial[len(spatial) - axes :]
        inner = None
        if lanes > 1:
            vectors = math.prod(stage.extents[i] for i in stage.spatial[-axes:]) // lanes
            *strips, inner = schedule.split(fuse(schedule, run), [None, serial_vectors(vectors, axes), lanes])
            outer += strips
            schedule.reorder(*outer, *reduced, inner)
            schedule.vectorize(inner)
        elif reduced and outer:
            schedule.reorder(*outer, *reduced)
        elif len(outer) > 1:
            outer = outer[:-1]  # the innermost loop stays LLVM's to vectorise
        if values["workers"] > 1 and outer and stage.iterations >= _SMALL_STAGE and stage.rows >= values["workers"]:
            parallelize(schedule, outer, values["workers"], self.hardware.threads)
        if reduced and inner is not None:
            schedule.decompose_reduction(block, reduced[0])


def _parallel_loops(stage: Stage) -> bool:
    """Whether a loop is left to share among threads when the innermost spatial one is LLVM's."""
    return len(stage.spatial) > (0 if stage.is_reduction else 1)


def _run(stage: Stage, full: int) -> tuple[int, int]:
    """How many of the last spatial axes are one contiguous run, and the vector that cuts it evenly; 0 and 1 if none."""
    if not stage.regular or stage.combiners != 1 or not stage.spatial:
        return 0, 1
    last = stage.spatial[-1]
    plain = all(access.strides[last] in (0, 1) for access in stage.reads) and last not in stage.guards
    if not plain or stage.writes[0].strides[last] != 1:
        return 0, 1
    axes = stage.run(stage.spatial)
    length = math.prod(stage.extents[i] for i in stage.spatial[-axes:])
    return axes, divisors_up_to(length, full)[-1]


class UntouchedSketch(Sketch):
    """The program as it came, for what cannot be analysed or scheduled. No knobs."""

    name = "untouched"
    knobs: tuple[Knob, ...] = ()

    def __init__(self, mod: Any) -> None:
        self.mod = mod

    def legal(self, values: Values) -> NDArray[np.bool_]:
        """Always."""
        return np.ones(len(values), dtype=np.bool_)

    def features(self, values: Values) -> NDArray[np.float32]:
        """Nothing is known."""
        return np.full((len(values), len(FEATURES)), np.nan, dtype=np.float32)

    def latency_s(self, values: Values) -> NDArray[np.float64]:
        """Nothing is known: one second, behind everything that is."""
        return np.ones(len(values))

    def apply(self, values: Mapping[str, int]) -> Any:
        """An empty schedule."""
        return schedule_of(self.mod)
