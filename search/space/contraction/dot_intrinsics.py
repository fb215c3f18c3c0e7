"""Instructions that multiply and sum small groups: four 8-bit products into 32 bits, or two bfloat16 into float32.

A tensor intrinsic computes `C[j] += sum of A[k] * B[j, k]` for 16 sums at a time, `A` being one group that all of them
share. TVM has one of these (`dot_16x4_vnni`), which LLVM 22 refuses: it wants the bytes as bytes.

A schedule's trace names its intrinsics. So they are registered when this module is imported, which whoever replays
traces does (with `search/space/lowering.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tvm import tirx
from tvm.s_tir import TensorIntrin
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

__all__ = ["DOT_PRODUCTS", "LANES", "DotProduct", "find_dot_product"]

LANES = 16
"""Sums of one instruction: 32 bits each, 512 in all."""


@dataclass(frozen=True)
class DotProduct:
    """Products of `left` and `right`, `depth` at a time, into `sums`.

    Attributes
    ----------
    left, right, sums : str
        Dtypes.
    depth : int
        Products of one sum.
    feature : str
        What LLVM calls a CPU that has the instruction.
    spare_registers : int
        Vector registers, beside those of sums and operands, that correcting a sign takes.
    corrections : int
        Dot products that correct the sign of a group of the left operand.
    """

    left: str
    right: str
    sums: str
    depth: int
    feature: str
    spare_registers: int = 0
    corrections: int = 0

    @property
    def name(self) -> str:
        """Of the registered intrinsic."""
        return f"eqtune_dot_{self.left}_{self.right}"


_BYTES = ("int32", 4, "avx512vnni")
DOT_PRODUCTS = (
    DotProduct("uint8", "int8", *_BYTES),
    DotProduct("int8", "uint8", *_BYTES),
    DotProduct("int8", "int8", *_BYTES, spare_registers=3, corrections=1),
    DotProduct("uint8", "uint8", *_BYTES, spare_registers=3, corrections=2),
    DotProduct("bfloat16", "bfloat16", "float32", 2, "avx512bf16"),
)


def find_dot_product(left: str, right: str, sums: str, features: tuple[str, ...]) -> DotProduct | None:
    """The one for these dtypes that a CPU with these `features` has; None where there is none."""
    wanted = (left, right, sums)
    found = [d for d in DOT_PRODUCTS if (d.left, d.right, d.sums) == wanted and d.feature in features]
    return found[0] if found else None


BFLOAT16_FUNCTION = "eqtune_dot_bf16"
BFLOAT16_LLVM = f"""
declare <16 x float> @llvm.x86.avx512bf16.dpbf16ps.512(<16 x float>, <32 x bfloat>, <32 x bfloat>)
define <16 x float> @{BFLOAT16_FUNCTION}(<16 x float> %c, <16 x i32> %a, <16 x i32> %b, ptr, ptr) #0 {{
  %x = bitcast <16 x i32> %a to <32 x bfloat>
  %y = bitcast <16 x i32> %b to <32 x bfloat>
  %r = call <16 x float> @llvm.x86.avx512bf16.dpbf16ps.512(<16 x float> %c, <32 x bfloat> %x, <32 x bfloat> %y)
  ret <16 x float> %r
}}
attributes #0 = {{ alwaysinline nounwind memory(none) "target-features"="+avx512f,+avx512bf16" }}
"""
"""TVM makes 16-bit integers of bfloat16 before LLVM sees it, and the instruction wants LLVM's own type. It also makes
float32 of intermediate buffers, except of those that something takes a pointer to."""


def _bytes_dot(sums: Any, unsigned: Any, signed: Any) -> Any:
    """sums + unsigned * signed, groups of four bytes in vectors of 32-bit integers."""
    return tirx.call_llvm_pure_intrin(
        "int32x16", "llvm.x86.avx512.vpdpbusd.512", sums, _as(unsigned, "int8x64"), _as(signed, "int8x64")
    )


def _as(value: Any, dtype: str) -> Any:
    return tirx.reinterpret(dtype, value)


def _four(byte: int) -> Any:
    """A group of one byte, as a 32-bit integer."""
    return tirx.const(int.from_bytes(bytes([byte] * 4), "little", signed=True), "int32")


def _spread(group: Any) -> Any:
    return tirx.Broadcast(group, LANES)


def _sum_of_bytes(dot: DotProduct, a: Any, b: Any, c: Any) -> Any:
    """The sums `c` plus the products of a group `a` (32 bits) and 16 groups `b` (32 bits each).

    The byte instruction multiplies unsigned by signed. With b the signed of two signed operands, b + 128 is unsigned
    (its highest bit flipped), and 128 times the sum of a is taken away; with two unsigned ones it is added to b - 128.
    The compiler computes that once for a row of a tile. To flip b is cheaper than to flip a, which is spread from
    memory; and LLVM 22 never ends on a spread group that is flipped.
    """
    zero, a = _spread(tirx.const(0, "int32")), _spread(a)
    flipped = b ^ _spread(_four(128))
    match dot.left, dot.right:
        case "uint8", "int8":
            return _bytes_dot(c, a, b)
        case "int8", "uint8":
            return _bytes_dot(c, b, a)
        case "int8", "int8":
            return _bytes_dot(c, flipped, a) - _bytes_dot(zero, _spread(_four(128)), a)
    half = _bytes_dot(zero, a, _spread(_four(64)))
    return _bytes_dot(c, a, flipped) + _bytes_dot(half, a, _spread(_four(64)))


def _function(dot: DotProduct, write: Callable[[Any, Any, Any], None]) -> Any:
    """A function of a group, 16 groups and 16 sums with the body of `write`; the parser would take 50 ms."""
    lanes, depth = LANES, dot.depth
    with IRBuilder() as builder, T.prim_func(s_tir=True):
        T.func_name("dot")
        a = T.match_buffer(T.arg("a", T.handle()), (depth,), dot.left, offset_factor=1)
        b = T.match_buffer(T.arg("b", T.handle()), (lanes, depth), dot.right, offset_factor=1)
        c = T.match_buffer(T.arg("c", T.handle()), (lanes,), dot.sums, offset_factor=1, scope="local")
        with T.sblock("root"):
            T.reads(c[0:lanes], a[0:depth], b[0:lanes, 0:depth])
            T.writes(c[0:lanes])
            write(a, b, c)
    return builder.get()


def _register(dot: DotProduct) -> None:
    def description(a: Any, b: Any, c: Any) -> None:
        with T.grid(LANES, dot.depth) as (i, k), T.sblock("update"):
            vi, vk = T.axis.spatial(LANES, i), T.axis.reduce(dot.depth, k)
            T.buffer_store(c, c[vi] + T.Cast(dot.sums, a[vk]) * T.Cast(dot.sums, b[vi, vk]), [vi])

    def implementation(a: Any, b: Any, c: Any) -> None:
        sums = c.vload([0], f"{dot.sums}x{LANES}")
        lanes = tirx.Ramp(tirx.const(0, "int32"), tirx.const(1, "int32"), LANES)
        group = tirx.reinterpret("int32", a.vload([0], f"{dot.left}x{dot.depth}"))
        groups = tirx.reinterpret("int32x16", b.vload([0, 0], f"{dot.right}x{LANES * dot.depth}"))
        if dot.sums == "int32":
            T.buffer_store(c, _sum_of_bytes(dot, group, groups, sums), [lanes])
            return
        operands = sums, _spread(group), groups, a.data, b.data
        # Here and not on a loop around: TVM drops loops of one iteration, with what is annotated.
        with T.attr(tirx.const(0, "int32"), "pragma_import_llvm", BFLOAT16_LLVM):
            T.buffer_store(c, tirx.call_pure_extern(f"float32x{LANES}", BFLOAT16_FUNCTION, *operands), [lanes])

    TensorIntrin.register(dot.name, _function(dot, description), _function(dot, implementation), override=True)


for _dot in DOT_PRODUCTS:
    _register(_dot)
