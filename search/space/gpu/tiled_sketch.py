"""The tiled matrix product as a sketch: knobs, constraints, and an analytic estimate."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..access import dtype_bytes
from ..base import Knob
from .hardware import GpuHardware
from .matrix import MatrixForm, Operand
from .occupancy import Array, Launch, Occupancy, occupancy
from .product import (
    LEAST_ASYNC_BYTES,
    LOAD_LATENCY,
    SHARED_BYTES_PER_CLOCK,
    ProductSketch,
    latency_seen,
    shared_buffers,
)
from .tiled import ASYNC_STAGES, fetch_vector, schedule_tiles, shared_line

__all__ = ["MatrixSketch"]

OTHER_REGISTERS = 40
"""Addresses, predicates, loop counters: what a thread needs beside its sums and operands."""

LARGEST_BODY = 2048
"""Multiply-adds of a thread in a step of the reduction; beyond, instruction caches overflow and nvcc takes seconds."""

FAST_BODY, LONG_BODY_FACTOR = 1024, 1.2
"""Multiply-adds up to which instructions are no bottleneck, and how much longer more of them take: on an H200, 2048
(32 KB of code) took 0.97 to 1.31 times as long as 1024 in twice as many steps."""


class MatrixSketch(ProductSketch):
    """Tiles of a contraction in matrix form.

    Knobs: `ti` x `tj` threads, `vi` x `vj` virtual threads, registers `ri` x `rj` of each, `bk` steps of the reduction
    in shared memory, `stages` (2: the next tiles are loaded into registers while these are used; 3 and 4: so many
    buffers in shared memory, filled by asynchronous copies), `split` of the reduction over blocks, with a second kernel
    that adds the parts.

    Parameters
    ----------
    mod : tvm.ir.IRModule
    form : MatrixForm
    hardware : GpuHardware
    """

    name = "gpu_tiled"
    family = 20.0

    def __init__(self, mod: Any, form: MatrixForm, hardware: GpuHardware) -> None:
        super().__init__(mod, form, hardware)
        _, rows, columns, reduction = form.shape
        self.knobs = (
            Knob("vi", (1, 2)),
            Knob("ti", _powers(1, 32, rows)),
            Knob("ri", _powers(1, 8, rows)),
            Knob("vj", (1, 2)),
            Knob("tj", _powers(1, 32, columns)),
            Knob("rj", _powers(1, 8, columns)),
            Knob("bk", _powers(min(4, reduction), 64, reduction)),
            self._stages_knob(),
            self._split_knob(),
        )

    def legal(self, values: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Whole warps, enough of them; registers and shared memory suffice; little padding; tiles are worth it."""
        v = self._columns(values)
        _, rows, columns, reduction = self.form.shape
        launch = self._launch(v)
        tile_i, tile_j = v["vi"] * v["ti"] * v["ri"], v["vj"] * v["tj"] * v["rj"]
        ok = occupancy(self._hardware, launch).legal
        ok &= (launch.threads % self._hardware.warp_size == 0) & (launch.threads >= 32)
        # Half a tile of padding at most, unless the whole extent is smaller than the least tile.
        ok &= (tile_i < 2 * rows) & (tile_j < 2 * columns) & (v["bk"] * v["split"] < 2 * reduction)
        ok &= v["vi"] * v["ri"] * v["vj"] * v["rj"] * v["bk"] <= LARGEST_BODY
        ok &= (v["stages"] == 1) | (np.ceil(reduction / (v["bk"] * v["split"])) > v["stages"])
        for operand, tile in ((self.form.a, tile_i), (self.form.b, tile_j)):
            bytes_at_once = operand.item_bytes * _vectors(operand, tile, v, launch.threads)
            ok &= (v["stages"] < ASYNC_STAGES) | (bytes_at_once >= LEAST_ASYNC_BYTES)
        # Every thread has something to fetch.
        ok &= (tile_i * v["bk"] >= launch.threads) & (tile_j * v["bk"] >= launch.threads)
        ok &= self._worth_splitting(v["split"], launch)
        result: NDArray[np.bool_] = ok
        return result

    def apply(self, values: Mapping[str, int]) -> Any:
        """A `tvm.s_tir.Schedule`; raises what TVM raises when a step is impossible."""
        return schedule_tiles(self._mod, self.form, values)

    def _launch(self, v: Mapping[str, Array]) -> Launch:
        batch, rows, columns, _ = self.form.shape
        tile_i, tile_j = v["vi"] * v["ti"] * v["ri"], v["vj"] * v["tj"] * v["rj"]
        threads = v["ti"] * v["tj"]
        sums = v["vi"] * v["ri"] * v["vj"] * v["rj"] * dtype_bytes(self.form.accumulator) / 4
        operands = v["vi"] * v["ri"] + v["vj"] * v["rj"]
        ahead = np.where(v["stages"] == 2, (tile_i + tile_j) * v["bk"] * self.form.a.item_bytes / 4 / threads, 0.0)
        tiles = ((tile_i, self.form.a), (tile_j, self.form.b))
        shared = sum(shared_line(operand, tile) * v["bk"] * operand.item_bytes for tile, operand in tiles)
        return Launch(
            blocks=batch * v["split"] * np.ceil(rows / tile_i) * np.ceil(columns / tile_j),
            threads=threads,
            registers=sums + operands + ahead + OTHER_REGISTERS,
            shared_bytes=np.asarray(shared) * shared_buffers(v["stages"]),
        )

    def _own_features(self, v: Mapping[str, Array], cost: Mapping[str, Array]) -> dict[str, Any]:
        height, width = v["vi"] * v["ri"], v["vj"] * v["rj"]
        return {
            "accumulators": height * width,
            "log_tile_m": np.log2(height),
            "log_tile_n": np.log2(width),
            "log_block_m": np.log2(height * v["ti"]),
            "log_block_n": np.log2(width * v["tj"]),
            "log_block_k": np.log2(v["bk"]),
            "log_unrolled_body": np.log2(height * width * v["bk"]),
            "coalescing": cost["coalescing"],
            "bank_conflicts": cost["conflicts"],
            "variant": np.log2(v["split"]),
        }

    def _cost(self, v: Mapping[str, Array], launch: Launch, fit: Occupancy) -> dict[str, Array]:
        hardware, form = self._hardware, self.form
        tile_i, tile_j = v["vi"] * v["ti"] * v["ri"], v["vj"] * v["tj"] * v["rj"]
        steps = np.ceil(form.shape[3] / (v["bk"] * v["split"]))
        # One step of the reduction, of one warp: multiply-adds on 32 lanes beside reads of shared memory.
        height, width = v["vi"] * v["ri"], v["vj"] * v["rj"]
        conflicts = _conflicts(v["tj"], v["rj"]) + _conflicts(v["ti"], v["ri"])
        reads = v["vi"] * np.ceil(v["ri"] / 4) * _words(v["ti"], v["tj"], v["ri"], False)
        reads = reads + v["vj"] * np.ceil(v["rj"] / 4) * _words(v["ti"], v["tj"], v["rj"], True)
        per_clock = hardware.peak_flops_per_s / hardware.clock_hz / 2.0
        fma_clocks = height * width * hardware.warp_size / per_clock
        issue_clocks = (height * width + v["vi"] * np.ceil(v["ri"] / 4) + v["vj"] * np.ceil(v["rj"] / 4)) / 4.0
        step_clocks = np.maximum(np.maximum(fma_clocks, reads), issue_clocks) + 0.25 * np.minimum(fma_clocks, reads)
        # What does not fit in an instruction cache is fetched again in every step.
        step_clocks = step_clocks * np.where(height * width * v["bk"] > FAST_BODY, LONG_BODY_FACTOR, 1.0)
        warps = launch.threads / hardware.warp_size
        # A warp alone cannot issue all the time: its multiply-adds wait for each other and for shared memory.
        parallel = np.minimum(1.0, warps * fit.resident * np.sqrt(height * width) / 32.0)
        fetches = tile_i / _vectors(form.a, tile_i, v, launch.threads) + tile_j / _vectors(
            form.b, tile_j, v, launch.threads
        )
        fetch_clocks = fetches * v["bk"] / 8.0
        waiting = LOAD_LATENCY * latency_seen(v["stages"]) / np.maximum(fit.resident, 1.0)
        block_clocks = (
            steps * (v["bk"] * step_clocks * warps / np.maximum(parallel, 0.05) + fetch_clocks + waiting)
            + 2.0 * LOAD_LATENCY
        )
        spread = np.ceil(launch.blocks / hardware.multiprocessors)
        compute_s = spread * block_clocks / hardware.clock_hz
        fetched = launch.blocks * steps * v["bk"] * (tile_i * form.a.item_bytes + tile_j * form.b.item_bytes)
        coalescing = np.minimum(_coalesced(form.a, v["bk"], tile_i), _coalesced(form.b, v["bk"], tile_j))
        memory_s = self._memory_s(fetched / coalescing + self._partial_bytes(v["split"]), fit)
        latency_s = np.maximum(compute_s, memory_s) + 0.2 * np.minimum(compute_s, memory_s)
        latency_s = latency_s + self._launches_s(v["split"])
        return {
            "compute_s": compute_s,
            "memory_s": memory_s,
            "latency_s": latency_s,
            "fetched": fetched,
            "padding": self._padding(tile_i, tile_j, v["bk"] * v["split"]),
            "coalescing": coalescing,
            "conflicts": conflicts,
        }


