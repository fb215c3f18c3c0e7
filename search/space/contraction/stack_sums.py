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

import itertools
import math
from collections.abc import Iterator
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

    A buffer is moved where all its accesses are in the sequence, and in one small box: schedules may be of others.
    """
    blocks: list[Any] = []
    tvm_ffi.structural_walk(func.body, (s_tir.SBlock, blocks.append))
    local = [buffer for block in blocks for buffer in block.alloc_buffers if buffer.scope() == "local"]
    if not local:
        return func
    analyzer = sym.Analyzer()
    tvm_ffi.structural_walk(
        func.body,
        (tirx.For, lambda loop: analyzer.bind(loop.loop_var, ir.Range.from_min_extent(loop.min, loop.extent))),
    )
    moved: list[Any] = []

    def move(sequence: Any) -> Any:
        for buffer in _filled(sequence):
            if _among(buffer, local) and _uses_of(buffer, func.body) == _uses_of(buffer, sequence):
                box = _box(sequence, buffer, analyzer)
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


class _Box(NamedTuple):
    """Where in a buffer a tile begins, and its extents."""

    start: list[Any]
    shape: list[int]


class _Nest:
    """A statement of a sequence: its loops, and what the variables of its blocks stand for in terms of loops."""

    def __init__(self, statement: Any) -> None:
        self.statement = statement
        self._loops: list[Any] = []
        self._bindings: list[tuple[Any, Any]] = []
        tvm_ffi.structural_walk(
            statement, [(tirx.For, self._loops.append), (s_tir.SBlockRealize, self._bind)], order="pre"
        )

    def _bind(self, realize: Any) -> None:
        """Of a block in a block, too: a vector of dot products is one."""
        self._bindings += [(axis, substitute(value, self._bindings)) for axis, value in binding_of(realize)]

    def first_store(self, buffer: Any) -> list[Any] | None:
        """Its indices at the first iteration of all loops; None where nothing is stored."""
        stores: list[Any] = []
        tvm_ffi.structural_walk(self.statement, (tirx.BufferStore, stores.append))
        first = next((store for store in stores if store.buffer.same_as(buffer)), None)
        if first is None:
            return None
        origin = [(loop.loop_var, loop.min) for loop in self._loops]
        return [substitute(self._by_loops(index), origin) for index in first.indices]

    def accesses(self, buffer: Any) -> Iterator[list[tuple[Any, Any]]]:
        """For each load, store and region of the buffer, by dimension: the first and the last index."""
        found: list[list[tuple[Any, Any]]] = []

        def note(source: Any, ends: Any) -> None:
            if source.same_as(buffer):
                found.append([(self._by_loops(first), self._by_loops(last)) for first, last in ends])

        tvm_ffi.structural_walk(
            self.statement,
            [
                (TensorLoad, lambda load: note(load.source, [(index, index) for index in load.indices])),
                (tirx.BufferStore, lambda store: note(store.buffer, [(index, index) for index in store.indices])),
                (TensorRegion, lambda node: note(node.source, [(r.min, r.min + r.extent - 1) for r in node.region])),
            ],
        )
        yield from found

    def _by_loops(self, index: Any) -> Any:
        return substitute(index, self._bindings)


def _filled(sequence: Any) -> list[Any]:
    """The buffers that statements of a sequence store to, each once."""
    found: list[Any] = []

    def note(store: Any) -> None:
        if not _among(store.buffer, found):
            found.append(store.buffer)

    tvm_ffi.structural_walk(sequence, (tirx.BufferStore, note))
    return found


def _box(sequence: Any, buffer: Any, analyzer: Any) -> _Box | None:
    """What all accesses are to, from where the first store begins; None where that is no small box of constant size.

    `analyzer` knows the ranges of all loops.
    """
    nests = [_Nest(statement) for statement in sequence.seq]
    start = next(indices for nest in nests if (indices := nest.first_store(buffer)) is not None)
    shape = [1] * len(start)
    for ends in itertools.chain.from_iterable(nest.accesses(buffer) for nest in nests):
        for dimension, (first, last) in enumerate(ends):
            begin = start[dimension]
            if analyzer.const_int_bound(analyzer.simplify(first - begin)).min_value < 0:
                return None
            largest = analyzer.const_int_bound(analyzer.simplify(last - begin)).max_value
            shape[dimension] = max(shape[dimension], int(largest) + 1)
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
