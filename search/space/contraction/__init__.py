"""Sketches for contractions: matrix products and convolutions."""

from __future__ import annotations

from typing import Any

from ..analysis import Kernel
from ..base import Sketch
from ..hardware import Hardware

__all__ = ["contraction_sketches"]


def contraction_sketches(mod: Any, kernel: Kernel, hardware: Hardware) -> list[Sketch]:
    """Every sketch that fits the kernel; empty when it is not a contraction."""
    return []
