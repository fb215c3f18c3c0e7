"""The matrix product on tensor cores as a sketch: knobs, constraints, and an analytic estimate."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..access import dtype_bytes
from ..base import Knob
from .hardware import STATIC_SHARED_BYTES, GpuHardware
from .matrix import MatrixForm, Operand
from .occupancy import Array, Launch, Occupancy, occupancy
from .product import (
    LEAST_ASYNC_BYTES,
    LOAD_LATENCY,
    SHARED_BYTES_PER_CLOCK,
    ProductSketch,
    bytes_at_once,
    latency_seen,
    shared_buffers,
)
from .tensor_core import FRAGMENT, SUMS_ALIGNMENT, WARP, fragment_steps, schedule_fragments
from .tf32 import permitted_products
from .tiled import ASYNC_STAGES, line_padding

__all__ = ["TensorCoreSketch", "tensor_dtype"]

OTHER_REGISTERS = 48
"""Addresses, predicates and loop counters of a thread."""

PEAK_SHARE = (0.65, 0.7)
"""Of the tensor cores' peak, what WMMA and `mma` reach at best on other GPUs than Hopper's. An assumption."""

HOPPER_SHARE = 0.4
"""The same on Hopper, which has faster instructions. Fitted, with the warps in `_cost`, to 39 candidates of float16
products of 4096 and 2048 on an H200: off by 23 % (root mean square)."""


class TensorCoreSketch(ProductSketch):
    """Tiles of a contraction in matrix form, of 16 x 16 x 16 fragments.

    Knobs: `wi` x `wj` warps, `fi` x `fj` fragments of each, `bk` steps of the reduction in shared memory, `stages`
    (2: the next tiles are loaded into registers while these are used; 3 and 4: so many buffers in shared memory, filled
    by asynchronous copies), `mma` (the instruction; 0: WMMA), `split` of the reduction over blocks, with a second
    kernel that adds the parts.

    Parameters
    ----------
    mod : tvm.ir.IRModule
    form : MatrixForm
        One that `tensor_core.supports`; of float32 where the kernel permits it (`tf32`).
    hardware : GpuHardware
    """

    name = "gpu_tensor_core"
    family = 21.0

    def __init__(self, mod: Any, form: MatrixForm, hardware: GpuHardware) -> None:
        super().__init__(mod, form, hardware)
        self._dtype = tensor_dtype(form)
        self._products = permitted_products(mod["main"]) if self._dtype == "tfloat32" else 1
        _, rows, columns, reduction = form.shape
        self.knobs = (
            Knob("wi", _counts(rows)),
            Knob("fi", _counts(rows)),
            Knob("wj", _counts(columns)),
            Knob("fj", _counts(columns)),
            Knob("bk", tuple(b for b in (16, 32, 64) if b == 16 or b < 2 * reduction)),
            self._stages_knob(),
            Knob("mma", (1,) if self._dtype == "tfloat32" else (0, 1) if hardware.copies_asynchronously else (0,)),
            self._split_knob(),
        )

    def legal(self, values: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Registers and shared memory suffice; little padding; every thread has something to fetch."""
        v = self._columns(values)
        _, rows, columns, reduction = self.form.shape
        launch = self._launch(v)
        tile_i, tile_j = _tiles(v)
        ok = occupancy(self._hardware, launch).legal & self._shares_memory(v)
        # Half a tile of padding at most, unless the whole extent is smaller than a fragment.
        ok &= (tile_i < 2 * max(rows, FRAGMENT)) & (tile_j < 2 * max(columns, FRAGMENT))
        ok &= (v["mma"] == 0) | (v["bk"] % fragment_steps(self.form.a.access.dtype, 1) == 0)
        ok &= (v["stages"] == 1) | (np.ceil(reduction / (v["bk"] * v["split"])) > v["stages"])
        ok &= self._worth_splitting(v["split"], launch)
        for tile, operand in self._staged_by(v):
            at_once = bytes_at_once(operand, tile * v["bk"], launch.threads)
            ok &= (v["stages"] < ASYNC_STAGES) | (at_once >= LEAST_ASYNC_BYTES)
        ok &= np.minimum(tile_i, tile_j) * v["bk"] >= launch.threads
        result: NDArray[np.bool_] = ok & (v["wi"] * v["wj"] <= 16)
        return result

    def apply(self, values: Mapping[str, int]) -> Any:
        """A `tvm.s_tir.Schedule`; raises what TVM raises when a step is impossible."""
        return schedule_fragments(self._mod, self.form, values)

    def _launch(self, v: Mapping[str, Array]) -> Launch:
        batch, rows, columns, _ = self.form.shape
        tile_i, tile_j = _tiles(v)
        threads = v["wi"] * v["wj"] * WARP
        item = self.form.a.item_bytes
        sums = 8.0 * v["fi"] * v["fj"] * dtype_bytes(self.form.accumulator) / 4
        # A fragment of an operand is 16 x 16 elements over 32 threads; WMMA keeps float16 twice. Of `mma` it is
        # 16 x 32 bytes.
        operands = (v["fi"] + v["fj"]) * np.where(v["mma"], 4.0, 8.0 if item == 2 else 2.0)
        operands = operands + (16.0 if self._products > 1 else 0.0)  # a pair of them in two parts
        ahead = np.where(v["stages"] == 2, (tile_i + tile_j) * v["bk"] * item / 4 / threads, 0.0)
        inputs = sum(_staged(tile, v["bk"], operand.along_reduction) for tile, operand in self._staged_by(v)) * item
        inputs = inputs * shared_buffers(v["stages"])
        result = tile_i * (tile_j + SUMS_ALIGNMENT) * dtype_bytes(self.form.accumulator)
        return Launch(
            blocks=batch * v["split"] * np.ceil(rows / tile_i) * np.ceil(columns / tile_j),
            threads=threads,
            registers=sums + operands + ahead + OTHER_REGISTERS,
            # The sums need their place beside the operands': TVM merges the two only in part.
            shared_bytes=np.asarray(inputs + result),
        )

    def _shares_memory(self, v: Mapping[str, Array]) -> NDArray[np.bool_]:
        """Whether TVM compiles and launches a kernel with its sums beside the operands in shared memory.

        Static sums: its runtime asks for more than 48 KB in all only where the dynamic part alone is as much. Dynamic
        ones, as WMMA stores them: it gives them an operand's place that is large enough, and refuses where dtypes
        differ (StorageRewrite; "tvm_access_ptr element type must match").
        """
        tile_i, tile_j = _tiles(v)
        sums_bytes = dtype_bytes(self.form.accumulator)
        sums = tile_i * tile_j * sums_bytes  # tensorized stores lose the padding of lines
        buffers = shared_buffers(v["stages"])
        operands = [buffers * _padded_bytes(tile, v["bk"], operand) for tile, operand in self._staged_by(v)]
        dynamic = operands[0] + operands[1]
        launched = (sums + dynamic <= STATIC_SHARED_BYTES) | (dynamic >= STATIC_SHARED_BYTES)
        same_dtype = self.form.a.access.dtype == self.form.accumulator
        apart = (v["mma"] > 0) | (np.maximum(*operands) < sums) | same_dtype
        static = tile_i * (tile_j + SUMS_ALIGNMENT) * sums_bytes <= STATIC_SHARED_BYTES
        return np.where(static, launched, apart)

    def _staged_by(self, v: Mapping[str, Array]) -> tuple[tuple[Array, Any], ...]:
        tile_i, tile_j = _tiles(v)
        return (tile_i, self.form.a), (tile_j, self.form.b)

    def _own_features(self, v: Mapping[str, Array], cost: Mapping[str, Array]) -> dict[str, Any]:
        tile_i, tile_j = _tiles(v)
        return {
            "accumulators": v["fi"] * v["fj"] * 8,
            "log_tile_m": np.log2(v["fi"] * FRAGMENT),
            "log_tile_n": np.log2(v["fj"] * FRAGMENT),
            "log_block_m": np.log2(tile_i),
            "log_block_n": np.log2(tile_j),
            "log_block_k": np.log2(v["bk"]),
            "variant": v["mma"] + 2.0 * np.log2(v["split"]),
        }

    def _cost(self, v: Mapping[str, Array], launch: Launch, fit: Occupancy) -> dict[str, Array]:
        hardware, form = self._hardware, self.form
        tile_i, tile_j = _tiles(v)
        steps = np.ceil(form.shape[3] / (v["bk"] * v["split"]))
        item = form.a.item_bytes
        peak = hardware.tensor_peak(self._dtype) / self._products
        shares = np.asarray(PEAK_SHARE)[v["mma"].astype(np.int64)]
        per_clock = (
            (HOPPER_SHARE if hardware.is_hopper else shares) * peak / hardware.multiprocessors / hardware.clock_hz / 2.0
        )
        warps = v["wi"] * v["wj"]
        # Of one step and block: multiply-adds on the tensor cores, beside reads of fragments from shared memory.
        math_clocks = tile_i * tile_j * v["bk"] / per_clock
        read_bytes = warps * (v["fi"] + v["fj"]) * FRAGMENT * v["bk"] * item
        step_clocks = np.maximum(math_clocks, read_bytes / SHARED_BYTES_PER_CLOCK) + 0.2 * np.minimum(
            math_clocks, read_bytes / SHARED_BYTES_PER_CLOCK
        )
        # Each of the four tensor cores wants a warp with several fragments in flight.
        parallel = np.minimum(1.0, np.sqrt(warps * fit.resident * v["fi"] * v["fj"] / 64.0))
        waiting = LOAD_LATENCY * latency_seen(v["stages"]) / np.maximum(fit.resident, 1.0)
        write_clocks = tile_i * tile_j * dtype_bytes(form.accumulator) / 32.0
        block_clocks = steps * (step_clocks / np.maximum(parallel, 0.05) + waiting) + 2.0 * LOAD_LATENCY + write_clocks
        compute_s = np.ceil(launch.blocks / hardware.multiprocessors) * block_clocks / hardware.clock_hz
        fetched = launch.blocks * steps * v["bk"] * (tile_i + tile_j) * item
        memory_s = self._memory_s(fetched + self._partial_bytes(v["split"]), fit)
        latency_s = np.maximum(compute_s, memory_s) + 0.2 * np.minimum(compute_s, memory_s)
        return {
            "compute_s": compute_s,
            "memory_s": memory_s,
            "latency_s": latency_s + self._launches_s(v["split"]),
            "fetched": fetched,
            "padding": self._padding(tile_i, tile_j, v["bk"] * v["split"]),
        }


