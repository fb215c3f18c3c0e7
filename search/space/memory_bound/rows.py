"""Reductions along contiguous memory, alone or several in a row: sums, means, softmax, layer, group and RMS norm.

All stages of one row are computed at the row's loop, so that the row stays in the cache; rows are shared among threads.
Each reduction runs in `accumulators` vectors (rfactor), which are added as vectors before the lanes of the last one are
summed (lane_trees.py). A stage with an expensive value that is read twice (softmax's exp) keeps its row in a small
buffer; a sum of that row is taken while it is written.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..base import Knob
from ..expressions import is_reduced
from ..hardware import PAGE_BYTES
from ..marks import NEXT_ROWS
from ..nest import STACK_BYTES, extent_of, fuse, vectorize
from .cost import Work, instructions
from .kernel import Kernel, Stage
from .row_reductions import finish_reduction, fitting, sum_as_written, vector_sums
from .sketch import MemoryBoundSketch, Values, divisors_up_to, worker_counts

__all__ = ["RowsSketch", "contiguous", "row_prefix", "run_axes"]

_MOST_LOADED = 24  # vectors of a row without a loop


class RowsSketch(MemoryBoundSketch):
    """Everything a row needs at the row's loop.

    Knobs: `lanes` of the vectors (1: plain scalar reductions), `accumulators` a reduction, `unroll` of the element-wise
    stages, `workers`, for a lone reduction with few results `parts` that the reduction is cut into, and `together`, the
    rows of one iteration: their sums of lanes, roots and divisions overlap, and vectors that all rows share (a norm's
    weights) are loaded once. `fetch`: the next rows are asked for while these are computed (next_rows.py).
    """

    family = "rows"
    family_index = 11

    @staticmethod
    def fits(kernel: Kernel) -> bool:
        """Whether all reductions have the same rows, lie contiguously, and the output walks the rows in order."""
        reductions = [stage for stage in kernel.stages if stage.is_reduction]
        output = kernel.stages[-1]
        if not reductions or not all(stage.regular for stage in kernel.stages) or len(kernel.outputs) != 1:
            return False
        rows = {stage.rows for stage in reductions}
        return (
            len(rows) == 1
            and all(contiguous(stage) for stage in reductions)
            and all(row_prefix(stage, stage.rows if stage is output else min(rows)) for stage in kernel.stages)
        )

    def _knobs(self) -> tuple[Knob, ...]:
        self.reductions = [stage for stage in self.kernel.stages if stage.is_reduction]
        self.rows = self.reductions[0].rows
        self.lengths = [_run_length(stage) for stage in self.reductions]
        longest = max(self.lengths)
        full = self.hardware.lanes(max(access.item_bytes for stage in self.reductions for access in stage.reads))
        self.full = full
        threads = self.hardware.threads
        lanes = sorted({v for v in (full // 2, full) if v > 1 and longest % v == 0})
        lanes = lanes or [v for v in divisors_up_to(longest, 2 * full) if v > 2][-2:]
        # A short row that no vector divides is loaded whole, its rest one by one (12 x 197 x 197: 146, not 578 us).
        self.short = (
            not self.kernel.stages[-1].is_reduction
            and longest % full != 0
            and full < longest <= _MOST_LOADED * full
            and all(length == longest for length in self.lengths)
            and all(len(stage.reads) == 1 and stage.operations <= 1 for stage in self.reductions)
            and all(run_axes(stage) == len(stage.reduction) for stage in self.reductions)
        )
        if self.short:
            lanes = [*lanes, full]
        alone = len(self.kernel.stages) == 1 and self.rows < 4 * threads and len(self.reductions[0].reduction) == 1
        parts = [
            p
            for p in (threads, 2 * threads, 8 * threads, 32 * threads)
            if p > 1 and longest % p == 0 and longest // p >= full
        ]
        self.tail = tail = self._tail()
        self.evaluating = self._evaluating()
        return (
            Knob("lanes", (1, *lanes)),
            Knob(
                "accumulators", tuple(a for a in (1, 2, 4, 8) if any(longest % (a * v) == 0 for v in (*lanes, longest)))
            ),
            Knob("unroll", tuple(u for u in (1, 2, 4) if u == 1 or u * full <= tail)),
            Knob("workers", worker_counts(self.hardware, self.rows * (max(parts) if alone and parts else 1))),
            Knob("parts", (1, *parts) if alone else (1,)),
            Knob("together", tuple(t for t in (1, 2, 4) if self._last_row_axis() % t == 0)),
            Knob("fetch", (0, 1) if self.evaluating else (0,)),
        )

    def _evaluating(self) -> str:
        """The block that evaluates functions of a row, where rows come from beyond the second-level cache; "" if none.

        Norms gain nothing from `fetch`, and nothing does where rows are nearer.
        """
        if self.kernel.argument_bytes <= self.hardware.l2_bytes:
            return ""
        return next((stage.name for stage in self.kernel.stages if stage.forms and not stage.is_reduction), "")

    def _last_row_axis(self) -> int:
        """A number whose divisors cut the rows of every stage along one axis; 1 when only reductions are left."""
        if self.kernel.stages[-1].is_reduction:
            return 1
        ends = []
        for stage in self.kernel.stages:
            count, share = row_prefix(stage, self.rows) or (0, 1)
            ends.append(share if share > 1 else next((n for n in reversed(stage.extents[:count]) if n > 1), 1))
        return math.gcd(*ends)

    def _joins(self, reduction: Stage) -> bool:
        """Whether it sums what an element-wise stage keeps of the same row: it is added while it is written."""
        kept = [s for s in self.kernel.stages[:-1] if not s.is_reduction and s.iterations == reduction.iterations]
        own = {access.buffer for access in reduction.reads}
        return len(reduction.reduction) == 1 and any(stage.writes[0].buffer in own for stage in kept)

    def _short(self, values: Mapping[str, int]) -> bool:
        return self.short and values["lanes"] == self.full and values["parts"] == 1

    def _tail(self) -> int:
        """Elements of the contiguous run of the output inside one row; 1 when the output is a reduction."""
        output = self.kernel.stages[-1]
        if output.is_reduction:
            return 1
        count, share = row_prefix(output, self.rows) or (0, 1)
        inside = len(output.extents) - count - (share > 1)
        axes = min(inside, output.run(tuple(range(len(output.extents)))))
        return math.prod(output.extents[len(output.extents) - axes :]) if axes else 1

    def legal(self, values: Values) -> NDArray[np.bool_]:
        """Vectors no longer than a row; enough rows or parts for the workers."""
        knobs = self._integer_columns(values)
        lanes, accumulators, parts = knobs["lanes"], knobs["accumulators"], knobs["parts"]
        ok = (lanes > 1) | ((accumulators == 1) & (knobs["unroll"] == 1))
        whole = max(self.lengths) // parts % (lanes * accumulators) == 0
        ok &= whole | (self.short & (lanes == self.full) & (accumulators == 1) & (parts == 1))
        ok &= (parts == 1) | (lanes > 1)
        ok &= (knobs["unroll"] == 1) | (self.tail % (lanes * knobs["unroll"]) == 0)
        item = self.reductions[0].writes[0].item_bytes
        small = knobs["together"] * accumulators * lanes * item < STACK_BYTES
        ok &= (knobs["together"] == 1) | ((lanes > 1) & (parts == 1) & (knobs["unroll"] <= 2) & small)
        ok &= self.rows >= knobs["together"] * knobs["workers"]
        ok &= (knobs["fetch"] == 0) | ((lanes > 1) & (parts == 1))
        return ok & (self.rows * parts >= knobs["workers"]) & ((parts == 1) | (knobs["workers"] > 1))

    def _work(self, knobs: Mapping[str, Values]) -> Work:
        lanes = knobs["lanes"].astype(np.float64)
        accumulators, parts = knobs["accumulators"].astype(np.float64), knobs["parts"].astype(np.float64)
        together = knobs["together"].astype(np.float64)
        total = np.zeros_like(lanes)
        tail = np.zeros_like(lanes)
        for stage in self.kernel.stages:
            axis = len(stage.extents) - 1
            total = total + instructions(stage, axis, lanes, np.ones_like(lanes))
            if stage.is_reduction:
                # Each of a chain of dependent additions waits four cycles, unless there are more chains or other work.
                steps = 0.0 if self._joins(stage) else stage.iterations / lanes
                total = total + steps * np.maximum(0.0, 4.0 / (accumulators * together) - 1.0)
                # The lanes of the last vector are added one after another, those of several rows at once.
                tail = tail + stage.rows * parts * (2.0 * lanes / together + 2.0 * accumulators)
        # Four rows and their results, a multiple of the page apart, want more than the eight places of their set in the
        # first cache: layer norm of 512 x 1024 takes 129 us with four, 78 with two.
        row_bytes = max(self.lengths) * self.reductions[0].writes[0].item_bytes
        if row_bytes % PAGE_BYTES == 0:
            total = total * np.where(together > 2, 1.7, 1.0)
        total = total * np.where(knobs["fetch"] == 1, 0.9, 1.0)  # a row comes while another is computed
        scratch = sum(
            2.0 * stage.iterations // self.rows * stage.writes[0].item_bytes
            for stage in self.kernel.stages[:-1]
            if not stage.is_reduction
        )
        return Work(
            instructions=total + tail,
            lanes=lanes,
            efficiency=np.ones_like(lanes),
            unrolled=accumulators * knobs["unroll"] * together,
            workers=knobs["workers"].astype(np.float64),
            chunks=np.maximum(self.rows * parts, 1.0),
            scratch_bytes=np.full_like(lanes, scratch),
            run_bytes=np.full_like(lanes, float(max(self.lengths) * 4)),
            accumulators=accumulators * together,
            variant=np.asarray(self.variant + 0.5 * (parts > 1), dtype=np.float64),
        )

    def _schedule(self, schedule: Any, values: Mapping[str, int]) -> None:
        lanes, parts = values["lanes"], values["parts"]
        output, stage = schedule.get_sblock(self.kernel.stages[-1].name), self.kernel.stages[-1]
        in_lanes: list[Any] = []
        for reduction, length in zip(self.reductions, self.lengths, strict=True):
            block = schedule.get_sblock(reduction.name)
            loops = schedule.get_loops(block)
            k = fuse(schedule, loops[len(loops) - run_axes(reduction) :])
            if parts > 1:
                part, _ = schedule.split(k, [parts, None])
                output = block = schedule.rfactor(part, len(reduction.spatial))
                k = schedule.get_loops(block)[-1]
            if (length // parts) % lanes == 0 and lanes > 1:
                accumulators = 1 if parts == 1 and self._joins(reduction) else values["accumulators"]
                width = lanes * fitting(accumulators, lanes, length // parts)
                in_lanes += vector_sums(schedule, block, k, len(reduction.spatial) + (parts > 1), lanes, width)
        row, depth = self._row_loop(schedule, output, stage, values)
        blocks = schedule.get_child_blocks(schedule.get_sblock("root"))
        # Not by name: TVM gives both blocks of a reduction that is factored twice the same one.
        own = next(i for i, b in enumerate(blocks) if schedule.get_sref(b).same_as(schedule.get_sref(output)))
        for block in reversed(blocks[:own]):
            schedule.compute_at(block, row, preserve_unit_loops=True)
        if not stage.is_reduction and lanes > 1:
            rows, inner = _rows_and_rest(schedule, output, depth, values["together"])
            if inner:
                count = min(len(inner), stage.run(tuple(range(len(stage.extents)))))
                self._vectorize(schedule, output, rows, inner[len(inner) - count :], values)
        written: dict[str, Any] = {}
        for block in blocks[:own]:
            if any(map(is_reduced, schedule.get(block).iter_vars)):
                sref = schedule.get_sref(block)
                vector = any(sref.same_as(schedule.get_sref(known)) for known in in_lanes)
                source = next((written[name] for name in _read(schedule, block) if name in written), None)
                if vector and source is not None:
                    sum_as_written(schedule, block, source, depth, lanes)
                else:
                    finish_reduction(schedule, block, depth, lanes, self._short(values), vector)
            elif lanes > 1:
                rows, inner = _rows_and_rest(schedule, block, depth, values["together"])
                if inner:
                    self._vectorize(schedule, block, rows, inner[-1:], values)
                if len(inner) == 1 and values["parts"] == 1 and _lanes_of(schedule, block) == lanes:
                    written[str(schedule.get(block).writes[0].source.name)] = block

    def _vectorize(
        self, schedule: Any, block: Any, rows: list[Any], loops: Sequence[Any], values: Mapping[str, int]
    ) -> None:
        """Vectors along the fused `loops` of a block, `rows` unrolled around each; perhaps the next rows asked for."""
        lanes, run = values["lanes"], fuse(schedule, loops)
        extent = extent_of(schedule, run)
        if extent < lanes:
            return
        outer = vectorize(schedule, run, lanes, fitting(values["unroll"], lanes, extent), len(loops))
        if rows:
            schedule.reorder(outer, *rows)
            schedule.unroll(rows[0])
        if values["fetch"] and schedule.get(block).name_hint == self.evaluating:
            schedule.annotate(outer, NEXT_ROWS, extent_of(schedule, outer) * values["together"])

    def _row_loop(self, schedule: Any, output: Any, stage: Stage, values: Mapping[str, int]) -> tuple[Any, int]:
        """Fuse the output's loops over rows and share them among the workers; the loop over rows, and its depth."""
        loops = list(schedule.get_loops(output))
        if values["parts"] > 1:
            rows = loops[: len(stage.spatial) + 1]
        else:
            count, inner = row_prefix(stage, self.rows) or (0, 1)
            rows = loops[:count]
            if inner > 1:
                outer, _ = schedule.split(loops[count], [inner, None])
                rows.append(outer)
        if values["together"] > 1:
            # Of the last axis before it is fused with others: what is left of indices that were divided, TVM finds not
            # to be affine where rows have three axes (softmax of 2 x 8 x 512 x 512).
            last = max(i for i, loop in enumerate(rows) if extent_of(schedule, loop) > 1)
            rows[last], inside = schedule.split(rows[last], [None, values["together"]])
            schedule.reorder(*rows, inside)
        row = fuse(schedule, rows) if rows else schedule.add_unit_loop(loops[0] if loops else output)
        workers, threads = values["workers"], self.hardware.threads
        if workers == 1:
            return row, 1
        if workers == threads:
            schedule.parallel(row)
            return row, 1
        outer, row = schedule.split(row, [workers, None])
        schedule.parallel(outer)
        return row, 2


