"""The matrix product on tensor cores, through fragments of WMMA or of `mma.sync`.

Blocks, warps, and fragments of a warp tile rows and columns; steps of the reduction are fetched to shared memory as in
`tiled`, in the order in which the operand lies in memory: fragments are loaded from either order. Edges are padded with
zeros on the way there. The sums go through shared memory, too, so that what follows is computed by whole warps.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tvm import tirx

from ..access import dtype_bytes
from ..marks import THROUGH_REGISTERS
from .bind import bind_elementwise
from .hardware import STATIC_SHARED_BYTES
from .matrix import MatrixForm, Operand, inline_producers
from .tf32 import permitted_products
from .tiled import line_padding, pipeline, split_reduction

__all__ = ["FRAGMENT", "fragment_steps", "schedule_fragments", "supports"]

FRAGMENT = 16
"""Rows and columns of one fragment; of WMMA, steps of the reduction as well."""

WARP = 32
SUMS = "wmma.accumulator"
SUMS_ALIGNMENT = 32

_SUPPORTED = {
    ("float16", "float16"),
    ("float16", "float32"),
    ("bfloat16", "float32"),
    ("int8", "int32"),
    ("uint8", "int32"),
}
"""Dtypes of operands and sums that TVM's code generator has fragments for."""


def supports(form: MatrixForm, products: int = 0) -> bool:
    """Whether there are fragments for these dtypes; `products` as `tf32.permitted_products` says."""
    dtype = form.a.access.dtype
    if products and dtype == form.accumulator == "float32":
        return form.b.access.dtype == dtype
    return dtype == form.b.access.dtype and (dtype, form.accumulator) in _SUPPORTED


def fragment_steps(dtype: str, mma: int) -> int:
    """Steps of the reduction that one fragment takes: 16 with WMMA, 32 bytes with `mma`."""
    return 32 // dtype_bytes(dtype) if mma else FRAGMENT


