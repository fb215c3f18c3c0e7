"""Products of matrix tiles: what AMX multiplies, and when products of float32 may be made of it.

A tile register has up to 16 rows of 64 bytes. One instruction adds the product of two tiles, whose rows are cut into
groups of four bytes, to a tile of 16 x 16 sums of 32 bits (Intel 64 and IA-32 Architectures Optimization Reference
Manual, chapter 20).

A product of float32 becomes three of bfloat16: x = hi + lo, where hi has the first 8 bits of x and lo the next 8, and

    x y  ~  hi(x) hi(y) + hi(x) lo(y) + lo(x) hi(y)

What is left out is off by 2^-16 of the product at most; sums are float32 (Henry, Tang and Heinecke, "Leveraging the
bfloat16 Artificial Intelligence Datatype For Higher-Precision Computations", ARITH 2019). Infinities become NaN, and
so do numbers that round to one. So somebody must permit it, by an attribute of the kernel that is part of its hash.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..hardware import Hardware

__all__ = ["AMX_FEATURES", "PRODUCTS", "SUM_TILES", "TILE_ROWS", "TILE_ROW_BYTES", "TileProduct", "find_tile_product"]

TILE_ROWS, TILE_ROW_BYTES = 16, 64
"""Of a tile register. A row of sums has as many as a whole tile has rows."""

SUM_TILES = 4
"""Of the eight registers, those that hold sums; two hold tiles of each operand."""


@dataclass(frozen=True)
class TileProduct:
    """One kind of product of tiles.

    Attributes
    ----------
    left, right, sums : str
        Dtypes of the kernel.
    instruction : str
        The end of LLVM's name for it.
    feature : str
        What LLVM calls a CPU that has it.
    group : int
        Factors in four bytes of a tile's row.
    halves : bool
        Whether float32 is split in two bfloat16, so that there are three products instead of one.
    """

    left: str
    right: str
    sums: str
    instruction: str
    feature: str
    group: int
    halves: bool = False

    @property
    def depth(self) -> int:
        """Products of one sum in an instruction: the reduction is cut into as many."""
        return TILE_ROWS * self.group

    @property
    def parts(self) -> int:
        """Tiles that stand for one tile of an operand."""
        return 2 if self.halves else 1

    @property
    def products(self) -> int:
        """Instructions for the product of two tiles."""
        return 3 if self.halves else 1


PRODUCTS = (
    TileProduct("uint8", "int8", "int32", "tdpbusd", "amx-int8", 4),
    TileProduct("int8", "uint8", "int32", "tdpbsud", "amx-int8", 4),
    TileProduct("int8", "int8", "int32", "tdpbssd", "amx-int8", 4),
    TileProduct("uint8", "uint8", "int32", "tdpbuud", "amx-int8", 4),
    TileProduct("bfloat16", "bfloat16", "float32", "tdpbf16ps", "amx-bf16", 2),
    TileProduct("float32", "float32", "float32", "tdpbf16ps", "amx-bf16", 2, halves=True),
)

AMX_FEATURES = tuple(dict.fromkeys(product.feature for product in PRODUCTS))


def find_tile_product(left: str, right: str, sums: str, hardware: Hardware, permitted: bool) -> TileProduct | None:
    """The one for these dtypes, where the CPU has it; float32 only where that is `permitted`."""
    for product in PRODUCTS:
        if product.feature in hardware.dot_products and (product.left, product.right, product.sums) == (
            left,
            right,
            sums,
        ):
            return product if permitted or not product.halves else None
    return None
