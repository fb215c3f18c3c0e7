"""Transfer: kernels start from what was best for similar ones, in this run and in the records of earlier runs."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..errors import RecordError
from ..records import Context, RecordDatabase
from ..records.workload import deserialize_workload
from ..search.space.base import Decision, Points
from ..search.space.hardware import ONE_THREAD
from ..search.strategies.transfer import nearest_point
from .kernel_search import KernelSearch

__all__ = ["Transfer", "shape_distance", "shapes_of"]

Shapes = Sequence[Sequence[int]]

DONORS = 8
"""Kernels whose best schedule is looked at, nearest first."""


@dataclass
class Transfer:
    """Suggests the first candidates of a kernel: the best decisions of the nearest kernels, mapped onto its knobs.

    Only kernels that were measured on the same device, with the same target, threads and version of TVM count.

    Attributes
    ----------
    database : RecordDatabase
        What earlier runs measured.
    context : Context
        Where this run measures.
    count : int
        Suggestions for a kernel, at most; the rest of its first batch is the search's own.
    """

    database: RecordDatabase
    context: Context
    count: int = 4
    _past: dict[str, tuple[Shapes, Decision]] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        for workload, record in self.database.best_by_workload(self.context).items():
            known = self.database.workload(workload)
            if record.decision and known is not None:
                try:
                    shapes = shapes_of(deserialize_workload(known.text))
                except RecordError:  # written by another version of TVM; a run without its suggestion is only slower
                    continue
                self._past[workload] = shapes, Decision.from_json(json.loads(record.decision))

    def suggest(self, kernel: KernelSearch, kernels: Iterable[KernelSearch]) -> Points:
        """At most `count` legal points of the kernel's space, shape [n, 1 + knobs], the nearest kernel's first.

        `kernels` are those of this run; what they measured so far is newer than the records.
        """
        donors: Mapping[str, tuple[Shapes, Decision]] = self._past | {
            other.task.workload_hash: (shapes_of(other.task.mod), other.best.decision)
            for other in kernels
            if other.best is not None
        }
        shapes = shapes_of(kernel.task.mod)
        ranked = sorted(
            (shape_distance(shapes, donor_shapes), workload)
            for workload, (donor_shapes, _) in donors.items()
            if workload != kernel.task.workload_hash
        )
        points: list[Points] = []
        for distance, workload in ranked[:DONORS]:
            point = nearest_point(kernel.space, donors[workload][1]) if math.isfinite(distance) else None
            if point is not None and not any(np.array_equal(point, other) for other in points):
                points.append(point)
        width = 1 + kernel.space.cardinalities.shape[1]
        return np.array(points[: self.count], dtype=np.int16).reshape(-1, width)


def shapes_of(mod: Any) -> Shapes:
    """The shapes of a workload's arguments; an extent that is not a constant counts as 1.

    Before them comes an empty one where one thread computes the workload: those are like each other alone.
    """
    shapes = [
        [int(extent) if hasattr(extent, "value") or isinstance(extent, int) else 1 for extent in parameter.shape]
        for parameter in mod["main"].params
    ]
    return [[], *shapes] if ONE_THREAD in (mod["main"].attrs or {}) else shapes


def shape_distance(left: Shapes, right: Shapes) -> float:
    """How unlike two kernels are: the distance of their log2 shapes; `inf` where the arguments do not correspond.

    The operands come first among a fused kernel's arguments, residuals and biases after: a missing one of those costs
    as much as one extent that is twice as large.
    """
    common = list(zip(left, right, strict=False))
    if any(len(a) != len(b) for a, b in common):
        return math.inf
    logs = [math.log2(max(1, m) / max(1, n)) for a, b in common for m, n in zip(a, b, strict=True)]
    return math.hypot(*logs, abs(len(left) - len(right)))
