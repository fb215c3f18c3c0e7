"""Tensor intrinsics for WMMA fragments of 16 x 16 x 16 (CUDA C++ Programming Guide, "Warp Matrix Functions").

TVM has such intrinsics, too, but importing them parses a hundred functions: half a minute on a busy core, in every
process that applies a schedule. These are five, and are made when the first schedule needs them.
"""

from __future__ import annotations

import functools
from typing import Any

from tvm import tirx
from tvm.s_tir import TensorIntrin
from tvm.script import tirx as T

from .tensor_core import FRAGMENT

__all__ = ["Fragments", "fragments"]

SCOPES = {"a": "wmma.matrix_a", "b": "wmma.matrix_b", "sums": "wmma.accumulator"}

_Pair = tuple[Any, Any]
"""What is replaced, and by what."""


class Fragments:
    """Names of the registered intrinsics for one pair of dtypes.

    Parameters
    ----------
    dtype : str
        Of both operands: "float16", "bfloat16", "int8" or "uint8".
    sums : str
        Of the accumulator: "float32" or "float16", for integers "int32".
    """

    def __init__(self, dtype: str, sums: str) -> None:
        self._dtype, self._sums = dtype, sums
        self.fill = self._register("fill", sums, _fill(sums))

    def compute(self, swapped: bool) -> str:
        """The intrinsic that multiplies; `swapped` where the kernel's first factor is operand "b"."""
        name = f"{'swapped_' if swapped else ''}{self._dtype}_{self._sums}"
        return self._register("compute", name, _compute(self._dtype, self._sums, swapped))

    def store(self, scope: str) -> str:
        """The intrinsic that stores an accumulator to shared memory of a scope, row by row."""
        return self._register("store", f"{self._sums}_{scope}", _store(self._sums, scope))

    def load(self, operand: str, transposed: bool) -> str:
        """The intrinsic that loads a fragment of `operand` ("a": [i, k], "b": [j, k]) from shared memory.

        There it lies in the same order, or `transposed`, with k first.
        """
        # What WMMA calls matrix B is [k, j]: our order is its column-major one.
        layout = "col_major" if transposed == (operand == "a") else "row_major"
        name = f"{operand}_{'transposed_' if transposed else ''}{self._dtype}"
        return self._register("load", name, _load(self._dtype, SCOPES[operand], transposed, layout))

    def _register(self, step: str, name: str, functions: _Pair) -> str:
        full = f"eqtune_wmma_{step}_{name}"
        TensorIntrin.register(full, *functions, override=True)
        return full


@functools.cache
def fragments(dtype: str, sums: str) -> Fragments:
    """The intrinsics for these dtypes, registered once in a process."""
    return Fragments(dtype, sums)


