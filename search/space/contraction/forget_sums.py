"""Sums of a register tile are set to zero once more after they were written back, so that no later loop carries them.

TVM takes a tile's sums from its workspace, which LLVM must assume to be read when it is given back. LLVM therefore
keeps the last value of every sum until the kernel ends: 20 registers that the loop over a ragged last tile lacks, which
then spills its own sums in every step (a product of 49 x 960 x 160 on Zen 4, one thread: 87 instead of 118 GFLOPS).
A zero needs no register:

    for tile:                                 for tile:
        sums[:] = 0                               sums[:] = 0
        for k: sums[:] += a[k] * b[k]     ->      for k: sums[:] += a[k] * b[k]
        out[tile] = sums[:] + bias                out[tile] = sums[:] + bias
                                                  sums[:] = 0
"""

from __future__ import annotations

from typing import Any

import tvm_ffi
from tvm import ir, s_tir, tirx

__all__ = ["forget_sums"]


def forget_sums(func: Any) -> Any:
    """Add the last line of the above to a scheduled PrimFunc; the same object where no local sums are written back."""

    def forget(sequence: Any) -> Any:
        first, *others = sequence.seq
        if len(others) < 2 or not _sets_local_zeros(first):
            return sequence
        return tirx.SeqStmt([first, *others, _with_variables_of_its_own(first)])

    body = tvm_ffi.structural_map(func.body, (tirx.SeqStmt, forget))
    return func if body.same_as(func.body) else func.with_body(body)


def _sets_local_zeros(statement: Any) -> bool:
    """Whether a loop nest does nothing but store a constant in a local buffer."""
    in_block = False
    while isinstance(statement, tirx.For | s_tir.SBlockRealize):  # a vector of dot products is a block in a block
        in_block |= isinstance(statement, s_tir.SBlockRealize)
        statement = statement.body if isinstance(statement, tirx.For) else statement.block.body
    constant = isinstance(statement, tirx.BufferStore) and isinstance(statement.value, tirx.FloatImm | tirx.IntImm)
    return in_block and constant and statement.buffer.scope() == "local"


def _with_variables_of_its_own(nest: Any) -> Any:
    """A copy of a loop nest around one block."""
    own: dict[Any, Any] = {}

    def define(variable: Any) -> None:
        own[variable] = tirx.Var(variable.name, variable.ty)

    tvm_ffi.structural_walk(nest, (tirx.For, lambda loop: define(loop.loop_var)))
    tvm_ffi.structural_walk(nest, (tirx.IterVar, lambda axis: define(axis.var)))
    return tvm_ffi.structural_map(nest, (ir.Var, lambda variable: own.get(variable, variable)))
