"""Sketches for NVIDIA GPUs. Constraints hold before anything is lowered: what is legal can be launched."""

from __future__ import annotations

from .hardware import GpuHardware

__all__ = ["GpuHardware"]
