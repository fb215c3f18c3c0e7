"""Kernels that fast math permits to compute less exactly, where the machine is faster at it."""

from __future__ import annotations

from typing import Any

from ..search.space.amx import permit_halves
from ..search.space.gpu.hardware import GpuHardware
from ..search.space.gpu.tf32 import permit_tf32
from ..search.space.hardware import Hardware

__all__ = ["lossy_products", "permit_lossy_products"]


def lossy_products(hardware: Hardware) -> str:
    """What products of float32 may be made of, for people."""
    return "tfloat32" if isinstance(hardware, GpuHardware) else "bfloat16 halves"


def permit_lossy_products(mod: Any, hardware: Hardware) -> Any:
    """The module with a permission for each kernel whose products of float32 may be three of smaller numbers each.

    Those are products of tfloat32 on tensor cores, or of bfloat16 on matrix tiles; the same module where the machine
    has neither.
    """
    return permit_tf32(mod) if isinstance(hardware, GpuHardware) else permit_halves(mod, hardware)
