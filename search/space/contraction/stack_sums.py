"""The sums of a register tile lie on the stack, however many they are, so that LLVM keeps them in registers alone.

TVM takes buffers of 1024 bytes and more from a workspace, which LLVM must assume to be read when it is given back. It
then stores the sums of every tile a second time, and carries those of the last tile to the end of the kernel: 20
registers that the loop over a ragged last tile lacks, which then spills its own sums in every step. In memory that is
the function's own, no sum is ever stored:

    sums = workspace(all tiles)               for tile:
    for tile:                                     sums = stack(one tile)
        sums[tile] = 0                 ->         sums[:] = 0
        for k: sums[tile] += a * b                for k: sums[:] += a * b
        out[tile] = sums[tile] + bias             out[tile] = sums[:] + bias
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import tvm_ffi
from tvm import ir, s_tir, sym, tirx
from tvm.ir.expr import TensorLoad, TensorRegion

from ..access import dtype_bytes
from ..expressions import binding_of, substitute

__all__ = ["sums_on_stack"]

MOST_BYTES = 4096
"""Of one buffer on the stack: twice what all registers of a CPU hold."""

UNIT_BYTES = 128
"""Of what TVM puts on the stack at the start of a cache line: it calls that a tensor map."""


def sums_on_stack(func: Any) -> Any:
    """Move local buffers that a sequence of loops fills and reads to the stack; the same object where there are none.

    A buffer is moved where all its accesses are in the sequence, and those that fill it are to a box of constant size.
    """
    blocks: list[Any] = []
    tvm_ffi.structural_walk(func.body, (s_tir.SBlock, blocks.append))
    local = [buffer for block in blocks for buffer in block.alloc_buffers if buffer.scope() == "local"]
    moved: list[Any] = []

    def move(sequence: Any) -> Any:
        for buffer in _filled(sequence):
            if _among(buffer, local) and _uses_of(buffer, func.body) == _uses_of(buffer, sequence):
                box = _box(sequence, buffer)
                if box is not None:
                    sequence = _on_stack(sequence, buffer, box)
                    moved.append(buffer)
        return sequence

    body = tvm_ffi.structural_map(func.body, (tirx.SeqStmt, move))
    if not moved:
        return func

    def without_moved(block: Any) -> Any:
        kept = [buffer for buffer in block.alloc_buffers if not _among(buffer, moved)]
        if len(kept) == len(block.alloc_buffers):
            return block
        return s_tir.SBlock(
            block.iter_vars,
            block.reads,
            block.writes,
            block.name_hint,
            block.body,
            block.init,
            kept,
            block.match_buffers,
            block.annotations,
        )

    return func.with_body(tvm_ffi.structural_map(body, (s_tir.SBlock, without_moved)))


class _Store(NamedTuple):
    """A store, its indices by the loops around it, and those of these loops that are in the statement."""

    buffer: Any
    indices: list[Any]
    loops: list[Any]


class _Box(NamedTuple):
    """Where in a buffer a tile begins, and its extents."""

    start: list[Any]
    shape: list[int]


def _filled(sequence: Any) -> list[Any]:
    """The buffers that statements of a sequence store to and nothing else, each once."""
    found: list[Any] = []
    for store in map(_only_store, sequence.seq):
        if store is not None and not _among(store.buffer, found):
            found.append(store.buffer)
    return found


def _only_store(statement: Any) -> _Store | None:
    """The store that a nest of loops and blocks is around; None where there is something else inside."""
    loops: list[Any] = []
    bindings: list[tuple[Any, Any]] = []
    while isinstance(statement, tirx.For | s_tir.SBlockRealize):  # a vector of dot products is a block in a block
        if isinstance(statement, tirx.For):
            loops.append(statement)
            statement = statement.body
        else:
            bindings += [(axis, substitute(value, bindings)) for axis, value in binding_of(statement)]
            statement = statement.block.body
    if not isinstance(statement, tirx.BufferStore):
        return None
    return _Store(statement.buffer, [substitute(index, bindings) for index in statement.indices], loops)


def _box(sequence: Any, buffer: Any) -> _Box | None:
    """What the first statement that fills the buffer fills of it; None where that is no small box of constant size."""
    first = next(store for store in map(_only_store, sequence.seq) if store and store.buffer.same_as(buffer))
    analyzer = sym.Analyzer()
    for loop in first.loops:
        analyzer.bind(loop.loop_var, ir.Range.from_min_extent(loop.min, loop.extent))
    origin = [(loop.loop_var, loop.min) for loop in first.loops]
    start = [analyzer.simplify(substitute(index, origin)) for index in first.indices]
    spans = [analyzer.const_int_bound(analyzer.simplify(i - s)) for i, s in zip(first.indices, start, strict=True)]
    if any(span.min_value != 0 for span in spans):
        return None
    shape = [int(span.max_value) + 1 for span in spans]
    return _Box(start, shape) if math.prod(shape) * dtype_bytes(str(buffer.dtype)) <= MOST_BYTES else None


def _on_stack(sequence: Any, buffer: Any, box: _Box) -> Any:
    """The sequence with a buffer of its own, which is as large as the box."""
    small = tirx.decl_buffer(box.shape, str(buffer.dtype), buffer.name, scope="local", data_alignment=64)

    def moved(indices: Any) -> list[Any]:
        return [index - start for index, start in zip(indices, box.start, strict=True)]

    def load(node: Any) -> Any:
        return tirx.BufferLoad(small, moved(node.indices)) if node.source.same_as(buffer) else node

    def store(node: Any) -> Any:
        return tirx.BufferStore(small, node.value, moved(node.indices)) if node.buffer.same_as(buffer) else node

    def region(node: Any) -> Any:
        if not node.source.same_as(buffer):
            return node
        ranges = [
            ir.Range.from_min_extent(part.min - start, part.extent)
            for part, start in zip(node.region, box.start, strict=True)
        ]
        return tirx.BufferRegion(small, ranges)

    handlers = ((TensorLoad, load), (tirx.BufferStore, store), (TensorRegion, region))
    statements = [tvm_ffi.structural_map(statement, list(handlers)) for statement in sequence.seq]
    units = -(-math.prod(box.shape) * dtype_bytes(str(buffer.dtype)) // UNIT_BYTES)
    memory = tirx.call_intrin("handle", "tirx.tvm_stack_alloca", "tensormap", units)
    return tirx.SeqStmt([tirx.DeclBuffer(small, data=memory), *statements])


def _uses_of(buffer: Any, statement: Any) -> int:
    """How often it is named: in loads, stores and regions."""
    used: list[Any] = []
    tvm_ffi.structural_walk(
        statement,
        [
            (TensorLoad, lambda load: used.append(load.source)),
            (tirx.BufferStore, lambda store: used.append(store.buffer)),
            (TensorRegion, lambda region: used.append(region.source)),
        ],
    )
    return sum(1 for other in used if other.same_as(buffer))


def _among(buffer: Any, buffers: list[Any]) -> bool:
    return any(buffer.same_as(other) for other in buffers)
