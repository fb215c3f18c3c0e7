"""Products by tile registers (AMX): 8-bit integers, bfloat16, and float32 in halves where that is permitted."""

from __future__ import annotations

from .sketch import TileContraction, permit_halves, tile_sketches

__all__ = ["TileContraction", "permit_halves", "tile_sketches"]
