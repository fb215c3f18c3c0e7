"""The matrix product by Hopper's `wgmma` as a sketch: knobs, constraints, and an analytic estimate."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..base import Knob
from .hardware import GpuHardware
from .matrix import MatrixForm
from .occupancy import Array, Launch, Occupancy, occupancy
from .product import LEAST_ASYNC_BYTES, SHARED_BYTES_PER_CLOCK, ProductSketch, bytes_at_once
from .tensor_sketch import tensor_dtype
from .warpgroup import LINE_BYTES, ROWS, line_steps, schedule_warpgroups
from .warpgroup_lowering import LANES

__all__ = ["WarpgroupSketch"]

OTHER_REGISTERS = 40
"""Addresses and loop counters of a thread."""

PEAK_SHARE = 0.775
"""Of the tensor cores' peak, what the instructions reach while nothing else is waited for. Fitted with the next."""

STEP_CLOCKS = 220.0
"""Of barriers and of the first instruction's way, where no other block computes meanwhile. On an H200,
float16 4096 x 4096 x 4096 takes 208 to 211 us with tiles of 128 x 128 and two blocks a multiprocessor, 215 to 221 with
128 x 256 and 256 x 128, and 300 with 128 x 64 and one block."""

BLOCK_CLOCKS = 2000.0
"""Until a block's first tiles are there, and its last results written."""


class WarpgroupSketch(ProductSketch):
    """Tiles of a contraction in matrix form, on Hopper's tensor cores.

    Knobs: `groups` of four warps, each with `height` times 64 rows; `width`, the columns of a block; `stages`, tiles in
    shared memory at once; `split` of the reduction over blocks, with a second kernel that adds the parts. Each step
    takes 128 bytes of the reduction.

    Parameters
    ----------
    mod : tvm.ir.IRModule
    form : MatrixForm
        One that `warpgroup.supports_warpgroups`.
    hardware : GpuHardware
        One that `has_warpgroups`.
    """

    name = "gpu_warpgroup"
    family = 22.0

    def __init__(self, mod: Any, form: MatrixForm, hardware: GpuHardware) -> None:
        super().__init__(mod, form, hardware)
        _, rows, columns, _ = form.shape
        self.knobs = (
            Knob("groups", tuple(g for g in (1, 2, 4) if g == 1 or g * ROWS < 2 * rows)),
            Knob("height", tuple(h for h in (1, 2) if h == 1 or h * ROWS < 2 * rows)),
            Knob("width", tuple(w for w in (32, 64, 128, 192, 256) if w <= 64 or w < 2 * columns)),
            Knob("stages", (3, 4, 5, 6)),  # of two, TVM makes one: the copies come after the instructions
            self._split_knob(),
        )

    def legal(self, values: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Registers and shared memory suffice; little padding; what is copied at once can be copied asynchronously."""
        v = self._columns(values)
        _, rows, columns, reduction = self.form.shape
        launch = self._launch(v)
        steps = line_steps(self.form.a.access.dtype)
        ok = occupancy(self._hardware, launch).legal
        ok &= (_height(v) < 2 * max(rows, ROWS)) & (v["width"] < 2 * max(columns, 32))
        # Across the reduction, lines are 64 columns long.
        ok &= self.form.b.along_reduction | (v["width"] % 64 == 0)
        # Of an edge within a line that is no power of two long, TVM does not see that it spares whole vectors.
        ok &= (v["width"] != 192) | (columns % v["width"] == 0)
        ok &= np.ceil(reduction / (steps * v["split"])) > v["stages"]
        ok &= self._worth_splitting(v["split"], launch)
        for tile, operand in ((_height(v), self.form.a), (v["width"], self.form.b)):
            ok &= bytes_at_once(operand, tile * steps, launch.threads) >= LEAST_ASYNC_BYTES
        result: NDArray[np.bool_] = ok
        return result

    def apply(self, values: Mapping[str, int]) -> Any:
        """A `tvm.s_tir.Schedule`; raises what TVM raises when a step is impossible."""
        return schedule_warpgroups(self._mod, self.form, values)

    def _launch(self, v: Mapping[str, Array]) -> Launch:
        batch, rows, columns, _ = self.form.shape
        sums = v["height"] * v["width"] / 2  # of 32 bits: those of float16 are summed in float32
        return Launch(
            blocks=batch * v["split"] * np.ceil(rows / _height(v)) * np.ceil(columns / v["width"]),
            threads=v["groups"] * LANES,
            registers=sums + OTHER_REGISTERS,
            shared_bytes=v["stages"] * (_height(v) + v["width"]) * LINE_BYTES,
        )

    def _own_features(self, v: Mapping[str, Array], cost: Mapping[str, Array]) -> dict[str, Any]:
        return {
            "accumulators": v["height"] * v["width"] / 2,
            "log_tile_m": np.log2(v["height"] * ROWS),
            "log_tile_n": np.log2(v["width"]),
            "log_block_m": np.log2(_height(v)),
            "log_block_n": np.log2(v["width"]),
            "log_block_k": np.log2(line_steps(self.form.a.access.dtype)),
            "variant": np.log2(v["split"]),
        }

    def _cost(self, v: Mapping[str, Array], launch: Launch, fit: Occupancy) -> dict[str, Array]:
        hardware, form = self._hardware, self.form
        height, width, line = _height(v), v["width"], line_steps(form.a.access.dtype)
        steps = np.ceil(form.shape[3] / (line * v["split"]))
        per_clock = hardware.tensor_peak(tensor_dtype(form)) / hardware.multiprocessors / hardware.clock_hz / 2.0
        # Each group of warps reads its rows and all columns; all are written once.
        shared_bytes = (height + v["groups"] * v["height"] * width + height + width) * LINE_BYTES
        math_clocks = height * width * line / (PEAK_SHARE * per_clock)
        step_clocks = np.maximum(math_clocks, shared_bytes / SHARED_BYTES_PER_CLOCK)
        block_clocks = steps * (step_clocks + STEP_CLOCKS / fit.resident) + BLOCK_CLOCKS / fit.resident
        compute_s = np.ceil(launch.blocks / hardware.multiprocessors) * block_clocks / hardware.clock_hz
        fetched = launch.blocks * steps * (height + width) * LINE_BYTES
        memory_s = self._memory_s(fetched + self._partial_bytes(v["split"]), fit)
        return {
            "compute_s": compute_s,
            "memory_s": memory_s,
            "latency_s": np.maximum(compute_s, memory_s) + self._launches_s(v["split"]),
            "fetched": fetched,
            "padding": self._padding(height, width, line * v["split"]),
        }


def _height(v: Mapping[str, Array]) -> Array:
    """Rows of a block."""
    return v["groups"] * v["height"] * ROWS
