"""Kernels whose sizes are known only when they run: loops over tiles of known sizes, each with its schedule."""

from .kernel import is_symbolic, with_sizes
from .schedules import UsedTile, sharing
from .tiled import READY, TiledKernels, tile_symbolic_kernels, tiled_kernels

__all__ = [
    "READY",
    "TiledKernels",
    "UsedTile",
    "is_symbolic",
    "sharing",
    "tile_symbolic_kernels",
    "tiled_kernels",
    "with_sizes",
]
