"""What the sketches of everything that is no matrix product share on a GPU: an estimate from what candidates do."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..base import Knob, Sketch
from ..features import feature_table
from ..memory_bound.inlining import inlined
from ..memory_bound.kernel import Kernel, Stage
from .hardware import STATIC_SHARED_BYTES, GpuHardware
from .occupancy import Array, Launch, occupancy

__all__ = ["GpuWork", "MemoryBoundGpuSketch", "coalesced_share", "powers", "stage_instructions"]

Values = NDArray[np.int64]

CALL_CLOCKS = 8.0
"""One special-function call, in issue slots: exp, tanh and the like go to a quarter-rate unit."""

LATENCY = 700.0
"""Clocks of a dependent load from DRAM, roughly."""


@dataclass
class GpuWork:
    """What a candidate does, arrays of shape [n].

    Attributes
    ----------
    blocks, threads : launch of the largest kernel
    moved_bytes : bytes moved in all, scratch buffers in global memory included
    coalescing : useful share of what the transactions move
    instructions : of all threads together
    chain : loads of one thread that wait for each other
    shared_bytes : of a block
    kernels : launches
    registers : of a thread
    """

    blocks: Array
    threads: Array
    moved_bytes: Array
    coalescing: Array
    instructions: Array
    chain: Array
    shared_bytes: Array
    kernels: Array
    registers: Array


class MemoryBoundGpuSketch(Sketch):
    """A sketch over the stages that are left when everything but `keep` is inlined.

    Parameters
    ----------
    mod : tvm.ir.IRModule
    keep : frozenset of str
        Element-wise stages that keep a buffer of their own.
    kernel : Kernel
        The stages that are left.
    hardware : GpuHardware
    suffix : str
        Tells sketches of one family with different `keep` apart.
    """

    family: str
    family_index: int

    def __init__(self, mod: Any, keep: frozenset[str], kernel: Kernel, hardware: GpuHardware, suffix: str = "") -> None:
        self.mod, self.keep, self.kernel, self.hardware = mod, keep, kernel, hardware
        self.name = self.family + suffix
        self.knobs = self._knobs()

    @staticmethod
    @abstractmethod
    def fits(kernel: Kernel) -> bool:
        """Whether the sketch can schedule these stages."""

    @abstractmethod
    def _knobs(self) -> tuple[Knob, ...]:
        """The decisions; called once."""

    @abstractmethod
    def _work(self, v: Mapping[str, Array]) -> GpuWork:
        """What candidates do; one array of values a knob."""

    @abstractmethod
    def _schedule(self, schedule: Any, values: Mapping[str, int]) -> None:
        """Transform a schedule whose stages are `self.kernel.stages`."""

    def _possible(self, v: Mapping[str, Array]) -> NDArray[np.bool_]:
        """Constraints beyond the device's limits."""
        return np.ones(len(next(iter(v.values()))), dtype=np.bool_)

    def legal(self, values: Values) -> NDArray[np.bool_]:
        """Whatever the device can launch and the sketch allows. All shared memory is declared by the kernel."""
        v = self._columns(values)
        launch = _launch(self._work(v))
        declared: NDArray[np.bool_] = launch.shared_bytes <= STATIC_SHARED_BYTES
        return self._possible(v) & declared & occupancy(self.hardware, launch).legal

    def latency_s(self, values: Values) -> NDArray[np.float64]:
        """See `Sketch.latency_s`."""
        return self._seconds(self._work(self._columns(values)))[2]

    def features(self, values: Values) -> NDArray[np.float32]:
        """See `Sketch.features`."""
        v = self._columns(values)
        work = self._work(v)
        fit = occupancy(self.hardware, _launch(work))
        compute_s, memory_s, latency_s = self._seconds(work)
        reduction = max((stage.iterations // max(1, stage.rows) for stage in self.kernel.stages), default=1)
        return feature_table(
            len(values),
            {
                "log_flops": float(np.log2(1.0 + self.kernel.operations)),
                "log_bytes": float(np.log2(1.0 + self.kernel.argument_bytes)),
                "family": float(self.family_index),
                "log_vector_elements": np.log2(v.get("vector", work.blocks * 0 + 1.0)),
                "register_pressure": work.registers / self.hardware.vector_registers,
                "log_parallel_chunks": np.log2(work.blocks),
                "imbalance": 1.0 / fit.busy,
                "l1_footprint": work.shared_bytes / self.hardware.shared_bytes_per_multiprocessor,
                "l2_footprint": work.moved_bytes / self.hardware.l2_bytes,
                "log_memory_traffic": np.log2(1.0 + work.moved_bytes),
                "log_reduction": float(np.log2(reduction)),
                "compute_share": compute_s / latency_s,
                "memory_share": memory_s / latency_s,
                "log_latency": np.log2(latency_s),
                "variant": float(len(self.keep)),
                "occupancy": fit.share,
                "coalescing": work.coalescing,
                "log_threads": np.log2(work.threads),
                "waves": np.log2(fit.waves),
            },
        )

    def apply(self, values: Mapping[str, int]) -> Any:
        """See `Sketch.apply`."""
        schedule = inlined(self.mod, self.keep)
        self._schedule(schedule, values)
        return schedule

    def _seconds(self, work: GpuWork) -> tuple[Array, Array, Array]:
        """Computing, moving, and all: the device's throughput, and the chain of waiting loads of one thread."""
        hardware = self.hardware
        fit = occupancy(hardware, _launch(work))
        lanes = hardware.peak_flops_per_s / hardware.clock_hz / 2.0 * hardware.multiprocessors
        filled = np.minimum(1.0, work.blocks * work.threads / lanes) * fit.busy
        compute_s = work.instructions / (lanes * hardware.clock_hz) / np.maximum(filled, 1e-3)
        # Some 8 resident warps a multiprocessor, each with a load under way, are needed to keep the memory busy.
        warps = np.minimum(
            fit.resident * work.threads / hardware.warp_size, work.blocks * work.threads / hardware.warp_size
        )
        reach = np.minimum(1.0, warps / 24.0) * np.minimum(1.0, work.blocks / hardware.multiprocessors)
        cached = work.moved_bytes <= hardware.l2_bytes
        l2 = hardware.cache_bandwidth_bytes_per_s * hardware.multiprocessors
        bandwidth = np.where(cached, l2, hardware.bandwidth_bytes_per_s)
        memory_s = work.moved_bytes / work.coalescing / bandwidth / np.maximum(reach, 1e-2)
        waiting_s = work.chain * LATENCY / hardware.clock_hz * np.maximum(1.0, np.ceil(fit.waves))
        latency_s = np.maximum(compute_s, memory_s) + waiting_s + work.kernels * hardware.parallel_overhead_s
        return compute_s, memory_s, latency_s


def _launch(work: GpuWork) -> Launch:
    return Launch(work.blocks, work.threads, work.registers, work.shared_bytes)


def stage_instructions(stage: Stage) -> float:
    """Issue slots of a whole stage: arithmetic, calls, and one a load or store."""
    per_element = stage.operations + stage.calls * CALL_CLOCKS + len(stage.reads) + len(stage.writes)
    return float(stage.iterations * per_element)


def coalesced_share(stage: Stage, axis: int | None) -> float:
    """Useful share of the 32-byte sectors that neighbouring threads touch when they follow `axis`, by bytes."""
    total, touched = 0.0, 0.0
    for access in stage.reads + stage.writes:
        stride = None if axis is None else access.strides[axis]
        need = float(access.item_bytes)
        total += need
        # A condition or an index that is looked up: assume that neighbours are close.
        step = 2 if stride is None else abs(stride)
        touched += need * min(max(step, 1 if step else 0.25), 32.0 / access.item_bytes) if step else need * 0.25
    return min(1.0, total / max(touched, 1e-9))


def powers(least: int, most: int) -> tuple[int, ...]:
    """Powers of two from `least` to `most`."""
    return tuple(1 << i for i in range(12) if least <= 1 << i <= most)
