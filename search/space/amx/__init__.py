"""Products by tile registers (AMX): 8-bit integers, bfloat16, and float32 in halves where that is permitted."""

from __future__ import annotations

from .products import AMX_FEATURES, PRODUCTS
from .sketch import PARTS, TileContraction, permit_halves, tile_sketches

__all__ = ["AMX_FEATURES", "PARTS", "PRODUCTS", "TileContraction", "permit_halves", "tile_sketches"]
