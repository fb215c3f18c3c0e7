"""Scores of attention in which no place sees those after it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from tvm import relax, tirx
from tvm.relax import op

from ..dtypes import numpy_dtype
from ..relax_ir.constants import constant_of

__all__ = ["without_later_places"]


def without_later_places(emit: Callable[[Any], Any], scores: Any, first: Any = 0) -> Any:
    """Scores, of [..., rows, places], with minus infinity where a place is later than its row.

    Parameters
    ----------
    emit : callable
        Of a block builder.
    scores : relax.Expr
    first : int or tvm.ir.Expr
        The place of the first row.
    """
    rows, places = list(scores.ty.shape)[-2:]
    dtype = str(scores.ty.dtype)
    if all(isinstance(extent, int | tirx.IntImm) for extent in (rows, places, first)):
        blocked = np.triu(np.full((int(rows), int(places)), -math.inf), 1 + int(first))
        return emit(op.add(scores, constant_of(blocked.astype(numpy_dtype(dtype)))))
    row = emit(op.expand_dims(emit(op.arange(first, rows + first, 1, "int64")), 1))
    place = emit(op.expand_dims(emit(op.arange(0, places, 1, "int64")), 0))
    return emit(op.where(emit(op.less_equal(place, row)), scores, relax.const(-math.inf, dtype)))
