"""Booleans in memory, which TVM's CUDA would take for numbers of two bytes where they are vectors."""

from __future__ import annotations

from typing import Any

from tvm import tirx
from tvm.ir.expr import TensorLoad

from ..expressions import nodes_of
from ..statements import rewritten

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

    return rewritten(func, (tirx.For, loop))


def _touches_booleans(body: Any) -> bool:
    loads, stores = nodes_of(body, TensorLoad), nodes_of(body, tirx.BufferStore)
    buffers = [*(load.source for load in loads), *(store.buffer for store in stores)]
    return any(str(buffer.dtype) == "bool" for buffer in buffers)
