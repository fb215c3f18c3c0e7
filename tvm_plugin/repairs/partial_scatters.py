"""Elements that are scattered into a part of a tensor: TVM finds their places by the extents of the indices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from tvm import ir, relax
from tvm.relax import op
from tvm.relax.expr_functor import PyExprMutator, mutator

from ..errors import UnsupportedModelError
from ..relax_ir.constants import constant_of, is_static_tensor
from ..relax_ir.functions import map_functions, operator
from ..relax_ir.tensors import as_dtype, extents
from .bounded_indices import from_start

__all__ = ["scatter_elements", "with_partial_scatters"]

_REDUCTIONS = ("update", "add", "mul", "min", "max")


def scatter_elements(
    emit: Any, x: relax.Expr, indices: relax.Expr, updates: relax.Expr, axis: int, reduction: str
) -> relax.Expr:
    """`op.scatter_elements`, or `scatter_nd` at all coordinates where TVM would count wrongly.

    Parameters
    ----------
    emit : callable
        Of a block builder.
    x, indices, updates : relax.Expr
        Of known shapes; `indices` and `updates` have one shape, no axis longer than that of `x` but for `axis`.
    axis : int
    reduction : str

    Raises
    ------
    UnsupportedModelError
        `scatter_nd` would be needed, and does not know the reduction.
    """
    shape, part = extents(x.ty), extents(indices.ty)
    axis %= len(shape)
    if _is_counted_right(shape, part, axis):
        return op.scatter_elements(x, indices, updates, axis, reduction)
    if reduction not in _REDUCTIONS:
        known = ", ".join(_REDUCTIONS)
        raise UnsupportedModelError(f"elements are scattered into a part of {shape} by {reduction}; known are {known}")
    wide = as_dtype(emit, indices, "int64")
    places: list[Any] = [constant_of(grid) for grid in np.indices(part)]
    places[axis] = from_start(emit, wide, shape[axis])
    return op.scatter_nd(x, emit(op.stack(places, -1)), updates, reduction)


def _is_counted_right(shape: Sequence[int], part: Sequence[int], axis: int) -> bool:
    """Before and behind the axis, all but the first of the axes must be whole."""
    sides = (slice(1, axis), slice(axis + 2, None))
    return all(list(shape[side]) == list(part[side]) for side in sides)


def with_partial_scatters(mod: ir.IRModule) -> ir.IRModule:
    """Write each `scatter_elements` of known shapes as the function of that name does."""
    return map_functions(mod, lambda function: _PartialScatters().visit_expr(function))


@mutator
class _PartialScatters(PyExprMutator):
    def visit_call_(self, call: relax.Call) -> relax.Expr:
        call = self.visit_expr_post_order(call)
        if operator(call) != "relax.scatter_elements" or not all(is_static_tensor(part.ty) for part in call.args):
            return call
        (x, indices, updates), axis = call.args, int(call.attrs.axis) % call.ty.ndim
        if _is_counted_right(extents(x.ty), extents(indices.ty), axis):
            return call
        written = scatter_elements(self.builder_.emit, x, indices, updates, axis, str(call.attrs.reduction))
        return self.builder_.normalize(written)
