"""Tensor intrinsics for mma.sync and ldmatrix (PTX ISA, "Warp Level Matrix Multiply-Accumulate Instructions").

One fragment is 16 rows, 16 columns and 32 bytes of the reduction: two instructions m16n8k16 of 16-bit numbers, m16n8k8
of tfloat32, or m16n8k32 of bytes. Counted in words of four bytes all have one layout, so one `ldmatrix` fetches any
operand that lies along the reduction.

A fragment's buffer is [thread of the warp, element that it holds]. Each thread uses row 0 of its own copy only, always
at constant places, so that the compiler keeps it in registers: TVM's scope "warp", made for this, lowers only the first
of several buffers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from tvm import tirx
from tvm.s_tir import TensorIntrin
from tvm.script import tirx as T

from ..access import dtype_bytes
from .tensor_core import FRAGMENT, fragment_steps

__all__ = ["MmaFragments", "mma_fragments"]

LANES = 32
SUMS = 8
"""Sums that one thread holds of a fragment."""

_PTX = {
    "float16": "fp16",
    "bfloat16": "bf16",
    "float32": "tf32",
    "int8": "int8",
    "uint8": "uint8",
}
_PTX_SUMS = {"float16": "fp16", "float32": "fp32", "int32": "int32"}

_Layout = Callable[[Any, Any], tuple[Any, Any]]
_Pair = tuple[Any, Any]
"""What is replaced, and by what."""


class MmaFragments:
    """Layouts, and names of the registered intrinsics, for one pair of dtypes.

    Parameters
    ----------
    dtype : str
        Of both operands: "float16", "bfloat16", "int8", "uint8", or "float32", which `tf32` says more about.
    sums : str
        Of the accumulator.
    products : int
        Of tfloat32 for each of float32: 1 or 3.
    """

    def __init__(self, dtype: str, sums: str, products: int) -> None:
        self._dtype, self._sums, self._products = dtype, sums, products
        self._word = 4 // dtype_bytes(dtype)
        self.fill = self._register("fill", sums, _fill(sums))

    def compute(self, swapped: bool) -> str:
        """The intrinsic that multiplies; `swapped` where the kernel's first factor is operand "b"."""
        name = f"{'swapped_' if swapped else ''}{self._dtype}_{self._sums}_{self._products}"
        return self._register("compute", name, _compute(self._dtype, self._sums, self._products, swapped))

    def layout(self, operand: str) -> _Layout:
        """Where element (row or column, step) of operand "a" or "b", or (row, column) of "sums", is held."""
        return _holder(operand, self._word)

    def store(self, scope: str) -> str:
        """The intrinsic that stores the sums to shared memory of a scope, row by row."""
        return self._register("store", f"{self._sums}_{scope}", _store(self._sums, scope))

    def load(self, operand: str, transposed: bool) -> str:
        """The intrinsic that loads a fragment of `operand` ("a": [i, k], "b": [j, k]) from shared memory.

        There it lies in the same order, or `transposed`, with k first.
        """
        name = f"{operand}_{'transposed_' if transposed else ''}{self._dtype}_{self._products}"
        rounds = self._dtype == "float32" and self._products == 1
        return self._register("load", name, _load(operand, self._dtype, transposed, rounds))

    def _register(self, step: str, name: str, functions: _Pair) -> str:
        full = f"eqtune_mma_{step}_{name}"
        TensorIntrin.register(full, *functions, override=True)
        return full


@functools.cache
def mma_fragments(dtype: str, sums: str, products: int) -> MmaFragments:
    """The intrinsics for these dtypes, registered once in a process."""
    return MmaFragments(dtype, sums, products)


def _holder(operand: str, word: int) -> _Layout:
    """Thread and place of an element: four threads share eight neighbours' words, eight such groups are a warp."""

    def sums(i: Any, j: Any) -> tuple[Any, Any]:
        return 4 * (i % 8) + j % 8 // 2, 4 * (j // 8) + 2 * (i // 8) + j % 2

    def a(i: Any, k: Any) -> tuple[Any, Any]:
        return 4 * (i % 8) + k % (4 * word) // word, word * (2 * (k // (4 * word)) + i // 8) + k % word

    def b(j: Any, k: Any) -> tuple[Any, Any]:
        return 4 * (j % 8) + k % (4 * word) // word, word * (2 * (j // 8) + k // (4 * word)) + k % word

    return {"a": a, "b": b, "sums": sums}[operand]


