"""Kernels that are bound by one thing: FMAs, memory, or the start of a parallel region."""

# TVMScript is read by TVM, not run by Python: its annotations are calls, its functions have no Python types.
# mypy: disable-error-code="untyped-decorator, no-untyped-def, valid-type"

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import tvm
from tvm import tirx
from tvm.script import tirx as T

__all__ = ["CHAINS", "STEPS", "TILE_STEPS", "arguments_of", "copy", "fma", "fma_from_cache", "tiles", "touch"]

CHAINS = 12
"""Independent chains of FMAs: they cover 4 cycles of latency on 2 units, and fit 16 registers with the operands."""

STEPS = 50_000
"""FMAs of each chain in one call: some tenths of a millisecond."""

NEAR_ROWS = 32
"""Rows of `CHAINS` vectors that stay in the first-level cache: up to 24 KiB."""

TILE_STEPS = 2_000
"""Products of each tile of sums in one call."""


def tiles() -> Any:
    """Four tiles of 16 x 16 sums of AMX: `TILE_STEPS` times products of bfloat16 whose factors stay near."""
    from ..search.space.amx import code
    from ..search.space.amx.products import PRODUCTS
    from ..search.space.statements import with_code

    product = next(product for product in PRODUCTS if product.left == "bfloat16")

    def call(name: str, *arguments: Any) -> Any:
        return tirx.Evaluate(tirx.call_extern("void", name, *arguments))

    x, out = (tirx.decl_buffer((count,), "float32", name) for count, name in ((1024, "x"), (1024, "out")))
    start, sums = (tirx.address_of(tirx.BufferLoad(buffer, [0])) for buffer in (x, out))
    step, panel = tirx.IntImm("int32", 64), tirx.IntImm("int32", 128)
    add = call(code.sum_name(product, 2, 2), step, start, start, start, start, start)
    loop = tirx.For(tirx.Var("step", "int32"), 0, TILE_STEPS, tirx.ForKind.SERIAL, add)
    body: Any = tirx.SeqStmt(
        [
            call(code.CONFIGURE, tirx.IntImm("int32", 16)),
            call(code.zero_name(2, 2)),
            loop,
            call(code.store_name(2, 2), panel, sums, sums, sums),
            call(code.RELEASE),
        ]
    )
    for text in (code.configuration_code(), code.tile_code(product, 2, 2)):
        body = with_code(text, body)
    return tirx.PrimFunc([x, out], body).with_attr("tirx.noalias", True)


@functools.cache  # read from its text, which takes as long as compiling it
def fma(threads: int, lanes: int, steps: int = STEPS) -> Any:
    """Each thread: CHAINS accumulators in registers, `steps` times accumulator * x + y."""

    @T.prim_func(s_tir=True)
    def kernel(x: T.Buffer((CHAINS, lanes), "float32"), out: T.Buffer((threads, CHAINS, lanes), "float32")):
        T.func_attr({"tirx.noalias": True})
        for thread in T.parallel(threads):
            with T.sblock("chains"):
                acc = T.sblock_alloc_buffer((CHAINS, lanes), "float32", scope="local")
                for chain in T.unroll(CHAINS):
                    for lane in T.vectorized(lanes):
                        acc[chain, lane] = x[chain, lane]
                for _ in range(steps):
                    for chain in T.unroll(CHAINS):
                        for lane in T.vectorized(lanes):
                            acc[chain, lane] = acc[chain, lane] * x[0, lane] + x[1, lane]
                for chain in T.unroll(CHAINS):
                    for lane in T.vectorized(lanes):
                        out[thread, chain, lane] = acc[chain, lane]

    return kernel


def fma_from_cache(lanes: int, steps: int = STEPS) -> Any:
    """As `fma` on one thread, where each multiply-add loads one of its operands from the first-level cache."""

    @T.prim_func(s_tir=True)
    def kernel(x: T.Buffer((NEAR_ROWS, CHAINS, lanes), "float32"), out: T.Buffer((CHAINS, lanes), "float32")):
        T.func_attr({"tirx.noalias": True})
        with T.sblock("chains"):
            acc = T.sblock_alloc_buffer((CHAINS, lanes), "float32", scope="local")
            for chain in T.unroll(CHAINS):
                for lane in T.vectorized(lanes):
                    acc[chain, lane] = x[0, chain, lane]
            for _ in range(steps // NEAR_ROWS):
                for row in range(NEAR_ROWS):
                    for chain in T.unroll(CHAINS):
                        for lane in T.vectorized(lanes):
                            acc[chain, lane] = acc[chain, lane] * x[0, 0, lane] + x[row, chain, lane]
            for chain in T.unroll(CHAINS):
                for lane in T.vectorized(lanes):
                    out[chain, lane] = acc[chain, lane]

    return kernel


def arguments_of(kernel: Any) -> list[Any]:
    """Tensors for one of these kernels. The chains, x -> x / 2 + 1 / 2, go to 1: no overflow, no denormal numbers."""
    shapes = [tuple(int(extent) for extent in param.shape) for param in kernel.params]
    return [tvm.runtime.tensor(np.full(shape, 0.5, np.float32)) for shape in shapes]


def copy(threads: int, count: int, lanes: int) -> Any:
    """Each thread: `count` vectors from `x` to `out`, one added."""

    @T.prim_func(s_tir=True)
    def kernel(x: T.Buffer((threads, count, lanes), "float32"), out: T.Buffer((threads, count, lanes), "float32")):
        T.func_attr({"tirx.noalias": True})
        for thread in T.parallel(threads):
            for i in range(count):
                for lane in T.vectorized(lanes):
                    out[thread, i, lane] = x[thread, i, lane] + T.float32(1)

    return kernel


def touch(threads: int) -> Any:
    """Each thread: one element."""

    @T.prim_func(s_tir=True)
    def kernel(out: T.Buffer((threads, 64), "float32")):
        # TVM 0.27 compiles a whole module as if arguments overlapped when its last function lacks this mark.
        T.func_attr({"tirx.noalias": True})
        for thread in T.parallel(threads):
            out[thread, 0] = T.float32(1)

    return kernel
