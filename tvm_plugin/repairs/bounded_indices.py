"""Indices out of bounds mean the nearest element: TVM's operators read or write whatever memory lies there."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import numpy as np
from tvm import ir, relax
from tvm.relax import op
from tvm.relax.expr_functor import PyExprMutator, mutator

from ..dtypes import is_integer
from ..relax_ir.constants import array_of, constant_of, is_static_tensor
from ..relax_ir.functions import map_functions, operator
from ..relax_ir.tensors import extents

__all__ = ["from_start", "with_bounded_indices"]


def with_bounded_indices(mod: ir.IRModule, leave: Collection[str] = ()) -> ir.IRModule:
    """Make operators that gather or scatter safe for any index, and count negative ones from the end of an axis.

    A token that a model does not know ends a PyTorch program; here it could end the process, read secrets, or write
    where it should not. What is in bounds stays what it was: take(x, i, mode="fast") -> take(x, i, mode="clip"), of
    which negative indices are the first element, and the others with min(max(i < 0 ? i + n : i, 0), n - 1) for i, once
    for each i. Constants, and places of extrema, that are in bounds stay as they are, and so do operators to `leave`.
    """
    return map_functions(mod, lambda function: _BoundedIndices(leave).visit_expr(function))


def from_start(emit: Callable[[Any], Any], index: relax.Expr, extent: Any) -> relax.Expr:
    """Indices, some of them perhaps counted from the end of an axis, all counted from its start.

    `extent` is of the axis, or one for each last axis of `index`, or a tensor of it where it is known only when the
    model runs; `emit` is a block builder's.
    """
    if isinstance(index, ir.GenericConst) and bool((array_of(index) >= 0).all()):
        return index
    dtype = str(index.ty.dtype)
    zero = constant_of(np.asarray(0, dtype))
    count = extent if isinstance(extent, relax.Expr) else constant_of(np.asarray(extent, dtype))
    return emit(op.where(emit(op.less(index, zero)), emit(op.add(index, count)), index))


@mutator
class _BoundedIndices(PyExprMutator):
    def __init__(self, leave: Collection[str]) -> None:
        super().__init__()
        self._leave = leave
        self._known: dict[Any, relax.Expr] = {}
        """Of this block: index and counts -> what is in bounds."""

    def visit_binding_block_(self, block: relax.BindingBlock) -> relax.BindingBlock:
        return self._apart(super().visit_binding_block_, block)

    def visit_dataflow_block_(self, block: relax.DataflowBlock) -> relax.DataflowBlock:
        return self._apart(super().visit_dataflow_block_, block)

    def _apart(self, visit: Callable[[Any], Any], block: Any) -> Any:
        """What the branches of an If bind is not known behind them."""
        outer, self._known = self._known, {}
        rewritten = visit(block)
        self._known = outer
        return rewritten

    def visit_call_(self, call: relax.Call) -> relax.Expr:
        call = self.visit_expr_post_order(call)
        name = operator(call)
        if name == "relax.take" and str(call.attrs.mode) == "fast":
            axis = None if call.attrs.axis is None else int(call.attrs.axis)
            return self.builder_.normalize(op.take(*call.args, axis=axis, mode="clip"))
        if name not in _INDEXED_EXTENTS or name in self._leave or not is_static_tensor(call.args[0].ty):
            return call
        separate = name in _SEPARATE
        if not separate and not is_static_tensor(call.args[1].ty):
            return call
        counts = _INDEXED_EXTENTS[name](call, extents(call.args[0].ty))
        bounded = self._bounded_each(call.args[1], counts) if separate else self._bounded(call.args[1], counts)
        if bounded is call.args[1]:
            return call
        arguments = [call.args[0], bounded, *call.args[2:]]
        return self.builder_.normalize(relax.Call(call.op, arguments, call.attrs, call.ty_args))

    def _bounded_each(self, indices: relax.Expr, counts: list[int]) -> relax.Expr:
        """A tuple of indices, one of each axis. Variables that one of another block is made of end with that block."""
        known = self._binding(indices)
        if isinstance(known, relax.Tuple):
            fields = list(known.fields)
        else:
            fields = [relax.TupleGetItem(indices, place) for place in range(len(indices.ty.fields))]
        if isinstance(indices, relax.Var) and not isinstance(indices, relax.DataflowVar):
            local = [isinstance(field, relax.DataflowVar) for field in fields]
            fields = [relax.TupleGetItem(indices, i) if local[i] else field for i, field in enumerate(fields)]
        bounded = [self._bounded(field, [count]) for field, count in zip(fields, counts, strict=False)]
        changed = any(new is not old for new, old in zip(bounded, fields, strict=True))
        return relax.Tuple(bounded) if changed else indices

    def _bounded(self, index: relax.Expr, counts: list[int]) -> relax.Expr:
        """`index`, of which each last axis has one of as many `counts`, or all of it the only one; itself if it is."""
        if not counts or not is_static_tensor(index.ty) or not is_integer(str(index.ty.dtype)):
            return index
        dtype = str(index.ty.dtype)
        if max(counts) > np.iinfo(dtype).max:
            return self._bounded(self.builder_.emit(op.astype(index, "int64")), counts)
        count = np.asarray(counts if len(counts) > 1 else counts[0], dtype)
        if isinstance(index, ir.GenericConst):
            given = array_of(index)
            nearest = np.clip(np.where(given < 0, given + count, given), 0, count - 1).astype(dtype)
            return index if np.array_equal(nearest, given) else constant_of(nearest)
        if self._is_bounded(index, count):
            return index
        key = (index, *counts)
        if key not in self._known:
            emit, bounded = self.builder_.emit, index
            if dtype.startswith("int"):
                bounded = emit(op.maximum(from_start(emit, index, count), constant_of(np.zeros((), dtype))))
            self._known[key] = emit(op.minimum(bounded, constant_of(count - 1)))
        return self._known[key]

    def _is_bounded(self, index: relax.Expr, count: np.ndarray) -> bool:
        """Whether an index is in bounds by what it is made of, `_bounded` among others: modules may pass here twice."""
        if isinstance(index, ir.GenericConst):
            given = array_of(index)
            return bool(((given >= 0) & (given < count)).all())
        value = self._binding(index)
        name = operator(value)
        if name == "relax.minimum" and _is_constant(value.args[1], count - 1):
            below = self._binding(value.args[0])
            return operator(below) == "relax.maximum" and _is_constant(below.args[1], 0)
        if count.ndim:
            return False
        if name in _MOVES:
            return self._is_bounded(value.args[0], count)
        if name == "relax.maximum" and _is_constant(value.args[1], 0):
            return self._is_place(self._binding(value.args[0]), count)
        return False

    def _is_place(self, value: Any, count: np.ndarray) -> bool:
        """Whether a value is the place of an extremum along an axis of no more elements: below zero at worst."""
        if operator(value) not in ("relax.argmax", "relax.argmin") or value.attrs.axis is None:
            return False
        x = value.args[0]
        return is_static_tensor(x.ty) and bool(extents(x.ty)[int(value.attrs.axis)] <= count)

    def _binding(self, value: Any) -> Any:
        return self.lookup_binding(value) if isinstance(value, relax.Var) else value


_MOVES = frozenset(f"relax.{name}" for name in ("broadcast_to", "reshape", "expand_dims", "squeeze", "permute_dims"))
"""Operators whose elements are those of their first argument."""


def _is_constant(value: Any, wanted: Any) -> bool:
    if not isinstance(value, ir.GenericConst):
        return False
    given = array_of(value)
    return given.shape == np.shape(wanted) and bool((given == wanted).all())


def _along(call: relax.Call, shape: list[int]) -> list[int]:
    return [shape[int(call.attrs.axis)]]


def _of_leading_axes(call: relax.Call, shape: list[int]) -> list[int]:
    """Coordinates are the last axis of the indices."""
    return shape[: extents(call.args[1].ty)[-1]]


def _behind_batch(call: relax.Call, shape: list[int]) -> list[int]:
    batch = int(call.attrs.batch_dims)
    return shape[batch : batch + extents(call.args[1].ty)[-1]]


_INDEXED_EXTENTS: dict[str, Callable[[relax.Call, list[int]], list[int]]] = {
    "relax.gather_elements": _along,
    "relax.scatter_elements": _along,
    "relax.gather_nd": _behind_batch,
    "relax.scatter_nd": _of_leading_axes,
    "relax.index_tensor": lambda _, shape: shape,
    "relax.index_put": lambda _, shape: shape,
}
"""Operator -> the extents of the axes that its second argument indexes, of a call and its first argument's shape."""

_SEPARATE = ("relax.index_tensor", "relax.index_put")
"""Whose indices are a tuple."""