def run_axes(stage: Stage) -> int:
    """How many of the last axes that it reduces over are one run of memory."""
    return stage.run(stage.reduction)


def _run_length(stage: Stage) -> int:
    return math.prod(stage.extents[len(stage.extents) - run_axes(stage) :])


def contiguous(stage: Stage) -> bool:
    """Whether the reduced axes come last and the last of them is contiguous, or invariant, in everything read."""
    last = len(stage.extents) - 1
    strides = [access.strides[last] for access in stage.reads]
    in_order = stage.reduction == tuple(range(len(stage.spatial), last + 1))
    return in_order and last not in stage.guards and 1 in strides and set(strides) <= {0, 1}


def row_prefix(stage: Stage, rows: int) -> tuple[int, int] | None:
    """How many leading axes make up the rows, and the share of the next one; None when they do not."""
    if stage.is_reduction:
        return (len(stage.spatial), 1) if stage.rows == rows else None
    product = 1
    for position, extent in enumerate(stage.extents):
        if product == rows:
            return position, 1
        if product * extent > rows:
            share = rows // product
            return (position, share) if share * product == rows and extent % share == 0 else None
        product *= extent
    return (len(stage.extents), 1) if product == rows else None


def _rows_and_rest(schedule: Any, block: Any, depth: int, together: int) -> tuple[list[Any], list[Any]]:
    """The loop over the rows of one iteration, where there are several, and the loops inside a row."""
    loops = [x for x in schedule.get_loops(block)[depth:] if extent_of(schedule, x) > 1]
    return (loops[:1], loops[1:]) if together > 1 else ([], loops)


def _lanes_of(schedule: Any, block: Any) -> int:
    return extent_of(schedule, schedule.get_loops(block)[-1])


def _read(schedule: Any, block: Any) -> list[str]:
    return [str(region.source.name) for region in schedule.get(block).reads]
