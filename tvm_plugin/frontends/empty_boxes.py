"""Boxes without a width or a height, of which TVM samples a point all the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm import relax
from tvm.relax import op

from ..relax_ir.tensors import shape_of

__all__ = ["zeros_of_empty_boxes"]


def zeros_of_empty_boxes(emit: Callable[[Any], Any], pooled: relax.Expr, boxes: relax.Expr) -> relax.Expr:
    """What was pooled of each box, [n, channels, height, width]; zeros where its last corner is not behind its first.

    Boxes are [n, 4], or [n, 5] with the number of the image first.
    """
    count, columns = shape_of(boxes)
    first, last = (emit(op.strided_slice(boxes, [1], [begin], [begin + 2])) for begin in (columns - 4, columns - 2))
    side = emit(op.min(emit(op.subtract(last, first)), axis=1))
    has_area = emit(op.greater(emit(op.reshape(side, [count, 1, 1, 1])), relax.const(0, str(boxes.ty.dtype))))
    return op.where(has_area, pooled, relax.const(0, str(pooled.ty.dtype)))
