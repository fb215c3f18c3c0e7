"""One reduction of any pattern: pooling, matrix-vector products, depthwise convolution, sums along any axis.

Each result gets `across` threads, which sum parts of the reduction and then add them up by warp shuffles (Luitjens,
"Faster Parallel Reductions on Kepler", 2014) or through shared memory; neighbouring threads follow whichever axis is
contiguous in what is read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tvm import tirx

from ..base import Knob
from ..marks import UNROLL_EXPLICIT, UNROLL_STEPS
from ..memory_bound.kernel import Kernel
from ..nest import extent_of, fuse
from .bind import bind_elementwise, split_kinds
from .memory_bound import GpuWork, MemoryBoundGpuSketch, coalesced_share, powers, stage_instructions
from .occupancy import Array
from .words import are_exchanged

__all__ = ["ReductionGpuSketch"]


class ReductionGpuSketch(MemoryBoundGpuSketch):
    """A block computes `results` neighbouring results with `across` threads each; what follows is done in the block.

    Knobs: `results`, `across`, `unroll` steps of the reduction.
    """

    family = "gpu_reduction"
    family_index = 32

    @staticmethod
    def fits(kernel: Kernel) -> bool:
        """Whether there is one reduction and at most one element-wise stage after it."""
        reductions = [i for i, stage in enumerate(kernel.stages) if stage.is_reduction]
        return (
            len(reductions) == 1
            and kernel.stages[reductions[0]].iterations > kernel.stages[reductions[0]].rows  # sums of more than one
            and all(stage.regular and stage.combiners == 1 for stage in kernel.stages)
            and reductions[0] >= len(kernel.stages) - 2
            and len(kernel.outputs) == 1
            and (reductions[0] == len(kernel.stages) - 1 or kernel.stages[-1].iterations == kernel.stages[-2].rows)
        )

    def _knobs(self) -> tuple[Knob, ...]:
        self.stage = next(stage for stage in self.kernel.stages if stage.is_reduction)
        self.length = self.stage.iterations // max(1, self.stage.rows)
        self.followed = self.kernel.stages[-1] is not self.stage
        results = {1} | {r for r in powers(2, 512) if r < 2 * self.stage.rows}
        across = {1} | {a for a in powers(2, 1024) if a < 2 * self.length}
        return (
            Knob("results", tuple(sorted(results))),
            Knob("across", tuple(sorted(across))),
            Knob("unroll", (0, 16, 64)),
        )

    @property
    def _reduction_contiguous(self) -> bool:
        """Whether most of what is read lies along the reduction."""
        last = self.stage.reduction[-1]
        largest = max(self.stage.reads, key=lambda access: access.buffer_bytes, default=None)
        if largest is None:
            return False
        spatial = self.stage.spatial[-1] if self.stage.spatial else None
        along = largest.strides[last]
        beside = None if spatial is None else largest.strides[spatial]
        return along == 1 and beside != 1

    def _possible(self, v: Mapping[str, Array]) -> NDArray[np.bool_]:
        threads = v["results"] * v["across"]
        result: NDArray[np.bool_] = (threads <= 1024) & (threads >= min(32, self.stage.iterations))
        # Shuffles and shared-memory sums want whole warps.
        result &= (v["across"] == 1) | (threads % 32 == 0) | (threads < 32)
        return result & ((v["unroll"] == 0) | (self.length > v["across"]))

    def _work(self, v: Mapping[str, Array]) -> GpuWork:
        stage, ones = self.stage, np.ones_like(v["results"])
        spatial = stage.spatial[-1] if stage.spatial else None
        by_reduction, by_result = coalesced_share(stage, stage.reduction[-1]), coalesced_share(stage, spatial)
        side = np.minimum(v["across"], 32.0) if self._reduction_contiguous else np.minimum(v["results"], 32.0)
        good = by_reduction if self._reduction_contiguous else by_result
        coalescing = np.clip(good * np.minimum(1.0, side / 8.0), 0.03, 1.0)
        steps = np.ceil(self.length / v["across"])
        read = float(sum(a.item_bytes for a in stage.reads)) * stage.iterations
        # Neighbouring windows overlap, and small operands stay in L1.
        reused = min(read, 4.0 * self.kernel.argument_bytes)
        combine = np.where(v["across"] > 32, 60.0, np.log2(np.maximum(v["across"], 1.0)) * 6.0)
        return GpuWork(
            blocks=np.ceil(stage.rows / v["results"]),
            threads=v["results"] * v["across"],
            moved_bytes=ones * max(float(self.kernel.argument_bytes), 0.5 * reused),
            coalescing=coalescing,
            instructions=stage_instructions(stage) * (1.0 + 2.0 / np.maximum(v["unroll"], 1.0))
            + stage.rows * v["across"] * combine,
            chain=1.0 + steps / np.where(v["unroll"] > 0, 8.0, 2.0) + combine / 100.0,
            shared_bytes=4.0 * v["results"] * v["across"] + 4.0 * v["results"],
            kernels=ones,
            registers=32.0 + np.minimum(v["unroll"], 32.0),
        )

    def _schedule(self, schedule: Any, values: Mapping[str, int]) -> None:
        block = schedule.get_sblock(self.stage.name)
        alone = values["across"] == 1
        results_axis, across_axis = (
            ("threadIdx.y", "threadIdx.x") if self._reduction_contiguous else ("threadIdx.x", "threadIdx.y")
        )
        if alone:
            results_axis = "threadIdx.x"
        # What is narrow is summed in words, which no output holds (words.py).
        apart = self.followed or alone or not are_exchanged(str(schedule.get(block).writes[0].source.dtype))
        if apart:
            if self.followed:
                epilogue, extents = schedule.get_sblock(self.kernel.stages[-1].name), self.kernel.stages[-1].extents
            else:  # the sum in a register or a shared word, and what writes it to memory
                epilogue = schedule.reindex(block, ("write", 0))
                extents = tuple(extent_of(schedule, loop) for loop in schedule.get_loops(epilogue))
            self._flatten(schedule, block, epilogue, extents)
            blocks, results = schedule.split(schedule.get_loops(epilogue)[0], [None, values["results"]])
            schedule.bind(blocks, "blockIdx.x")
            schedule.bind(results, results_axis)
            schedule.set_scope(block, 0, "local" if alone else "shared")
            schedule.compute_at(block, results if alone else blocks, preserve_unit_loops=True)
            inside = schedule.get_loops(block)[2 if alone else 1 :]
        else:
            inside = schedule.get_loops(block)
        spatial, reduced = split_kinds(schedule, block, inside)
        if not spatial:
            spatial = [schedule.add_unit_loop(reduced[0])]
        schedule.reorder(*spatial, *reduced)
        rows = fuse(schedule, spatial)
        steps = fuse(schedule, reduced)
        if not apart:
            blocks, results = schedule.split(rows, [None, values["results"]])
            schedule.bind(blocks, "blockIdx.x")
            schedule.bind(results, results_axis)
        elif not alone:
            schedule.bind(rows, results_axis)
        if alone:
            schedule.decompose_reduction(block, steps)
        else:
            steps, across = schedule.split(steps, [None, values["across"]])
            schedule.bind(across, across_axis)
        if values["unroll"]:
            schedule.annotate(steps, UNROLL_STEPS, values["unroll"])
            schedule.annotate(steps, UNROLL_EXPLICIT, 0)
        bind_elementwise(schedule)

    def _flatten(self, schedule: Any, block: Any, epilogue: Any, extents: Sequence[int]) -> None:
        """Give the reduction two axes and the epilogue, whose loops have these extents, one.

        TVM sees through what joins them only in this form. Of several axes, it would also drop the condition that ends
        the first, where the threads of a block do not divide the results.
        """
        index_dtype = str(schedule.get(block).iter_vars[0].var.ty.dtype)
        stage = self.stage

        def flat(index: Sequence[Any], extents: Sequence[int]) -> Any:
            result: Any = tirx.const(0, index_dtype)
            for value, extent in zip(index, extents, strict=True):
                result = result * extent + value
            return result

        def axes(positions: Sequence[int], index: Sequence[Any]) -> Any:
            return flat([index[i] for i in positions], [stage.extents[i] for i in positions])

        def index_map(function: Callable[..., list[Any]], rank: int) -> Any:
            return tirx.IndexMap.from_func(function, ndim=rank, index_dtype=index_dtype)

        shape = [int(extent) for extent in schedule.get(block).writes[0].source.shape]
        schedule.transform_layout(block, ("write", 0), index_map(lambda *i: [flat(i, shape)], len(shape)))
        both = index_map(lambda *i: [axes(stage.spatial, i), axes(stage.reduction, i)], len(stage.extents))
        schedule.transform_block_layout(block, both)
        one = index_map(lambda *i: [flat(i, extents)], len(extents))
        schedule.transform_block_layout(epilogue, one)
