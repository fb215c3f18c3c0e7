"""The features that the cost model reads, for every kind of kernel alike.

All are computed from decision vectors with numpy, without lowering. Logarithms are base 2. NaN means "does not apply".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

__all__ = ["COMPILED", "FEATURES", "feature_table", "with_compiled"]

COMPILED: tuple[str, ...] = (
    "registers",  # of a thread
    "spill_bytes",  # stored and loaded by a thread because registers ran out
    "stack_bytes",  # of a thread's local memory
    "static_shared_bytes",  # shared memory that the kernel declares
)
"""What only a GPU's compiler knows: NaN for a candidate that was not compiled. Of several kernels, the most."""

FEATURES: tuple[str, ...] = (
    "log_flops",  # of the whole kernel
    "log_bytes",  # inputs and outputs, each once
    "family",  # which sketch family, an index
    "log_vector_elements",  # elements of the innermost vectorised run
    "vector_efficiency",  # useful share of the vector lanes (tails and padding lose)
    "accumulators",  # vector registers that hold sums in the innermost tile
    "register_pressure",  # registers needed / registers there are
    "log_tile_m",  # register tile, rows
    "log_tile_n",  # register tile, columns in elements
    "log_tile_k",  # unrolled reduction steps
    "log_block_m",  # cache block, rows
    "log_block_n",
    "log_block_k",
    "log_unrolled_body",  # statements in the innermost unrolled body
    "tail_waste",  # share of the work done by ragged tails
    "log_parallel_chunks",  # iterations of the parallel loop; 0 when serial
    "imbalance",  # work of the busiest thread / mean work
    "log_chunk_flops",  # work of one parallel iteration
    "l1_footprint",  # bytes touched by the innermost block / L1
    "l2_footprint",  # bytes touched by the middle block / L2
    "l3_footprint",  # bytes of the whole kernel / L3
    "log_l2_traffic",  # bytes that cross from L2 to L1, estimated
    "log_memory_traffic",  # bytes that cross from memory, estimated
    "log_pack_bytes",  # bytes copied into packed buffers inside the kernel
    "log_contiguous_run",  # bytes read one after another in the innermost loops
    "log_reduction",  # extent of the whole reduction
    "compute_share",  # analytic compute time / analytic latency
    "memory_share",  # analytic memory time / analytic latency
    "log_latency",  # analytic latency in seconds
    "variant",  # which of a sketch's forms (where the epilogue, padding or packing is computed), an index
    # GPUs only:
    "occupancy",  # resident warps / most that a multiprocessor can hold
    "coalescing",  # useful share of the bytes in the memory transactions of a warp
    "bank_conflicts",  # shared-memory passes a warp's access takes, 1 when there are no conflicts
    "arithmetic_intensity",  # log2 of FLOP for each byte that a block loads
    "log_threads",  # threads of a block
    "waves",  # log2 of (blocks / blocks that are resident at once)
    "stages",  # shared-memory buffers that loads run ahead in
    *COMPILED,
)


def feature_table(count: int, known: Mapping[str, NDArray[np.float64] | float]) -> NDArray[np.float32]:
    """The features of `count` candidates, shape [count, len(FEATURES)]: NaN but for the columns that are `known`.

    Raises ValueError for a name that is none of `FEATURES`.
    """
    table = np.full((count, len(FEATURES)), np.nan, dtype=np.float32)
    for feature, column in known.items():
        table[:, FEATURES.index(feature)] = column
    return table


def with_compiled(table: NDArray[np.float32], notes: Sequence[Mapping[str, float]]) -> NDArray[np.float32]:
    """The features, shape [n, len(FEATURES)], with what compiling each of the n candidates told."""
    if not any(notes):
        return table
    result = table.copy()
    for column, name in enumerate(FEATURES):
        if name in COMPILED:
            result[:, column] = [note.get(name, np.nan) for note in notes]
    return result
