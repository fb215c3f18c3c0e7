"""Kernels whose sizes are known only when they run: loops over tiles of known sizes, each with its schedule."""

from .kernel import is_symbolic, with_sizes
from .known import known_tasks
from .schedules import UsedTile, sharing
from .tiled import TILED, TiledKernels, tile_symbolic_kernels, tiled_kernels
from .winograd_choice import WINOGRAD, permit_winograd, winograd_gain, winograd_weight_bytes

__all__ = [
    "TILED",
    "WINOGRAD",
    "TiledKernels",
    "UsedTile",
    "is_symbolic",
    "known_tasks",
    "permit_winograd",
    "sharing",
    "tile_symbolic_kernels",
    "tiled_kernels",
    "winograd_gain",
    "winograd_weight_bytes",
    "with_sizes",
]
