"""Marks: annotations by which a schedule says what no primitive of TVM does.

A sketch marks a loop or a block. A rewriter, which is a step of `lowering.prepare_for_lowering`, reads the mark,
rewrites what is marked and drops the mark. Without it, the loops compute the same.

Marks are in the traces that records store: names and values stay as they are. The records may be others', so a rewriter
raises ValueError for a mark that does not fit its loop, or leaves the loop as it is.

Two marks rarely meet on a loop. These do:

    FETCH_AHEAD, NEXT_PANEL, NEXT_TILE, SEPARATE_STEPS    the steps of a reduction
    AMX_TILES, NEXT_PANEL                                 the same, on tile registers
    NEXT_ROWS, PARTITION                                  the vectors of a row with a ragged end

These are nested, outer ones first: ROLLING, ROLLING_STEP, WINDOW_ROW, MASKED_LANES; AMX_CONFIGURED, AMX_TILES;
OVERLAPPING_TAIL, TRANSPOSE_TILE. Why a rewriter runs before another: `lowering.CPU_STEPS`.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

__all__ = [
    "AHEAD_OF_TIME",
    "AMX_CONFIGURED",
    "AMX_TILES",
    "FETCH_AHEAD",
    "IMAGE_ROWS",
    "JOIN_VECTORS",
    "LANE_TREE",
    "MARKS",
    "MASKED_LANES",
    "NEXT_PANEL",
    "NEXT_ROWS",
    "NEXT_TILE",
    "OUTPUTS_OF_TILE",
    "OVERLAPPING_TAIL",
    "OWN",
    "PARTITION",
    "PICKED_LANES",
    "PIPELINE_ASYNC_STAGES",
    "PIPELINE_ORDER",
    "PIPELINE_STAGE",
    "ROLLING",
    "ROLLING_STEP",
    "SEPARATE_STEPS",
    "SPLIT_IN_HALVES",
    "SPREAD_GROUPS",
    "SWIZZLED",
    "THROUGH_REGISTERS",
    "TILE_GRID",
    "TRANSPOSE_TILE",
    "TVM",
    "UNROLL_EXPLICIT",
    "UNROLL_STEPS",
    "WINDOW_ROW",
    "Mark",
]

OWN = "eqtune."
"""What the names of marks that only eqtune reads begin with."""

TVM = "TVM"
"""The reader of marks whose names are TVM's."""

AMX_CONFIGURED = "eqtune.amx_configured"
AMX_TILES = "eqtune.amx_tiles"
FETCH_AHEAD = "eqtune.fetch_ahead"
IMAGE_ROWS = "eqtune.image_rows"
JOIN_VECTORS = "eqtune.join_vectors"
LANE_TREE = "eqtune.lane_tree"
MASKED_LANES = "eqtune.masked_lanes"
NEXT_PANEL = "eqtune.next_panel"
NEXT_ROWS = "eqtune.next_rows"
NEXT_TILE = "eqtune.next_tile"
OVERLAPPING_TAIL = "eqtune.overlapping_tail"
PICKED_LANES = "eqtune.picked_lanes"
ROLLING = "eqtune.rolling"
ROLLING_STEP = "eqtune.rolling_step"
SEPARATE_STEPS = "eqtune.separate_steps"
SPLIT_IN_HALVES = "eqtune.split_in_halves"
SPREAD_GROUPS = "eqtune.spread_groups"
SWIZZLED = "eqtune.swizzled"
TRANSPOSE_TILE = "eqtune.transpose_tile"
WINDOW_ROW = "eqtune.window_row"

AHEAD_OF_TIME = "meta_schedule.layout_rewrite_preproc"
PARTITION = "pragma_loop_partition_hint"
PIPELINE_ASYNC_STAGES = "software_pipeline_async_stages"
PIPELINE_ORDER = "software_pipeline_order"
PIPELINE_STAGE = "software_pipeline_stage"
THROUGH_REGISTERS = "tirx.manifest_shared_memory_local_stage"
UNROLL_EXPLICIT = "pragma_unroll_explicit"
UNROLL_STEPS = "pragma_auto_unroll_max_step"

# No marks of schedules, but annotations that a kernel comes with (search/graph/winograd_kernels.py).

TILE_GRID = "eqtune.tile_grid"
"""Of the block that writes transformed data: what its axis of tiles is made of, (batch, down, across)."""

OUTPUTS_OF_TILE = "eqtune.outputs_of_tile"
"""Of a convolution's block that writes transformed data: rows and columns that a tile gives."""


