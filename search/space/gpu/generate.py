"""From a kernel to its search space on a GPU."""

from __future__ import annotations

from typing import Any

from tvm.error import InternalError
from tvm.s_tir import ScheduleError

from ..analysis import analyze
from ..applicable import best_apply
from ..base import Sketch, Space
from ..memory_bound import kept_stages
from ..memory_bound.inlining import inlined_kernel
from ..memory_bound.kernel import read_kernel
from ..memory_bound.stages import UntouchedSketch
from ..schedule import schedule_of
from .elementwise import ElementwiseGpuSketch, StagesGpuSketch
from .hardware import GpuHardware
from .matrix import MatrixForm, matrix_form
from .memory_bound import MemoryBoundGpuSketch
from .reduction import ReductionGpuSketch
from .rows import RowsGpuSketch
from .tensor_core import supports
from .tensor_sketch import TensorCoreSketch, tensor_dtype
from .tf32 import permitted_products
from .tiled_sketch import MatrixSketch
from .transpose import TransposeGpuSketch
from .warpgroup import supports_warpgroups
from .warpgroup_sketch import WarpgroupSketch

__all__ = ["build_gpu_space"]

_FAMILIES: tuple[type[MemoryBoundGpuSketch], ...] = (
    ElementwiseGpuSketch,
    TransposeGpuSketch,
    RowsGpuSketch,
    ReductionGpuSketch,
)
_REFUSALS = (ScheduleError, ValueError, InternalError)
"""The last where a kernel mixes 32-bit and 64-bit indices."""


def build_gpu_space(mod: Any, hardware: GpuHardware) -> Space:
    """The sketches that fit `mod["main"]`, each of which was applied at a few of its points.

    Raises
    ------
    ValueError
        When a shape is symbolic.
    """
    try:
        whole = read_kernel(schedule_of(mod))
    except ScheduleError:  # no blocks: a hand-written or library routine (sort, cumsum)
        return Space([UntouchedSketch(mod)])
    sketches: list[Sketch] = []
    form = _matrix_form(mod)
    if form is not None:
        if supports(form, permitted_products(mod["main"])) and hardware.tensor_peak(tensor_dtype(form)):
            sketches.append(TensorCoreSketch(mod, form, hardware))
        if hardware.has_warpgroups and supports_warpgroups(form) and hardware.tensor_peak(tensor_dtype(form)):
            sketches.append(WarpgroupSketch(mod, form, hardware))
        sketches.append(MatrixSketch(mod, form, hardware))
    for number, keep in enumerate(kept_stages(whole)):
        kernel = inlined_kernel(mod, keep)
        suffix = f"-{number}" if number else ""
        fitting = [family for family in _FAMILIES if family.fits(kernel)] or [StagesGpuSketch]
        sketches += [family(mod, keep, kernel, hardware, suffix) for family in fitting]
    found = [sketch for sketch in sketches if best_apply(sketch, tried=3, refusals=_REFUSALS)]
    if not found and StagesGpuSketch.fits(whole):
        found = [StagesGpuSketch(mod, frozenset(), inlined_kernel(mod, frozenset()), hardware)]
    return Space(found or [UntouchedSketch(mod)])


def _matrix_form(mod: Any) -> MatrixForm | None:
    try:
        return matrix_form(analyze(mod))
    except ValueError:  # a block that the analysis does not read, such as one that stores two values
        return None
