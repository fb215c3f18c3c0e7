"""What a scheduled kernel needs before TVM lowers it: rewriters, in an order that they need."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tvm import IRModule, tirx
from tvm.s_tir import SBlock

from .amx.tiles import multiply_tiles
from .byte_tables import pick_from_tables
from .chosen_values import load_chosen_values
from .contraction.join_vectors import join_vectors
from .contraction.padding import skip_padding
from .contraction.prefetch import prefetch_operands
from .contraction.separate_steps import separate_steps
from .contraction.spread_groups import spread_groups
from .contraction.stack_sums import sums_on_stack
from .expressions import nodes_of
from .extrema import begin_with_infinity
from .gpu.booleans import booleans_one_by_one
from .gpu.guards import keep_guards
from .gpu.warpgroup_lowering import lower_warpgroups
from .gpu.words import reduce_in_words
from .index_division import keep_index_divisions
from .marks import PARTITION
from .memory_bound.lane_trees import multiply_by_reciprocals, reduce_lanes_as_trees
from .memory_bound.masked_lanes import mask_lanes
from .memory_bound.maxima import exp_of_differences_from_maxima
from .memory_bound.moments import sum_moments_together
from .memory_bound.next_rows import fetch_next_rows
from .memory_bound.picked_lanes import pick_lanes
from .memory_bound.rolling_sums import roll_windows
from .memory_bound.tails import overlap_tails
from .memory_bound.transpose_tiles import transpose_in_registers
from .memory_bound.vector_math import vectorizable_math
from .partitions import keep_within_loops
from .rounding import round_in_vectors
from .statements import rewrite_marked_loops, with_body

__all__ = [
    "ASYNC_COPIES",
    "CPU_STEPS",
    "GPU_STEPS",
    "Step",
    "as_written",
    "lowerable_schedule",
    "narrow_indices",
    "prepare_for_lowering",
]

Rewriter = Callable[[Any], Any]

ASYNC_COPIES = {"tirx.use_async_copy": True}
"""The option of TVM's `PassContext` with which GPU schedules are compiled: their asynchronous copies become cp.async.
Without it they compute the same, and wait for every copy."""


WIDE_LOOP = "eqtune.wide_loop"
"""Annotation of loops marked PARTITION whose variables stay 64 bits wide. Where TVM splits one iteration off a loop
without annotations, it puts a zero of 32 bits in the variable's place, and cannot add that to 64 bits."""


def narrow_indices(function: Any) -> Any:
    """The scheduled PrimFunc with 32-bit loop variables, or with those that it has where 32 bits do not suffice.

    Relax kernels have 64-bit loops. TVM narrows them while lowering, and loses on the way which loops were marked
    PARTITION: ragged tiles then keep a condition around every element and run at a third of the speed. Narrowed before
    lowering, the mark survives. So it does where TVM cannot narrow them: in tiles of a tensor of symbolic size.
    """
    narrowed = _narrowed(function)
    if narrowed is not None:
        return narrowed
    return rewrite_marked_loops(
        function, PARTITION, lambda loop: with_body(loop, loop.body, annotations={WIDE_LOOP: True})
    )


def _narrowed(function: Any) -> Any | None:
    """The PrimFunc with 32-bit loop variables; None where they do not suffice."""
    for parameter in function.params:
        shape = getattr(parameter.ty, "shape", ())
        known = all(isinstance(extent, tirx.IntImm) for extent in shape)
        wide = str(parameter.dtype).startswith("int64")
        if wide or not known or math.prod(int(extent) for extent in shape) >= 2**31:
            return None
    if _sees_strides(function):
        # TVM would narrow the strides that an intrinsic sees, and not the indices that are made of them.
        return None
    if _has_ragged_axes(function):
        # TVM would narrow the loops, and leave 64 bits in parts of where they end: windows of ragged adaptive pooling.
        return None
    try:
        return tirx.transform.ForceNarrowIndexToInt32()(IRModule({"main": function}))["main"]
    except RuntimeError:  # a loop or an index of its own goes beyond 32 bits
        return None


