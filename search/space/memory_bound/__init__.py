"""Sketches for kernels that are not contractions: element-wise, reductions, pooling, normalisation, data movement.

`elementwise` and `transpose` move data, `rows` reduces along memory (softmax, norms), `shared_rows` where rows are few,
`columns` across it (pooling), `windows` pools with stride one, `masked_windows` and `rolling_windows` take pooling and
depthwise convolutions with channels first, `resample` resizes images with channels first, `stages` takes whatever is
left.
Transcendental functions vectorise only in the form that `vector_math` gives them.
"""

from __future__ import annotations

from typing import Any

from tvm.s_tir import ScheduleError

from ..applicable import best_apply
from ..base import Sketch
from ..hardware import MASKED_BYTES, Hardware
from ..schedule import schedule_of
from .columns import ColumnsSketch
from .elementwise import ElementwiseSketch
from .inlining import inlined, inlined_kernel
from .kernel import Kernel, Stage, read_kernel
from .masked_lanes import guards_only_loads
from .masked_windows import MaskedWindowsSketch
from .resample import ResampleSketch
from .rolling_windows import RollingWindowsSketch
from .rows import RowsSketch
from .shared_rows import SharedRowsSketch
from .sketch import MemoryBoundSketch
from .stages import StagesSketch, UntouchedSketch
from .transpose import TransposeSketch
from .vector_math import vectorizable_math
from .windows import WindowsSketch

__all__ = ["kept_stages", "masked_window_sketches", "memory_bound_sketches", "vectorizable_math"]

_FAMILIES: tuple[type[MemoryBoundSketch], ...] = (
    ElementwiseSketch,
    ResampleSketch,
    TransposeSketch,
    RowsSketch,
    SharedRowsSketch,
    ColumnsSketch,
    WindowsSketch,
)
_EXPENSIVE = 8  # vector instructions of an element; below, recomputing is cheaper than storing


def memory_bound_sketches(mod: Any, hardware: Hardware) -> list[Sketch]:
    """The sketches that fit `mod["main"]`; at worst one without knobs that leaves the program as it is.

    Parameters
    ----------
    mod : tvm.ir.IRModule
        One function, "main". Its `exp`, `tanh` and the like vectorise only after `vectorizable_math`.
    hardware : Hardware

    Returns
    -------
    list of Sketch, each of which was applied at its best and its worst point.

    Raises
    ------
    ValueError
        When a shape is symbolic.
    """
    try:
        whole = read_kernel(schedule_of(mod))
    except ScheduleError:  # no blocks: a hand-written or library routine (sort, cumsum)
        return [UntouchedSketch(mod)]
    found: list[MemoryBoundSketch] = []
    fallbacks: list[MemoryBoundSketch] = []
    for number, keep in enumerate(kept_stages(whole)):
        kernel = inlined_kernel(mod, keep)
        suffix = f"-{number}" if number else ""
        for family in _FAMILIES:
            if family.fits(kernel):
                found.append(family(mod, keep, kernel, hardware, suffix))
        if StagesSketch.fits(kernel) and (not found or any(stage.is_reduction for stage in kernel.stages)):
            fallbacks.append(StagesSketch(mod, keep, kernel, hardware, suffix))
    found += masked_window_sketches(mod, hardware)
    return [sketch for sketch in found + fallbacks if best_apply(sketch)] or [UntouchedSketch(mod)]


def masked_window_sketches(mod: Any, hardware: Hardware, outputs: int = 1) -> list[MaskedWindowsSketch]:
    """The sketch of pooling and depthwise convolutions with channels first, if `mod["main"]` is one.

    Of grouped convolutions as well, whose groups have several `outputs`.
    """
    if hardware.vector_bytes < MASKED_BYTES:
        return []
    kernel = inlined_kernel(mod, frozenset())
    if not MaskedWindowsSketch.fits(kernel, outputs) or not guards_only_loads(inlined(mod, ()).mod["main"]):
        return []
    found = [MaskedWindowsSketch(mod, frozenset(), kernel, hardware, outputs=outputs)]
    if RollingWindowsSketch.fits(kernel, outputs):
        found.append(RollingWindowsSketch(mod, frozenset(), kernel, hardware))
    return [sketch for sketch in found if best_apply(sketch)]


def kept_stages(kernel: Kernel) -> list[frozenset[str]]:
    """Sets of element-wise stages that could keep a buffer: none; those read twice; those and padding."""
    inner = [stage for stage in kernel.stages if not stage.is_reduction and stage.name not in kernel.outputs]

    def uses(name: str) -> int:
        return sum(access.buffer == name for stage in kernel.stages for access in stage.reads)

    def cost(stage: Stage) -> float:
        return stage.operations + (stage.calls + stage.forms) * _EXPENSIVE

    twice = frozenset(stage.name for stage in inner if cost(stage) >= _EXPENSIVE and uses(stage.writes[0].buffer) > 1)
    padding = frozenset(stage.name for stage in inner if stage.guards)
    return list(dict.fromkeys([frozenset(), twice, twice | padding]))
