"""Runs a GPU schedule on the CPU: thread loops become serial loops, and every buffer lies in memory.

Before lowering, TensorIR's loops mean the same whoever runs them, so this checks what a schedule computes: indices,
padding, predicates, epilogues, initialisation. It does not check barriers, which TVM puts in while lowering.
"""

from __future__ import annotations

import re

import numpy as np
import tvm

TARGET = tvm.target.Target({"kind": "llvm", "opt-level": 0})
"""What kernels compute is asked; to optimise their code takes LLVM longer than all else here takes."""


def serial(mod):
    text = mod.script()
    text = re.sub(r'T\.thread_binding\((.*?), thread="[^"]*"(, annotations=\{.*?\})?\)', r"T.serial(\1)", text)
    text = re.sub(r', scope="(shared|shared\.dyn|local|wmma\.\w+)"', "", text)
    text = re.sub(r"T\.sblock_attr\(.*manifest_shared_memory.*\)", "T.evaluate(0)", text)
    text = re.sub(r", annotations=\{[^}]*\}", "", text)
    text = re.sub(r"T\.(vectorized|unroll)\(", "T.serial(", text)
    return tvm.IRModule({"main": tvm.script.from_source(text)["main"].with_attr("global_symbol", "main")})


def outputs(mod, seed=0):
    """The last argument after a call on small integers, which sum exactly in float32."""
    rng = np.random.default_rng(seed)
    function = mod["main"].with_attr("global_symbol", "main")
    arguments = [
        tvm.runtime.tensor(rng.integers(-3, 4, [int(e) for e in p.shape]).astype(str(p.dtype))) for p in function.params
    ]
    result = arguments[-1].numpy()
    arguments[-1].copyfrom(np.full_like(result, np.nan if result.dtype.kind == "f" else np.iinfo(result.dtype).max))
    tvm.compile(tvm.IRModule({"main": function}), TARGET).jit()["main"](*arguments)
    return arguments[-1].numpy()
