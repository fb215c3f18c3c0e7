"""Detection: regions of interest, and suppression of boxes that overlap."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from tvm.relax import op

from ..builder import Builder
from .operator import Operator, row

__all__ = ["DETECTION"]


def _roi_align(b: Builder, args: Sequence[Any], attrs: SimpleNamespace) -> Any:
    return op.vision.roi_align(
        args[0],
        args[1],
        pooled_size=[int(extent) for extent in attrs.pooled_size],
        spatial_scale=attrs.spatial_scale,
        sample_ratio=attrs.sample_ratio,
        layout=attrs.layout,
        mode=attrs.mode,
    )


def _roi_pool(b: Builder, args: Sequence[Any], attrs: SimpleNamespace) -> Any:
    return op.vision.roi_pool(
        args[0],
        args[1],
        pooled_size=[int(extent) for extent in attrs.pooled_size],
        spatial_scale=attrs.spatial_scale,
        layout=attrs.layout,
    )


def _number(b: Builder, value: Any, what: str) -> float:
    """A threshold, which Relay has as an argument and Relax as an attribute."""
    known = b.known(value)
    if known is None or known.size != 1:
        raise ValueError(f"{what} is computed when the program runs; only a constant can be converted")
    return float(known.reshape(()))


def _non_max_suppression(b: Builder, args: Sequence[Any], attrs: SimpleNamespace) -> Any:
    """Arguments: boxes, how many are valid, their indices, the most to keep, the overlap that suppresses."""
    return op.vision.non_max_suppression(
        *args[:3],
        max_output_size=int(_number(b, args[3], "max_output_size")),
        iou_threshold=_number(b, args[4], "iou_threshold"),
        force_suppress=attrs.force_suppress,
        top_k=attrs.top_k,
        coord_start=attrs.coord_start,
        score_index=attrs.score_index,
        id_index=attrs.id_index,
        return_indices=attrs.return_indices,
        invalid_to_bottom=attrs.invalid_to_bottom,
    )


def _get_valid_counts(b: Builder, args: Sequence[Any], attrs: SimpleNamespace) -> Any:
    """The threshold is an argument since 0.8, and was an attribute."""
    threshold = _number(b, args[1], "score_threshold") if len(args) > 1 else float(attrs.score_threshold or 0)
    return op.vision.get_valid_counts(
        args[0], score_threshold=threshold, id_index=attrs.id_index, score_index=attrs.score_index
    )


DETECTION: list[Operator] = [
    row("vision.roi_align", 2, "ROIAlignAttrs", _roi_align),
    row("vision.roi_pool", 2, "ROIPoolAttrs", _roi_pool),
    row("vision.non_max_suppression", 5, "NonMaximumSuppressionAttrs", _non_max_suppression),
    row("vision.get_valid_counts", (1, 2), "GetValidCountsAttrs", _get_valid_counts),
]
