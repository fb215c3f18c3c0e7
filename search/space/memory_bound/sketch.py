"""What all sketches of memory-bound kernels share."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..base import Knob, Sketch
from ..hardware import Hardware
from ..nest import partition
from . import cost
from .cost import Work
from .inlining import inlined
from .kernel import Kernel, Stage

__all__ = ["MemoryBoundSketch", "compute_padded_at", "divisors_up_to", "ragged_efficiency", "worker_counts"]

Values = NDArray[np.int64]


class MemoryBoundSketch(Sketch):
    """A sketch over the stages that are left when everything but `keep` is inlined.

    Parameters
    ----------
    mod : tvm.ir.IRModule
        One function, "main".
    keep : frozenset of str
        Element-wise stages that keep a buffer of their own.
    kernel : Kernel
        The stages that are left.
    hardware : Hardware
    suffix : str
        Distinguishes sketches of one family with different `keep`.
    """

    family: str
    family_index: int

    def __init__(self, mod: Any, keep: frozenset[str], kernel: Kernel, hardware: Hardware, suffix: str = "") -> None:
        self.mod, self.keep, self.kernel, self.hardware = mod, keep, kernel, hardware
        self.name = self.family + suffix
        self.variant = float(len(keep))
        self.knobs = self._knobs()

    @staticmethod
    @abstractmethod
    def fits(kernel: Kernel) -> bool:
        """Whether the sketch can schedule these stages."""

    @abstractmethod
    def _knobs(self) -> tuple[Knob, ...]:
        """The decisions; called once."""

    @abstractmethod
    def _work(self, knobs: Mapping[str, Values]) -> Work:
        """What candidates do; one array of values a knob."""

    @abstractmethod
    def _schedule(self, schedule: Any, values: Mapping[str, int]) -> None:
        """Transform a schedule whose stages are `self.kernel.stages`."""

    def _integer_columns(self, values: Values) -> dict[str, Values]:
        """As `_columns`, of integers."""
        return {knob.name: values[:, column] for column, knob in enumerate(self.knobs)}

    def legal(self, values: Values) -> NDArray[np.bool_]:
        """Every combination, unless a sketch says otherwise."""
        return np.ones(len(values), dtype=np.bool_)

    def features(self, values: Values) -> NDArray[np.float32]:
        """See `Sketch.features`."""
        return cost.features(self.hardware, self.kernel, self._work(self._integer_columns(values)), self.family_index)

    def latency_s(self, values: Values) -> NDArray[np.float64]:
        """See `Sketch.latency_s`."""
        return cost.latency_s(self.hardware, self.kernel, self._work(self._integer_columns(values)))

    def apply(self, values: Mapping[str, int]) -> Any:
        """See `Sketch.apply`."""
        schedule = inlined(self.mod, self.keep)
        self._schedule(schedule, values)
        return schedule


def compute_padded_at(schedule: Any, block: Any, stage: Stage, loop: Any) -> None:
    """Compute a stage that keeps a buffer, and whose block this is, at a loop: a border of conditions is code apart."""
    schedule.compute_at(block, loop, preserve_unit_loops=True)
    own = schedule.get_loops(block)
    inner = own[len(own) - len(stage.extents) :]
    for axis in stage.guards:
        partition(schedule, inner[axis])


def worker_counts(hardware: Hardware, chunks: int) -> tuple[int, ...]:
    """1 (serial), powers of two, and all threads; no more than there are chunks."""
    counts = {1, hardware.threads} | {1 << i for i in range(1, hardware.threads.bit_length())}
    return tuple(sorted(c for c in counts if c <= min(hardware.threads, max(1, chunks))))


def divisors_up_to(extent: int, most: int) -> tuple[int, ...]:
    """Divisors of `extent` that are at most `most`, ascending."""
    return tuple(d for d in range(1, min(extent, most) + 1) if extent % d == 0)


def ragged_efficiency(extent: int, step: Values, lanes: NDArray[np.float64]) -> NDArray[np.float64]:
    """Useful share of vector slots when a loop of `extent` is cut in steps and the tail runs one by one."""
    tail = extent % step
    slots = (extent // step) * (step / lanes) + tail
    return (extent / lanes) / np.maximum(slots, 1e-9)
