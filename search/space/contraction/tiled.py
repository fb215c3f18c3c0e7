"""The tiled contraction: register tiles over any layout, packed panels, parallel chunks, epilogue in registers.

The loop nest, outermost first: parallel chunks of tiles, tiles, the reduction, and an unrolled register tile of
`second x mr x nr` sums. It is the BLIS macro-kernel (Van Zee and van de Geijn, 2015) without a fixed micro-kernel:
LLVM keeps the sums in registers when the reduction's initialisation is taken out of the loop.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import astuple
from typing import Any

import tvm_ffi
from tvm import tirx
from tvm.ir.expr import TensorLoad

from ..access import Access, dtype_bytes
from ..hardware import FAR_WEIGHTS, MASKED_BYTES, Hardware
from ..memory_bound.tails import OVERLAPPING_TAIL
from ..memory_bound.transpose_tiles import TRANSPOSE_TILE
from .join_vectors import JOIN_VECTORS
from .padding import IMAGE_ROWS, image_rows
from .plan import Plan, dimension_of, whole_width
from .prefetch import FETCH_AHEAD, NEXT_PANEL, NEXT_TILE
from .separate_steps import SEPARATE_STEPS
from .spread_groups import SPREAD_GROUPS

__all__ = [
    "LEAST_FAR_BYTES",
    "ahead_bytes",
    "asks_for_rows",
    "asks_for_weights",
    "index_map",
    "local_sums",
    "overlapping_columns",
    "overlapping_rows",
    "readers_of_panel",
    "schedule_copy",
    "schedule_padding",
    "schedule_tiles",
    "split_lanes",
]

AHEAD, UNPACKED, AT_CHUNK, AT_ROOT = 3, 0, 1, 2
"""Values of the `pack` knob: by a separate kernel that runs once, not at all, in each chunk, once in each call."""

PAD_AT_ROOT, PAD_AT_OUTER, PAD_AT_CHUNK, PAD_INLINE = 0, 1, 2, 3
"""Values of the `pad` knob: the padded left operand is computed once, in each iteration of the outermost (parallel)
loop, in each chunk of rows, or wherever it is read."""

AHEAD_BYTES, SMALL_AHEAD_BYTES = 8192, 2048
"""Of packed weights, that are asked for ahead: 64 steps of 32 columns. Operands that are read where they are would lose
4 to 12 % (512 x 512 x 512; 1 x 1 convolutions, channels first). Where the first cache has 32 KB, they push each other
out of it: two threads of Zen 3, weights from memory, in turns (ms): 49 rows times 512 x 2048 15.7, with 2 KB 15.0, with
nothing asked 16.2; 196 rows times 256 x 1024 45.3, 43.7 and 43.6."""

SMALL_L1_BYTES = 32 * 1024
"""Of such a cache."""

LEAST_FAR_BYTES = 128 * 1024
"""Smaller weights are read before asking for the next panel pays."""

MANY_REGISTERS = 32
"""Where vectors are half as long and half as many, each multiplication has more instructions around it, and asking for
weights costs more. Two threads of Zen 3 (AVX2), ResNet-50's 3 x 3 convolutions, unasked and asked (us): 14 x 14 x 256
1532, 1602; 28 x 28 x 128 1475, 1574; 7 x 7 x 512, whose weights are 9.4 MB, 1767, 1649. One row times 2048 x 1000 320,
414; products of 4 to 128 rows gain 1 to 50 %. Nor does LLVM run out of registers there."""

WAITING = 0.15
"""Of the time that products take, what their weights take to come from memory, from which asking pays there."""

LEAST_ROW_BYTES = 256
"""Of the rows that are asked for: a tile of shorter ones is a single stream."""

STACK_BYTES = 1024
"""TVM puts smaller intermediates in the "global" scope on the stack; all others cost an allocation in each call, unless
`stack_sums` moves them."""

LONG_RUN = 4
"""Vectors of channels a pixel from which the loop over padded pixels is not partitioned."""

CROWDED_SUMS = 22 / 32
"""Share of the registers for a tile's sums from which LLVM spills them where it writes out a row of taps (of 32, with
3 x 3 over 28 x 28 and 5 x 5 over 35 x 35, channels first: no tile of 21 sums or less, nearly all others)."""

MOST_TAPS = 7
"""Of a row of a window that LLVM might write out as a whole: three and five it does."""

UNROLLED_EPILOGUE = 8
"""Operations of an element's epilogue up to which writing a tile back is unrolled: bias, residual, activation."""


