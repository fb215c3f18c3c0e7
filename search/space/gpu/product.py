"""What the sketches of products on a GPU share: an estimate from what is launched and what it costs, and features."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..access import dtype_bytes
from ..base import Knob, Sketch
from ..features import feature_table
from .hardware import GpuHardware
from .matrix import MatrixForm, Operand
from .occupancy import Array, Launch, Occupancy, occupancy
from .tiled import ASYNC_STAGES

__all__ = [
    "LEAST_ASYNC_BYTES",
    "LOAD_LATENCY",
    "SHARED_BYTES_PER_CLOCK",
    "ProductSketch",
    "bytes_at_once",
    "latency_seen",
    "shared_buffers",
]

LEAST_ASYNC_BYTES = 4
"""What cp.async copies at least; TVM copies less through registers."""

LATENCY_SEEN = (2.0, 1.5, 0.2)
"""Of the latency of loads, what a block waits for, barriers included: without fetching ahead, through registers,
asynchronously. Fitted to 56 candidates of a float32 product of 4096 on an H200, off by 18 %: registers hide less than
was thought, so that asynchronous copies are 15 to 40 % faster."""
LOAD_LATENCY = 600.0
"""Clocks from a load to its value in DRAM or L2, roughly."""

SHARED_BYTES_PER_CLOCK = 128.0
"""Of a multiprocessor's shared memory."""


class ProductSketch(Sketch):
    """A contraction in matrix form, by tiles.

    Parameters
    ----------
    mod : tvm.ir.IRModule
    form : MatrixForm
    hardware : GpuHardware
    """

    family: float
    """The column of that name."""

    def __init__(self, mod: Any, form: MatrixForm, hardware: GpuHardware) -> None:
        self.form = form
        self._mod = mod
        self._hardware = hardware

    def features(self, values: NDArray[np.int64]) -> NDArray[np.float32]:
        """See `features.FEATURES`."""
        v = self._columns(values)
        launch = self._launch(v)
        fit = occupancy(self._hardware, launch)
        c = self._cost(v, launch, fit)
        flops, moved = self.form.contraction.flops, self.form.kernel.bytes_moved
        batch, rows, columns, reduction = self.form.shape
        common = {
            "log_flops": np.log2(flops),
            "log_bytes": np.log2(moved),
            "family": self.family,
            "register_pressure": launch.registers / self._hardware.vector_registers,
            "tail_waste": c["padding"] - 1.0,
            "log_parallel_chunks": np.log2(launch.blocks),
            "imbalance": 1.0 / fit.busy,
            "log_chunk_flops": np.log2(flops / launch.blocks),
            "l1_footprint": launch.shared_bytes / self._hardware.shared_bytes_per_multiprocessor,
            "l2_footprint": moved / self._hardware.l2_bytes,
            "log_l2_traffic": np.log2(c["fetched"]),
            "log_memory_traffic": np.log2(moved),
            "log_reduction": np.log2(reduction),
            "compute_share": c["compute_s"] / c["latency_s"],
            "memory_share": c["memory_s"] / c["latency_s"],
            "log_latency": np.log2(c["latency_s"]),
            "occupancy": fit.share,
            "arithmetic_intensity": np.log2(2.0 * batch * rows * columns * reduction / c["fetched"]),
            "log_threads": np.log2(launch.threads),
            "waves": np.log2(fit.waves),
            "stages": v["stages"],
        }
        return feature_table(len(values), common | self._own_features(v, c))

    def latency_s(self, values: NDArray[np.int64]) -> NDArray[np.float64]:
        """The analytic estimate, shape [n]."""
        v = self._columns(values)
        launch = self._launch(v)
        return self._cost(v, launch, occupancy(self._hardware, launch))["latency_s"]

    def _stages_knob(self) -> Knob:
        """Tiles at once: asynchronous copies where the GPU has them and they reach."""
        reach = self._hardware.copies_asynchronously and self.form.copies_reach
        return Knob("stages", (1, 2, 3, 4) if reach else (1, 2))

    def _split_knob(self) -> Knob:
        """Parts of the reduction, each of 64 steps at least."""
        return Knob("split", tuple(s for s in (1, 2, 4, 8, 16, 32) if s == 1 or self.form.shape[3] >= 64 * s))

    def _worth_splitting(self, split: Array, launch: Launch) -> NDArray[np.bool_]:
        """Whether the reduction is whole, or its blocks alone would leave multiprocessors idle."""
        result: NDArray[np.bool_] = (split == 1) | (launch.blocks / split < 2 * self._hardware.multiprocessors)
        return result

    def _partial_bytes(self, split: Array) -> Array:
        """What the parts of a split reduction write, and what reads them again."""
        batch, rows, columns, _ = self.form.shape
        return np.where(split > 1, 2.0 * split * batch * rows * columns * dtype_bytes(self.form.accumulator), 0.0)

    def _padding(self, tile_i: Array, tile_j: Array, tile_k: Array) -> Array:
        """Work over what is needed, where a block sums whole multiples of `tile_k` steps of all rows and columns."""
        _, rows, columns, reduction = self.form.shape
        whole_i, whole_j = np.ceil(rows / tile_i) * tile_i, np.ceil(columns / tile_j) * tile_j
        result: Array = whole_i / rows * whole_j / columns * (np.ceil(reduction / tile_k) * tile_k) / reduction
        return result

    def _memory_s(self, moved: Array, fit: Occupancy) -> Array:
        """Seconds of what blocks move beyond their multiprocessors, in bytes: L2's time, or that of DRAM."""
        hardware = self._hardware
        l2 = hardware.cache_bandwidth_bytes_per_s * hardware.threads
        least_s = self.form.kernel.bytes_moved / hardware.bandwidth_bytes_per_s
        return np.maximum(moved / (l2 * np.minimum(1.0, 0.2 + fit.busy)), least_s)

    def _launches_s(self, split: Array) -> Array:
        """Seconds of launching: a split reduction has a second kernel."""
        return self._hardware.parallel_overhead_s * np.where(split > 1, 2.0, 1.0)

    @abstractmethod
    def _launch(self, v: Mapping[str, Array]) -> Launch:
        """What points ask for, by their knobs."""

    @abstractmethod
    def _cost(self, v: Mapping[str, Array], launch: Launch, fit: Occupancy) -> dict[str, Array]:
        """Seconds (`compute_s`, `memory_s`, `latency_s`), bytes `fetched`, and `padding`: work over what is needed."""

    @abstractmethod
    def _own_features(self, v: Mapping[str, Array], cost: Mapping[str, Array]) -> dict[str, Any]:
        """Features of this sketch's tiles."""


def shared_buffers(stages: Array) -> Array:
    """Tiles of an operand in shared memory at once: where the next ones wait in registers, one is enough."""
    return np.where(stages < ASYNC_STAGES, 1.0, stages)


def latency_seen(stages: Array) -> Array:
    """What a block waits for in a step, in latencies of a load."""
    result: Array = np.asarray(LATENCY_SEEN)[np.minimum(stages, ASYNC_STAGES).astype(np.int64) - 1]
    return result


def bytes_at_once(operand: Operand, elements: Array, threads: Array) -> Array:
    """Bytes of one load when so many threads fetch a tile of so many elements, arrays of shape [n]."""
    fetches = zip(elements, threads, strict=True)
    return operand.item_bytes * np.array([operand.vector(int(n), int(t)) for n, t in fetches])
