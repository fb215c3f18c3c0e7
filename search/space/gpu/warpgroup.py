"""The matrix product by `wgmma`, Hopper's instruction: four warps multiply tiles of shared memory, sums in registers.

PTX ISA, "Asynchronous Warpgroup Level Matrix Multiply-Accumulate Instructions". One instruction takes 64 rows, up to
256 columns and 32 bytes of the reduction. Both operands lie in shared memory, in lines of 128 bytes whose pieces of 16
bytes are exchanged (the 128-byte swizzle): along the reduction, or for types of 16 bits also across it, so that
operands are copied in the order in which they lie in memory.

The sums' buffer is [thread of the warpgroup, sum that it holds]; each thread uses row 0 of its own copy, as in `mma`.
What TVM's schedules cannot say follows in `warpgroup_lowering`: the exchange of pieces, that copies are issued while
the instructions run, and row 0.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from tvm import tirx
from tvm.backend.cuda.op import cuda_func_call
from tvm.s_tir import TensorIntrin
from tvm.script import tirx as T

from ..access import dtype_bytes
from ..marks import PIPELINE_ASYNC_STAGES, PIPELINE_ORDER, PIPELINE_STAGE, SWIZZLED
from .bind import bind_elementwise
from .matrix import MatrixForm, Operand, inline_producers
from .tensor_core import supports
from .tiled import split_reduction
from .warpgroup_lowering import CONSTRAINTS, CUDA_TYPES, LANES, MULTIPLY

__all__ = [
    "LINE_BYTES",
    "MOST_COLUMNS",
    "ROWS",
    "line_steps",
    "multiply_intrinsic",
    "schedule_warpgroups",
    "supports_warpgroups",
]

ROWS, MOST_COLUMNS = 64, 256
"""Of one instruction."""

LINE_BYTES = 128
PIECE_BYTES = 16
PIECES = LINE_BYTES // PIECE_BYTES

_PTX = {"float16": "f16", "bfloat16": "bf16", "int8": "s8", "uint8": "u8"}
_PTX_SUMS = {"float32": "f32", "int32": "s32"}


def supports_warpgroups(form: MatrixForm) -> bool:
    """Whether the instruction takes these dtypes, those of fragments, in this order: bytes only along the reduction.

    Tiles are copied asynchronously.
    """
    in_order = form.a.item_bytes == 2 or (form.a.along_reduction and form.b.along_reduction)
    return supports(form) and in_order and form.copies_reach


def _held(sums: str) -> str:
    """What the instruction adds up in: half of float16's registers would be saved, and all of its precision lost."""
    return "float32" if sums == "float16" else sums


def line_steps(dtype: str) -> int:
    """Steps of the reduction in a line of shared memory."""
    return LINE_BYTES // dtype_bytes(dtype)


def schedule_warpgroups(mod: Any, form: MatrixForm, v: Mapping[str, int]) -> Any:
    """Apply the sketch; `v` holds every knob of `warpgroup_sketch.WarpgroupSketch`.

    Raises
    ------
    tvm.s_tir.ScheduleError
        When TVM finds a step impossible for this kernel.
    """
    dtype, sums = form.a.access.dtype, form.accumulator
    groups, height, width = v["groups"], v["height"], v["width"]
    steps = line_steps(dtype)
    tile_i = ROWS * groups * height
    normalized = form.normalize(mod, [tile_i, width, steps * v["split"]])
    sch, inner = normalized.schedule, normalized.block
    if v["split"] > 1:
        inner = split_reduction(normalized, v["split"])
        writer = sch.cache_write(inner, 0, "local")
    else:
        sch.set_scope(inner, 0, "local")
        writer = normalized.take_epilogue()
    if _held(sums) != sums:
        sch.unsafe_set_dtype(inner, 0, _held(sums))
    *batch, i, j, k = sch.get_loops(inner)
    (i, ii), (j, jj), (k, kk) = (sch.split(loop, [None, n]) for loop, n in ((i, ROWS), (j, width), (k, steps)))
    sch.reorder(*batch, i, j, k, ii, jj, kk)
    outer = sch.blockize(ii)
    i0, i1, i2 = sch.split(i, [None, groups, height])
    sch.reorder(*batch, i0, j, i1, k, i2)
    sch.bind(sch.fuse(*batch, i0, j), "blockIdx.x")
    sch.bind(i1, "threadIdx.y")
    sch.unroll(i2)
    for operand, place, tile in ((form.a, normalized.places[0], tile_i), (form.b, normalized.places[1], width)):
        copy = sch.cache_read(outer, place, "shared.dyn")
        _fetch(sch, copy, k, operand, tile, groups, normalized.index_dtype)
    sch.annotate(k, PIPELINE_STAGE, [0, 0, v["stages"] - 1])
    sch.annotate(k, PIPELINE_ORDER, [0, 1, 2])
    sch.annotate(k, PIPELINE_ASYNC_STAGES, [0])
    sch.reverse_compute_at(writer, i1, preserve_unit_loops=True)
    _write(sch, writer, form)
    sch.transform_layout(outer, ("write", 0), _sums_layout(sch, outer, width, normalized.index_dtype))
    fill = sch.decompose_reduction(outer, k)
    swapped = normalized.places[0] > normalized.places[1]
    orders = form.a.along_reduction, form.b.along_reduction
    _spread(sch, sch.get_child_blocks(fill)[0])
    sch.tensorize(sch.get_loops(inner)[-3], multiply_intrinsic(dtype, sums, width, *orders, swapped))
    bind_elementwise(sch)
    return sch