def _held(operand: str, word: int) -> _Layout:
    """The inverse of `_holder`: row (or column) and step (or column) of a thread's element."""

    def sums(lane: Any, place: Any) -> tuple[Any, Any]:
        return lane // 4 + 8 * (place // 2 % 2), 8 * (place // 4) + lane % 4 * 2 + place % 2

    def a(lane: Any, place: Any) -> tuple[Any, Any]:
        quarter = place // word
        return lane // 4 + 8 * (quarter % 2), 4 * word * (quarter // 2) + lane % 4 * word + place % word

    def b(lane: Any, place: Any) -> tuple[Any, Any]:
        quarter = place // word
        return lane // 4 + 8 * (quarter // 2), 4 * word * (quarter % 2) + lane % 4 * word + place % word

    return {"a": a, "b": b, "sums": sums}[operand]


def _rounded(value: Any) -> Any:
    """To tfloat32, nearest, ties away from zero; without this, the instruction cuts the last 13 bits off.

    NaN stays as it is: the one that GPUs write, 0x7FFFFFFF, would be rounded to zero.
    """
    bits = tirx.reinterpret("uint32", value)
    rounded = (bits + tirx.const(0x1000, "uint32")) & tirx.const(0xFFFFE000, "uint32")
    # TVM takes `value == value` for true.
    is_nan = (bits & tirx.const(0x7FFFFFFF, "uint32")) > tirx.const(0x7F800000, "uint32")
    return tirx.reinterpret("float32", tirx.Select(is_nan, bits, rounded))


def _fill(dtype: str) -> _Pair:
    n = FRAGMENT
    zero = tirx.const(0, dtype)
    holder = _holder("sums", 1)

    @T.prim_func(s_tir=True, check_well_formed=False)  # type: ignore[untyped-decorator]
    def description(c: T.handle) -> None:
        C = T.match_buffer(c, (LANES, SUMS), dtype, align=64, offset_factor=1, scope="local")
        with T.sblock("root"):
            T.reads()
            T.writes(C[0:LANES, 0:SUMS])
            for i, j in T.grid(n, n):
                with T.sblock("fill"):
                    vi, vj = T.axis.remap("SS", [i, j])
                    lane, place = T.meta_var(holder(vi, vj))
                    C[lane, place] = zero

    @T.prim_func(s_tir=True, check_well_formed=False)  # type: ignore[untyped-decorator]
    def implementation(c: T.handle) -> None:
        C = T.match_buffer(c, (LANES, SUMS), dtype, align=64, offset_factor=1, scope="local")
        with T.sblock("root"):
            T.reads()
            T.writes(C[0:LANES, 0:SUMS])
            for place in T.unroll(SUMS):
                C[0, place] = zero

    return description, implementation