def tensor_dtype(form: MatrixForm) -> str:
    """What the tensor cores take the operands as: an entry of `hardware.TENSOR_DTYPES`."""
    dtype = form.a.access.dtype
    return {"uint8": "int8", "float32": "tfloat32"}.get(dtype, dtype)


def _counts(extent: int) -> tuple[int, ...]:
    return tuple(n for n in (1, 2, 4) if n == 1 or n * FRAGMENT < 2 * extent)


def _tiles(v: Mapping[str, Array]) -> tuple[Array, Array]:
    return v["wi"] * v["fi"] * FRAGMENT, v["wj"] * v["fj"] * FRAGMENT


def _padded_bytes(tile: Array, steps: Array, operand: Operand) -> Array:
    """Bytes of one buffer of an operand's tile, its lines padded as `tensor_core` asks for."""
    lines, items = (tile, steps) if operand.along_reduction else (steps, tile)
    factor, offset = 64 // operand.item_bytes, line_padding(operand.item_bytes)
    if operand.item_bytes == 4 and not operand.along_reduction:
        offset *= 2
    return lines * (items + (offset - items) % factor) * operand.item_bytes


def _staged(tile: Array, steps: Array, along_reduction: bool) -> Array:
    """Elements of a tile in shared memory with its padding."""
    lines, items = (tile, steps) if along_reduction else (steps, tile)
    return lines * (items + 64)