def _fetch(sch: Any, copy: Any, step: Any, operand: Operand, tile: int, groups: int, index_dtype: str) -> None:
    """Copy one operand's tile to lines of shared memory in every step, by all threads."""
    piece = PIECE_BYTES // operand.item_bytes
    line = PIECES * piece

    def lines(b: Any, x: Any, k: Any) -> list[Any]:
        across, along = (x, k) if operand.along_reduction else (k, x)
        return [b, along // line, across, along % line // piece, along % piece]

    sch.transform_layout(copy, ("write", 0), tirx.IndexMap.from_func(lines, index_dtype=index_dtype))
    sch.annotate(copy, SWIZZLED, 1)
    sch.compute_at(copy, step, preserve_unit_loops=True)
    inline_producers(sch, copy)
    rows, items = sch.get_loops(copy)[-2:]
    if not operand.along_reduction:
        sch.reorder(items, rows)
        rows, items = items, rows
    vector = operand.vector(tile * line, groups * LANES)
    _, y, x, lane = sch.split(sch.fuse(rows, items), [None, groups, LANES, vector])
    sch.bind(y, "threadIdx.y")
    sch.bind(x, "threadIdx.x")
    if vector > 1:
        sch.vectorize(lane)


def _holder(i: Any, j: Any) -> tuple[Any, Any]:
    """Thread and place of a sum: each warp has 16 rows, whose columns are spread as those of `mma`."""
    return 32 * (i // 16) + 4 * (i % 8) + j % 8 // 2, 4 * (j // 8) + 2 * (i % 16 // 8) + j % 2


def _sums_layout(sch: Any, block: Any, width: int, index_dtype: str) -> Any:
    def held(*index: Any) -> list[Any]:
        *batch, i, j = index
        return [*batch, i // ROWS, j // width, *_holder(i % ROWS, j % width)]

    rank = len(sch.get(block).writes[0].source.shape)
    return tirx.IndexMap.from_func(held, ndim=rank, index_dtype=index_dtype)


def _spread(sch: Any, block: Any) -> Any:
    """Let every thread compute what it holds of a block's last two loops; the loop over two neighbours."""
    rows, columns = sch.get_loops(block)[-2:]
    m, warp, half, row = sch.split(rows, [None, 4, 2, 8])
    n, pair, column = sch.split(columns, [None, 4, 2])
    sch.reorder(warp, row, pair, m, n, half, column)
    sch.bind(sch.fuse(warp, row, pair), "threadIdx.x")
    for loop in (m, n, half, column):
        sch.unroll(loop)
    return column


def _write(sch: Any, writer: Any, form: MatrixForm) -> None:
    """Every thread writes the sums that it holds, and what follows them, in pairs where those are aligned."""
    column = _spread(sch, writer)
    if form.written_run % 2 == 0:
        sch.vectorize(column)


@functools.cache
def multiply_intrinsic(dtype: str, sums: str, width: int, a_along: bool, b_along: bool, swapped: bool) -> str:
    """The name of the registered intrinsic that multiplies a line of the reduction.

    `a_along`, `b_along`: whether the operands lie along the reduction; `swapped` where the kernel's first factor is
    operand B.
    """
    steps, piece, count, held = line_steps(dtype), PIECE_BYTES // dtype_bytes(dtype), width // 2, _held(sums)
    line = PIECES * piece
    a_shape = (1, ROWS, PIECES, piece) if a_along else (ROWS // line, steps, PIECES, piece)
    b_shape = (1, width, PIECES, piece) if b_along else (width // line, steps, PIECES, piece)

    def place_of(x: Any, k: Any, along: bool) -> tuple[Any, ...]:
        across, position = (x, k) if along else (k, x)
        return (0 if along else position // line), across, position % line // piece, position % piece

    def added(c: Any, a: Any, b: Any) -> Any:
        left, right = (b, a) if swapped else (a, b)
        if held != sums:
            return tirx.Cast(held, tirx.Cast(sums, c) + left * right)
        return c + tirx.Cast(sums, left) * tirx.Cast(sums, right)

    @T.prim_func(s_tir=True, check_well_formed=False)  # type: ignore[untyped-decorator]
    def description(a: T.handle, b: T.handle, c: T.handle) -> None:
        A = T.match_buffer(a, a_shape, dtype, align=64, offset_factor=1, scope="shared.dyn")
        B = T.match_buffer(b, b_shape, dtype, align=64, offset_factor=1, scope="shared.dyn")
        C = T.match_buffer(c, (LANES, count), held, align=64, offset_factor=1, scope="local")
        with T.sblock("root"):
            first, second = T.meta_var((B, A) if swapped else (A, B))
            first_shape, second_shape = T.meta_var((b_shape, a_shape) if swapped else (a_shape, b_shape))
            T.reads(
                C[0:LANES, 0:count],
                first[0 : first_shape[0], 0 : first_shape[1], 0:PIECES, 0:piece],
                second[0 : second_shape[0], 0 : second_shape[1], 0:PIECES, 0:piece],
            )
            T.writes(C[0:LANES, 0:count])
            for i, j, k in T.grid(ROWS, width, steps):
                with T.sblock(""):
                    vi, vj, vk = T.axis.remap("SSR", [i, j, k])
                    a0, a1, a2, a3 = T.meta_var(place_of(vi, vk, a_along))
                    b0, b1, b2, b3 = T.meta_var(place_of(vj, vk, b_along))
                    lane, place = T.meta_var(_holder(vi, vj))
                    C[lane, place] = added(C[lane, place], A[a0, a1, a2, a3], B[b0, b1, b2, b3])

    name = f"{MULTIPLY}_{dtype}_{held}_{width}_{int(a_along)}{int(b_along)}"
    source = _multiply_source(name, dtype, held, width, a_along, b_along)

    @T.prim_func(s_tir=True, check_well_formed=False)  # type: ignore[untyped-decorator]
    def implementation(a: T.handle, b: T.handle, c: T.handle) -> None:
        # Strides that nobody reads: TVM would narrow 64-bit loops, and not the regions here (`lowering._sees_strides`).
        s3, s2, s1, s0 = T.int32(), T.int32(), T.int32(), T.int32()
        strides = T.meta_var([s3, s2, s1, s0])
        A = T.match_buffer(a, a_shape, dtype, align=64, offset_factor=1, scope="shared.dyn", strides=strides)
        B = T.match_buffer(b, b_shape, dtype, align=64, offset_factor=1, scope="shared.dyn")
        C = T.match_buffer(c, (LANES, count), held, align=64, offset_factor=1, scope="local")
        with T.sblock("root"):
            T.reads(
                C[0:LANES, 0:count],
                A[0 : a_shape[0], 0 : a_shape[1], 0:PIECES, 0:piece],
                B[0 : b_shape[0], 0 : b_shape[1], 0:PIECES, 0:piece],
            )
            T.writes(C[0:LANES, 0:count])
            for _ in T.thread_binding(LANES, "threadIdx.x"):
                T.evaluate(
                    cuda_func_call(
                        name,
                        C.data,
                        C.elem_offset,
                        # Not as reads: TVM would put a barrier behind them, too (`warpgroup_lowering`). The one
                        # before them follows every wait for asynchronous copies.
                        A.access_ptr(0, ptr_type=dtype),
                        B.access_ptr(0, ptr_type=dtype),
                        source_code=source,
                    )
                )

    registered = f"{name}_{sums}{'_swapped' * swapped}"
    TensorIntrin.register(registered, description, implementation, override=True)
    return registered


def _multiply_source(name: str, dtype: str, sums: str, width: int, a_along: bool, b_along: bool) -> str:
    """A device function that issues the instructions of one line, and waits for none."""
    registers, constraint, steps = width // 2, CONSTRAINTS[sums], line_steps(dtype)
    operands = ", ".join(f"%{n}" for n in range(registers))
    outputs = ", ".join(f'"+{constraint}"(d[{n}])' for n in range(registers))
    wide = dtype_bytes(dtype) == 2
    # Scales of both factors, and whether each lies across the reduction.
    modifiers = f", 1, 1, {int(not a_along)}, {int(not b_along)}" if wide else ""
    instruction = f"wgmma.mma_async.sync.aligned.m64n{width}k{32 // dtype_bytes(dtype)}"
    types = f"{_PTX_SUMS[sums]}.{_PTX[dtype]}.{_PTX[dtype]}"
    # Eight lines are 1024 bytes. Across the reduction, 16 steps are 16 lines, and columns go on after a line's steps.
    a_step, b_step = (2 if along else 128 for along in (a_along, b_along))
    issue = "\n".join(
        f'  asm volatile("{instruction}.{types} {{{operands}}}, %{registers}, %{registers + 1}, 1{modifiers};" '
        f': {outputs} : "l"(da + {a_step * n}), "l"(db + {b_step * n}));'
        for n in range(4)
    )
    # Of a descriptor: strides and start in units of 16 bytes, and the 128-byte swizzle, which goes by addresses.
    layout = 1 << 62 | (8 * LINE_BYTES >> 4) << 32 | (steps * LINE_BYTES >> 4) << 16
    return f"""
__forceinline__ __device__ void {name}({CUDA_TYPES[sums]}* sums, int place, const void* a, const void* b) {{
  {CUDA_TYPES[sums]}* d = sums + place;
  unsigned long long da = {layout}ull | ((unsigned)__cvta_generic_to_shared(a) & 0x3FFFFu) >> 4;
  unsigned long long db = {layout}ull | ((unsigned)__cvta_generic_to_shared(b) & 0x3FFFFu) >> 4;
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
{issue}
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}}
"""