@functools.cache
def _load(operand: str, dtype: str, transposed: bool, rounds: bool) -> _Pair:
    n, steps = FRAGMENT, fragment_steps(dtype, 1)
    word = 4 // dtype_bytes(dtype)
    count = 4 * word
    holder, held = _holder(operand, word), _held(operand, word)
    rows, columns = (steps, n) if transposed else (n, steps)
    by_matrix = not rounds and (not transposed or word == 2)

    def source(i: Any, k: Any) -> tuple[Any, Any]:
        return (k, i) if transposed else (i, k)

    def line(lane: Any, stride: Any) -> Any:
        """Where the eight rows of 16 bytes of the matrix begin that this thread gives the address of."""
        matrix, row = lane // 8, lane % 8
        half = 4 * word
        rows_half, steps_half = (matrix % 2, matrix // 2) if operand == "a" else (matrix // 2, matrix % 2)
        if transposed:
            return (8 * steps_half + row) * stride + 8 * rows_half
        return (8 * rows_half + row) * stride + half * steps_half

    @T.prim_func(s_tir=True, check_well_formed=False)  # type: ignore[untyped-decorator]
    def description(a: T.handle, c: T.handle) -> None:
        A = T.match_buffer(a, (rows, columns), dtype, align=64, offset_factor=1, scope="shared.dyn")
        C = T.match_buffer(c, (LANES, count), dtype, align=64, offset_factor=1, scope="local")
        with T.sblock("root"):
            T.reads(A[0:rows, 0:columns])
            T.writes(C[0:LANES, 0:count])
            for i, k in T.grid(n, steps):
                with T.sblock("load"):
                    vi, vk = T.axis.remap("SS", [i, k])
                    si, sk = T.meta_var(source(vi, vk))
                    lane, place = T.meta_var(holder(vi, vk))
                    C[lane, place] = A[si, sk]

    @T.prim_func(s_tir=True, check_well_formed=False)  # type: ignore[untyped-decorator]
    def matrices(a: T.handle, c: T.handle) -> None:
        a1, a0 = T.int32(), T.int32()
        A = T.match_buffer(a, (rows, columns), dtype, align=64, offset_factor=1, scope="shared.dyn", strides=[a1, a0])
        C = T.match_buffer(c, (LANES, count), dtype, align=64, offset_factor=1, scope="local")
        with T.sblock("root"):
            T.reads(A[0:rows, 0:columns])
            T.writes(C[0:LANES, 0:count])
            for lane in T.thread_binding(LANES, "threadIdx.x"):
                T.evaluate(
                    T.ptx_legacy.ldmatrix(
                        transposed,
                        4,
                        ".b16",
                        C.data,
                        C.elem_offset,
                        A.access_ptr("r", ptr_type=dtype),
                        line(lane, a1),
                        dtype=dtype,
                    )
                )

    @T.prim_func(s_tir=True, check_well_formed=False)  # type: ignore[untyped-decorator]
    def elements(a: T.handle, c: T.handle) -> None:
        A = T.match_buffer(a, (rows, columns), dtype, align=64, offset_factor=1, scope="shared.dyn")
        C = T.match_buffer(c, (LANES, count), dtype, align=64, offset_factor=1, scope="local")
        with T.sblock("root"):
            T.reads(A[0:rows, 0:columns])
            T.writes(C[0:LANES, 0:count])
            for lane in T.thread_binding(LANES, "threadIdx.x"):
                for place in T.unroll(count):
                    si, sk = T.meta_var(source(*held(lane, place)))
                    value = T.meta_var(_rounded(A[si, sk]) if rounds else A[si, sk])
                    C[0, place] = value

    return description, matrices if by_matrix else elements


@functools.cache
def _compute(dtype: str, sums: str, products: int, swapped: bool) -> _Pair:
    n, steps = FRAGMENT, fragment_steps(dtype, 1)
    word = 4 // dtype_bytes(dtype)
    count = 4 * word
    shape = f"m16n8k{steps}"
    a_type, c_type = _PTX[dtype], _PTX_SUMS[sums]
    in_a, in_b, in_c = _holder("a", word), _holder("b", word), _holder("sums", 1)

    def product(a: Any, b: Any) -> Any:
        left, right = (b, a) if swapped else (a, b)
        return left * right if dtype == sums else tirx.Cast(sums, left) * tirx.Cast(sums, right)

    @T.prim_func(s_tir=True, check_well_formed=False)  # type: ignore[untyped-decorator]
    def description(a: T.handle, b: T.handle, c: T.handle) -> None:
        A = T.match_buffer(a, (LANES, count), dtype, align=64, offset_factor=1, scope="local")
        B = T.match_buffer(b, (LANES, count), dtype, align=64, offset_factor=1, scope="local")
        C = T.match_buffer(c, (LANES, SUMS), sums, align=64, offset_factor=1, scope="local")
        with T.sblock("root"):
            first, second = T.meta_var((B, A) if swapped else (A, B))
            T.reads(C[0:LANES, 0:SUMS], first[0:LANES, 0:count], second[0:LANES, 0:count])
            T.writes(C[0:LANES, 0:SUMS])
            for i, j, k in T.grid(n, n, steps):
                with T.sblock(""):
                    vi, vj, vk = T.axis.remap("SSR", [i, j, k])
                    a_lane, a_place = T.meta_var(in_a(vi, vk))
                    b_lane, b_place = T.meta_var(in_b(vj, vk))
                    c_lane, c_place = T.meta_var(in_c(vi, vj))
                    C[c_lane, c_place] = C[c_lane, c_place] + product(A[a_lane, a_place], B[b_lane, b_place])

    def multiply(a: Any, a_offset: Any, b: Any, b_offset: Any, c: Any, half: Any) -> Any:
        """The instruction for the columns of one half: `a` and `b` are pointers, `c` the buffer of the sums."""
        places = (a, a_offset, b, b_offset + half * (count // 2), c.data, c.elem_offset + half * (SUMS // 2))
        return T.ptx_legacy.mma(shape, "row", "col", a_type, a_type, c_type, *places, False, dtype=sums)

    @T.prim_func(s_tir=True, check_well_formed=False)  # type: ignore[untyped-decorator]
    def implementation(a: T.handle, b: T.handle, c: T.handle) -> None:
        A = T.match_buffer(a, (LANES, count), dtype, align=64, offset_factor=1, scope="local")
        B = T.match_buffer(b, (LANES, count), dtype, align=64, offset_factor=1, scope="local")
        C = T.match_buffer(c, (LANES, SUMS), sums, align=64, offset_factor=1, scope="local")
        with T.sblock("root"):
            T.reads(C[0:LANES, 0:SUMS], A[0:LANES, 0:count], B[0:LANES, 0:count])
            T.writes(C[0:LANES, 0:SUMS])
            for _ in T.thread_binding(LANES, "threadIdx.x"):
                for half in T.unroll(2):
                    T.evaluate(multiply(A.data, A.elem_offset, B.data, B.elem_offset, C, half))

    if products == 1:
        return description, implementation

    @T.prim_func(s_tir=True, check_well_formed=False)  # type: ignore[untyped-decorator]
    def in_parts(a: T.handle, b: T.handle, c: T.handle) -> None:
        A = T.match_buffer(a, (LANES, count), dtype, align=64, offset_factor=1, scope="local")
        B = T.match_buffer(b, (LANES, count), dtype, align=64, offset_factor=1, scope="local")
        C = T.match_buffer(c, (LANES, SUMS), sums, align=64, offset_factor=1, scope="local")
        with T.sblock("root"):
            T.reads(C[0:LANES, 0:SUMS], A[0:LANES, 0:count], B[0:LANES, 0:count])
            T.writes(C[0:LANES, 0:SUMS])
            for _ in T.thread_binding(LANES, "threadIdx.x"):
                with T.sblock("parts"):
                    T.reads(C[0:LANES, 0:SUMS], A[0:LANES, 0:count], B[0:LANES, 0:count])
                    T.writes(C[0:LANES, 0:SUMS])
                    large = T.sblock_alloc_buffer((2, count), dtype, scope="local")
                    small = T.sblock_alloc_buffer((2, count), dtype, scope="local")
                    for place in T.unroll(count):
                        large[0, place] = _rounded(A[0, place])
                        small[0, place] = _rounded(A[0, place] - large[0, place])
                        large[1, place] = _rounded(B[0, place])
                        small[1, place] = _rounded(B[0, place] - large[1, place])
                    for half in T.unroll(2):  # the small ones first, before the sum grows
                        T.evaluate(multiply(small.data, 0, large.data, count, C, half))
                        T.evaluate(multiply(large.data, 0, small.data, count, C, half))
                        T.evaluate(multiply(large.data, 0, large.data, count, C, half))

    return description, in_parts


@functools.cache
def _store(dtype: str, scope: str) -> _Pair:
    n = FRAGMENT
    holder, held = _holder("sums", 1), _held("sums", 1)

    @T.prim_func(s_tir=True, check_well_formed=False)  # type: ignore[untyped-decorator]
    def description(a: T.handle, c: T.handle) -> None:
        A = T.match_buffer(a, (LANES, SUMS), dtype, align=64, offset_factor=1, scope="local")
        C = T.match_buffer(c, (n, n), dtype, align=64, offset_factor=1, scope=scope)
        with T.sblock("root"):
            T.reads(A[0:LANES, 0:SUMS])
            T.writes(C[0:n, 0:n])
            for i, j in T.grid(n, n):
                with T.sblock("store"):
                    vi, vj = T.axis.remap("SS", [i, j])
                    lane, place = T.meta_var(holder(vi, vj))
                    C[vi, vj] = A[lane, place]

    @T.prim_func(s_tir=True, check_well_formed=False)  # type: ignore[untyped-decorator]
    def implementation(a: T.handle, c: T.handle) -> None:
        A = T.match_buffer(a, (LANES, SUMS), dtype, align=64, offset_factor=1, scope="local")
        C = T.match_buffer(c, (n, n), dtype, align=64, offset_factor=1, scope=scope)
        with T.sblock("root"):
            T.reads(A[0:LANES, 0:SUMS])
            T.writes(C[0:n, 0:n])
            for lane in T.thread_binding(LANES, "threadIdx.x"):
                for place in T.unroll(SUMS):
                    ci, cj = T.meta_var(held(lane, place))
                    C[ci, cj] = A[0, place]

    return description, implementation
