"""Several stages over the same rows in one kernel: softmax, layer, group and RMS norm. One block, or one warp, a row.

Each reduction runs across the row's threads, which all keep its result in a register; what other stages hand to each
other stays in shared memory, so that the row is read once from DRAM.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..base import Knob
from ..memory_bound.kernel import Kernel
from ..memory_bound.rows import RowsSketch, row_prefix
from ..nest import extent_of, fuse
from .bind import split_kinds
from .memory_bound import GpuWork, MemoryBoundGpuSketch, powers, stage_instructions
from .occupancy import Array
from .words import are_exchanged

__all__ = ["RowsGpuSketch"]


class RowsGpuSketch(MemoryBoundGpuSketch):
    """Knobs: `threads` of a row, `rows` of a block."""

    family = "gpu_rows"
    family_index = 33

    @staticmethod
    def fits(kernel: Kernel) -> bool:
        """Whether all reductions have the same rows, and the output walks the rows in order."""
        return RowsSketch.fits(kernel) and all(stage.combiners == 1 for stage in kernel.stages)

    def _knobs(self) -> tuple[Knob, ...]:
        reductions = [stage for stage in self.kernel.stages if stage.is_reduction]
        self.rows = reductions[0].rows
        # The rows of a block are a box of every stage's axes.
        count, inner = row_prefix(self.kernel.stages[-1], self.rows) or (0, 1)
        written = inner if inner > 1 else math.prod(self.kernel.stages[-1].extents[max(0, count - 1) : count])
        last = math.gcd(written, *(stage.extents[stage.spatial[-1]] if stage.spatial else 1 for stage in reductions))
        self.length = max(stage.iterations // stage.rows for stage in reductions)
        return (
            Knob("threads", powers(32, max(32, min(1024, self.length)))),
            Knob("rows", tuple(r for r in (1, 2, 4, 8) if last % r == 0)),
        )

    def _possible(self, v: Mapping[str, Array]) -> NDArray[np.bool_]:
        result: NDArray[np.bool_] = (v["threads"] * v["rows"] <= 1024) & ((v["rows"] == 1) | (v["threads"] <= 128))
        return result

    def _work(self, v: Mapping[str, Array]) -> GpuWork:
        ones = np.ones_like(v["threads"])
        kept = sum(
            stage.iterations // self.rows * stage.writes[0].item_bytes
            for stage in self.kernel.stages[:-1]
            if not stage.is_reduction
        )
        reductions = sum(stage.is_reduction for stage in self.kernel.stages)
        combine = np.where(v["threads"] > 32, 60.0, 30.0) * reductions
        read = [s for s in self.kernel.stages if s.iterations >= self.rows * self.length]
        return GpuWork(
            blocks=np.ceil(self.rows / v["rows"]),
            threads=v["threads"] * v["rows"],
            # The first pass reads DRAM, the others L1 or L2.
            moved_bytes=ones * (self.kernel.argument_bytes * (1.0 + 0.2 * max(0, len(read) - 1))),
            coalescing=ones,
            instructions=sum(stage_instructions(s) for s in self.kernel.stages) + self.rows * v["threads"] * combine,
            chain=len(self.kernel.stages) * (0.5 + np.ceil(self.length / v["threads"]) / 6.0) + combine / 100.0,
            shared_bytes=(kept + 8.0 * reductions + 4.0 * v["threads"]) * v["rows"],
            kernels=ones,
            registers=32.0 * ones,
        )

    def _schedule(self, schedule: Any, values: Mapping[str, int]) -> None:
        for stage in self.kernel.stages[:-1]:
            # What is computed of a row's sum is computed where it is read. In a register, TVM would write it over the
            # sum, which the threads of a row share by then.
            if not stage.is_reduction and stage.iterations == self.rows:
                schedule.compute_inline(schedule.get_sblock(stage.name))
        output, stage = schedule.get_sblock(self.kernel.stages[-1].name), self.kernel.stages[-1]
        count, inner = row_prefix(stage, self.rows) or (0, 1)
        if stage.is_reduction and not are_exchanged(str(schedule.get(output).writes[0].source.dtype)):
            # What is narrow is summed in words, which no output holds (words.py).
            output = schedule.cache_write(output, 0, "local")
            count = len(schedule.get_loops(output))
        loops = list(schedule.get_loops(output))
        rows = loops[:count]
        if inner > 1:
            outer, _ = schedule.split(loops[count], [inner, None])
            rows.append(outer)
        rows = rows or [schedule.add_unit_loop(loops[0] if loops else output)]
        # Before what is around it is fused, or TVM sees no box in what the rows of a block read of several axes.
        outer, row = schedule.split(rows[-1], [None, values["rows"]])
        blocks = fuse(schedule, [*rows[:-1], outer])
        schedule.bind(blocks, "blockIdx.x")
        schedule.bind(row, "threadIdx.y")
        in_order = schedule.get_child_blocks(schedule.get_sblock("root"))
        own = next(i for i, b in enumerate(in_order) if schedule.get_sref(b).same_as(schedule.get_sref(output)))
        for block in reversed(in_order[:own]):
            # A row's sum is in a register of every thread. In shared memory, thread 0 of a row would write it, and TVM
            # puts no barrier before others read what is indexed by the row alone.
            schedule.set_scope(block, 0, "local" if _reduces(schedule, block) else "shared")
            # At the block's loop, not the row's: what is in shared memory belongs to all of a block's threads.
            schedule.compute_at(block, blocks, preserve_unit_loops=True)
        for block in in_order[:own]:
            _bind_inside(schedule, block, schedule.get_loops(block)[1:], values)
        inside = schedule.get_loops(output)[2:] or [schedule.add_unit_loop(output)]
        _, thread = schedule.split(fuse(schedule, inside), [None, values["threads"]])
        schedule.bind(thread, "threadIdx.x")


def _reduces(schedule: Any, block: Any) -> bool:
    return schedule.get(block).init is not None


def _bind_inside(schedule: Any, block: Any, inside: list[Any], values: Mapping[str, int]) -> None:
    """Share a stage's loops inside a block among its threads: rows along y, the reduction or the columns along x."""
    spatial, reduced = split_kinds(schedule, block, inside)
    spatial = spatial or [schedule.add_unit_loop(reduced[0])]
    schedule.reorder(*spatial, *reduced)
    rows = fuse(schedule, spatial)
    if reduced:
        _, across = schedule.split(fuse(schedule, reduced), [None, values["threads"]])
        if extent_of(schedule, rows) != values["rows"]:
            raise ValueError(f"a stage has {extent_of(schedule, rows)} rows in a block of {values['rows']}")
    else:
        rows, across = schedule.split(rows, [values["rows"], None])
        _, across = schedule.split(across, [None, values["threads"]])
    schedule.bind(rows, "threadIdx.y")
    schedule.bind(across, "threadIdx.x")
