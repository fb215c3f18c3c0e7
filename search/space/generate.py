"""From a kernel to its search space."""

from __future__ import annotations

from typing import Any

from .analysis import analyze
from .attention import attention_sketches
from .base import Space
from .contraction import contraction_sketches
from .gpu.generate import build_gpu_space
from .gpu.hardware import GpuHardware
from .hardware import Hardware
from .memory_bound import masked_window_sketches, memory_bound_sketches
from .winograd import winograd_sketches
from .winograd_conv2d import winograd_conv2d_sketches

__all__ = ["build_space"]


def build_space(mod: Any, hardware: Hardware) -> Space:
    """The sketches that fit the function `mod["main"]` on a machine.

    Parameters
    ----------
    mod : tvm.ir.IRModule
        One fused function named "main".
    hardware : Hardware
        What the constraints and the analytic estimates read; a `GpuHardware` gives sketches for that GPU.

    Raises
    ------
    ValueError
        When a shape is symbolic.
    """
    if isinstance(hardware, GpuHardware):
        return build_gpu_space(mod, hardware)
    special = (
        winograd_sketches(mod, hardware) or winograd_conv2d_sketches(mod, hardware) or attention_sketches(mod, hardware)
    )
    if special:
        return Space(special)
    try:
        kernel = analyze(mod)
    except (
        ValueError
    ):  # not read by the analysis, such as a block that stores two values; the fallback takes any kernel
        return Space(memory_bound_sketches(mod, hardware))
    sketches = contraction_sketches(mod, kernel, hardware)
    if sketches:
        return Space([*sketches, *masked_window_sketches(mod, hardware)])
    return Space(memory_bound_sketches(mod, hardware))