class Mark(NamedTuple):
    """One row of `MARKS`.

    Attributes
    ----------
    name : str
        The annotation.
    on : "loop" or "block"
        What is marked; `which` says which.
    value : str
        What the annotation's value is. A list is in brackets.
    set_by : tuple of str
        Modules of `search/space` with sketches that annotate.
    read_by : tuple of str
        Functions that look at the mark, in the order in which they run; `TVM` where it does.
    becomes : str
        What a reader makes of what is marked.
    """

    name: str
    on: Literal["loop", "block"]
    which: str
    value: str
    set_by: tuple[str, ...]
    read_by: tuple[str, ...]
    becomes: str


MARKS = (
    # Vectors.
    Mark(
        JOIN_VECTORS,
        "loop",
        "around a vectorised one",
        "elements of a full vector, a power of two",
        ("contraction.tiled", "contraction.write_back"),
        ("join_vectors",),
        "full vectors and a narrower rest",
    ),
    Mark(
        MASKED_LANES,
        "loop",
        "innermost, with a single store; perhaps shorter than a vector",
        "lanes of the vector",
        ("memory_bound.masked_windows", "memory_bound.rolling_windows"),
        ("roll_windows", "mask_lanes"),
        "one vector, masked where conditions depend on the lane",
    ),
    Mark(
        PICKED_LANES,
        "loop",
        "innermost, over a row no shorter than a vector, with a single store",
        "lanes of a vector",
        ("memory_bound.resample",),
        ("pick_lanes",),
        "all vectors of the row, of loads and shuffles; a ragged last one overlaps (`WriteInPlace` asks for it)",
    ),
    Mark(
        OVERLAPPING_TAIL,
        "loop",
        "over vectors or tiles of a row; stores inside do not depend on earlier ones",
        "length of a vector or tile",
        ("contraction.tiled", "contraction.write_back", "memory_bound.windows"),
        ("overlap_tails",),
        "whole vectors or tiles, the last of which overlaps the one before (`WriteInPlace` asks for it)",
    ),
    Mark(
        TRANSPOSE_TILE,
        "loop",
        "around one of the same extent, which is innermost; read along the first, written along the second",
        "place of the load to shuffle, among all loads of the stored value",
        ("attention", "contraction.write_back", "memory_bound.transpose"),
        ("transpose_in_registers",),
        "vector loads, shuffles and vector stores",
    ),
    Mark(
        LANE_TREE,
        "loop",
        "around `out = out op part[..., lane]`, contiguous along it",
        "lanes of a vector",
        ("attention", "memory_bound.row_reductions"),
        ("reduce_lanes_as_trees",),
        "halves of vectors combined, log2(lanes) times",
    ),
    # Windows over images.
    Mark(
        ROLLING,
        "loop",
        "over vectors of a row, around the one over rows",
        "vectors side by side",
        ("memory_bound.rolling_windows",),
        ("roll_windows",),
        "windows that roll down the image, their sums in registers",
    ),
    Mark(
        ROLLING_STEP,
        "loop",
        "over rows, inside a ROLLING one",
        "rows of the image between two windows",
        ("memory_bound.rolling_windows",),
        ("roll_windows",),
        "steps that each read some rows of the image, once",
    ),
    Mark(
        WINDOW_ROW,
        "loop",
        "over a window's rows, inside a ROLLING_STEP one",
        "1",
        ("memory_bound.rolling_windows",),
        ("roll_windows",),
        "the window in which a row of the image counts",
    ),
    Mark(
        IMAGE_ROWS,
        "loop",
        "over the rows or columns of a window",
        "the fields of `padding.ImageRows`, [dimension, extent, first, end, dilation]",
        ("contraction.tiled",),
        ("skip_padding",),
        "the part of the loop that reads no zeros of padding",
    ),
    Mark(
        SPREAD_GROUPS,
        "loop",
        "over the inputs of a group, around unrolled loops and vectors of several groups' outputs",
        "1",
        ("contraction.tiled",),
        ("spread_groups",),
        "products of vectors with inputs that are shuffled",
    ),
    # Steps of a reduction, and what they ask memory for.
    Mark(
        FETCH_AHEAD,
        "loop",
        "innermost of a reduction that is not unrolled",
        "steps ahead",
        ("contraction.prefetch_choice", "narrow_weights", "winograd_conv2d"),
        ("prefetch_operands",),
        "requests for what these steps will read by vectors",
    ),
    Mark(
        NEXT_PANEL,
        "loop",
        "the same, or an AMX_TILES one",
        "[loops of the reduction around it, iterations of the loop over panels that read the same one because other "
        "loops were fused into it, dimension of the packed weights that counts panels]",
        ("amx.schedule", "contraction.prefetch_choice", "winograd_conv2d"),
        ("multiply_tiles", "prefetch_operands"),
        "requests for a share of the next panel of weights",
    ),
    Mark(
        NEXT_TILE,
        "loop",
        "the same",
        "[loops of the reduction around it, elements that a tile reads of the operand that is not read by vectors, all "
        "of them before those of the next tile]",
        ("contraction.tiled",),
        ("prefetch_operands",),
        "requests for a share of the next tile's rows",
    ),
    Mark(
        NEXT_ROWS,
        "loop",
        "over the vectors of a row",
        "its steps from these rows to those that come next",
        ("memory_bound.rows",),
        ("fetch_next_rows",),
        "requests for the rows that come next",
    ),
    Mark(
        SEPARATE_STEPS,
        "loop",
        "serial or unrolled",
        "1",
        ("contraction.tiled",),
        ("separate_steps",),
        "a loop that stays serial; of an unrolled one, iterations that LLVM does not mix",
    ),
    # Tile registers (AMX).
    Mark(
        AMX_CONFIGURED,
        "loop",
        "outermost around products of tiles",
        "1",
        ("amx.schedule",),
        ("multiply_tiles",),
        "the loop between instructions that configure and release registers; in each iteration of a parallel one",
    ),
    Mark(
        AMX_TILES,
        "loop",
        "outermost of a reduction; inside are the others, then lines, rows, vectors of columns, lanes and the depth of "
        "a product",
        "[place in `amx.products.PRODUCTS`, loops of the reduction, rows of a tile]",
        ("amx.schedule",),
        ("multiply_tiles",),
        "zeroed tile registers, the loops with products of tiles, stores; tiles down are those of all lines",
    ),
    Mark(
        SPLIT_IN_HALVES,
        "loop",
        "whose body stores 16 floats of a row and then 16 more, or tiles of 32 rows of 16",
        "0 for a row, or how many tiles",
        ("amx.schedule",),
        ("multiply_tiles", "splits_panels"),
        "the same, and at its end what it stored as halves in bfloat16; constant weights in numpy",
    ),
    # GPUs.
    Mark(
        SWIZZLED,
        "block",
        "that copies lines to shared memory",
        "1",
        ("gpu.warpgroup",),
        ("lower_warpgroups",),
        "a copy with the pieces of each line exchanged",
    ),
    Mark(
        THROUGH_REGISTERS,
        "block",
        "that copies a tile to shared memory, in a pipeline of two stages",
        "1",
        ("gpu.tensor_core", "gpu.tiled"),
        (TVM,),
        "a copy to registers, and one from there",
    ),
    Mark(
        PIPELINE_STAGE,
        "loop",
        "over the steps of a product",
        "[stage of each statement of its body]",
        ("gpu.tiled", "gpu.warpgroup"),
        ("lower_warpgroups", TVM),
        "a pipeline; of warpgroups, one that waits for its sums as late as possible",
    ),
    Mark(
        PIPELINE_ORDER,
        "loop",
        "the same",
        "[place of each statement in an iteration]",
        ("gpu.tiled", "gpu.warpgroup"),
        ("lower_warpgroups", TVM),
        "that order",
    ),
    Mark(
        PIPELINE_ASYNC_STAGES,
        "loop",
        "the same",
        "[stages whose copies are asynchronous]",
        ("gpu.tiled", "gpu.warpgroup"),
        (TVM,),
        "cp.async",
    ),
    Mark(
        UNROLL_STEPS,
        "loop",
        "over steps of a reduction",
        "most steps that are unrolled",
        ("gpu.reduction", "gpu.tiled"),
        ("sums_on_stack", TVM),
        "an unrolled loop; in kernels of others for CPUs, sums stay where they are",
    ),
    Mark(
        UNROLL_EXPLICIT,
        "loop",
        "the same",
        "0",
        ("gpu.reduction", "gpu.tiled"),
        (TVM,),
        "a pragma that leaves the unrolling to the compiler of CUDA",
    ),
    # Everywhere.
    Mark(
        AHEAD_OF_TIME,
        "block",
        "that rearranges weights",
        "True",
        ("amx.schedule", "contraction.copies", "contraction.dot", "narrow_weights", "winograd_conv2d"),
        (TVM,),
        "a function of its own, which runs once, before the kernel does",
    ),
    Mark(
        PARTITION,
        "loop",
        "in which a condition changes",
        "1",
        ("nest",),
        ("keep_within_loops", "narrow_indices", TVM),
        "parts, of which the bulk has no condition; whole where TVM would split beyond its ends",
    ),
)
"""Every annotation that sketches set. A test compares the rows with the code."""
