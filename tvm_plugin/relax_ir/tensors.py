"""Tensors in Relax functions: their sizes, known or open, and views of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tvm_ffi
from tvm import ir, relax, tirx

from .functions import operator, top_level_bindings

__all__ = [
    "BOUNDS",
    "STEPS",
    "as_dtype",
    "as_shape",
    "extents",
    "is_empty",
    "is_seen_as",
    "repeated",
    "seen_as",
    "shape_of",
    "sizes_read",
    "symbols_of",
]

BOUNDS = ("tir_var_lower_bound", "tir_var_upper_bound")
"""Attributes of functions that TVM's importers write: of each symbol, by name."""

STEPS = "eqtune.size_steps"
"""Attribute of a function: [step, first] of each size that is `first` and any number of steps more, by name."""

_VIEW = "vm.builtin.reshape"

_SHAPE = "vm.builtin.tensor_to_shape"


def as_dtype(emit: Callable[[Any], Any], tensor: Any, dtype: str) -> Any:
    """A tensor in another dtype, by a block builder's `emit`, or as it is."""
    return tensor if str(tensor.ty.dtype) == dtype else emit(relax.op.astype(tensor, dtype))


def extents(ty: Any) -> list[int]:
    """The shape of a static tensor type."""
    return [int(extent) for extent in ty.shape.values]


def shape_of(value: relax.Expr) -> list[Any]:
    """The extents of a tensor: ints, but for those that are known only when the model runs."""
    return [int(extent) if isinstance(extent, int | tirx.IntImm) else extent for extent in value.ty.shape]


def is_empty(value: relax.Expr) -> bool:
    """Whether a tensor has certainly no elements."""
    return any(isinstance(extent, int) and extent == 0 for extent in shape_of(value))


def repeated(emit: Callable[[Any], Any], x: relax.Expr, counts: Sequence[Any], shape: Sequence[Any]) -> relax.Expr:
    """All of a tensor, so many times along each axis, which is of this `shape`; counts and sizes may be open."""
    extents = [1] * (len(counts) - len(shape_of(x))) + shape_of(x)
    apart = emit(relax.op.reshape(x, [part for extent in extents for part in (1, extent)]))
    pairs = zip(counts, extents, strict=True)
    wide = emit(relax.op.broadcast_to(apart, [part for pair in pairs for part in pair]))
    return relax.op.reshape(wide, list(shape))


def seen_as(value: relax.Expr, shape: Sequence[Any]) -> relax.Expr:
    """A tensor as one of a shape that it has, though TVM does not see it: n // 2 * 2 is n. A view.

    No match_cast, which CanonicalizeBindings follows for ever there, and no reshape, which TVM would compute.
    """
    ty = relax.TensorType(shape, str(value.ty.dtype))
    return relax.op.call_pure_packed(_VIEW, value, relax.ShapeExpr(shape), ty_args=ty)


def is_seen_as(value: Any) -> bool:
    """Whether a value is such a view; its second argument is what is seen."""
    return _calls(value, _VIEW)


def as_shape(sizes: relax.Expr) -> relax.Expr:
    """A tensor of integers as a shape.

    No tensor_to_shape: what TVM makes of that names the sizes once more, and not all uses of them agree on a name then.
    """
    (count,) = shape_of(sizes)
    return relax.op.call_pure_packed(_SHAPE, sizes, ty_args=relax.ShapeType(ndim=count))


def _calls(value: Any, name: str) -> bool:
    return operator(value) == "relax.call_pure_packed" and str(value.args[0].global_symbol) == name


def symbols_of(function: relax.Function) -> list[Any]:
    """The symbols in the shapes of what a function takes, in order."""
    found: list[Any] = []
    for parameter in function.params:
        for extent in getattr(getattr(parameter.ty, "shape", None), "values", ()):
            tvm_ffi.structural_walk(extent, (ir.Var, found.append))
    return list(dict.fromkeys(found))


def sizes_read(function: relax.Function) -> set[relax.Var]:
    """The variables of tuples an element of which becomes a shape (`as_shape`): how many boxes are chosen."""
    elements: dict[Any, Any] = {}
    found: set[relax.Var] = set()
    for binding in top_level_bindings(function):
        value = binding.value
        if isinstance(value, relax.TupleGetItem):
            elements[binding.var] = value.tuple_value
        elif _calls(value, _SHAPE) and value.args[1] in elements:
            found.add(elements[value.args[1]])
    return found
