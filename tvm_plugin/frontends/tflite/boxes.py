"""Boxes that TFLite selects: those of the highest scores that no other one of them overlaps by too much."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from tvm import relax
from tvm.relax import op

from ...relax_ir.tensors import extents

__all__ = ["selected_boxes"]

_NO_DECAY = 1e30
"""Of so wide a Gaussian, factors are 1."""


def selected_boxes(
    emit: Callable[[Any], Any],
    given: tuple[relax.Expr, relax.Expr],
    most: int,
    overlap: float,
    threshold: float,
    sigma: float,
) -> tuple[relax.Expr, relax.Expr, relax.Expr]:
    """Places and scores of at most so many boxes, [most] each, and their number. Behind them are zeros.

    All boxes, [boxes, 4], and their scores, [boxes], are `given`.

    TVM's operator leaves out scores that are not positive, whatever the threshold, unless scores of boxes that overlap
    fall (`sigma`).
    """
    boxes, scores = given
    data = emit(op.expand_dims(emit(op.concat([emit(op.expand_dims(scores, -1)), boxes], -1)), 0))
    threshold = max(threshold, float(np.finfo("float32").min))
    valid = emit(op.vision.get_valid_counts(data, score_threshold=threshold, id_index=-1, score_index=0))
    count, data, places = (emit(relax.TupleGetItem(valid, n)) for n in range(3))
    found = emit(
        op.vision.non_max_suppression(
            data,
            count,
            places,
            max_output_size=most,
            iou_threshold=overlap,
            force_suppress=True,
            coord_start=1,
            score_index=0,
            id_index=-1,
            return_indices=True,
            soft_nms_sigma=sigma or _NO_DECAY,
            score_threshold=threshold,
        )
    )
    data, places, count = (emit(relax.TupleGetItem(found, n)) for n in range(3))
    number = emit(op.minimum(emit(op.reshape(count, [])), relax.const(most, "int32")))  # of 0, TVM selects all
    is_selected = emit(op.less(relax.const(np.arange(most, dtype="int32")), number))

    def selected(values: relax.Expr) -> relax.Expr:
        """[most] of [1, boxes]"""
        given = extents(values.ty)[1]
        row = emit(op.reshape(values, [given]))
        row = emit(op.strided_slice(row, [0], [0], [most]) if given >= most else op.nn.pad(row, [0, most - given]))
        return op.where(is_selected, row, relax.const(0, str(row.ty.dtype)))

    first = emit(op.strided_slice(data, [2], [0], [1]))
    return selected(places), selected(emit(op.squeeze(first, [2]))), number
