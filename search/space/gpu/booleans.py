"""Booleans in memory, which TVM's CUDA would take for numbers of two bytes where they are vectors."""

from __future__ import annotations

from typing import Any

import tvm_ffi
from tvm import tirx
from tvm.ir.expr import TensorLoad

__all__ = ["booleans_one_by_one"]


def booleans_one_by_one(func: Any) -> Any:
    """Unroll vectorized loops that load or store booleans; the same object where there are none.

    CUDA has no vectors of booleans. TVM computes with `ushort4` instead, and reads and writes memory as that, too:
    eight bytes where four booleans are.
    """

    def loop(node: Any) -> Any:
        if node.kind != tirx.ForKind.VECTORIZED or not _touches_booleans(node.body):
            return node
        return tirx.For(node.loop_var, node.min, node.extent, tirx.ForKind.UNROLLED, node.body)

    body = tvm_ffi.structural_map(func.body, (tirx.For, loop))
    return func if body.same_as(func.body) else func.with_body(body)


def _touches_booleans(body: Any) -> bool:
    dtypes: list[str] = []
    loads = (TensorLoad, lambda load: dtypes.append(str(load.source.dtype)))
    stores = (tirx.BufferStore, lambda store: dtypes.append(str(store.buffer.dtype)))
    tvm_ffi.structural_walk(body, [loads, stores])
    return "bool" in dtypes
