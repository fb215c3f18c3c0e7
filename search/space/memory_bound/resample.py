"""Resized images with channels first: each row of the output picks elements of rows of the input (picked_lanes.py)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..base import Knob
from ..marks import PICKED_LANES
from ..nest import parallelize
from .cost import Work
from .inlining import inlined
from .kernel import Kernel
from .picked_lanes import picked_rows
from .sketch import MemoryBoundSketch, Values, worker_counts

__all__ = ["ResampleSketch"]

_MOST_VECTORS = 64
_PICK = 8.0  # instructions' worth of one: a load that often lies in two lines, its permutation, its multiply-adds


class ResampleSketch(MemoryBoundSketch):
    """One stage without reduction that reads some row at places which depend on the column, but on nothing else.

    Knobs: `lanes` of the vectors, `workers`.
    """

    family = "resample"
    family_index = 16

    @staticmethod
    def fits(kernel: Kernel) -> bool:
        """Whether the kernel may be one, by its numbers. Which vectors are possible, if any, its code tells later."""
        if len(kernel.stages) != 1 or not kernel.stages[0].regular or kernel.stages[0].is_reduction:
            return False
        (stage,) = kernel.stages
        column = len(stage.extents) - 1
        return (
            column > 0
            and len(stage.writes) == 1
            and stage.writes[0].strides[column] == 1
            and column not in stage.guards
            and not stage.calls
            and not stage.forms
            and any(read.strides[column] is None for read in stage.reads)
        )

    def _knobs(self) -> tuple[Knob, ...]:
        (self.stage,) = self.kernel.stages
        *outer, self.width = self.stage.extents
        self.rows = int(np.prod(outer))
        schedule = inlined(self.mod, self.keep)
        block = schedule.get(schedule.get_sblock(self.stage.name))
        full = self.hardware.lanes(self.stage.writes[0].item_bytes)
        lengths = [v for v in (full // 2, full) if 1 < v <= self.width <= _MOST_VECTORS * v and picked_rows(block, v)]
        return (Knob("lanes", tuple(lengths) or (1,)), Knob("workers", worker_counts(self.hardware, self.rows)))

    def legal(self, values: Values) -> NDArray[np.bool_]:
        """Vectors."""
        return np.asarray(self._integer_columns(values)["lanes"] > 1)

    def _work(self, knobs: Mapping[str, Values]) -> Work:
        lanes = knobs["lanes"].astype(np.float64)
        vectors = self.rows * np.ceil(self.width / lanes)
        picks = sum(read.strides[-1] is None for read in self.stage.reads)
        same = np.zeros_like(lanes)
        # What depends on no load is folded, or computed once a row.
        return Work(
            instructions=vectors * (_PICK * picks + 2.0 * (len(self.stage.reads) - picks) + 1.0),
            lanes=lanes,
            efficiency=np.ones_like(lanes),
            unrolled=np.ceil(self.width / lanes),
            workers=knobs["workers"].astype(np.float64),
            chunks=same + float(self.rows),
            scratch_bytes=same,
            run_bytes=same + float(self.width * self.stage.writes[0].item_bytes),
            accumulators=same,
            variant=same + self.variant,
        )

    def _schedule(self, schedule: Any, values: Mapping[str, int]) -> None:
        *outer, row = schedule.get_loops(schedule.get_sblock(self.stage.name))
        schedule.annotate(row, PICKED_LANES, values["lanes"])
        parallelize(schedule, outer, values["workers"], self.hardware.threads)
