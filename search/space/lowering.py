"""What a scheduled kernel needs before TVM lowers it."""

from __future__ import annotations

import math
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
from .rounding import round_in_vectors

__all__ = ["ASYNC_COPIES", "as_written", "lowerable_schedule", "narrow_indices", "prepare_for_lowering"]

ASYNC_COPIES = {"tirx.use_async_copy": True}
"""The option of TVM's `PassContext` with which GPU schedules are compiled: their asynchronous copies become cp.async.
Without it they compute the same, and wait for every copy."""


def narrow_indices(function: Any) -> Any:
    """The scheduled PrimFunc with 32-bit loop variables, or the function itself where 32 bits do not suffice.

    Relax kernels have 64-bit loops. TVM narrows them while lowering, and loses on the way which loops were marked with
    "pragma_loop_partition_hint": ragged tiles then keep a condition around every element and run at a third of the
    speed. Narrowed before lowering, the mark survives.
    """
    for parameter in function.params:
        shape = getattr(parameter.ty, "shape", ())
        known = all(isinstance(extent, tirx.IntImm) for extent in shape)
        wide = str(parameter.dtype).startswith("int64")
        if wide or not known or math.prod(int(extent) for extent in shape) >= 2**31:
            return function
    if _sees_strides(function):
        # TVM would narrow the strides that an intrinsic sees, and not the indices that are made of them.
        return function
    if _has_ragged_axes(function):
        # TVM would narrow the loops, and leave 64 bits in parts of where they end: windows of ragged adaptive pooling.
        return function
    try:
        return tirx.transform.ForceNarrowIndexToInt32()(IRModule({"main": function}))["main"]
    except RuntimeError:  # a loop or an index of its own goes beyond 32 bits
        return function


def prepare_for_lowering(function: Any) -> Any:
    """A scheduled PrimFunc as it should be given to TVM: tiles, functions and sums of lanes in vectors, 32-bit indices.

    Whoever compiles a schedule of these spaces calls this first, on the kernel and on its packing function alike.
    No step is part of the schedule, so a trace replays on the kernel as it was extracted. GPUs have `exp` and the
    like in hardware: where loops are bound to threads, functions stay, narrow sums become words, conditions are put as
    TVM keeps them, and booleans are in no vectors.
    """
    if _has_threads(function):
        function = begin_with_infinity(reduce_in_words(function))
        function = lower_warpgroups(booleans_one_by_one(keep_guards(function)))
    else:
        function = begin_with_infinity(multiply_tiles(join_vectors(function)))
        function = exp_of_differences_from_maxima(sum_moments_together(function))
        function = fetch_next_rows(pick_lanes(mask_lanes(roll_windows(function))))
        function = multiply_by_reciprocals(reduce_lanes_as_trees(transpose_in_registers(overlap_tails(function))))
        function = vectorizable_math(round_in_vectors(pick_from_tables(function)))
        function = separate_steps(prefetch_operands(sums_on_stack(function)))
        function = spread_groups(skip_padding(function))
    return narrow_indices(keep_index_divisions(load_chosen_values(function)))


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