def schedule_tiles(sch: Any, plan: Plan, lanes: int, values: Mapping[str, int], hardware: Hardware) -> None:
    """Apply the sketch.

    Parameters
    ----------
    sch : tvm.s_tir.Schedule
        Of the kernel, in which the contraction has one loop for each of its axes, in their order.
    plan : Plan
    lanes : int
        Elements of a full vector register.
    values : mapping
        Every knob's value: mr, m2, nr, ku, chunk, order, depth, pack, pad, far_weights.
    hardware : Hardware
        With more than one thread, fused outer loops are spread over them.

    Raises
    ------
    tvm.s_tir.ScheduleError
        When TVM finds a step impossible for this kernel.
    """
    parallel = hardware.threads > 1 and values["depth"] > 0
    block = sch.get_sblock(plan.contraction.block.name)
    for name in (*plan.inlined, *plan.epilogue_inlined):
        sch.compute_inline(sch.get_sblock(name))
    staged = sch.get_sblock(plan.staged) if plan.staged else None
    images = image_rows(sch, plan)
    if staged is not None and values["pad"] == PAD_INLINE:
        sch.compute_inline(staged)
        staged = None
    panel = _pack(sch, block, plan, values)
    tile_bytes = values["mr"] * values["m2"] * values["nr"] * plan.element_bytes
    writers = local_sums(sch, block, plan, "global" if tile_bytes < STACK_BYTES else "local")
    loops = _tile_loops(sch, block, plan, lanes, values, hardware)
    for writer in writers:
        sch.reverse_compute_at(writer, loops["tile"], preserve_unit_loops=True)
        if not plan.scattered or writer is not writers[-1]:
            _write_vectors(sch, writer, plan, lanes, values)
        else:
            _write_squares(sch, writer, plan, values)
    if panel is not None and values["pack"] == AT_CHUNK:
        sch.compute_at(panel, loops["outer"], preserve_unit_loops=True)
        sch.vectorize(split_lanes(sch, sch.get_loops(panel)[-1], lanes, values["nr"])[1])
    if staged is not None and values["pad"] in (PAD_AT_OUTER, PAD_AT_CHUNK):
        sch.compute_at(staged, loops["outer" if values["pad"] == PAD_AT_OUTER else "chunk"], preserve_unit_loops=True)
        schedule_padding(sch, staged, plan, lanes, False)
    elif staged is not None:
        schedule_padding(sch, staged, plan, lanes, parallel)
    if panel is not None and values["pack"] == AT_ROOT:
        schedule_copy(sch, panel, lanes, parallel)
    if plan.epilogue and not plan.epilogue_fusable:
        schedule_copy(sch, sch.get_sblock(plan.epilogue), lanes, parallel)
    if parallel:
        sch.parallel(loops["outer"])
    for axis, loop in zip(plan.reduction, loops["window"], strict=False):
        rows = images.get(axis.position)
        if rows is not None and staged is not None and values["m2"] == 1:
            sch.annotate(loop, IMAGE_ROWS, list(astuple(rows)))
    sch.decompose_reduction(block, loops["reduction"])


