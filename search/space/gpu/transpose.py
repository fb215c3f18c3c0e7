"""Data movement that reads along one axis and writes along another: tiles turn in shared memory (Ruetsch and
Micikevicius, "Optimizing Matrix Transpose in CUDA", 2009), so that both sides coalesce.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..base import Knob
from ..memory_bound.kernel import Kernel
from ..memory_bound.transpose import read_and_write_axes
from ..nest import extent_of, fuse
from .memory_bound import GpuWork, MemoryBoundGpuSketch, powers, stage_instructions
from .occupancy import Array

__all__ = ["TransposeGpuSketch"]


class TransposeGpuSketch(MemoryBoundGpuSketch):
    """Knobs: `read_tile` x `write_tile` elements of a block, and its `threads`."""

    family = "gpu_transpose"
    family_index = 34

    @staticmethod
    def fits(kernel: Kernel) -> bool:
        """Whether the one stage reads one buffer along an axis that is not the output's last."""
        if len(kernel.stages) != 1:
            return False
        (stage,) = kernel.stages
        if not stage.regular or stage.is_reduction or stage.guards:
            return False
        axes = read_and_write_axes(stage)
        return axes is not None and sum(access.strides[axes[0]] == 1 for access in stage.reads) == 1

    def _knobs(self) -> tuple[Knob, ...]:
        self.stage = self.kernel.stages[0]
        self.read_axis, self.write_axis = read_and_write_axes(self.stage) or (0, 0)
        read, write = self.stage.extents[self.read_axis], self.stage.extents[self.write_axis]
        return (
            Knob("read_tile", tuple(t for t in (8, 16, 32, 64) if t < 2 * read) or (8,)),
            Knob("write_tile", tuple(t for t in (8, 16, 32, 64) if t < 2 * write) or (8,)),
            Knob("threads", powers(64, 512)),
        )

    def _possible(self, v: Mapping[str, Array]) -> NDArray[np.bool_]:
        result: NDArray[np.bool_] = v["threads"] <= v["read_tile"] * v["write_tile"]
        return result

    def _work(self, v: Mapping[str, Array]) -> GpuWork:
        item = float(self.stage.writes[0].item_bytes)
        tile = v["read_tile"] * v["write_tile"]
        shorter = np.minimum(v["read_tile"], v["write_tile"]) * item
        read, write = self.stage.extents[self.read_axis], self.stage.extents[self.write_axis]
        others = self.stage.iterations // (read * write)
        ones = np.ones_like(tile)
        return GpuWork(
            blocks=others * np.ceil(read / v["read_tile"]) * np.ceil(write / v["write_tile"]),
            threads=v["threads"],
            moved_bytes=ones * float(self.kernel.argument_bytes),
            coalescing=np.clip(shorter / 64.0, 0.1, 1.0),
            instructions=ones * 4.0 * stage_instructions(self.stage),
            chain=1.0 + 0.15 * tile / v["threads"],
            shared_bytes=v["write_tile"] * (v["read_tile"] + 1) * item,
            kernels=ones,
            registers=32.0 * ones,
        )

    def _schedule(self, schedule: Any, values: Mapping[str, int]) -> None:
        block = schedule.get_sblock(self.stage.name)
        loops = list(schedule.get_loops(block))
        read_outer, read_inner = schedule.split(loops[self.read_axis], [None, values["read_tile"]])
        write_outer, write_inner = schedule.split(loops[self.write_axis], [None, values["write_tile"]])
        loops[self.read_axis], loops[self.write_axis] = read_outer, write_outer
        schedule.reorder(*loops, read_inner, write_inner)
        tile = fuse(schedule, loops)
        schedule.bind(tile, "blockIdx.x")
        _, thread = schedule.split(schedule.fuse(read_inner, write_inner), [None, values["threads"]])
        schedule.bind(thread, "threadIdx.x")
        names = [str(region.source.name) for region in schedule.get(block).reads]
        turned = next(a.buffer for a in self.stage.reads if a.strides[self.read_axis] == 1)
        copy = schedule.cache_read(block, names.index(turned), "shared")
        schedule.compute_at(copy, tile, preserve_unit_loops=True)
        inside = schedule.get_loops(copy)[1:]
        copied = math.prod(extent_of(schedule, loop) for loop in inside)
        if copied > values["read_tile"] * values["write_tile"]:
            raise ValueError(f"a tile needs {copied} elements of what is read: it is no box there")
        _, thread = schedule.split(fuse(schedule, inside), [None, values["threads"]])
        schedule.bind(thread, "threadIdx.x")
        if len(inside) > 1:
            schedule.storage_align(copy, 0, axis=-2, factor=32, offset=1)
