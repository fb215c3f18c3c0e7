"""Sketches for contractions: matrix products and convolutions."""

from __future__ import annotations

from typing import Any

from ..analysis import Kernel
from ..base import Sketch
from ..hardware import Hardware
from .dot_sketch import DotContraction, dot_sketches
from .planning import make_plans, spread_plan
from .sketch import TiledContraction, spans_groups
from .split_sum import SplitContraction, split_sketches

__all__ = ["DotContraction", "SplitContraction", "TiledContraction", "contraction_sketches"]


def contraction_sketches(mod: Any, kernel: Kernel, hardware: Hardware) -> list[Sketch]:
    """Every sketch that fits; none when the kernel is no contraction or its surroundings are not element-wise."""
    dots = dot_sketches(mod, kernel, hardware)
    if dots:
        return dots
    plans = make_plans(kernel)
    spanning = [plan for plan in map(spread_plan, plans) if plan is not None and spans_groups(plan, hardware)]
    whole: list[Sketch] = [TiledContraction(mod, plan, hardware) for plan in spanning or plans]
    return [*whole, *split_sketches(mod, kernel, hardware)] if whole else []
