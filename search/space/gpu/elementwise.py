"""Kernels without reductions, and the fallback: one thread for one or a few elements of each stage."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tvm import sym, tirx

from ..base import Knob
from ..expressions import nodes_of, substitute
from ..memory_bound.inlining import inlined
from ..memory_bound.kernel import Kernel, Stage
from ..nest import fuse
from .bind import bind_elementwise
from .matrix import WIDEST_ACCESS_BYTES
from .memory_bound import GpuWork, MemoryBoundGpuSketch, coalesced_share, powers, stage_instructions
from .occupancy import Array

__all__ = ["ElementwiseGpuSketch", "StagesGpuSketch"]


class ElementwiseGpuSketch(MemoryBoundGpuSketch):
    """The last stage with vectors and several elements a thread; earlier ones one element a thread.

    Knobs: `threads` of a block, `vector` elements of one access, `repeat` vectors of a thread, a block apart, so that
    several loads are under way.
    """

    family = "gpu_elementwise"
    family_index = 30

    @staticmethod
    def fits(kernel: Kernel) -> bool:
        """Whether nothing is reduced."""
        return all(stage.regular and not stage.is_reduction for stage in kernel.stages)

    @property
    def main(self) -> Stage:
        """The output's stage."""
        return self.kernel.stages[-1]

    def _knobs(self) -> tuple[Knob, ...]:
        stage = self.main
        axes = tuple(range(len(stage.extents)))
        count = stage.run(axes) if axes else 0
        run = math.prod(stage.extents[len(axes) - count :]) if count else 1
        # A condition on the last axis may change inside a vector.
        guards = stage.guards.get(len(axes) - 1, ()) if axes else ()
        common = math.gcd(run, *guards, *self._written_from(len(axes) - count))
        vectors = tuple(v for v in powers(1, _widest_vector(stage)) if common % v == 0)
        most = max(32, min(1024, stage.iterations))
        return (
            Knob("threads", powers(32, most)),
            Knob("vector", vectors),
            Knob("repeat", tuple(r for r in (1, 2, 4, 8) if r == 1 or stage.iterations >= 256 * r)),
        )

    def _written_from(self, outer: int) -> list[int]:
        """Where runs of the output begin, the steps of its `outer` axes, for whoever writes vectors: TVM does so at any
        address, also where a part of a concatenation begins at an odd one.
        """
        stage, schedule = self.main, inlined(self.mod, self.keep)
        block = schedule.get(schedule.get_sblock(stage.name))
        first = [(axis.var, tirx.const(0, str(axis.var.ty.dtype))) for axis in block.iter_vars]
        result: list[int] = []
        for access, store in zip(stage.writes, nodes_of(block.body, tirx.BufferStore), strict=True):
            moving = [step for step, extent in zip(access.strides, stage.extents, strict=True) if extent > 1]
            if None in moving:
                result.append(1)
            elif moving and moving[-1] == 1:  # else a vector's elements are written one by one
                begin: Any = tirx.const(0, "int64")
                for index, extent in zip(store.indices, store.buffer.shape, strict=True):
                    begin = begin * int(extent) + tirx.Cast("int64", substitute(index, first))
                begin = sym.Analyzer().simplify(begin)
                result.append(int(begin) if isinstance(begin, tirx.IntImm) else 1)
                outer_steps = zip(access.strides[:outer], stage.extents[:outer], strict=True)
                result += [step for step, extent in outer_steps if step is not None and extent > 1]
        return result

    def _work(self, v: Mapping[str, Array]) -> GpuWork:
        stage = self.main
        ones = np.ones_like(v["threads"])
        elements = v["vector"] * v["repeat"]
        threads = np.ceil(stage.iterations / elements)
        scratch = sum(2.0 * s.rows * s.writes[0].item_bytes for s in self.kernel.stages[:-1])
        axis = len(stage.extents) - 1 if stage.extents else None
        total = sum(stage_instructions(s) for s in self.kernel.stages)
        accesses = stage.iterations * (len(stage.reads) + len(stage.writes))
        return GpuWork(
            blocks=np.ceil(threads / v["threads"]),
            threads=v["threads"],
            moved_bytes=ones * (self.kernel.argument_bytes + scratch),
            coalescing=ones * coalesced_share(stage, axis),
            # Address arithmetic is shared by a vector.
            instructions=total - accesses * (1.0 - 1.0 / v["vector"]) + 8.0 * stage.iterations / v["vector"],
            chain=ones + 0.1 * v["repeat"],
            shared_bytes=0.0 * ones,
            kernels=ones * len(self.kernel.stages),
            registers=16.0 + elements * (1.0 + len(stage.reads)),
        )

    def _possible(self, v: Mapping[str, Array]) -> NDArray[np.bool_]:
        result: NDArray[np.bool_] = v["threads"] * v["vector"] * v["repeat"] <= max(32, 2 * self.main.iterations)
        return result

    def _schedule(self, schedule: Any, values: Mapping[str, int]) -> None:
        block = schedule.get_sblock(self.main.name)
        loops = schedule.get_loops(block)
        if loops:
            fused = fuse(schedule, loops)
            factors = [None, values["repeat"], values["threads"], values["vector"]]
            blocks, repeat, threads, lane = schedule.split(fused, factors)
            schedule.bind(blocks, "blockIdx.x")
            schedule.reorder(threads, repeat)
            schedule.bind(threads, "threadIdx.x")
            schedule.unroll(repeat)
            if values["vector"] > 1:
                schedule.vectorize(lane)
        bind_elementwise(schedule)


