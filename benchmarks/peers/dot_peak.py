"""How many products a second this machine's dot-product instruction does. `python -m benchmarks.peers.dot_peak JSON`.

Each thread runs the instruction on `CHAINS` independent sums in registers, as `eqtune.measure.peak_kernels.fma` does.
"""

# TVMScript is read by TVM, not run by Python: its annotations are calls, its functions have no Python types.
# mypy: disable-error-code="untyped-decorator, no-untyped-def, valid-type"

from __future__ import annotations

import json
import os
import sys
from typing import Any

import tvm
from tvm import tirx
from tvm.script import tirx as T

from benchmarks.cpu_target import cpu_target
from eqtune.measure.affinity import on_first_core
from eqtune.search.space.contraction.dot_intrinsics import BFLOAT16_FUNCTION, BFLOAT16_LLVM

CHAINS = 12
STEPS = 50_000
ROUNDS = 20


def chains(threads: int, dtype: str, lanes: int) -> Any:
    """Each thread: CHAINS vectors of `lanes` sums in registers, STEPS times one dot product onto each."""
    sums = "float32" if dtype == "bfloat16" else "int32"

    def dot(c: Any, a: Any, b: Any, pointer: Any) -> Any:
        if dtype == "bfloat16":
            return tirx.call_pure_extern(f"{sums}x{lanes}", BFLOAT16_FUNCTION, c, a, b, pointer, pointer)
        left, right = (tirx.reinterpret(f"int8x{4 * lanes}", value) for value in (a, b))
        return tirx.call_llvm_pure_intrin(f"{sums}x{lanes}", f"llvm.x86.avx512.vpdpbusd.{32 * lanes}", c, left, right)

    @T.prim_func(s_tir=True)
    def kernel(x: T.Buffer((2, lanes), "int32"), out: T.Buffer((threads, CHAINS, lanes), sums)):
        T.func_attr({"tirx.noalias": True})
        for thread in T.parallel(threads):
            with T.sblock("chains"):
                T.reads(x[0:2, 0:lanes])
                T.writes(out[thread, 0:CHAINS, 0:lanes])
                acc = T.sblock_alloc_buffer((CHAINS, lanes), sums, scope="local")
                for chain in T.unroll(CHAINS):
                    acc[chain, T.ramp(0, 1, lanes)] = T.broadcast(T.Cast(sums, 0), lanes)
                for _ in range(STEPS):
                    for chain in T.unroll(CHAINS):
                        with T.attr(T.int32(0), "pragma_import_llvm", BFLOAT16_LLVM):
                            acc[chain, T.ramp(0, 1, lanes)] = dot(
                                acc[chain, T.ramp(0, 1, lanes)],
                                x[0, T.ramp(0, 1, lanes)],
                                x[1, T.ramp(0, 1, lanes)],
                                x.data,
                            )
                for chain in T.unroll(CHAINS):
                    out[thread, chain, T.ramp(0, 1, lanes)] = acc[chain, T.ramp(0, 1, lanes)]

    return kernel


def main(dtype: str, threads: int, lanes: int = 16, cpu: str | None = None) -> dict[str, float]:
    """Operations a second of `dtype` ("int8" or "bfloat16"), two for each product; the best of several rounds.

    `lanes` are the 32-bit sums of one instruction, 16 for bfloat16; `cpu` has the instruction (this machine's).
    """
    import numpy as np

    os.environ["TVM_NUM_THREADS"] = str(threads)
    mod = tvm.IRModule({"main": chains(threads, dtype, lanes).with_attr("global_symbol", "main")})
    library = tvm.compile(mod, cpu_target(cpu, threads)).jit()
    sums = "float32" if dtype == "bfloat16" else "int32"
    arguments = [np.zeros((2, lanes), np.int32), np.zeros((threads, CHAINS, lanes), sums)]
    timer = library.time_evaluator("main", tvm.cpu(), number=2, repeat=ROUNDS)
    with on_first_core():  # as kernels are timed: beside a thread of the pool, the peak would be too low
        seconds = min(timer(*map(tvm.runtime.tensor, arguments)).results)
    depth = 2 if dtype == "bfloat16" else 4
    return {"flops_per_s": 2.0 * depth * lanes * CHAINS * STEPS * threads / seconds}


if __name__ == "__main__":
    print(json.dumps(main(**json.loads(sys.argv[1]))))
