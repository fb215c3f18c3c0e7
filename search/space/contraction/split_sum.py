"""Contractions whose sum is cut in parts, which are summed side by side and then added up.

Where a kernel has few outputs, the parts are what threads and registers share: 4 x 65536 times 65536 x 16 has four
vectors of outputs (two threads of a Zen 4: 224 of 233 GFLOP/s). Where it has one row, parts are streams: one alone does
not fill a core's share of the memory bus (1 x 4096 times 4096 x 4096, one thread: 3.3 ms as one stream, 2.0 ms as
eight). Where both operands are contiguous along the sum, as in a dot product, it is dealt out to the lanes of vectors.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tvm.s_tir import ScheduleError

from ..access import Axis
from ..analysis import Contraction, Kernel, analyze
from ..hardware import Hardware
from ..schedule import schedule_of
from .copies import schedule_copy, split_lanes
from .plan import Plan
from .planning import make_plans
from .sketch import TiledContraction
from .tiled import schedule_tiles

__all__ = ["SplitContraction", "split_sketches"]

SUMS = 8
"""Vectors of sums that keep the multiply-add units of a core busy: with more outputs, each can have its whole sum."""

LEAST_STEPS = {False: 64, True: 8}
"""Of a run, and of a lane: shorter ones are not worth adding up."""

MOST_CUTS = 4
"""Numbers of parts that are tried."""


@dataclass(frozen=True)
class Cut:
    """How a sum over `axis` falls into `parts`: runs of neighbours, or lanes, which take every so many-th element."""

    axis: Axis
    parts: int
    lanes: bool


class SplitContraction(TiledContraction):
    """Register tiles over the partial sums of one kernel.

    Parameters
    ----------
    mod : tvm.ir.IRModule
        The kernel, as "main".
    kernel : Kernel
        The same, analysed.
    cut : Cut
    plan : Plan
        For the partial sums, a contraction with an axis more.
    hardware : Hardware
        Bounds the register tile; read by the estimates.
    """

    def __init__(self, mod: Any, kernel: Kernel, cut: Cut, plan: Plan, hardware: Hardware) -> None:
        super().__init__(mod, plan, hardware)
        self.name = f"split{cut.parts}_{plan.name}"
        self._kernel, self._cut = kernel, cut

    def latency_s(self, values: NDArray[np.int64]) -> NDArray[np.float64]:
        """The analytic estimate, shape [n]; the partial sums are read once more."""
        added = self.plan.contraction.block.write.bytes
        result: NDArray[np.float64] = super().latency_s(values) + added / self._hardware.cache_bandwidth_bytes_per_s
        return result

    def apply(self, values: Mapping[str, int]) -> Any:
        """A `tvm.s_tir.Schedule`; raises what TVM raises when a step is impossible."""
        sch = schedule_of(self._mod)
        total = _cut_sum(sch, self._kernel, self._cut)
        schedule_tiles(sch, self.plan, self._lanes, values, self._hardware)
        _add_up(sch, total, self._kernel, self._lanes)
        return sch


def split_sketches(mod: Any, kernel: Kernel, hardware: Hardware) -> list[TiledContraction]:
    """The forms with partial sums that may pay; none for most kernels."""
    contraction = kernel.contraction
    if contraction is None or not all(block.is_elementwise for block in kernel.epilogue):
        return []
    outputs = math.prod(axis.extent for axis in contraction.block.spatial)
    lanes = hardware.lanes(4)
    one_row = not any(axis.extent > 1 for axis in (*contraction.rows, *contraction.batch))
    if outputs > SUMS * lanes * hardware.threads and not one_row:
        return []
    axis = max(contraction.reduction, key=lambda a: a.extent)
    dealt = _contiguous_along(axis, contraction)
    parts = [lanes * n for n in (1, 2, 4, 8)] if dealt else [2, 4, 8, 16, 32, 64]
    cuts = [Cut(axis, p, dealt) for p in parts if axis.extent % p == 0 and axis.extent // p >= LEAST_STEPS[dealt]]
    found: list[TiledContraction] = []
    for cut in cuts[:MOST_CUTS]:
        sch = schedule_of(mod)
        try:
            _cut_sum(sch, kernel, cut)
            partial = _partial_sums(analyze(sch.mod), f"{contraction.block.name}_rf")
        except (ScheduleError, ValueError):  # an odd kernel: whole sums do
            return []
        plans = [plan for plan in make_plans(partial) if (plan.name == "channels") == dealt]
        found += [SplitContraction(mod, kernel, cut, plan, hardware) for plan in plans]
    return found


def _contiguous_along(axis: Axis, contraction: Contraction) -> bool:
    """Whether neither operand can be read by vectors but along the sum, and none may be packed ahead of time."""
    left, right = contraction.left, contraction.right
    along = all(operand.access.stride(axis.position) == 1 for operand in (left, right))
    return along and not right.weight


def _cut_sum(sch: Any, kernel: Kernel, cut: Cut) -> Any:
    """Sum the parts apart; the block that adds them up."""
    assert kernel.contraction is not None
    block = sch.get_sblock(kernel.contraction.block.name)
    loops = sch.get_loops(block)
    outer, inner = sch.split(loops[cut.axis.position], [None, cut.parts] if cut.lanes else [cut.parts, None])
    part, rest = (inner, outer) if cut.lanes else (outer, inner)
    sch.reorder(part, *(rest if position == cut.axis.position else loop for position, loop in enumerate(loops)))
    sch.rfactor(part, len(kernel.contraction.block.write.shape) if cut.lanes else 0)
    return block


def _partial_sums(kernel: Kernel, name: str) -> Kernel:
    """The kernel up to the block of that name, as if this were all."""
    block = kernel.block(name)
    end = kernel.blocks.index(block)
    return replace(kernel, blocks=kernel.blocks[: end + 1], outputs=(block.write.buffer,))


def _add_up(sch: Any, total: Any, kernel: Kernel, lanes: int) -> None:
    """Add the parts by vectors of outputs, and compute what follows. Short: one thread does it."""
    part, *outputs = sch.get_loops(total)
    sch.vectorize(split_lanes(sch, sch.fuse(*outputs), lanes)[1])
    sch.decompose_reduction(total, part)
    if kernel.epilogue:
        *inlined, last = kernel.epilogue
        for block in inlined:
            sch.compute_inline(sch.get_sblock(block.name))
        schedule_copy(sch, sch.get_sblock(last.name), lanes, False)
