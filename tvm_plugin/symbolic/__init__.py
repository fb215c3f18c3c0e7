"""Kernels whose sizes are known only when they run: loops over tiles of known sizes, each with its schedule."""

from .kernel import is_symbolic, with_sizes
from .tiled import READY, tile_symbolic_kernels

__all__ = ["READY", "is_symbolic", "tile_symbolic_kernels", "with_sizes"]