def _widest_vector(stage: Stage) -> int:
    """Elements of the widest vectors that TVM writes as CUDA that compiles."""
    widest = max(1, WIDEST_ACCESS_BYTES // stage.widest_bytes)
    accesses = [(access.strides[-1] if access.strides else 0, access.item_bytes) for access in stage.reads]
    # Of a scalar of one byte it makes no vector of four.
    if any(stride == 0 and item_bytes == 1 for stride, item_bytes in accesses):
        return min(widest, 2)
    # It joins more than four bytes as if they were words, and more than four indices that are no neighbours.
    bytes_joined = stage.writes[0].item_bytes == 1 or any(item_bytes == 1 for _, item_bytes in accesses)
    scattered = any(stride not in (0, 1) for stride, _ in accesses)
    return min(widest, 4) if bytes_joined or scattered else widest


class StagesGpuSketch(MemoryBoundGpuSketch):
    """Every stage a kernel of its own, one thread for each of its results. Takes any kernel that has loops.

    Knob: `threads` of a block.
    """

    family = "gpu_stages"
    family_index = 31

    @staticmethod
    def fits(kernel: Kernel) -> bool:
        """Whether there is anything to bind."""
        return bool(kernel.stages)

    def _knobs(self) -> tuple[Knob, ...]:
        return (Knob("threads", (64, 128, 256, 512)),)

    def _work(self, v: Mapping[str, Array]) -> GpuWork:
        ones = np.ones_like(v["threads"])
        largest = max(self.kernel.stages, key=lambda stage: stage.iterations)
        scratch = sum(2.0 * s.rows * s.writes[0].item_bytes for s in self.kernel.stages[:-1])
        axis = largest.spatial[-1] if largest.spatial else None
        return GpuWork(
            blocks=np.ceil(largest.rows / v["threads"]),
            threads=np.minimum(v["threads"], max(largest.rows, 1)),
            moved_bytes=ones * (self.kernel.argument_bytes + scratch),
            coalescing=ones * coalesced_share(largest, axis),
            instructions=ones * 2.0 * sum(stage_instructions(s) for s in self.kernel.stages),
            chain=ones * max(1.0, largest.iterations / max(1, largest.rows) / 4.0),
            shared_bytes=0.0 * ones,
            kernels=ones * len(self.kernel.stages),
            registers=32.0 * ones,
        )

    def _schedule(self, schedule: Any, values: Mapping[str, int]) -> None:
        bind_elementwise(schedule, values["threads"])
