"""SimplifyShapes: fewer and cheaper copies."""

from __future__ import annotations

from typing import Any

from tvm import ir, relax, transform
from tvm.relax.expr_functor import mutator

from ..relax_ir.constants import is_static_tensor
from ..relax_ir.functions import LookupMutator, bound_values, has_call, map_functions, operator, use_counts
from ..relax_ir.tensors import extents

__all__ = ["RESHAPES", "SimplifyShapes", "permutation_of"]

RESHAPES = frozenset({"relax.reshape", "relax.flatten", "relax.nn.batch_flatten", "relax.squeeze", "relax.expand_dims"})


@transform.module_pass(opt_level=0, name="SimplifyShapes")
class SimplifyShapes:
    """Rewrite what only moves data into forms that cost less.

    - split(x)[i] -> strided_slice(x): a slice fuses into its consumers, a split is a copy of its own
    - permute_dims(permute_dims(x)) -> permute_dims(x), reshape(reshape(x)) -> reshape(x)
    - permute_dims that moves axes of extent 1 only -> reshape, which is a view
    - permute_dims and reshape that change nothing -> x
    - reshape(permute_dims(reshape(x))) -> permute_dims(x), where rows and columns of matrices are exchanged
    - concat(concat(x, y), z) -> concat(x, y, z), where nothing else reads the inner one
    """

    def transform_module(self, mod: ir.IRModule, _context: transform.PassContext) -> ir.IRModule:
        """Simplify every Relax function."""
        return map_functions(mod, _simplify)


def _simplify(function: relax.Function) -> relax.Function:
    if not has_call(function, {"relax.split", "relax.permute_dims", "relax.concat", *RESHAPES}):
        return function
    return relax.analysis.remove_all_unused(_Simplifier(function).visit_expr(function))


def permutation_of(call: relax.Call) -> list[int]:
    """The axes of a permute_dims, spelled out."""
    axes = call.attrs.axes
    rank = call.args[0].ty.ndim
    return list(reversed(range(rank))) if axes is None else [int(axis) % rank for axis in axes]


@mutator
class _Simplifier(LookupMutator):
    """Works on what the builder holds already: operands are simplified before their users."""

    def __init__(self, function: relax.Function) -> None:
        super().__init__(function)
        self._uses = use_counts(function)
        self._given = {var: value for var, value in bound_values(function).items() if var not in self._results}

    def visit_call_(self, call: relax.Call) -> Any:
        if operator(call) == "relax.concat" and isinstance(call.args[0], relax.Tuple):
            parts = self._flat_parts(call)
            if len(parts) > len(call.args[0].fields):
                return relax.op.concat([self.visit_expr(part) for part in parts], int(call.attrs.axis))
        call = self.visit_expr_post_order(call)
        if not is_static_tensor(call.ty):
            return call
        if operator(call) == "relax.permute_dims":
            return self._permute(call)
        if operator(call) in RESHAPES:
            return self._reshape(call)
        return call

    def visit_tuple_getitem_(self, item: relax.TupleGetItem) -> Any:
        item = self.visit_expr_post_order(item)
        call = self._value(item.tuple_value)
        if operator(call) != "relax.split" or not is_static_tensor(item.ty):
            return item
        axis = int(call.attrs.axis) % item.ty.ndim
        begin = sum(extents(call.ty.fields[before])[axis] for before in range(item.index))
        end = begin + extents(item.ty)[axis]
        return relax.op.strided_slice(call.args[0], axes=[axis], begin=[begin], end=[end])

    def _flat_parts(self, call: relax.Call) -> list[Any]:
        """The parts of a concat, with those of inner ones along the same axis in their place."""
        parts: list[Any] = []
        for part in call.args[0].fields:
            inner: Any = self._given.get(part) if isinstance(part, relax.Var) and self._uses.get(part) == 1 else None
            if (
                operator(inner) == "relax.concat"
                and isinstance(inner.args[0], relax.Tuple)
                and call.attrs.axis is not None
                and inner.attrs.axis is not None
                and int(inner.attrs.axis) % inner.ty.ndim == int(call.attrs.axis) % call.ty.ndim
            ):
                parts += self._flat_parts(inner)
            else:
                parts.append(part)
        return parts

    def _permute(self, call: relax.Call) -> Any:
        data, order = call.args[0], permutation_of(call)
        inner = self._value(data)
        if operator(inner) == "relax.permute_dims":
            order = [permutation_of(inner)[axis] for axis in order]
            data = inner.args[0]
        if order == sorted(order):
            return data
        shape = extents(data.ty)
        moving = [axis for axis in order if shape[axis] != 1]
        if moving == sorted(moving) and 0 not in shape:
            return self._reshape(self.builder_.normalize(relax.op.reshape(data, call.ty.shape)))
        return relax.op.permute_dims(data, order)

    def _reshape(self, call: relax.Call) -> Any:
        data = call.args[0]
        inner = self._value(data)
        if operator(inner) in RESHAPES:
            data = inner.args[0]
        if not is_static_tensor(data.ty):
            return call
        if extents(data.ty) == extents(call.ty):
            return data
        turned = self._turned(inner, extents(call.ty))
        if turned is not None:
            return turned
        # Relax takes 0 for the extent that was there.
        is_given = data.same_as(call.args[0]) or 0 in extents(call.ty)
        return call if is_given else relax.op.reshape(data, call.ty.shape)

    def _turned(self, permuted: Any, shape: list[int]) -> Any:
        """What an operand's rows and columns were exchanged of, before its other axes took the shape that they had."""
        rank = len(shape)
        if operator(permuted) != "relax.permute_dims" or rank < 2:
            return None
        order = permutation_of(permuted)
        if order != [*range(len(order) - 2), len(order) - 1, len(order) - 2] or extents(permuted.ty)[-2:] != shape[-2:]:
            return None
        inner = self._value(permuted.args[0])
        given = [*shape[:-2], shape[-1], shape[-2]]
        if operator(inner) not in RESHAPES or not is_static_tensor(inner.args[0].ty):
            return None
        source = inner.args[0]
        if extents(source.ty) != given:
            return None
        return relax.op.permute_dims(source, [*range(rank - 2), rank - 1, rank - 2])
