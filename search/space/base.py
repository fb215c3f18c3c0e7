"""The search space of one kernel, seen as decision vectors.

A *sketch* is a parametrised schedule: a list of *knobs* (decisions with ordered values) and a function that applies
chosen values to the kernel. A *space* holds the sketches that fit a kernel. A *point* is one candidate as a row of
small integers: column 0 is the sketch, column 1 + j the index into the values of the sketch's j-th knob; columns that
a sketch does not use are 0. Strategies see points only, thousands at a time; nothing is lowered to score them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

__all__ = ["Decision", "DecisionSpace", "Knob", "Points", "Sketch", "Space"]

Points = NDArray[np.int16]
"""Candidates, shape [n, 1 + most knobs of any sketch]."""


@dataclass(frozen=True)
class Knob:
    """One decision. `values` are ordered, so that neighbours are similar programs and a move of one step is small."""

    name: str
    values: tuple[int, ...]


@dataclass(frozen=True)
class Decision:
    """A candidate by name: what records store, and what workers apply. Independent of the order of knobs and values."""

    sketch: str
    values: Mapping[str, int]

    def to_json(self) -> dict[str, Any]:
        """As a JSON object."""
        return {"sketch": self.sketch, "values": dict(self.values)}

    @staticmethod
    def from_json(fields: Mapping[str, Any]) -> Decision:
        """The inverse of `to_json`."""
        return Decision(str(fields["sketch"]), {str(k): int(v) for k, v in fields["values"].items()})


class Sketch(ABC):
    """A parametrised schedule of one kernel. Arrays of values have shape [n, number of knobs], in knob order."""

    name: str
    knobs: tuple[Knob, ...]

    @property
    def skipped_share(self) -> float:
        """Share of the kernel's FLOPs that some candidates leave out, because they are with zeros around an image."""
        return 0.0

    @property
    def product_rate(self) -> float:
        """How many times as fast as float32's multiply-adds the kernel's products may be."""
        return 1.0

    @abstractmethod
    def legal(self, values: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which rows obey the constraints, shape [n]. A row that can be seen to be bad is not legal."""

    @abstractmethod
    def features(self, values: NDArray[np.int64]) -> NDArray[np.float32]:
        """What the cost model reads, shape [n, len(FEATURES)] (features.py); NaN where a feature does not apply."""

    @abstractmethod
    def latency_s(self, values: NDArray[np.int64]) -> NDArray[np.float64]:
        """An analytic estimate of the run time in seconds, shape [n]: roofline, tile efficiency, memory traffic."""

    @abstractmethod
    def apply(self, values: Mapping[str, int]) -> Any:
        """Schedule the kernel: returns a `tvm.s_tir.Schedule` whose trace replays the result."""

    def _columns(self, values: NDArray[np.int64]) -> dict[str, NDArray[np.float64]]:
        """The values of each knob by its name, arrays of shape [n]."""
        return {knob.name: values[:, column].astype(np.float64) for column, knob in enumerate(self.knobs)}


class DecisionSpace(Protocol):
    """What a strategy may know of a space. Tests and users' own strategies can bring a toy one."""

    @property
    def cardinalities(self) -> NDArray[np.int64]:
        """Number of values of each knob, shape [sketches, most knobs of any sketch]; 1 where there is no such knob."""

    def legal(self, points: Points) -> NDArray[np.bool_]:
        """Which points obey their sketch's constraints, shape [n]."""

    def features(self, points: Points) -> NDArray[np.float32]:
        """Features for the cost model, shape [n, features]."""

    def latency_s(self, points: Points) -> NDArray[np.float64]:
        """Analytic estimate in seconds, shape [n]."""


class Space:
    """The sketches of one kernel; a `DecisionSpace` that also turns points into schedules."""

    def __init__(self, sketches: Sequence[Sketch]) -> None:
        if not sketches:
            raise ValueError("a space needs at least one sketch")
        names = [sketch.name for sketch in sketches]
        if len(set(names)) != len(names):
            raise ValueError(f"sketch names repeat: {names}")
        self.sketches = tuple(sketches)
        width = max(len(sketch.knobs) for sketch in sketches)
        self._cardinalities = np.ones((len(sketches), width), dtype=np.int64)
        for row, sketch in enumerate(sketches):
            for column, knob in enumerate(sketch.knobs):
                self._cardinalities[row, column] = len(knob.values)

    @property
    def skipped_share(self) -> float:
        """The most of any sketch's: what a roofline must not count."""
        return max(sketch.skipped_share for sketch in self.sketches)

    @property
    def product_rate(self) -> float:
        """The most of any sketch's: what a roofline must divide FLOPs by."""
        return max(sketch.product_rate for sketch in self.sketches)

    @property
    def cardinalities(self) -> NDArray[np.int64]:
        """Number of values of each knob, shape [sketches, knobs]; 1 where a sketch has no such knob."""
        return self._cardinalities

    @property
    def size(self) -> int:
        """How many points there are, legal or not."""
        return int(sum(int(np.prod(row.astype(object))) for row in self._cardinalities))

    def legal(self, points: Points) -> NDArray[np.bool_]:
        """Which points obey their sketch's constraints, shape [n]."""
        result = np.zeros(len(points), dtype=np.bool_)
        for sketch, rows, values in self._by_sketch(points):
            result[rows] = sketch.legal(values)
        return result

    def features(self, points: Points) -> NDArray[np.float32]:
        """Features for the cost model, shape [n, len(FEATURES)]."""
        from .features import FEATURES

        result = np.full((len(points), len(FEATURES)), np.nan, dtype=np.float32)
        for sketch, rows, values in self._by_sketch(points):
            result[rows] = sketch.features(values)
        return result

    def latency_s(self, points: Points) -> NDArray[np.float64]:
        """Analytic estimate in seconds, shape [n]."""
        result = np.full(len(points), np.inf)
        for sketch, rows, values in self._by_sketch(points):
            result[rows] = sketch.latency_s(values)
        return result

    def decision(self, point: NDArray[Any]) -> Decision:
        """The point (shape [1 + knobs]) by name."""
        sketch = self.sketches[int(point[0])]
        return Decision(sketch.name, {k.name: k.values[int(i)] for k, i in zip(sketch.knobs, point[1:], strict=False)})

    def point(self, decision: Decision) -> Points | None:
        """The inverse of `decision`, shape [1 + knobs]; None when this space no longer has that sketch or value."""
        for row, sketch in enumerate(self.sketches):
            if sketch.name != decision.sketch or len(sketch.knobs) != len(decision.values):
                continue
            point = np.zeros(1 + self._cardinalities.shape[1], dtype=np.int16)
            point[0] = row
            for column, knob in enumerate(sketch.knobs):
                if decision.values.get(knob.name) not in knob.values:
                    return None
                point[1 + column] = knob.values.index(decision.values[knob.name])
            return point
        return None

    def apply(self, decision: Decision) -> Any:
        """Schedule the kernel. Raises KeyError for an unknown sketch, ScheduleError where it does not fit.

        What LLVM would compile for minutes is refused: not all of it is compiled in a process that can be killed.
        """
        from .code_size import check_code_size  # needs TVM, which a space need not

        for sketch in self.sketches:
            if sketch.name == decision.sketch:
                schedule = sketch.apply(decision.values)
                check_code_size(schedule)
                return schedule
        raise KeyError(f"no sketch {decision.sketch!r}; this kernel has {[s.name for s in self.sketches]}")

    def _by_sketch(self, points: Points) -> list[tuple[Sketch, NDArray[np.intp], NDArray[np.int64]]]:
        groups = []
        for index, sketch in enumerate(self.sketches):
            rows = np.flatnonzero(points[:, 0] == index)
            if rows.size:
                values = np.empty((rows.size, len(sketch.knobs)), dtype=np.int64)
                for column, knob in enumerate(sketch.knobs):
                    values[:, column] = np.asarray(knob.values, dtype=np.int64)[points[rows, 1 + column]]
                groups.append((sketch, rows, values))
        return groups
