"""From a kernel to its search space."""

from __future__ import annotations

from typing import Any

from tvm import tirx
from tvm.s_tir import SBlock

from .access import Block
from .amx import tile_sketches
from .analysis import Kernel, analyze
from .attention import attention_sketches
from .base import Sketch, Space
from .contraction import contraction_sketches
from .expressions import nodes_of
from .gpu.generate import build_gpu_space
from .gpu.hardware import GpuHardware
from .hardware import Hardware, usable_by
from .memory_bound import masked_window_sketches, memory_bound_sketches
from .memory_bound.stages import UntouchedSketch
from .narrow_weights import narrow_weights_sketches
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
        What the constraints and the analytic estimates read; a `GpuHardware` gives sketches for that GPU. Of its
        threads, a kernel with the attribute `ONE_THREAD` uses one.

    Raises
    ------
    ValueError
        When a shape is symbolic.
    """
    if _is_empty(mod["main"]):  # no tile is small enough
        return Space([UntouchedSketch(mod)])
    hardware = usable_by(mod, hardware)
    if isinstance(hardware, GpuHardware):
        return build_gpu_space(mod, hardware)
    special = (
        winograd_sketches(mod, hardware)
        or winograd_conv2d_sketches(mod, hardware)
        or attention_sketches(mod, hardware)
        or narrow_weights_sketches(mod, hardware)
    )
    if special:
        return Space(special)
    try:
        kernel = analyze(mod)
    except ValueError:  # not read by the analysis, such as a block with two stores; the fallback takes any kernel
        return Space(memory_bound_sketches(mod, hardware))
    sketches: list[Sketch] = [*tile_sketches(mod, kernel, hardware), *contraction_sketches(mod, kernel, hardware)]
    outputs = _outputs_of_group(kernel)
    if sketches and (outputs > 1 or any(map(_slides_alone, kernel.blocks))):
        sketches += masked_window_sketches(mod, hardware, outputs)
    return Space(sketches or memory_bound_sketches(mod, hardware))


def _is_empty(function: Any) -> bool:
    """Whether some statement of the kernel has no iterations: it writes an empty tensor, or sums nothing."""
    extents = [axis.dom.extent for block in nodes_of(function.body, SBlock) for axis in block.iter_vars]
    return any(isinstance(extent, tirx.IntImm) and int(extent) == 0 for extent in extents)


def _outputs_of_group(kernel: Kernel) -> int:
    """Output channels of one group of a grouped convolution; 1 for everything else."""
    contraction = kernel.contraction
    if contraction is None or contraction.groups == 1:
        return 1
    return contraction.columns[0].extent // contraction.groups


def _slides_alone(block: Block) -> bool:
    """Whether the block sums over nothing but a window of two axes: only such are read once more for masked windows."""
    reduced = [axis.extent for axis in block.axes if axis.reduction]
    return len(reduced) > 1 and all(extent == 1 for extent in reduced[:-2])