def overlapping_columns(plan: Plan, values: Mapping[str, Any]) -> Any:
    """Whether the last column tile is ragged and begins early enough to be whole. For numbers and arrays of them.

    Not where a copy of an operand is made of each tile: it has the columns of that tile alone.
    """
    copied = values["pack"] != UNPACKED
    if plan.staged and plan.left_vectorised:
        copied = copied | ((values["pad"] != PAD_AT_ROOT) & (values["pad"] != PAD_INLINE) & (values["order"] == 0))
    ragged = plan.vector_extent % values["nr"] != 0
    whole = plan.groups == 1 or plan.vector not in plan.contraction.columns  # not the columns of a group
    return ragged & (copied ^ True) if plan.overlaps and whole else ragged & False


def overlapping_rows(plan: Plan, values: Mapping[str, Any]) -> Any:
    """The same for rows: where a tile is transposed in registers, or written out, its last one must be whole."""
    copied = (values["pad"] == PAD_AT_CHUNK) & bool(plan.staged)
    if plan.staged and not plan.row_loops:
        copied = copied | (values["pad"] == PAD_AT_OUTER)
    ragged = plan.unrolled_extent % values["mr"] != 0
    wanted = plan.overlaps and (plan.scattered or plan.spread is not None)
    return ragged & (copied ^ True) if wanted else ragged & False