@dataclass(frozen=True)
class Step:
    """A rewriter, in its place among others.

    Attributes
    ----------
    rewrite : callable
        PrimFunc to PrimFunc, the same object where there is nothing to do.
    leaves : str
        What it makes of a scheduled kernel. Which marks it looks at: `MARKS` (marks.py).
    needs : mapping
        Rewriters that run before, if they are steps of the same kernels; each with the reason why it cannot run later.
    """

    rewrite: Rewriter
    leaves: str
    needs: Mapping[Rewriter, str] = field(default_factory=dict)


_MAKE_VECTORS: tuple[Rewriter, ...] = (mask_lanes, pick_lanes, transpose_in_registers)

_LAST_STEPS = (
    Step(
        load_chosen_values,
        "conditions in place of selections that would load what is not chosen",
        {
            mask_lanes: "it refuses conditions that guard more than a load",
            vectorizable_math: "functions that a condition guards become statements, selected ones do not",
        },
    ),
    Step(
        keep_index_divisions,
        "indices that TVM does not simplify",
        {spread_groups: "groups are known by floor divisions"},
    ),
    Step(narrow_indices, "32-bit loops, which keep the mark PARTITION"),
)

CPU_STEPS = (
    Step(join_vectors, "vectors of several widths, one after another"),
    Step(multiply_tiles, "calls of tile registers, without blocks"),
    Step(begin_with_infinity, "infinities where maxima and minima begin, and beside images"),
    Step(sum_moments_together, "mean and variance in one pass"),
    Step(exp_of_differences_from_maxima, "`exp` of what is never positive, in its shorter form"),
    Step(roll_windows, "sums of windows in registers; their vectors are still marked MASKED_LANES"),
    Step(
        mask_lanes,
        "vector loops without blocks",
        {
            begin_with_infinity: "what lies beside an image stands in a condition, which becomes a mask",
            roll_windows: "it finds its sums by the mark that is dropped here",
        },
    ),
    Step(pick_lanes, "vector loops without blocks"),
    Step(fetch_next_rows, "requests for rows, in front of what a loop holds"),
    Step(overlap_tails, "tiles and vectors without the condition that ends a row"),
    Step(
        transpose_in_registers,
        "vector loops, most without blocks",
        {overlap_tails: "a tile that has a condition stays two loops, and one without a block is not moved"},
    ),
    Step(
        reduce_lanes_as_trees,
        "sums of lanes without a loop",
        {exp_of_differences_from_maxima: "maxima of a row are known by the loads of their stores"},
    ),
    Step(
        multiply_by_reciprocals,
        "one division for all lanes that share a divisor",
        dict.fromkeys(_MAKE_VECTORS, "they make vector loops"),
    ),
    Step(
        pick_from_tables,
        "vector loops with further statements around and inside",
        {
            join_vectors: "it takes loops around nothing but a vector",
            **dict.fromkeys(_MAKE_VECTORS, "they make vector loops"),
        },
    ),
    Step(
        round_in_vectors,
        "roundings by bits, or LLVM's",
        {multiply_by_reciprocals: "quotients that are rounded are known by `nearbyint`, and stay"},
    ),
    Step(
        vectorizable_math,
        "functions in forms that vectorise, with further statements around and inside",
        {
            join_vectors: "it takes loops around nothing but a vector",
            sum_moments_together: "it takes sums of single stores",
            exp_of_differences_from_maxima: "no `exp` will be left",
            **dict.fromkeys(_MAKE_VECTORS, "they take single stores, and make vector loops"),
        },
    ),
    Step(
        sums_on_stack,
        "buffers of a tile's sums where tiles are computed",
        {overlap_tails: "places in the small buffer count from where a tile begins"},
    ),
    Step(
        prefetch_operands,
        "requests for operands, in front of what a loop holds",
        {multiply_tiles: "the mark NEXT_PANEL of its loops is its own, and they hold no vectors"},
    ),
    Step(
        separate_steps,
        "an instruction in front of what a loop holds",
        {
            sums_on_stack: "sums in several statements of an unrolled loop are not moved",
            prefetch_operands: "requests belong to their step",
        },
    ),
    Step(
        skip_padding,
        "loops whose length depends on those around, over axes that count as none of a reduction",
        {
            sums_on_stack: "whether loops around carry sums is asked of the axes",
            prefetch_operands: "it divides by how many steps there are",
        },
    ),
    Step(
        spread_groups,
        "vectors of products without loops and blocks",
        {
            overlap_tails: "products with a condition are refused",
            sums_on_stack: "whether loops around carry sums is asked of the blocks",
            skip_padding: "rows of an image are found in blocks",
        },
    ),
    Step(
        keep_within_loops,
        "loops marked PARTITION that TVM splits within their ends",
        {
            skip_padding: "its loops end where a condition on those around says",
            spread_groups: "conditions are those of vectors that are written out",
        },
    ),
    *_LAST_STEPS,
)
"""What kernels for CPUs need, in order."""

