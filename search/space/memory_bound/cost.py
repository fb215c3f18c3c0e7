"""From what a schedule does to seconds and to the cost model's features; arrays of one number a candidate."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..features import feature_table
from ..hardware import Hardware
from .kernel import Kernel, Stage

__all__ = ["CALL_INSTRUCTIONS", "FORM_INSTRUCTIONS", "Work", "features", "instructions", "latency_s"]

Array = NDArray[np.float64]

CALL_INSTRUCTIONS = 20.0
"""One scalar call of libm, in instructions."""

FORM_INSTRUCTIONS = 24.0
"""A vector of `exp`, `tanh` or `erf` in its vectorising form: 12 to 18 cycles at two instructions a cycle."""

LOADED_FROM_TABLE = 2.5
"""An element of a table, its place taken out of a vector: 16 take 20 cycles (Zen 5)."""

_LOOP_INSTRUCTIONS = 2.0
_L3_SLOWDOWN = 2.0  # L3 over L2, of one thread
_ONE_THREAD_SHARE = 0.7  # what one thread gets of the bandwidth to memory


@dataclass
class Work:
    """What a candidate does, arrays of shape [n].

    Attributes
    ----------
    instructions : vector (or scalar, where it is not vectorised) instructions of the whole kernel
    lanes : elements of one vector
    efficiency : useful share of the lanes, 0 to 1
    unrolled : statements in the innermost body
    workers : threads that share the work, 1 for a serial kernel
    chunks : iterations of the parallel loop
    scratch_bytes : intermediate buffers written and read again
    run_bytes : bytes read one after another in the innermost loops
    accumulators : vectors that hold sums
    variant : which form
    """

    instructions: Array
    lanes: Array
    efficiency: Array
    unrolled: Array
    workers: Array
    chunks: Array
    scratch_bytes: Array
    run_bytes: Array
    accumulators: Array
    variant: Array


def instructions(stage: Stage, axis: int | None, lanes: Array, unroll: Array, loop: Array | None = None) -> Array:
    """Instructions of a whole stage whose innermost loop over `axis` has `lanes` elements a vector, shape [n].

    An access with stride one is a vector access, one with stride zero leaves the loop, any other is one scalar access
    an element. What is looked up in a table of bytes is picked, where instructions do that for vectors of so many
    elements as the innermost loop is vectorised by: `loop`, unless those are `lanes`.
    """
    # Part of the additions and multiplications become multiply-adds.
    vector = 0.7 * stage.operations + stage.forms * FORM_INSTRUCTIONS
    scalar: Array | float = stage.calls * CALL_INSTRUCTIONS
    for access in stage.reads + stage.writes:
        if access.looked_up:
            scalar = scalar + _looked_up(stage, lanes if loop is None else loop)
            continue
        stride = None if axis is None else access.strides[axis]
        vector += stride == 1
        scalar += stride not in (0, 1)
    per_element = (vector + _LOOP_INSTRUCTIONS / unroll) / lanes + scalar
    return np.asarray(stage.iterations * per_element, dtype=np.float64)


def _looked_up(stage: Stage, loop: Array) -> Array | float:
    """Instructions in which an element of a table is found."""
    if stage.picks is None:
        return LOADED_FROM_TABLE
    picked = (stage.picks.least <= loop) & (loop <= stage.picks.lanes)
    return np.where(picked, stage.picks.instructions / loop, LOADED_FROM_TABLE)


def _compute_s(hardware: Hardware, work: Work) -> Array:
    # Machines issue about twice as many vector instructions as multiply-adds.
    per_second = 2.0 * hardware.peak_flops_per_s / (2 * hardware.lanes(4))
    busiest = np.ceil(work.chunks / work.workers) / work.chunks
    return work.instructions / np.maximum(work.efficiency, 0.05) / per_second * busiest


def _memory_s(hardware: Hardware, kernel: Kernel, work: Work) -> Array:
    total = kernel.argument_bytes + work.scratch_bytes
    busiest = np.ceil(work.chunks / work.workers) / work.chunks
    cached = hardware.cache_bandwidth_bytes_per_s
    beyond = hardware.bandwidth_bytes_per_s * np.minimum(1.0, _ONE_THREAD_SHARE * work.workers)
    fits_l2 = total / work.workers <= hardware.l2_bytes
    fits_l3 = total <= hardware.l3_bytes
    one_thread = np.where(fits_l2, cached, cached / _L3_SLOWDOWN)
    # A line is fetched whole: short runs waste the rest of it.
    waste = np.maximum(1.0, hardware.cache_line_bytes / np.maximum(work.run_bytes, 1.0)) ** 0.5
    return np.where(fits_l2 | fits_l3, total * busiest / one_thread, total / beyond) * waste


def latency_s(hardware: Hardware, kernel: Kernel, work: Work) -> Array:
    """Seconds, shape [n]: computing and moving overlap in part, a parallel region costs its start."""
    compute, memory = _compute_s(hardware, work), _memory_s(hardware, kernel, work)
    parallel = np.where(work.workers > 1, hardware.parallel_overhead_s, 0.0)
    return np.maximum(compute, memory) + 0.3 * np.minimum(compute, memory) + parallel


def features(hardware: Hardware, kernel: Kernel, work: Work, family: int) -> NDArray[np.float32]:
    """The cost model's features, shape [n, len(FEATURES)]; NaN where one does not apply."""
    compute, memory = _compute_s(hardware, work), _memory_s(hardware, kernel, work)
    latency = latency_s(hardware, kernel, work)
    reduction = max((stage.iterations // max(1, stage.rows) for stage in kernel.stages), default=1)
    total = kernel.argument_bytes + work.scratch_bytes
    known = {
        "log_flops": np.log2(1.0 + kernel.operations),
        "log_bytes": np.log2(1.0 + kernel.argument_bytes),
        "family": float(family),
        "log_vector_elements": np.log2(work.lanes),
        "vector_efficiency": work.efficiency,
        "accumulators": work.accumulators,
        "register_pressure": (work.accumulators + 2) / hardware.vector_registers,
        "log_unrolled_body": np.log2(work.unrolled),
        "tail_waste": 1.0 - work.efficiency,
        "log_parallel_chunks": np.where(work.workers > 1, np.log2(work.chunks), 0.0),
        "imbalance": np.ceil(work.chunks / work.workers) * work.workers / work.chunks,
        "log_chunk_flops": np.log2(1.0 + kernel.operations / work.chunks),
        "l2_footprint": total / work.chunks / hardware.l2_bytes,
        "l3_footprint": total / hardware.l3_bytes,
        "log_memory_traffic": np.log2(1.0 + total),
        "log_pack_bytes": np.log2(1.0 + work.scratch_bytes),
        "log_contiguous_run": np.log2(np.maximum(work.run_bytes, 1.0)),
        "log_reduction": np.log2(reduction),
        "compute_share": compute / latency,
        "memory_share": memory / latency,
        "log_latency": np.log2(latency),
        "variant": work.variant,
    }
    return feature_table(len(work.lanes), known)
