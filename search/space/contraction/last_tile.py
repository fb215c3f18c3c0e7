"""What the last tile does where tiles do not divide an extent: it begins early, or is computed whole beyond the end."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .copies import PAD_AT_CHUNK, PAD_AT_OUTER, PAD_AT_ROOT, PAD_INLINE, UNPACKED
from .plan import Plan

__all__ = ["overlapping_columns", "overlapping_rows", "pads_last_columns"]


def overlapping_columns(plan: Plan, values: Mapping[str, Any]) -> Any:
    """Whether the last column tile is ragged and begins early enough to be whole. For numbers and arrays of them.

    Not where a copy of an operand is made of each tile: it has the columns of that tile alone.
    """
    copied = values["pack"] != UNPACKED
    if plan.staged and plan.left_vectorised:
        copied = copied | ((values["pad"] != PAD_AT_ROOT) & (values["pad"] != PAD_INLINE) & (values["order"] == 0))
    ragged = plan.vector_extent % values["nr"] != 0
    whole = plan.groups == 1 or plan.vector not in plan.contraction.columns  # not the columns of a group
    return ragged & (copied ^ True) if plan.overlaps and whole else ragged & False


def overlapping_rows(plan: Plan, values: Mapping[str, Any]) -> Any:
    """The same for rows: where a tile is transposed in registers, or written out, its last one must be whole."""
    copied = (values["pad"] == PAD_AT_CHUNK) & bool(plan.staged)
    if plan.staged and not plan.row_loops:
        copied = copied | (values["pad"] == PAD_AT_OUTER)
    ragged = plan.unrolled_extent % values["mr"] != 0
    wanted = plan.overlaps and (plan.scattered or plan.spread is not None)
    return ragged & (copied ^ True) if wanted else ragged & False


def pads_last_columns(plan: Plan, lanes: int, values: Mapping[str, int]) -> bool:
    """Whether the last column tile is computed whole, though ragged."""
    return values["pack"] != UNPACKED and plan.pads_columns(values["nr"], lanes)
