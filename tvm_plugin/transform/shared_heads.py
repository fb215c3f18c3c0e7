"""JoinSharedHeads: products by an operand that is repeated for several heads are products of more rows by it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from tvm import ir, relax, transform
from tvm.relax import op
from tvm.relax.expr_functor import PyExprMutator, mutator

from ..relax_ir.constants import is_number, is_static_tensor
from ..relax_ir.functions import map_functions, operator, values_of_one_block
from ..relax_ir.tensors import extents
from .simplify_shapes import RESHAPES, permutation_of

__all__ = ["JoinSharedHeads"]

_MOST_ROWS = 3
"""Of a head. Attention of four rows or more may become one kernel, which reads keys and values of each head."""

_BY_NUMBERS = frozenset({"relax.multiply", "relax.divide", "relax.add", "relax.subtract"})


@transform.module_pass(opt_level=0, name="JoinSharedHeads")
class JoinSharedHeads:
    """matmul(x, repeat(y, g)) -> reshape(matmul(reshape(x), y)), where heads of few rows share what they multiply.

    The keys and values of a decoder are shared by groups of g heads (Ainslie et al., "GQA: training generalized
    multi-query transformer models from multi-head checkpoints", EMNLP 2023). Models repeat them as expand_dims,
    broadcast_to and reshape: for the next word that is g copies of the whole cache, each read once.
    """

    def transform_module(self, mod: ir.IRModule, _context: transform.PassContext) -> ir.IRModule:
        """Rewrite `relax.matmul` of every Relax function."""
        return map_functions(mod, _join)


def _join(function: relax.Function) -> relax.Function:
    values = values_of_one_block(function)
    if not any(_has_few_rows(value) for value in values.values()):
        return function
    return relax.analysis.remove_all_unused(_Joiner(values).visit_expr(function))


def _has_few_rows(value: Any) -> bool:
    if operator(value) != "relax.matmul" or not all(is_static_tensor(arg.ty) for arg in value.args):
        return False
    x, y = (extents(arg.ty) for arg in value.args)
    return len(x) == len(y) > 2 and 0 < x[-2] <= _MOST_ROWS


@dataclass(frozen=True)
class _Repeated:
    """`times` copies of each element along an axis: of what `source()` emits, whose shape is given."""

    source: Callable[[], Any]
    shape: tuple[int, ...]
    axis: int
    times: int

    @property
    def whole(self) -> list[int]:
        """The shape with the copies."""
        return [n * self.times if axis == self.axis else n for axis, n in enumerate(self.shape)]


@mutator
class _Joiner(PyExprMutator):
    def __init__(self, values: Mapping[relax.Var, Any]) -> None:
        super().__init__()
        self._values = values

    def visit_call_(self, call: relax.Call) -> Any:
        if not _has_few_rows(call):
            return self.visit_expr_post_order(call)
        x, y = call.args
        repeated = self._repeated(y)
        rows, columns = extents(x.ty), extents(y.ty)
        if repeated is None and columns[-3] == 1 < rows[-3]:
            repeated = _Repeated(lambda: self.visit_expr(y), tuple(columns), len(columns) - 3, rows[-3])
        if repeated is None or repeated.axis != len(rows) - 3 or rows[:-2] != repeated.whole[:-2]:
            return self.visit_expr_post_order(call)
        *batch, _heads, count, depth = rows
        joined = [*batch, repeated.shape[-3], repeated.times * count, depth]
        together = self.builder_.emit(op.reshape(self.visit_expr(x), joined))
        product = self.builder_.emit(op.matmul(together, repeated.source(), out_dtype=str(call.ty.dtype)))
        return op.reshape(product, extents(call.ty))

    def _repeated(self, var: Any) -> _Repeated | None:
        """The value of a variable as copies; None where it is none."""
        value = self._values.get(var) if isinstance(var, relax.Var) else None
        if not isinstance(value, relax.Call) or not is_static_tensor(value.ty):
            return None
        name = operator(value)
        if name in RESHAPES:
            return self._reshaped(value)
        if name == "relax.repeat" and value.attrs.axis is not None and is_static_tensor(value.args[0].ty):
            axis, source = int(value.attrs.axis) % value.ty.ndim, value.args[0]
            return _Repeated(lambda: self.visit_expr(source), tuple(extents(source.ty)), axis, int(value.attrs.repeats))
        by_number = name in _BY_NUMBERS and is_static_tensor(value.args[0].ty)
        by_number = by_number and is_number(value.args[1], value.args[0].ty.ndim)
        inner = self._repeated(value.args[0]) if by_number or name == "relax.permute_dims" else None
        if inner is None:
            return None
        emit = self.builder_.emit
        if name == "relax.permute_dims":
            order = permutation_of(value)
            shape, axis = tuple(inner.shape[axis] for axis in order), order.index(inner.axis)
            return replace(inner, source=lambda: emit(op.permute_dims(inner.source(), order)), shape=shape, axis=axis)
        number = value.args[1]
        return replace(inner, source=lambda: emit(relax.Call(value.op, [inner.source(), number], value.attrs)))

    def _reshaped(self, call: relax.Call) -> _Repeated | None:
        source, new = call.args[0], extents(call.ty)
        inner = self._repeated(source)
        if inner is not None:
            found = _axis_of(inner.whole, inner.axis, inner.axis, new)
            given, times = inner.source, inner.times
        else:
            value = self._values.get(source) if isinstance(source, relax.Var) else None
            if value is None or operator(value) != "relax.broadcast_to" or not is_static_tensor(value.args[0].ty):
                return None
            given_value = value.args[0]
            small, whole = extents(given_value.ty), extents(value.ty)
            grown = [axis for axis in range(len(whole)) if len(small) == len(whole) and small[axis] != whole[axis]]
            if len(grown) != 1 or grown[0] == 0:
                return None
            found = _axis_of(whole, grown[0] - 1, grown[0], new)
            given, times = (lambda: self.visit_expr(given_value)), whole[grown[0]]
        if found is None:
            return None
        shape = [n // times if axis == found else n for axis, n in enumerate(new)]
        return _Repeated(lambda: self.builder_.emit(op.reshape(given(), shape)), tuple(shape), found, times)


def _axis_of(old: list[int], first: int, last: int, new: list[int]) -> int | None:
    """The axis of the new shape that the axes from `first` to `last` of the old one become; None where none does."""
    before, extent = math.prod(old[:first]), math.prod(old[first : last + 1])
    return next((a for a, n in enumerate(new) if n == extent > 1 and math.prod(new[:a]) == before), None)
