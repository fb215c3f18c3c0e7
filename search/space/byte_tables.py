"""Functions of bytes as tables: 256 results in registers, from which instructions pick those of a vector.

    for j in vectorized(16):                                for j in vectorized(16):
        y[j] = table[T.Cast("int32", f(j))]    ->               at[j] = f(j)
                                                            pick(found, at, table)
                                                            y[j] = found[j]

TVM loads the elements one by one, 20 cycles for 16 of them. Instructions take 3 with AVX-512 VBMI, 7 with AVX2 where 32
are looked up at once (23 for 16 alone). Layers of 8 bits end so where a function follows that is more than a limit:
SiLU and its roundings take 36 cycles in float32, with vectors of 16 (Zen 5).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import tvm_ffi
from tvm import s_tir, tirx
from tvm.ir.expr import TensorLoad

from .expressions import guarded_loads, nodes_of
from .statements import with_body, with_code

__all__ = [
    "BYTES",
    "BYTE_TABLES",
    "TABLE_INSTRUCTIONS",
    "TableInstructions",
    "has_table",
    "is_looked_up",
    "looks_up_elements",
    "pick_from_tables",
    "table_index",
    "table_instructions_of",
]

BYTE_TABLES = "eqtune.byte_tables"
"""Attribute of kernels: the instructions that pick bytes on the CPU that they are for, in `TABLE_INSTRUCTIONS`."""

BYTES = 256
"""Elements of a table, by what a byte is as an unsigned number."""


@dataclass(frozen=True)
class TableInstructions:
    """What picks bytes of a table on a CPU.

    Attributes
    ----------
    lanes, least : int
        How many bytes are picked at once, and how few are worth it.
    instructions : float
        In which they are picked, those around included.
    features : str
        Of the CPU, as LLVM lists them.
    declarations, body : str
        Of a function in LLVM's language: the body makes %found of %q, the places, and %table, a pointer to the table.
    """

    lanes: int
    least: int
    instructions: float
    features: str
    declarations: str = field(repr=False)
    body: str = field(repr=False)

    def function(self, name: str, count: int) -> str:
        """The definition of a function that picks `count` bytes, no more than `lanes`."""
        own, whole = f"<{count} x i8>", f"<{self.lanes} x i8>"
        wider = ", ".join(f"i32 {lane}" if lane < count else "i32 poison" for lane in range(self.lanes))
        narrower = ", ".join(f"i32 {lane}" for lane in range(count))
        return f"""{self.declarations}
define void @{name}(ptr %result, ptr %at, ptr %table) #0 {{
  %places = load {own}, ptr %at, align 1
  %q = shufflevector {own} %places, {own} poison, <{self.lanes} x i32> <{wider}>
{self.body}
  %own = shufflevector {whole} %found, {whole} poison, <{count} x i32> <{narrower}>
  store {own} %own, ptr %result, align 1
  ret void
}}
attributes #0 = {{ alwaysinline nounwind memory(argmem: readwrite) "target-features"="{self.features}" }}
"""


def table_index(byte: Any) -> Any:
    """The place of an int8 or uint8 in a table."""
    return tirx.Cast("int32", tirx.Cast("uint8", byte))


def has_table(function: Any) -> bool:
    """Whether a PrimFunc loads from a table by what a byte is."""
    return any(map(is_looked_up, nodes_of(function.body, TensorLoad)))


def is_looked_up(load: Any) -> bool:
    """Whether it is of a table, by what a byte is."""
    return _byte(load) is not None


def table_instructions_of(function: Any) -> TableInstructions | None:
    """What picks the bytes of a PrimFunc's tables; None where they are loaded."""
    return TABLE_INSTRUCTIONS.get(str((function.attrs or {}).get(BYTE_TABLES, "")))


def looks_up_elements(function: Any) -> bool:
    """Whether a PrimFunc is one block that writes, for each byte of a tensor, what a table has for it, in its place."""
    stores = nodes_of(function.body, tirx.BufferStore)
    if not isinstance(function.body, s_tir.SBlockRealize) or len(stores) != 1:
        return False
    byte = _byte(stores[0].value) if isinstance(stores[0].value, TensorLoad) else None
    while isinstance(byte, tirx.Cast):
        byte = byte.value
    if not isinstance(byte, TensorLoad) or len(byte.indices) != len(stores[0].indices):
        return False
    return all(one.same_as(other) for one, other in zip(byte.indices, stores[0].indices, strict=True))


def pick_from_tables(function: Any) -> Any:
    """Rewrite loads of tables in the vector loops of a scheduled PrimFunc; the same object when there is none.

    Where a condition decides what is looked up, loads stay: the place of a byte that is not wanted may not be there.
    """
    instructions, code = table_instructions_of(function), dict[str, str]()
    if instructions is None:
        return function
    name = str(function.attrs[BYTE_TABLES])

    def vector_loop(loop: Any) -> Any:
        count = int(loop.extent) if loop.kind == tirx.ForKind.VECTORIZED else 0
        if not instructions.least <= count <= instructions.lanes:
            return loop
        buffers: list[Any] = []
        called = f"eqtune_pick_{name}_{count}"
        body = tvm_ffi.structural_map(loop.body, (tirx.BufferStore, _staging(buffers, loop.loop_var, count, called)))
        if body.same_as(loop.body):
            return loop
        code[called] = instructions.function(called, count)
        return tirx.SeqStmt([*map(tirx.AllocBuffer, buffers), *map(_cleared, buffers), with_body(loop, body)])

    body = tvm_ffi.structural_map(function.body, (tirx.For, vector_loop))
    for text in code.values():
        body = with_code(text, body)
    return function if body.same_as(function.body) else function.with_body(body)


