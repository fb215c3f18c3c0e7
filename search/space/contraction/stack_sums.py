"""The sums of a register tile lie on the stack, however many they are, so that LLVM keeps them in registers alone.

TVM takes local buffers, and all of 1024 bytes and more, from a workspace, which LLVM must assume to be read when it is
given back. It then stores the sums of every tile a second time, and carries those of the last tile to the end of the
kernel: 20 registers that the loop over a ragged last tile lacks, which then spills its own sums in every step. In
memory that is the function's own, no sum is ever stored:

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
from ..expressions import binding_of, nodes_of, substitute
from ..marks import UNROLL_STEPS
from ..statements import block_with

__all__ = ["sums_on_stack"]

MOST_BYTES = 4096
"""Of one buffer on the stack: twice what all registers of a CPU hold."""

UNIT_BYTES = 128
"""Of what TVM puts on the stack at the start of a cache line: it calls that a tensor map."""

_ONE_COPY = (tirx.ForKind.SERIAL, tirx.ForKind.PARALLEL)
"""Kinds of loops whose bodies stay one piece of code, with one place on the stack."""


def sums_on_stack(func: Any) -> Any:
    """Move local buffers that a sequence of loops fills and reads to the stack; the same object where there are none.

    Schedules may be replayed from somebody else's record, so nothing is taken for granted of them. A buffer is moved
    where the sequence stores all that any access to it may reach, in one small box; where no reduction around the
    sequence carries sums from one iteration to the next; and where no loop around it is written out (none is marked
    UNROLL_STEPS).
    """
    blocks, loops = nodes_of(func.body, s_tir.SBlock), nodes_of(func.body, tirx.For)
    local = [buffer for block in blocks for buffer in block.alloc_buffers if buffer.scope() == "local"]
    if not local or any(UNROLL_STEPS in part.annotations for part in (*blocks, *loops)):
        return func
    written_out = [loop.body for loop in loops if loop.kind not in _ONE_COPY]
    copied = [buffer for body in written_out for part in nodes_of(body, tirx.SeqStmt) for buffer in _filled(part)]
    local = [buffer for buffer in local if not _among(buffer, copied) and not _is_widened(buffer)]
    analyzer = sym.Analyzer()
    for loop in loops:
        analyzer.bind(loop.loop_var, ir.Range.from_min_extent(loop.min, loop.extent))
    moved: list[Any] = []

    def move(sequence: Any) -> Any:
        for buffer in _filled(sequence):
            if _among(buffer, local) and len(_accesses(buffer, func.body)) == len(_accesses(buffer, sequence)):
                box = _box([_Nest(statement) for statement in sequence.seq], buffer, analyzer)
                if box is not None:
                    sequence = _on_stack(sequence, buffer, box)
                    moved.append(buffer)
        return sequence

    body = tvm_ffi.structural_map(func.body, (tirx.SeqStmt, move))
    if not moved:
        return func

    def without_moved(block: Any) -> Any:
        kept = [buffer for buffer in block.alloc_buffers if not _among(buffer, moved)]
        return block if len(kept) == len(block.alloc_buffers) else block_with(block, alloc_buffers=kept)

    return func.with_body(tvm_ffi.structural_map(body, (s_tir.SBlock, without_moved)))


class _Box(NamedTuple):
    """Where in a buffer a tile begins, and its extents."""

    start: list[Any]
    shape: list[int]


class _Nest:
    """A statement of a sequence: its loops, and what the variables of its blocks stand for in terms of loops."""

    def __init__(self, statement: Any) -> None:
        self.statement = statement
        self.loops: list[Any] = []
        self.blocks: list[Any] = []
        self._bindings: list[tuple[Any, Any]] = []
        tvm_ffi.structural_walk(
            statement, [(tirx.For, self.loops.append), (s_tir.SBlockRealize, self._bind)], order="pre"
        )

    def _bind(self, realize: Any) -> None:
        """Of a block in a block, too: a vector of dot products is one."""
        self.blocks.append(realize.block)
        self._bindings += [(axis, self.by_loops(value)) for axis, value in binding_of(realize)]

    def by_loops(self, index: Any) -> Any:
        """An index by the variables of loops, those around the statement included."""
        return substitute(index, self._bindings)

    def stores(self, buffer: Any) -> list[Any]:
        """The indices of each store to the buffer."""
        found = nodes_of(self.statement, tirx.BufferStore)
        return [[self.by_loops(i) for i in store.indices] for store in found if store.buffer.same_as(buffer)]

    def accesses(self, buffer: Any) -> list[list[tuple[Any, Any]]]:
        """What `_accesses` finds, by the variables of loops."""
        return [
            [(self.by_loops(first), self.by_loops(last)) for first, last in ends]
            for ends in _accesses(buffer, self.statement)
        ]

    def carries(self, buffer: Any) -> bool:
        """Whether loops around the statement are part of a reduction into the buffer, which lasts longer than they."""
        reduced = [
            self.by_loops(axis.var)
            for block in self.blocks
            if any(region.source.same_as(buffer) for region in block.writes)
            for axis in block.iter_vars
            if axis.iter_type != tirx.IterVar.DataPar
        ]
        used = [variable for value in reduced for variable in nodes_of(value, ir.Var)]
        return not all(_among(variable, [loop.loop_var for loop in self.loops]) for variable in used)


def _filled(sequence: Any) -> list[Any]:
    """The buffers that statements of a sequence store to, each once."""
    found: list[Any] = []
    for store in nodes_of(sequence, tirx.BufferStore):
        if not _among(store.buffer, found):
            found.append(store.buffer)
    return found


def _is_widened(buffer: Any) -> bool:
    """Whether TVM computes in a wider type, in what it allocates itself."""
    return str(buffer.dtype).startswith(("bfloat", "float8"))


def _box(nests: list[_Nest], buffer: Any, analyzer: Any) -> _Box | None:
    """What is stored, from where the first store begins; None where that is no small box, or not all that is accessed.

    `analyzer` knows the ranges of all loops.
    """
    stores = [(nest, indices) for nest in nests for indices in nest.stores(buffer)]
    first_nest, first = stores[0]
    origin = [(loop.loop_var, loop.min) for loop in first_nest.loops]
    start = [substitute(index, origin) for index in first]

    def bounds(index: Any, dimension: int) -> tuple[int, int]:
        bound = analyzer.const_int_bound(analyzer.simplify(index - start[dimension]))
        return int(bound.min_value), int(bound.max_value)

    if any(nest.carries(buffer) for nest in nests) or any("x" in str(index.ty.dtype) for index in start):
        return None  # indices that are vectors differ by vectors
    shape = [1 + max(bounds(indices[d], d)[1] for _, indices in stores) for d in range(len(start))]
    if math.prod(shape) * dtype_bytes(str(buffer.dtype)) > MOST_BYTES:
        return None
    for nest in nests:
        for ends in nest.accesses(buffer):
            for dimension, (least, largest) in enumerate(ends):
                if bounds(least, dimension)[0] < 0 or bounds(largest, dimension)[1] >= shape[dimension]:
                    return None
    return _Box(start, shape)


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

    handlers = [(TensorLoad, load), (tirx.BufferStore, store), (TensorRegion, region)]
    statements = [tvm_ffi.structural_map(statement, handlers) for statement in sequence.seq]
    units = -(-math.prod(box.shape) * dtype_bytes(str(buffer.dtype)) // UNIT_BYTES)
    memory = tirx.call_intrin("handle", "tirx.tvm_stack_alloca", "tensormap", units)
    return tirx.SeqStmt([tirx.DeclBuffer(small, data=memory), *statements])


def _accesses(buffer: Any, statement: Any) -> list[list[tuple[Any, Any]]]:
    """For each load, store and region of the buffer, by dimension: the first and the last index."""
    found: list[list[tuple[Any, Any]]] = []

    def note(source: Any, ends: Any) -> None:
        if source.same_as(buffer):
            found.append(list(ends))

    tvm_ffi.structural_walk(
        statement,
        [
            (TensorLoad, lambda load: note(load.source, ((index, index) for index in load.indices))),
            (tirx.BufferStore, lambda store: note(store.buffer, ((index, index) for index in store.indices))),
            (TensorRegion, lambda node: note(node.source, ((r.min, r.min + r.extent - 1) for r in node.region))),
        ],
    )
    return found


def _among(buffer: Any, buffers: list[Any]) -> bool:
    return any(buffer.same_as(other) for other in buffers)