def schedule_fragments(mod: Any, form: MatrixForm, v: Mapping[str, int]) -> Any:
    """Apply the sketch; `v` holds every knob of `tensor_sketch.TensorCoreSketch`.

    Raises
    ------
    tvm.s_tir.ScheduleError
        When TVM finds a step impossible for this kernel.
    """
    dtype, sums = form.a.access.dtype, form.accumulator
    if v["mma"]:
        from .mma import mma_fragments  # parses five functions

        intrinsics: Any = mma_fragments(dtype, sums, permitted_products(mod["main"]) or 1)
    else:
        from .fragments import fragments  # as many

        intrinsics = fragments(dtype, sums)
    steps = fragment_steps(dtype, v["mma"])
    tile_i, tile_j = v["wi"] * v["fi"] * FRAGMENT, v["wj"] * v["fj"] * FRAGMENT
    warps = v["wi"] * v["wj"]
    normalized = form.normalize(mod, [tile_i, tile_j, v["bk"] * v["split"]])
    sch, inner = normalized.schedule, normalized.block
    # Apart from the operands: TVM would give both one place, and refuses to when their dtypes differ.
    sums_bytes = tile_i * (tile_j + SUMS_ALIGNMENT) * dtype_bytes(form.accumulator)
    scope = "shared" if sums_bytes <= STATIC_SHARED_BYTES else "shared.dyn"
    if v["split"] > 1:
        inner = split_reduction(normalized, v["split"])
        writer = sch.cache_write(inner, 0, scope)
    else:
        sch.set_scope(inner, 0, scope)
        writer = normalized.take_epilogue()
    *batch, i, j, k = sch.get_loops(inner)
    (i, ii), (j, jj) = (sch.split(loop, [None, FRAGMENT]) for loop in (i, j))
    k, kk = sch.split(k, [None, steps])
    sch.reorder(*batch, i, j, k, ii, jj, kk)
    outer = sch.blockize(ii)
    i0, i1, i2 = sch.split(i, [None, v["wi"], v["fi"]])
    j0, j1, j2 = sch.split(j, [None, v["wj"], v["fj"]])
    k0, k1 = sch.split(k, [None, v["bk"] // steps])
    sch.reorder(*batch, i0, j0, i1, j1, k0, k1, i2, j2)
    block = sch.fuse(*batch, i0, j0)
    sch.bind(block, "blockIdx.x")
    warp = sch.fuse(i1, j1)
    sch.bind(warp, "threadIdx.y")
    store = sch.cache_write(outer, 0, "local" if v["mma"] else SUMS)
    sch.reverse_compute_at(store, warp, preserve_unit_loops=True)
    sch.reverse_compute_at(writer, block, preserve_unit_loops=True)
    loads = []
    for name, operand, place in zip("ab", (form.a, form.b), normalized.places, strict=True):
        copy = sch.cache_read(outer, place, "shared.dyn")
        fragment = sch.cache_read(outer, place, "local" if v["mma"] else f"wmma.matrix_{name}")
        if v["mma"]:
            _lay_out(sch, fragment, ("write", 0), intrinsics.layout(name), steps, normalized.index_dtype)
        sch.compute_at(fragment, k1, preserve_unit_loops=True)
        _fetch(sch, copy, k0, operand, (tile_i if name == "a" else tile_j, v["bk"]), warps, normalized.index_dtype)
        if v["stages"] == 2:
            sch.annotate(copy, THROUGH_REGISTERS, 1)
        loads.append((fragment, steps, intrinsics.load(name, not operand.along_reduction)))
    if v["mma"]:
        _lay_out(sch, store, ("read", 0), intrinsics.layout("sums"), FRAGMENT, normalized.index_dtype)
    pipeline(sch, k0, v["stages"])
    _write(sch, writer, form, warps)
    fill = sch.decompose_reduction(outer, k0)
    for part, width, intrinsic in (*loads, (store, FRAGMENT, intrinsics.store(scope))):
        sch.tensorize(_fragment_loops(sch, part, width), intrinsic)
    sch.tensorize(sch.get_loops(sch.get_child_blocks(fill)[0])[-2], intrinsics.fill)
    swapped = normalized.places[0] > normalized.places[1]
    sch.tensorize(sch.get_loops(inner)[-3], intrinsics.compute(swapped))
    bind_elementwise(sch)
    return sch


def _fetch(
    sch: Any, copy: Any, step: Any, operand: Operand, tile: tuple[int, int], warps: int, index_dtype: str
) -> None:
    """Copy one operand's tile to shared memory in every step, by all threads, in the widest loads that are legal."""
    if not operand.along_reduction:
        layout = tirx.IndexMap.from_func(lambda b, x, k: [b, k, x], index_dtype=index_dtype)
        sch.transform_layout(copy, ("write", 0), layout)
    sch.compute_at(copy, step, preserve_unit_loops=True)
    inline_producers(sch, copy)
    lines, items = sch.get_loops(copy)[-2:]
    if not operand.along_reduction:
        sch.reorder(items, lines)
        lines, items = items, lines
    vector = operand.vector(tile[0] * tile[1], warps * WARP)
    _, y, x, lane = sch.split(sch.fuse(lines, items), [None, warps, WARP, vector])
    sch.bind(y, "threadIdx.y")
    sch.bind(x, "threadIdx.x")
    if vector > 1:
        sch.vectorize(lane)
    offset = line_padding(operand.item_bytes)
    if operand.item_bytes == 4 and not operand.along_reduction:
        offset *= 2  # eight threads of a warp read along the line, and four of them across
    sch.storage_align(copy, 0, axis=-2, factor=64 // operand.item_bytes, offset=offset)


def _write(sch: Any, writer: Any, form: MatrixForm, warps: int) -> None:
    """Share the block's results, and what follows them, among all threads; neighbours write neighbours."""
    sums = sch.get_producers(writer)
    sch.storage_align(sums[0], 0, axis=-2, factor=SUMS_ALIGNMENT, offset=line_padding(dtype_bytes(form.accumulator)))
    rows, columns = sch.get_loops(writer)[-2:]
    _, y, x = sch.split(sch.fuse(rows, columns), [None, warps, WARP])
    sch.bind(y, "threadIdx.y")
    sch.bind(x, "threadIdx.x")


def _lay_out(sch: Any, block: Any, place: tuple[str, int], layout: Any, width: int, index_dtype: str) -> None:
    """Spread fragments of 16 x `width` elements over the threads of a warp."""

    def held(*index: Any) -> list[Any]:
        *batch, i, j = index
        return [*batch, i // FRAGMENT, j // width, *layout(i % FRAGMENT, j % width)]

    regions = sch.get(block).reads if place[0] == "read" else sch.get(block).writes
    rank = len(regions[place[1]].source.shape)
    sch.transform_layout(block, place, tirx.IndexMap.from_func(held, ndim=rank, index_dtype=index_dtype))


def _fragment_loops(sch: Any, block: Any, width: int) -> Any:
    """Cut a block's last two loops in fragments of 16 x `width`; the loop over a fragment's rows."""
    i, j = sch.get_loops(block)[-2:]
    (i, ii), (j, jj) = sch.split(i, [None, FRAGMENT]), sch.split(j, [None, width])
    sch.reorder(i, j, ii, jj)
    return ii
