"""Contractions by dot-product instructions as a sketch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..access import Access
from ..analysis import Kernel
from ..applicable import applies
from ..base import Knob, Sketch
from ..features import FEATURES
from ..hardware import FAR_WEIGHTS, Hardware
from .copies import AHEAD, AT_ROOT, PAD_AT_OUTER, PAD_AT_ROOT
from .dot import DotPlan, dot_plan, schedule_dots
from .dot_intrinsics import find_dot_product
from .planning import make_plans
from .sketch import TiledContraction

__all__ = ["DotContraction", "dot_sketches", "has_strides"]

FAMILY_INDEX = 4.0

MOST_SUMS = 28
"""Of a tile: the left operand's broadcast may be folded into the instruction, a vector of the right one may not."""


def dot_sketches(mod: Any, kernel: Kernel, hardware: Hardware) -> list[Sketch]:
    """The sketch of dot products where the CPU has an instruction for the kernel's dtypes, else none."""
    contraction = kernel.contraction
    if contraction is None:
        return []
    dtypes = contraction.left.access.dtype, contraction.right.access.dtype, contraction.block.write.dtype
    dot = find_dot_product(*dtypes, hardware)
    if dot is None:
        return []
    plans = filter(None, (dot_plan(plan, dot) for plan in make_plans(kernel)))
    sketches = (DotContraction(mod, plan, hardware) for plan in plans)
    return [sketch for sketch in sketches if applies(sketch)]  # an odd kernel is the plain sketch's


class DotContraction(TiledContraction):
    """Register tiles of dot products over one kernel.

    Parameters
    ----------
    mod : tvm.ir.IRModule
        The kernel, as "main".
    plan : DotPlan
    hardware : Hardware
        Bounds the register tile; read by the estimates, which count a group of products as one.
    """

    plan: DotPlan

    def __init__(self, mod: Any, plan: DotPlan, hardware: Hardware) -> None:
        super().__init__(mod, plan, hardware)
        self.name = f"dot_{plan.dot.depth}"

    @property
    def skipped_share(self) -> float:
        """Nothing is left out."""
        return 0.0

    def legal(self, values: NDArray[np.int64]) -> NDArray[np.bool_]:
        """See `TiledContraction.legal`; correcting a sign takes registers, too."""
        v = self._columns(values)
        vectors = v["nr"] / self.plan.dot.lanes
        needed = v["mr"] * vectors + vectors + 1 + self.plan.dot.spare_registers
        ok: NDArray[np.bool_] = super().legal(values) & (needed <= self._hardware.vector_registers)
        return ok

    def features(self, values: NDArray[np.int64]) -> NDArray[np.float32]:
        """See `features.FEATURES`."""
        result = super().features(values)
        result[:, FEATURES.index("family")] = FAMILY_INDEX
        return result

    def apply(self, values: Mapping[str, int]) -> Any:
        """A `tvm.s_tir.Schedule`; raises what TVM raises when a step is impossible."""
        return schedule_dots(self._mod, self.plan, values, self._hardware.threads > 1)

    def _make_knobs(self) -> tuple[Knob, ...]:
        packs = (AHEAD,) if self.plan.panel_is_weight else (AT_ROOT,)
        plan = self.plan
        inside = plan.staged and not plan.copies_left and not has_strides(plan.contraction.left.access)
        pads = (PAD_AT_ROOT, PAD_AT_OUTER) if inside else (PAD_AT_ROOT,)
        fixed = {"m2": (1,), "pack": packs, "pad": pads, FAR_WEIGHTS: (0,)}
        return tuple(replace(knob, values=fixed.get(knob.name, knob.values)) for knob in super()._make_knobs())

    def _vector_tiles(self) -> list[int]:
        """Whole vectors up to eight, no more than the columns fill; many more where there is one row.

        A tile of several rows that is wider than the columns was eight times as slow (24 columns in tiles of 32).
        """
        lanes = self.plan.dot.lanes
        if self.plan.unrolled_extent > 1:
            most, limit = max(1, self.plan.vector_extent // lanes), 8
        else:
            most, limit = -(-self.plan.vector_extent // lanes), MOST_SUMS // 2
        return [lanes * count for count in range(1, min(most, limit) + 1)]


def has_strides(access: Access) -> bool:
    """Whether windows begin more than one place apart.

    TVM makes the loops of an intrinsic's block 32 bits wide and not the block's own axes, and then cannot tell which
    rows of a strided window a copy inside must hold.
    """
    return any(
        index is not None and len(index.coefficients) > 1 and max(index.coefficients.values()) > 1
        for index in access.indices
    )
