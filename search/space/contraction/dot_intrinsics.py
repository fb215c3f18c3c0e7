"""Instructions that multiply and sum small groups: four products of 8 bits or two of 16 into 32 bits.

A tensor intrinsic computes `C[j] += sum of A[k] * B[j, k]` for a vector of sums at a time, `A` being one group that all
of them share. TVM has one of these (`dot_16x4_vnni`), which LLVM 22 refuses: it wants the bytes as bytes.

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

from ..hardware import Hardware

__all__ = ["DOT_PRODUCTS", "DotProduct", "find_dot_product"]


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
    lanes : int
        Sums of one instruction, 32 bits each.
    spare_registers : int
        Vector registers, beside those of sums and operands, that correcting a sign or adding apart takes.
    corrections : int
        Dot products that correct the sign of a group of the left operand.
    """

    left: str
    right: str
    sums: str
    depth: int
    feature: str
    lanes: int
    spare_registers: int = 0
    corrections: int = 0

    @property
    def name(self) -> str:
        """Of the registered intrinsic."""
        width = "" if self.lanes == 16 else f"_x{self.lanes}"
        return f"eqtune_dot_{self.left}_{self.right}{width}"


def _dots_of_bytes(feature: str, lanes: int) -> tuple[DotProduct, ...]:
    sums = ("int32", 4, feature, lanes)
    return (
        DotProduct("uint8", "int8", *sums),
        DotProduct("int8", "uint8", *sums),
        DotProduct("int8", "int8", *sums, spare_registers=3, corrections=1),
        DotProduct("uint8", "uint8", *sums, spare_registers=3, corrections=2),
    )


DOT_PRODUCTS = (
    *_dots_of_bytes("avx512vnni", 16),
    *_dots_of_bytes("avxvnni", 8),
    *(
        DotProduct("int16", "int16", "int32", 2, feature, lanes, spare_registers=1)
        for feature, lanes in (("avx512bw", 16), ("avx2", 8), ("sse2", 4))
    ),
    DotProduct("bfloat16", "bfloat16", "float32", 2, "avx512bf16", 16),
)
"""The widest first."""


def find_dot_product(left: str, right: str, sums: str, hardware: Hardware) -> DotProduct | None:
    """The widest one for these dtypes that a CPU has; None where there is none."""
    for dot in DOT_PRODUCTS:
        fits = dot.feature in hardware.dot_products and 4 * dot.lanes <= hardware.vector_bytes
        if fits and (dot.left, dot.right, dot.sums) == (left, right, sums):
            return dot
    return None


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
    lanes = int(sums.ty.dtype.lanes)
    left, right = (tirx.reinterpret(f"int8x{4 * lanes}", value) for value in (unsigned, signed))
    return tirx.call_llvm_pure_intrin(f"int32x{lanes}", f"llvm.x86.avx512.vpdpbusd.{32 * lanes}", sums, left, right)


def _pairs_dot(sums: Any, a: Any, b: Any) -> Any:
    """sums + a * b, pairs of 16-bit integers in vectors of 32-bit ones. Only -32768 twice in both overflows."""
    lanes = int(sums.ty.dtype.lanes)
    name = {4: "sse2.pmadd.wd", 8: "avx2.pmadd.wd", 16: "avx512.pmaddw.d.512"}[lanes]
    left, right = (tirx.reinterpret(f"int16x{2 * lanes}", value) for value in (a, b))
    return sums + tirx.call_llvm_pure_intrin(f"int32x{lanes}", f"llvm.x86.{name}", left, right)


def _four(byte: int) -> Any:
    """A group of one byte, as a 32-bit integer."""
    return tirx.const(int.from_bytes(bytes([byte] * 4), "little", signed=True), "int32")


def _sum_of_integers(dot: DotProduct, a: Any, b: Any, c: Any) -> Any:
    """The sums `c` plus the products of a group `a` (32 bits) and as many groups `b` (32 bits each) as there are sums.

    The byte instruction multiplies unsigned by signed. With b the signed of two signed operands, b + 128 is unsigned
    (its highest bit flipped), and 128 times the sum of a is taken away; with two unsigned ones it is added to b - 128.
    The compiler computes that once for a row of a tile. To flip b is cheaper than to flip a, which is spread from
    memory; and LLVM 22 never ends on a spread group that is flipped.
    """

    def spread(group: Any) -> Any:
        return tirx.Broadcast(group, dot.lanes)

    zero, a = spread(tirx.const(0, "int32")), spread(a)
    if dot.left == "int16":
        return _pairs_dot(c, a, b)
    flipped = b ^ spread(_four(128))
    match dot.left, dot.right:
        case "uint8", "int8":
            return _bytes_dot(c, a, b)
        case "int8", "uint8":
            return _bytes_dot(c, b, a)
        case "int8", "int8":
            return _bytes_dot(c, flipped, a) - _bytes_dot(zero, spread(_four(128)), a)
    half = _bytes_dot(zero, a, spread(_four(64)))
    return _bytes_dot(c, a, flipped) + _bytes_dot(half, a, spread(_four(64)))


def _function(dot: DotProduct, write: Callable[[Any, Any, Any], None]) -> Any:
    """A function of a group, a vector of groups and one of sums that does what `write` writes.

    TVMScript's parser would take 50 ms.
    """
    lanes, depth = dot.lanes, dot.depth
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
    lanes = dot.lanes

    def description(a: Any, b: Any, c: Any) -> None:
        with T.grid(lanes, dot.depth) as (i, k), T.sblock("update"):
            vi, vk = T.axis.spatial(lanes, i), T.axis.reduce(dot.depth, k)
            T.buffer_store(c, c[vi] + T.Cast(dot.sums, a[vk]) * T.Cast(dot.sums, b[vi, vk]), [vi])

    def implementation(a: Any, b: Any, c: Any) -> None:
        sums = c.vload([0], f"{dot.sums}x{lanes}")
        places = tirx.Ramp(tirx.const(0, "int32"), tirx.const(1, "int32"), lanes)
        group = tirx.reinterpret("int32", a.vload([0], f"{dot.left}x{dot.depth}"))
        groups = tirx.reinterpret(f"int32x{lanes}", b.vload([0, 0], f"{dot.right}x{lanes * dot.depth}"))
        if dot.sums == "int32":
            T.buffer_store(c, _sum_of_integers(dot, group, groups, sums), [places])
            return
        operands = sums, tirx.Broadcast(group, lanes), groups, a.data, b.data
        # Here and not on a loop around: TVM drops loops of one iteration, with what is annotated.
        with T.attr(tirx.const(0, "int32"), "pragma_import_llvm", BFLOAT16_LLVM):
            T.buffer_store(c, tirx.call_pure_extern(f"float32x{lanes}", BFLOAT16_FUNCTION, *operands), [places])

    TensorIntrin.register(dot.name, _function(dot, description), _function(dot, implementation), override=True)


for _dot in DOT_PRODUCTS:
    _register(_dot)
