"""Kernels whose sizes are known only when they run: loops over tiles of known sizes, each with its schedule."""

from .kernel import with_sizes
from .schedules import UsedTile, sharing
from .tiled import TILED, TiledKernels, tile_symbolic_kernels, tiled_kernels
from .typical import TYPICAL_SIZE, typical_size, typical_sizes
from .winograd_choice import WINOGRAD, permit_winograd, winograd_gain, winograd_weight_bytes

__all__ = [
    "TILED",
    "TYPICAL_SIZE",
    "WINOGRAD",
    "TiledKernels",
    "UsedTile",
    "permit_winograd",
    "sharing",
    "tile_symbolic_kernels",
    "tiled_kernels",
    "typical_size",
    "typical_sizes",
    "winograd_gain",
    "winograd_weight_bytes",
    "with_sizes",
]
