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

from eqtune.machine import detect_target
from eqtune.search.space.contraction.dot_intrinsics import BFLOAT16_FUNCTION, BFLOAT16_LLVM, LANES

CHAINS = 12
STEPS = 50_000
ROUNDS = 20


def chains(threads: int, dtype: str) -> Any:
    """Each thread: CHAINS sums in registers, STEPS times one dot product onto each."""
    sums = "float32" if dtype == "bfloat16" else "int32"

    def dot(c: Any, a: Any, b: Any, pointer: Any) -> Any:
        if dtype == "bfloat16":
            return tirx.call_pure_extern(f"{sums}x{LANES}", BFLOAT16_FUNCTION, c, a, b, pointer, pointer)
        left, right = (tirx.reinterpret(f"int8x{4 * LANES}", value) for value in (a, b))
        return tirx.call_llvm_pure_intrin(f"{sums}x{LANES}", "llvm.x86.avx512.vpdpbusd.512", c, left, right)

    @T.prim_func(s_tir=True)
    def kernel(x: T.Buffer((2, LANES), "int32"), out: T.Buffer((threads, CHAINS, LANES), sums)):
        T.func_attr({"tirx.noalias": True})
        for thread in T.parallel(threads):
            with T.sblock("chains"):
                T.reads(x[0:2, 0:LANES])
                T.writes(out[thread, 0:CHAINS, 0:LANES])
                acc = T.sblock_alloc_buffer((CHAINS, LANES), sums, scope="local")
                for chain in T.unroll(CHAINS):
                    acc[chain, T.ramp(0, 1, LANES)] = T.broadcast(T.Cast(sums, 0), LANES)
                for _ in range(STEPS):
                    for chain in T.unroll(CHAINS):
                        with T.attr(T.int32(0), "pragma_import_llvm", BFLOAT16_LLVM):
                            acc[chain, T.ramp(0, 1, LANES)] = dot(
                                acc[chain, T.ramp(0, 1, LANES)],
                                x[0, T.ramp(0, 1, LANES)],
                                x[1, T.ramp(0, 1, LANES)],
                                x.data,
                            )
                for chain in T.unroll(CHAINS):
                    out[thread, chain, T.ramp(0, 1, LANES)] = acc[chain, T.ramp(0, 1, LANES)]

    return kernel


def main(dtype: str, threads: int) -> dict[str, float]:
    """Operations a second of `dtype` ("int8" or "bfloat16"), two for each product; the best of several rounds."""
    import numpy as np

    os.environ["TVM_NUM_THREADS"] = str(threads)
    mod = tvm.IRModule({"main": chains(threads, dtype).with_attr("global_symbol", "main")})
    library = tvm.compile(mod, detect_target(threads)).jit()
    sums = "float32" if dtype == "bfloat16" else "int32"
    arguments = [np.zeros((2, LANES), np.int32), np.zeros((threads, CHAINS, LANES), sums)]
    timer = library.time_evaluator("main", tvm.cpu(), number=2, repeat=ROUNDS)
    seconds = min(timer(*map(tvm.runtime.tensor, arguments)).results)
    depth = 2 if dtype == "bfloat16" else 4
    return {"flops_per_s": 2.0 * depth * LANES * CHAINS * STEPS * threads / seconds}


if __name__ == "__main__":
    print(json.dumps(main(**json.loads(sys.argv[1]))))
