"""Elements that are gathered or scattered by an index that is the same along whole rows: rows by that index."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from tvm import ir, relax
from tvm.relax import op
from tvm.relax.expr_functor import PyExprMutator, mutator

from ..relax_ir.constants import array_of, constant_of, is_static_tensor
from ..relax_ir.functions import map_functions, operator
from ..relax_ir.tensors import extents
from ..repairs.bounded_indices import from_start

__all__ = ["with_whole_rows"]

_SCATTERS = frozenset({"update", "add", "mul", "min", "max"})


def with_whole_rows(mod: ir.IRModule) -> ir.IRModule:
    """Gather and scatter whole rows as such, where each element of a row has the same index.

    gather_elements(x, broadcast_to(i[:, None], (n, 64))) -> take(x, i, axis=0), and scatter_elements likewise ->
    scatter_nd: graph networks spell it so, in PyTorch and ONNX.
    """
    return map_functions(mod, lambda function: relax.analysis.remove_all_unused(_WholeRows().visit_expr(function)))


@mutator
class _WholeRows(PyExprMutator):
    def visit_call_(self, call: relax.Call) -> relax.Expr:
        call = self.visit_expr_post_order(call)
        name = operator(call)
        if name not in ("relax.gather_elements", "relax.scatter_elements") or not _are_static(call):
            return call
        x, index = call.args[:2]
        shape, rank = extents(x.ty), x.ty.ndim
        axis = int(call.attrs.axis) % rank
        rows = self._rows(index, shape, axis)
        if rows is None:
            return call
        if name == "relax.gather_elements":
            return self.builder_.normalize(op.take(x, from_start(self.builder_.emit, rows, shape[axis]), axis=axis))
        if call.attrs.reduction not in _SCATTERS:
            return call
        order = [axis, *(a for a in range(rank) if a != axis)]
        moved, updates = (self.builder_.emit(op.permute_dims(value, order)) for value in (x, call.args[2]))
        places = self.builder_.emit(op.expand_dims(rows, -1))
        written = self.builder_.emit(op.scatter_nd(moved, places, updates, call.attrs.reduction))
        return self.builder_.normalize(op.permute_dims(written, [order.index(a) for a in range(rank)]))

    def _rows(self, index: relax.Expr, shape: list[int], axis: int) -> relax.Expr | None:
        """What is repeated along all other axes, which are whole."""
        count = extents(index.ty)[axis]
        if [n for a, n in enumerate(extents(index.ty)) if a != axis] != [n for a, n in enumerate(shape) if a != axis]:
            return None
        base = self._repeated(index, axis)
        if base is None or math.prod(extents(base.ty)) != count:
            return None
        return self.builder_.emit(op.astype(self.builder_.emit(op.reshape(base, [count])), "int64"))

    def _repeated(self, index: relax.Expr, axis: int) -> relax.Expr | None:
        """What `index` repeats along other axes than this one."""
        if isinstance(index, ir.GenericConst):
            lines = np.moveaxis(array_of(index), axis, -1).reshape(-1, extents(index.ty)[axis])
            return constant_of(lines[0].copy()) if len(lines) and (lines == lines[0]).all() else None
        value: Any = self.lookup_binding(index) if isinstance(index, relax.Var) else None
        if operator(value) != "relax.broadcast_to" or not is_static_tensor(value.args[0].ty):
            return None
        base = value.args[0]
        along = axis - index.ty.ndim + base.ty.ndim
        return base if along >= 0 and extents(base.ty)[along] == math.prod(extents(base.ty)) else None


def _are_static(call: relax.Call) -> bool:
    return all(is_static_tensor(argument.ty) for argument in call.args)