def _pack(sch: Any, block: Any, plan: Plan, values: Mapping[str, int]) -> Any:
    """Copy the vectorised operand into panels `[.., columns / nr, reduction.., nr]`; the copying block, or None."""
    if plan.panel is None or values["pack"] == UNPACKED:
        return None
    nr, panel = values["nr"], plan.panel
    name = plan.kernel.buffers[panel.buffer]
    region = [read.source.name for read in sch.get(block).reads].index(name)
    copy = sch.cache_read(block, region, "global")
    rest, column, reduced = _panel_dimensions(panel, plan)

    def layout(*index: Any) -> list[Any]:
        j = index[column]
        return [*(index[d] for d in rest), j // nr, *(index[d] for d in reduced), j % nr]

    rank = len(panel.shape)
    ragged = panel.shape[column] % nr != 0
    pad_value = (0.0 if panel.dtype.startswith(("float", "bfloat")) else 0) if ragged else None
    sch.transform_layout(copy, ("write", 0), index_map(sch, block, layout, rank), pad_value=pad_value)
    if values["pack"] == AHEAD:
        sch.annotate(copy, "meta_schedule.layout_rewrite_preproc", True)
    return copy


def readers_of_panel(sch: Any, order: list[Any], depth: int, values: Mapping[str, int]) -> int:
    """How many iterations of the loop over panels read the same one, once `depth` of the loops in order are fused."""
    return math.prod(int(sch.get(loop).extent) for loop in order[1:depth]) if values["order"] == 0 else 1


def ahead_bytes(hardware: Hardware) -> int:
    """Bytes of packed weights that are asked for ahead."""
    return SMALL_AHEAD_BYTES if hardware.l1_bytes <= SMALL_L1_BYTES else AHEAD_BYTES


def asks_for_weights(plan: Plan, hardware: Hardware) -> bool:
    """Whether packed weights are asked for ahead: never where each group has panels of its own, few of them."""
    if plan.panel is None or plan.groups > 1 or not hardware.weights_are_far:
        return False
    if hardware.last_cache_is_far or hardware.vector_registers >= MANY_REGISTERS:
        return True
    computing_s = plan.contraction.flops / hardware.peak_flops_per_s_all
    rows = plan.contraction.flops // (2 * math.prod(plan.panel.shape))
    return rows > 1 and plan.panel.bytes / hardware.bandwidth_bytes_per_s >= WAITING * computing_s


def asks_for_rows(plan: Plan) -> bool:
    """Whether a tile's rows, which lie one behind the other, are asked for ahead: where they are more than the weights.

    Else those are what tiles wait for, or all columns find the rows in a cache. Two threads of Zen 3 (us): 196 rows
    times 2560 x 512 3252, asked 3307; 64 rows times 3072 x 768 with weights from memory 2120, 2193.
    """
    left, right = plan.contraction.left.access, plan.contraction.right.access
    if not plan.panel_is_weight or plan.groups > 1 or left.bytes < right.bytes or not _lies_in_memory(plan, left):
        return False
    row = plan.reduction_extent
    next_row, next_element = (left.stride(axis.position) for axis in (plan.unrolled[-1], plan.reduction[-1]))
    dense = next_row == row and next_element == 1
    return dense and plan.second is None and row * dtype_bytes(left.dtype) >= LEAST_ROW_BYTES


def _lies_in_memory(plan: Plan, operand: Access) -> bool:
    """Whether an operand is an argument, or a copy of one as it lies, which TVM makes of what needs no padding."""
    for block in plan.kernel.blocks:
        if block.write.buffer == operand.buffer:
            source = block.reads[0] if block.name in plan.inlined and len(block.reads) == 1 else None
            alike = source is not None and all(
                source.stride(axis.position) == block.write.stride(axis.position) for axis in block.axes
            )
            return source is not None and alike and _lies_in_memory(plan, source)
    return True


def _ask_for_weights(
    sch: Any, steps: Any, plan: Plan, values: Mapping[str, int], hardware: Hardware, fused: int
) -> bool:
    """Mark the reduction's loop, where it pays: `fused` iterations of the loop over panels read the same one."""
    assert plan.panel is not None
    step_bytes = values["ku"] * values["nr"] * plan.element_bytes
    long_panels = values["nr"] * plan.reduction_extent * plan.element_bytes > hardware.l1_bytes // 2
    many_panels = plan.panel.bytes >= LEAST_FAR_BYTES
    if long_panels:
        sch.annotate(steps, FETCH_AHEAD, max(1, ahead_bytes(hardware) // step_bytes))
    if many_panels:
        sch.annotate(steps, NEXT_PANEL, [len(plan.reduction) - 1, fused, len(_panel_dimensions(plan.panel, plan)[0])])
    return long_panels or many_panels


def _panel_dimensions(panel: Access, plan: Plan) -> tuple[list[int], int, list[int]]:
    """Of the operand that is packed: its dimensions before columns, that of columns, those of the reduction."""
    # Of an axis that is cut in two, the inner part stands for both.
    steps = [index.coefficients for index in panel.indices if index is not None]
    axis_of = [min(step, key=step.__getitem__, default=None) for step in steps]
    column = axis_of.index(plan.vector.position)
    reduced = [axis_of.index(a.position) for a in plan.reduction if a.position in axis_of]
    return [d for d in range(len(axis_of)) if d != column and d not in reduced], column, reduced


def local_sums(sch: Any, block: Any, plan: Plan, scope: str) -> list[Any]:
    """Let the contraction sum into a local buffer with contiguous vectors; the blocks that write a tile back, in order.

    The buffer has one row for each of the axes that are merged. Where vectors are written across the output's rows, a
    tile goes through a second one first: LLVM would otherwise take the sums out of their registers, element by element,
    in the middle of the loop.
    """
    if plan.epilogue and plan.epilogue_fusable:
        sch.set_scope(block, 0, scope)
        writers = [sch.get_sblock(plan.epilogue)]
    else:
        writers = [sch.cache_write(block, 0, scope)]
    contraction = plan.kernel.contraction
    assert contraction is not None
    rank, run, vector = len(contraction.block.write.shape), plan.merged, plan.vector_dimension
    merged_dimensions = tuple(dimension_of(contraction.block.write, axis) for axis in run)

    def merge(index: tuple[Any, ...], positions: tuple[int, ...]) -> list[tuple[int, Any]]:
        """The indices with those at `positions` made one, each with its first position."""
        if not positions:
            return list(enumerate(index))
        flat = index[positions[0]]
        for d, axis in zip(positions[1:], run[1:], strict=True):
            flat = flat * axis.extent + index[d]
        kept = [(d, index[d]) for d in range(len(index)) if d not in positions[1:]]
        return [(d, flat if d == positions[0] else i) for d, i in kept]

    if run:
        axes = tuple(axis.position for axis in run)
        count = len(contraction.block.axes)
        sch.transform_block_layout(block, index_map(sch, block, lambda *i: [x for _, x in merge(i, axes)], count))
        written = index_map(sch, block, lambda *i: [x for _, x in merge(i, merged_dimensions)], rank)
        sch.transform_block_layout(writers[0], written)

    def sums_layout(*index: Any) -> list[Any]:
        merged = merge(index, merged_dimensions)
        return [x for d, x in merged if d != vector] + [x for d, x in merged if d == vector]

    if run or vector != rank - 1:
        sch.transform_layout(block, ("write", 0), index_map(sch, block, sums_layout, rank))
    if plan.scattered:
        writers.insert(0, sch.cache_write(block, 0, scope))
    return writers


def _write_vectors(sch: Any, writer: Any, plan: Plan, lanes: int, values: Mapping[str, int]) -> None:
    """Write a tile back by vectors, unrolled where that is short.

    Then LLVM sees from the start that no sum is addressed by a variable, and keeps all of them in registers: a fifth
    less compile time, and up to a sixth less run time where the reduction is short.
    """
    *rows, columns = sch.get_loops(writer)[-len(sch.get(writer).iter_vars) :]
    overlapping = overlapping_columns(plan, values)
    width = whole_width(values["nr"], lanes) if overlapping else plan.vector_width(values["nr"], lanes)[0]
    vectors, lane = sch.split(columns, [None, width])
    sch.vectorize(lane)
    joined = plan.joins_vectors(values["nr"], lanes)
    if joined:
        sch.annotate(vectors, JOIN_VECTORS, lanes)
    elif not overlapping and not _padded(plan, lanes, values):
        sch.annotate(vectors, "pragma_loop_partition_hint", 1)
    operations = 0 if plan.scattered else sum(block.operations for block in plan.kernel.epilogue)
    if operations <= UNROLLED_EPILOGUE:
        for loop in (*rows, vectors):
            sch.unroll(loop)


def _write_squares(sch: Any, writer: Any, plan: Plan, values: Mapping[str, int]) -> None:
    """Write a tile across the output's rows, by squares that are transposed in registers where it consists of such."""
    size = plan.transposed_tile(values["mr"], values["nr"])
    loads: list[Any] = []
    tvm_ffi.structural_walk(sch.get(writer).body, (TensorLoad, loads.append))
    sums = sch.get(sch.get_producers(writer)[0]).writes[0].source
    of_sums = [position for position, load in enumerate(loads) if load.source.same_as(sums)]
    if not size or len(of_sums) != 1:
        return
    loops = sch.get_loops(writer)[-len(sch.get(writer).iter_vars) :]
    merged = {d for d in plan.fused_dimensions[1:]}
    kept = [d for d in range(len(loops) + len(merged)) if d not in merged]
    column = loops[kept.index(plan.vector_dimension)]
    row = loops[kept.index(plan.fused_dimensions[0])]
    columns, column = sch.split(column, [None, size])
    rows, row = sch.split(row, [None, size])
    sch.reorder(columns, rows, column, row)
    if values["mr"] % size:
        sch.annotate(rows, OVERLAPPING_TAIL, size)
        sch.unroll(rows)
    sch.annotate(column, TRANSPOSE_TILE, of_sums[0])


def _padded(plan: Plan, lanes: int, values: Mapping[str, int]) -> bool:
    """Whether the last column tile is computed whole, though ragged."""
    return values["pack"] != UNPACKED and plan.pads_columns(values["nr"], lanes)


def index_map(sch: Any, block: Any, function: Any, rank: int) -> Any:
    """The function of `rank` indices as TVM wants it, in the index type that the kernel uses."""
    index_dtype = str(sch.get(block).iter_vars[0].var.ty.dtype)
    return tirx.IndexMap.from_func(function, ndim=rank, index_dtype=index_dtype)


def _tile_loops(
    sch: Any, block: Any, plan: Plan, lanes: int, values: Mapping[str, int], hardware: Hardware
) -> dict[str, Any]:
    """Split, order, fuse, unroll and vectorise; returns the loops that other steps attach to."""
    merged = {axis.position for axis in plan.unrolled[1:]}
    axes = [axis for axis in plan.contraction.block.axes if axis.position not in merged]
    found = sch.get_loops(block)
    if len(found) != len(axes):
        raise ValueError(f"the contraction has {len(found)} loops for {len(axes)} axes; expected one for each")
    loop = dict(zip((axis.position for axis in axes), found, strict=True))
    outer = [loop[axis.position] for axis in plan.outer]
    vector = loop[plan.vector.position]
    if plan.groups > 1:
        grouped = plan.contraction.columns[0]
        run, within = sch.split(loop[grouped.position], [plan.groups, None])
        outer.append(run)
        loop[grouped.position] = within
        vector = loop[plan.vector.position]
    unrolled = loop[plan.unrolled[0].position]
    second = loop[plan.second.position] if plan.second else None
    reduction = [loop[axis.position] for axis in plan.reduction]
    sch.reorder(*outer, *([second] if second is not None else []), unrolled, vector, *reduction)
    rows, row = sch.split(unrolled, [None, values["mr"]])
    chunk, rows = sch.split(rows, [None, values["chunk"]])
    padded = _padded(plan, lanes, values)
    overlapping = overlapping_columns(plan, values)
    columns, column = sch.split(vector, [None, values["nr"]], disable_predication=padded)
    image: list[Any] = []
    inner: list[Any] = []
    if second is not None:
        lines, line = sch.split(second, [None, values["m2"]])
        image, inner = [lines], [line]
    steps, step = sch.split(reduction[-1], [None, values["ku"]])
    row_loops = [*outer, *image, chunk]
    order = [columns, *row_loops] if values["order"] == 0 else [*row_loops, columns]
    sch.reorder(*order, rows, *reduction[:-1], steps, step, *inner, row, column)
    if padded or overlapping:
        vectors, lane = split_lanes(sch, column, lanes)
    else:
        width, _ = plan.vector_width(values["nr"], lanes)
        vectors, lane = sch.split(column, [None, width])
    if plan.joins_vectors(values["nr"], lanes):
        sch.annotate(vectors, JOIN_VECTORS, lanes)
    sch.vectorize(lane)
    for unroll in (step, *inner, row, vectors):
        sch.unroll(unroll)
    if plan.spread is not None:
        sch.annotate(loop[plan.spread.position], SPREAD_GROUPS, 1)
    if plan.vector_extent % values["nr"] and not padded and not overlapping:
        sch.annotate(vectors, "pragma_loop_partition_hint", 1)
    first = reduction[0] if len(reduction) > 1 else steps
    count = int(sch.get(vectors).extent)
    sums = values["mr"] * values["m2"] * count
    crowded = sums >= CROWDED_SUMS * hardware.vector_registers
    if plan.rows_share_taps and crowded and 1 < int(sch.get(steps).extent) <= MOST_TAPS:
        sch.annotate(steps, SEPARATE_STEPS, 1)
    depth = min(values["depth"], len(order))
    if values["pack"] == AHEAD and values[FAR_WEIGHTS]:
        asked = _ask_for_weights(sch, steps, plan, values, hardware, readers_of_panel(sch, order, depth, values))
        full = sums + 2 * count + 1 > hardware.vector_registers >= MANY_REGISTERS
        if asked and full and values["ku"] > 1 and plan.spread is None:
            sch.annotate(step, SEPARATE_STEPS, 1)
    if values["nr"] > lanes and asks_for_rows(plan):
        sch.annotate(steps, NEXT_TILE, [len(plan.reduction) - 1, values["mr"] * plan.reduction_extent])
    outermost = order[0] if depth <= 1 else sch.fuse(*order[:depth], preserve_unit_iters=True)
    inside = order.index(chunk) < depth
    if overlapping:
        sch.annotate(columns, OVERLAPPING_TAIL, values["nr"])
    whole_rows = overlapping_rows(plan, values)
    if whole_rows:
        sch.annotate(chunk if values["chunk"] == 1 else rows, OVERLAPPING_TAIL, values["mr"])
    tiled = [*([] if whole_rows else [chunk, rows]), *([] if padded or overlapping else [columns])]
    for partitioned in (*image, *tiled):
        if partitioned not in order[: max(depth, 1)] or depth <= 1:
            sch.annotate(partitioned, "pragma_loop_partition_hint", 1)
    return {
        "outer": outermost,
        "chunk": outermost if inside else chunk,
        "tile": rows,
        "window": reduction[:-1],
        "reduction": first,
    }


def split_lanes(sch: Any, loop: Any, lanes: int, extent: int | None = None) -> Any:
    """Split a loop into whole vectors that divide its extent: the loop over vectors, and the one over lanes."""
    extent = int(sch.get(loop).extent) if extent is None else extent
    return sch.split(loop, [None, whole_width(extent, lanes)])


def schedule_padding(sch: Any, staged: Any, plan: Plan, lanes: int, parallel: bool) -> None:
    """The padded operand: loops are partitioned into border and interior, so that the interior is a plain copy.

    Not where each pixel is a long run of channels: a branch a pixel costs nothing there, and LLVM would unroll the
    interior wholly, rows and channels alike (896 vectors of a 16 x 16 x 1024 image: 1.7 s of compiling instead of 0.1).
    Nor where rows of pixels are copied and the machine has masks: LLVM makes masked vectors of the whole row, as fast
    and in 5 to 70 % less time to compile.
    Channels of one group, where they are last and not padded, are copied by narrower vectors, too: element by element,
    a copy of 28 x 28 x 256 in 32 groups takes a third as long as the convolution.
    """
    copy = plan.kernel.block(plan.staged)
    rank = len(copy.axes)
    loops = sch.get_loops(staged)
    own = loops[-rank:]
    conditional = copy.conditional
    run = int(sch.get(own[-1]).extent)
    width = whole_width(run, lanes)
    inside = conditional and copy.write.shape[-1] == copy.reads[0].shape[-1]
    whole_vectors = width == lanes or (inside and 4 * width >= lanes)
    long_runs = inside and whole_vectors and run >= LONG_RUN * width
    masked = not inside and lanes * plan.element_bytes >= MASKED_BYTES
    if parallel and rank > 2 and not long_runs:
        sch.parallel(sch.fuse(*own[:-2], preserve_unit_iters=True))
        own = own[-2:]
    if long_runs:
        pixels = sch.fuse(*own[:-1], preserve_unit_iters=True)
        if parallel:
            sch.parallel(pixels)
    elif conditional and not masked:
        for loop in own[-3:-1] if whole_vectors else own[-2:]:
            sch.annotate(loop, "pragma_loop_partition_hint", 1)
    if whole_vectors or not conditional:
        sch.vectorize(split_lanes(sch, own[-1], lanes)[1])


def schedule_copy(sch: Any, block: Any, lanes: int, parallel: bool) -> None:
    """An element-wise block on its own: outer loops parallel, innermost vectorised."""
    loops = sch.get_loops(block)
    _, lane = split_lanes(sch, loops[-1], lanes)
    if parallel and len(loops) > 1:
        sch.parallel(sch.fuse(*loops[:-1]) if len(loops) > 2 else loops[0])
    sch.vectorize(lane)