def _cleared(buffer: Any) -> Any:
    """Zeros in all lanes: where a condition leaves out some, TVM makes a buffer as short as those that are stored."""
    count = int(buffer.shape[0])
    lanes = tirx.Ramp(tirx.IntImm("int32", 0), tirx.IntImm("int32", 1), count)
    return tirx.BufferStore(buffer, tirx.Broadcast(tirx.const(0, "uint8"), count), [lanes])


def _staging(buffers: list[Any], lane: Any, count: int, name: str) -> Callable[[Any], Any]:
    """Rewrites a store into stores of places, of what is picked there, and of its value."""
    first = tirx.IntImm("int32", 0)

    def staged(store: Any) -> Any:
        before: list[Any] = []

        def kept(what: str) -> Any:
            buffers.append(tirx.decl_buffer([count], "uint8", what))
            return buffers[-1]

        def replace(load: Any) -> Any:
            byte = _byte(load)
            if byte is None:
                return load
            at, found = kept("at"), kept("found")
            before.append(tirx.BufferStore(at, byte, [lane]))
            pointers = [tirx.address_of(tirx.BufferLoad(buffer, [first])) for buffer in (found, at, load.source)]
            before.append(tirx.Evaluate(tirx.call_extern("void", name, *pointers)))
            picked = tirx.BufferLoad(found, [lane])
            return picked if str(load.ty.dtype) == "uint8" else tirx.reinterpret(str(load.ty.dtype), picked)

        if _guards_tables(store.value):
            return store
        value = tvm_ffi.structural_map(store.value, (TensorLoad, replace))
        if not before:
            return store
        return tirx.SeqStmt([*before, tirx.BufferStore(store.buffer, value, store.indices)])

    return staged


def _guards_tables(value: Any) -> bool:
    """Whether a condition in a value decides if a table is asked."""
    return any(is_looked_up(load) for load in guarded_loads(value))


_WIDE = ("int16", "int32", "int64", "uint16", "uint32", "uint64")
"""Integers that hold every byte."""


def _byte(load: Any) -> Any:
    """The byte by which a table is looked up; None for another load."""
    if len(load.source.shape) != 1 or str(load.ty.dtype) not in ("int8", "uint8"):
        return None
    (extent,), (index,) = load.source.shape, load.indices
    if not isinstance(extent, tirx.IntImm) or int(extent) != BYTES:
        return None
    while isinstance(index, tirx.Cast) and str(index.ty.dtype) in _WIDE:
        if str(index.value.ty.dtype) == "uint8":
            return index.value
        index = index.value
    return None


def _vector_of_rows() -> str:
    """Two instructions, each of which picks from 128 bytes by the last seven bits of a place, and the first bit."""
    loads = "\n".join(
        f"  %p{n} = getelementptr i8, ptr %table, i64 {64 * n}\n  %r{n} = load <64 x i8>, ptr %p{n}, align 1"
        for n in range(4)
    )
    pick = "call <64 x i8> @llvm.x86.avx512.vpermi2var.qi.512"
    return f"""{loads}
  %low = {pick}(<64 x i8> %r0, <64 x i8> %q, <64 x i8> %r1)
  %high = {pick}(<64 x i8> %r2, <64 x i8> %q, <64 x i8> %r3)
  %is_high = icmp slt <64 x i8> %q, zeroinitializer
  %found = select <64 x i1> %is_high, <64 x i8> %high, <64 x i8> %low"""


def _chosen_rows() -> str:
    """Sixteen instructions that pick from 16 bytes, by the last four bits of a place, and choices by the others."""
    halves = ", ".join(f"i32 {lane % 16}" for lane in range(32))
    lines = ["  %last = and <32 x i8> %q, splat (i8 15)"]
    for n in range(16):
        lines += [
            f"  %p{n} = getelementptr i8, ptr %table, i64 {16 * n}",
            f"  %half{n} = load <16 x i8>, ptr %p{n}, align 1",
            f"  %row{n} = shufflevector <16 x i8> %half{n}, <16 x i8> poison, <32 x i32> <{halves}>",
            f"  %c4_{n} = call <32 x i8> @llvm.x86.avx2.pshuf.b(<32 x i8> %row{n}, <32 x i8> %last)",
        ]
    for bit in (4, 5, 6, 7):
        lines += [
            f"  %up{bit} = shl <32 x i8> %q, splat (i8 {7 - bit})",
            f"  %is{bit} = icmp slt <32 x i8> %up{bit}, zeroinitializer",
        ]
        for n in range(128 >> bit):
            name = "%found" if bit == 7 else f"%c{bit + 1}_{n}"
            sides = f"<32 x i8> %c{bit}_{2 * n + 1}, <32 x i8> %c{bit}_{2 * n}"
            lines.append(f"  {name} = select <32 x i1> %is{bit}, {sides}")
    return "\n".join(lines)


TABLE_INSTRUCTIONS: Mapping[str, TableInstructions] = {
    "avx512vbmi": TableInstructions(
        64,
        4,
        6.0,
        "+avx512f,+avx512bw,+avx512vbmi",
        "declare <64 x i8> @llvm.x86.avx512.vpermi2var.qi.512(<64 x i8>, <64 x i8>, <64 x i8>)",
        _vector_of_rows(),
    ),
    "avx2": TableInstructions(
        32, 32, 28.0, "+avx2", "declare <32 x i8> @llvm.x86.avx2.pshuf.b(<32 x i8>, <32 x i8>)", _chosen_rows()
    ),
}
"""By the feature that a CPU needs, as LLVM calls it; the fastest first. Others load the elements."""
