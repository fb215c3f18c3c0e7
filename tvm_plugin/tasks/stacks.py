"""Stacks and concatenations of many equal tensors as copies one after another, as recurrent layers make of their steps.

TVM writes them as a choice for every element, `if i == 299 then a else if i == 298 then b ...`, and fuses what computes
the last part into it. One such kernel of an LSTM of 200 steps took 30 s to analyse, quadratic in the steps, and 12 to
compile.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tvm_ffi
from tvm import ir, relax, s_tir, tirx, topi
from tvm.relax.expr_functor import PyExprMutator, mutator

from ..relax_ir.constants import is_static_tensor, type_bytes
from ..relax_ir.functions import bound_values, map_functions, operator
from ..relax_ir.tensors import extents
from ..search.space.statements import function_of
from .copies import copy_block
from .fusion import OPAQUE
from .slices import FEWEST, MOST, SMALL_BYTES

__all__ = ["MOST", "write_stacks_as_copies"]

FEWEST_CONCATENATED = 32
"""Fewer are written where they belong by the kernels that compute them (`concat`)."""


def write_stacks_as_copies(mod: ir.IRModule, fewest: int = FEWEST) -> ir.IRModule:
    """Copy `fewest` small tensors and more of one shape that are stacked or concatenated. For CPUs.

    Kernels have a bounded size: more tensors than one takes become several stacks by equal kernels, which are then
    concatenated.
    """

    def is_wide(value: Any) -> bool:
        least = {"relax.stack": fewest, "relax.concat": max(fewest, FEWEST_CONCATENATED)}.get(operator(value))
        if least is None or len(_parts(value)) < least:
            return False
        first, *others = _parts(value)
        return _is_small(first) and all(tvm_ffi.structural_equal(first.ty, other.ty) for other in others)

    stacks = _Stacks(mod, is_wide)

    def written(function: relax.Function) -> relax.Function:
        has_wide = any(is_wide(value) for value in bound_values(function).values())
        return stacks.visit_expr(function) if has_wide else function

    return map_functions(mod, written, stacks.builder_)


@mutator
class _Stacks(PyExprMutator):
    def __init__(self, mod: ir.IRModule, is_wide: Callable[[Any], bool]) -> None:
        super().__init__(mod)
        self._is_wide = is_wide

    def visit_call_(self, call: relax.Call) -> relax.Expr:
        if not self._is_wide(call):
            return call
        call = self.visit_expr_post_order(call)
        axis = int(call.attrs.axis or 0) % call.ty.ndim
        return _stacked(self.builder_, _parts(call), axis, new=operator(call) == "relax.stack")


def _parts(stack: relax.Call) -> list[Any]:
    return list(stack.args[0].fields) if isinstance(stack.args[0], relax.Tuple) else []


def _is_small(part: Any) -> bool:
    return is_static_tensor(part.ty) and 0 < type_bytes(part.ty) <= SMALL_BYTES


def _stacked(builder: relax.BlockBuilder, parts: Sequence[Any], axis: int, new: bool) -> Any:
    shape, dtype = list(extents(parts[0].ty)), str(parts[0].ty.dtype)
    wholes = []
    for start in range(0, len(parts), MOST):
        share = parts[start : start + MOST]
        variable = builder.add_func(_kernel(shape, dtype, len(share), axis, new), "stack" if new else "concatenate")
        whole = relax.TensorType(_whole(shape, len(share), axis, new), dtype)
        wholes.append(builder.emit(relax.call_tir(variable, share, whole)))
    while len(wholes) > 1:  # a choice of at most `MOST`, as above
        wholes = [_concatenated(builder, wholes[i : i + MOST], axis) for i in range(0, len(wholes), MOST)]
    return wholes[0]


def _concatenated(builder: relax.BlockBuilder, wholes: Sequence[Any], axis: int) -> Any:
    return builder.emit_te(topi.concatenate, list(wholes), axis, primfunc_name_hint="concatenate")


def _whole(shape: list[int], count: int, axis: int, new: bool) -> list[int]:
    """The shape of `count` tensors along a new axis, or one after another along one that they have."""
    if new:
        return [*shape[:axis], count, *shape[axis:]]
    return [*shape[:axis], count * shape[axis], *shape[axis + 1 :]]


def _kernel(shape: list[int], dtype: str, count: int, axis: int, new: bool) -> tirx.PrimFunc:
    """A kernel that copies each of `count` tensors of `shape` to its place along `axis`."""
    whole = tirx.decl_buffer(_wide(_whole(shape, count, axis, new)), dtype, "stacked")
    parts = [tirx.decl_buffer(_wide(shape), dtype, f"part_{number}") for number in range(count)]

    def at(number: int) -> Callable[[list[Any]], list[Any]]:
        if new:
            return lambda indices: [*indices[:axis], tirx.IntImm("int64", number), *indices[axis:]]
        return lambda indices: [*indices[:axis], indices[axis] + number * shape[axis], *indices[axis + 1 :]]

    copies = [copy_block(part, whole, shape, at(number), f"stack_{number}") for number, part in enumerate(parts)]
    return s_tir.renew_defs(function_of([*parts, whole], copies, {"tirx.noalias": True, "op_pattern": OPAQUE}))


def _wide(shape: Sequence[int]) -> list[Any]:
    return [tirx.IntImm("int64", extent) for extent in shape]