GPU_STEPS = (
    Step(reduce_in_words, "sums of narrow types in words of 32 bits, narrowed where they are read"),
    Step(
        begin_with_infinity,
        "infinities where maxima and minima begin, and beside images",
        {reduce_in_words: "maxima of bfloat16 are floats only in words"},
    ),
    Step(keep_guards, "conditions of reductions into memory as TVM keeps them"),
    Step(booleans_one_by_one, "no vectors of booleans"),
    Step(lower_warpgroups, "pipelines that wait late, copies with exchanged pieces, sums in row 0"),
    *_LAST_STEPS,
)
"""What kernels for GPUs need, whose loops are bound to threads. They have `exp` and the like in hardware."""


def prepare_for_lowering(function: Any) -> Any:
    """A scheduled PrimFunc as it should be given to TVM: tiles, functions and sums of lanes in vectors, 32-bit indices.

    Whoever compiles a schedule of these spaces calls this first, on the kernel and on its packing function alike.
    No step is part of the schedule, so a trace replays on the kernel as it was extracted.
    """
    for step in GPU_STEPS if _has_threads(function) else CPU_STEPS:
        function = step.rewrite(function)
    return function


def as_written(function: Any) -> Any:
    """A PrimFunc, scheduled or not, without what TVM would compile to something else than it says.

    For kernels that no schedule of these spaces is for: references must be right, too.
    """
    return keep_index_divisions(begin_with_infinity(function))


def lowerable_schedule(space: Any, decision: Any, compiles: bool = False) -> Any:
    """The kernel of `space` scheduled, where nothing will be compiled before the model is; None where that would fail.

    A schedule that was not measured may fail only when it is prepared; one that is known to compile need not be.
    """
    try:
        schedule = space.apply(decision)
        if not compiles:
            prepare_for_lowering(schedule.mod["main"])
    except (RuntimeError, ValueError, TypeError, LookupError):  # ScheduleError, and whatever TVM's own checks raise
        return None
    return schedule


def _sees_strides(function: Any) -> bool:
    """Whether an intrinsic of the function asks for the strides of what it works on."""
    blocks = nodes_of(function.body, SBlock)
    return any(len(match.buffer.strides) for block in blocks for match in block.match_buffers)


def _has_ragged_axes(function: Any) -> bool:
    """Whether an axis of a block varies. Loops that `skip_padding` shortens go over axes that do not."""
    axes = nodes_of(function.body, tirx.IterVar)
    return not all(isinstance(axis.dom.extent, tirx.IntImm) for axis in axes if axis.dom is not None)


def _has_threads(function: Any) -> bool:
    return any(loop.thread_binding is not None for loop in nodes_of(function.body, tirx.For))