def _number(buffer: Any, stride: Any) -> Any:
    """Which fragment of its array a region is: the array is cut into fragments, row by row."""
    row = buffer.elem_offset // stride // FRAGMENT
    return row * (stride // FRAGMENT) + buffer.elem_offset % stride // FRAGMENT


def _fill(dtype: str) -> _Pair:
    n, scope = FRAGMENT, SCOPES["sums"]
    zero = tirx.const(0, dtype)

    @T.prim_func(s_tir=True, check_well_formed=False)  # type: ignore[untyped-decorator]
    def description(c: T.handle) -> None:
        C = T.match_buffer(c, (n, n), dtype, align=64, offset_factor=n, scope=scope)
        with T.sblock("root"):
            T.reads()
            T.writes(C[0:n, 0:n])
            for i, j in T.grid(n, n):
                with T.sblock("fill"):
                    vi, vj = T.axis.remap("SS", [i, j])
                    C[vi, vj] = zero

    @T.prim_func(s_tir=True, check_well_formed=False)  # type: ignore[untyped-decorator]
    def implementation(c: T.handle) -> None:
        c1, c0 = T.int32(), T.int32()
        C = T.match_buffer(c, (n, n), dtype, align=64, offset_factor=n, scope=scope, strides=[c1, c0])
        with T.sblock("root"):
            T.reads()
            T.writes(C[0:n, 0:n])
            T.evaluate(T.tvm_fill_fragment(C.data, n, n, n, _number(C, c1), T.float32(0), dtype="void"))

    return description, implementation


@functools.cache
def _load(dtype: str, scope: str, transposed: bool, layout: str) -> _Pair:
    n = FRAGMENT

    def source(i: Any, j: Any) -> tuple[Any, Any]:
        return (j, i) if transposed else (i, j)

    @T.prim_func(s_tir=True, check_well_formed=False)  # type: ignore[untyped-decorator]
    def description(a: T.handle, c: T.handle) -> None:
        A = T.match_buffer(a, (n, n), dtype, align=64, offset_factor=n, scope="shared.dyn")
        C = T.match_buffer(c, (n, n), dtype, align=64, offset_factor=n, scope=scope)
        with T.sblock("root"):
            T.reads(A[0:n, 0:n])
            T.writes(C[0:n, 0:n])
            for i, j in T.grid(n, n):
                with T.sblock("load"):
                    vi, vj = T.axis.remap("SS", [i, j])
                    si, sj = T.meta_var(source(vi, vj))
                    C[vi, vj] = A[si, sj]

    @T.prim_func(s_tir=True, check_well_formed=False)  # type: ignore[untyped-decorator]
    def implementation(a: T.handle, c: T.handle) -> None:
        a1, a0, c1, c0 = T.int32(), T.int32(), T.int32(), T.int32()
        A = T.match_buffer(a, (n, n), dtype, align=64, offset_factor=n, scope="shared.dyn", strides=[a1, a0])
        C = T.match_buffer(c, (n, n), dtype, align=64, offset_factor=n, scope=scope, strides=[c1, c0])
        with T.sblock("root"):
            T.reads(A[0:n, 0:n])
            T.writes(C[0:n, 0:n])
            T.evaluate(
                T.tvm_load_matrix_sync(
                    C.data, n, n, n, _number(C, c1), A.access_ptr("r", ptr_type=dtype), a1, layout, dtype="void"
                )
            )

    return description, implementation


@functools.cache
def _compute(dtype: str, sums: str, swapped: bool) -> _Pair:
    n = FRAGMENT

    def product(a: Any, b: Any) -> Any:
        left, right = (b, a) if swapped else (a, b)
        return left * right if dtype == sums else tirx.Cast(sums, left) * tirx.Cast(sums, right)

    @T.prim_func(s_tir=True, check_well_formed=False)  # type: ignore[untyped-decorator]
    def description(a: T.handle, b: T.handle, c: T.handle) -> None:
        A = T.match_buffer(a, (n, n), dtype, align=64, offset_factor=n, scope="wmma.matrix_a")
        B = T.match_buffer(b, (n, n), dtype, align=64, offset_factor=n, scope="wmma.matrix_b")
        C = T.match_buffer(c, (n, n), sums, align=64, offset_factor=n, scope="wmma.accumulator")
        with T.sblock("root"):
            first, second = T.meta_var((B, A) if swapped else (A, B))
            T.reads(C[0:n, 0:n], first[0:n, 0:n], second[0:n, 0:n])
            T.writes(C[0:n, 0:n])
            for i, j, k in T.grid(n, n, n):
                with T.sblock(""):
                    vi, vj, vk = T.axis.remap("SSR", [i, j, k])
                    C[vi, vj] = C[vi, vj] + product(A[vi, vk], B[vj, vk])

    @T.prim_func(s_tir=True, check_well_formed=False)  # type: ignore[untyped-decorator]
    def implementation(a: T.handle, b: T.handle, c: T.handle) -> None:
        a1, a0, b1, b0, c1, c0 = T.int32(), T.int32(), T.int32(), T.int32(), T.int32(), T.int32()
        A = T.match_buffer(a, (n, n), dtype, align=64, offset_factor=n, scope="wmma.matrix_a", strides=[a1, a0])
        B = T.match_buffer(b, (n, n), dtype, align=64, offset_factor=n, scope="wmma.matrix_b", strides=[b1, b0])
        C = T.match_buffer(c, (n, n), sums, align=64, offset_factor=n, scope="wmma.accumulator", strides=[c1, c0])
        with T.sblock("root"):
            T.reads(C[0:n, 0:n], A[0:n, 0:n], B[0:n, 0:n])
            T.writes(C[0:n, 0:n])
            T.evaluate(
                T.tvm_mma_sync(
                    C.data,
                    _number(C, c1),
                    A.data,
                    _number(A, a1),
                    B.data,
                    _number(B, b1),
                    C.data,
                    _number(C, c1),
                    dtype="void",
                )
            )

    return description, implementation


@functools.cache
def _store(dtype: str, scope: str) -> _Pair:
    n = FRAGMENT

    @T.prim_func(s_tir=True, check_well_formed=False)  # type: ignore[untyped-decorator]
    def description(a: T.handle, c: T.handle) -> None:
        A = T.match_buffer(a, (n, n), dtype, align=64, offset_factor=n, scope="wmma.accumulator")
        C = T.match_buffer(c, (n, n), dtype, align=64, offset_factor=n, scope=scope)
        with T.sblock("root"):
            T.reads(A[0:n, 0:n])
            T.writes(C[0:n, 0:n])
            for i, j in T.grid(n, n):
                with T.sblock("store"):
                    vi, vj = T.axis.remap("SS", [i, j])
                    C[vi, vj] = A[vi, vj]

    @T.prim_func(s_tir=True, check_well_formed=False)  # type: ignore[untyped-decorator]
    def implementation(a: T.handle, c: T.handle) -> None:
        a1, a0, c1, c0 = T.int32(), T.int32(), T.int32(), T.int32()
        A = T.match_buffer(a, (n, n), dtype, align=64, offset_factor=n, scope="wmma.accumulator", strides=[a1, a0])
        C = T.match_buffer(c, (n, n), dtype, align=64, offset_factor=n, scope=scope, strides=[c1, c0])
        with T.sblock("root"):
            T.reads(A[0:n, 0:n])
            T.writes(C[0:n, 0:n])
            T.evaluate(
                T.tvm_store_matrix_sync(
                    A.data, n, n, n, _number(A, a1), C.access_ptr("w", ptr_type=dtype), c1, "row_major", dtype="void"
                )
            )

    return description, implementation