def _powers(least: int, most: int, extent: int) -> tuple[int, ...]:
    """Powers of two from `least` to `most`, none of twice the extent or more."""
    values = [1 << i for i in range(7) if least <= 1 << i <= most and 1 << i < 2 * extent]
    return tuple(values) or (1,)


def _vectors(operand: Operand, tile: Array, v: Mapping[str, Array], threads: Array) -> Array:
    columns = np.stack([tile, v["bk"], threads, v["stages"]]).astype(np.int64)
    limits = columns.max(axis=1, initial=0) + 1
    # As single numbers they are sorted ten times as fast.
    different, which = np.unique(np.ravel_multi_index(tuple(columns), tuple(limits)), return_inverse=True)
    shapes = np.stack(np.unravel_index(different, tuple(limits)), axis=1)
    chosen = [fetch_vector(operand, (x, k), t, s) for x, k, t, s in shapes.tolist()]
    return np.array(chosen, dtype=np.float64)[which]


def _coalesced(operand: Operand, steps: Array, tile: Array) -> Array:
    """Useful share of the 32-byte sectors that a warp's loads touch."""
    run = np.minimum(steps if operand.along_reduction else tile, max(operand.run, 32 if operand.stride == 1 else 1))
    run_bytes = run * operand.item_bytes / operand.stride
    return np.clip(run_bytes / 32.0, operand.item_bytes / 32.0, 1.0)


def _words(ti: Array, tj: Array, registers: Array, columns: bool) -> Array:
    """Clocks of one shared-memory read by a warp whose threads run along the columns first; equal addresses are one."""
    lanes = np.minimum(tj, 32.0) if columns else np.maximum(32.0 / tj, 1.0)
    distinct = lanes * np.minimum(registers, 4.0) * 4.0
    return np.maximum(1.0, distinct / SHARED_BYTES_PER_CLOCK)


def _conflicts(threads: Array, registers: Array) -> Array:
    """Passes of a read in which neighbours are `registers` words apart, at four words a thread."""
    return np.maximum(1.0, np.minimum(threads, 8.0) * registers / 32.0)
