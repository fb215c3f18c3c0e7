"""The tiled matrix product on CUDA cores: tiles in shared memory, sub-tiles in registers.

The loop nest is Ansor's SSSRRS (Zheng et al., OSDI 2020) over the matrix form: blocks, virtual threads, threads; steps
of the reduction, whose tiles are fetched together by all threads; and an unrolled register tile. Virtual threads
interleave a thread's columns with its neighbours', which keeps shared-memory reads free of bank conflicts.

Fetching runs ahead of computing in one of two ways: the next tiles wait in registers, or asynchronous copies (cp.async
of compute capability 8.0) fill further buffers in shared memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tvm import tirx

from ..access import dtype_bytes
from ..marks import (
    PIPELINE_ASYNC_STAGES,
    PIPELINE_ORDER,
    PIPELINE_STAGE,
    THROUGH_REGISTERS,
    UNROLL_EXPLICIT,
    UNROLL_STEPS,
)
from .bind import THREADS, bind_elementwise
from .matrix import MatrixForm, Normalized, Operand, inline_producers

__all__ = [
    "ASYNC_STAGES",
    "fetch_vector",
    "line_padding",
    "pipeline",
    "schedule_tiles",
    "shared_line",
    "split_reduction",
]

ASYNC_STAGES = 3
"""Buffers from which on tiles are copied asynchronously; two are one in shared memory and one in registers."""

MAX_UNROLLED = 1024

LINE_BYTES = 128
"""What lines of a tile in shared memory are a multiple of, less their padding: all banks."""


def shared_line(operand: Operand, extent: Any) -> Any:
    """Elements from one line of a tile in shared memory to the next, for lines of `extent` rows or columns."""
    aligned = (line_padding(operand.item_bytes) - extent) % (LINE_BYTES // operand.item_bytes)
    return extent + aligned if operand.along_reduction else extent


def line_padding(item_bytes: int) -> int:
    """Elements that follow each line of a tile in shared memory: 16 bytes keep vectors aligned and spread lines over
    banks."""
    return 16 // item_bytes


def schedule_tiles(mod: Any, form: MatrixForm, v: Mapping[str, int]) -> Any:
    """Apply the sketch; `v` holds every knob of `tiled_sketch.MatrixSketch`.

    Raises
    ------
    tvm.s_tir.ScheduleError
        When TVM finds a step impossible for this kernel.
    """
    tile_i, tile_j = v["vi"] * v["ti"] * v["ri"], v["vj"] * v["tj"] * v["rj"]
    normalized = form.normalize(mod, [tile_i, tile_j, v["bk"] * v["split"]])
    sch, block = normalized.schedule, normalized.block
    if v["split"] > 1:
        block = split_reduction(normalized, v["split"])
        batch = sch.fuse(*sch.get_loops(block)[:2])
        i, j, k = sch.get_loops(block)[1:]
        writer = sch.cache_write(block, 0, "local")
    else:
        sch.set_scope(block, 0, "local")
        writer = normalized.take_epilogue()
        batch, i, j, k = sch.get_loops(block)
    i0, i1, i2, i3 = sch.split(i, [None, v["vi"], v["ti"], v["ri"]])
    j0, j1, j2, j3 = sch.split(j, [None, v["vj"], v["tj"], v["rj"]])
    k0, k1 = sch.split(k, [None, v["bk"]])
    sch.reorder(batch, i0, j0, i1, j1, i2, j2, k0, k1, i3, j3)
    thread = sch.fuse(i2, j2)
    sch.bind(sch.fuse(batch, i0, j0), "blockIdx.x")
    sch.bind(sch.fuse(i1, j1), "vthread.x")
    sch.bind(thread, "threadIdx.x")
    sch.reverse_compute_at(writer, thread, preserve_unit_loops=True)
    _write_back(sch, writer, form, v)
    threads = v["ti"] * v["tj"]
    for operand, place, extent in ((form.a, normalized.places[0], tile_i), (form.b, normalized.places[1], tile_j)):
        fetch_tile(sch, block, place, operand, k0, (extent, v["bk"]), threads, normalized.index_dtype, v["stages"])
    for loop in (i3, j3):
        sch.unroll(loop)
    # Not on k0: what is left of a pipeline after its last fetch must be unrolled before CUDA is written.
    sch.annotate(k1, UNROLL_STEPS, MAX_UNROLLED)
    sch.annotate(k1, UNROLL_EXPLICIT, 0)
    pipeline(sch, k0, v["stages"])
    sch.decompose_reduction(block, k0)
    bind_elementwise(sch)
    return sch


def pipeline(sch: Any, step: Any, stages: int) -> None:
    """Let the two fetches of a loop run ahead of the computation that follows them."""
    if stages >= ASYNC_STAGES:
        sch.annotate(step, PIPELINE_STAGE, [0, 0, stages - 1])
        sch.annotate(step, PIPELINE_ORDER, [0, 1, 2])
        sch.annotate(step, PIPELINE_ASYNC_STAGES, [0])
    elif stages > 1:
        # Fetch the next tiles into registers, compute with these, then store the next ones.
        sch.annotate(step, PIPELINE_STAGE, [0, 0, 0, 0, 1])
        sch.annotate(step, PIPELINE_ORDER, [0, 3, 1, 4, 2])


def fetch_vector(operand: Operand, tile: tuple[int, int], threads: int, stages: int) -> int:
    """Elements that a thread copies at once into a tile (rows or columns, steps) that has rows or columns contiguous.

    An asynchronous copy writes one run. TVM takes one that scatters its elements for such a run, which is wrong.
    """
    if stages >= ASYNC_STAGES and operand.along_reduction:
        return 1
    extent, steps = tile
    return min(operand.vector(extent * steps, threads), steps if operand.along_reduction else extent)


def split_reduction(normalized: Normalized, parts: int) -> Any:
    """Sum parts of the reduction apart; a second kernel adds them and computes what follows.

    Returns the block of the partial sums, whose loops are part, batch, row, column and reduction.
    """
    sch = normalized.schedule
    k = sch.get_loops(normalized.block)[-1]
    part, _ = sch.split(k, [parts, None])
    partial = sch.rfactor(part, 0)
    loops = sch.get_loops(partial)
    sch.reorder(loops[3], *loops[:3])
    sch.set_scope(normalized.block, 0, "local")
    writer = normalized.take_epilogue()
    elements = sch.get_loops(writer)
    blocks, threads = sch.split(sch.fuse(*elements), [None, THREADS])
    sch.bind(blocks, "blockIdx.x")
    sch.bind(threads, "threadIdx.x")
    sch.compute_at(normalized.block, threads, preserve_unit_loops=True)
    return partial


def fetch_tile(
    sch: Any,
    block: Any,
    place: int,
    operand: Operand,
    step: Any,
    tile: tuple[int, int],
    threads: int,
    index_dtype: str,
    stages: int,
) -> Any:
    """Copy one operand's tile to shared memory in every `step`, by all threads, in the widest loads that are legal."""
    copy = sch.cache_read(block, place, "shared.dyn")
    layout = tirx.IndexMap.from_func(lambda b, x, k: [b, k, x], index_dtype=index_dtype)
    sch.transform_layout(copy, ("write", 0), layout)
    sch.compute_at(copy, step, preserve_unit_loops=True)
    inline_producers(sch, copy)
    outer, k = sch.get_loops(copy)[-2:]
    if not operand.along_reduction:
        sch.reorder(k, outer)
        outer, k = k, outer
    vector = fetch_vector(operand, tile, threads, stages)
    _, thread, lane = sch.split(sch.fuse(outer, k), [None, threads, vector])
    sch.bind(thread, "threadIdx.x")
    if vector > 1:
        sch.vectorize(lane)
    if operand.along_reduction:  # threads store down the lines
        factor, offset = LINE_BYTES // operand.item_bytes, line_padding(operand.item_bytes)
        sch.storage_align(copy, 0, axis=-2, factor=factor, offset=offset)
    if stages == 2:
        sch.annotate(copy, THROUGH_REGISTERS, 1)
    return copy


def _write_back(sch: Any, writer: Any, form: MatrixForm, v: Mapping[str, int]) -> None:
    """Write a thread's sums, in vectors where its columns are contiguous, aligned and never cut by the edge."""
    loops = sch.get_loops(writer)
    # What is narrow in memory may be wide on the way there; TVM counts bfloat16 as float32.
    between = [access.dtype for stage in form.kernel.epilogue for access in (*stage.reads, stage.write)]
    dtypes = {form.accumulator, form.kernel.arguments[form.kernel.outputs[0]][1], *between}
    width = max(1, 16 // max(4 if dtype == "bfloat16" else dtype_bytes(dtype) for dtype in dtypes))
    while v["rj"] % width:
        width //= 2
    inner = sch.get(loops[-1]).extent
    constant = isinstance(inner, tirx.IntImm) and int(inner) % width == 0
    if width > 1 and constant and form.written_run % width == 0:
        sch.vectorize(sch.split(loops[-1], [None, width])[1])
