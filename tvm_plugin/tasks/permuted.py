"""Tensors that are read through a permute of their axes, which then needs no kernel of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from tvm import ir, relax, te

from ..relax_ir.constants import is_static_tensor
from ..relax_ir.functions import block_results, bound_values, leaves, operator, top_level_bindings, use_counts
from ..transform.fold_weights import transposed_weights
from ..transform.simplify_shapes import permutation_of

__all__ = [
    "Permuted",
    "element",
    "keeps_runs",
    "moves_axes",
    "permute_order",
    "permuted_operands",
    "with_permuted_results",
]


@dataclass(frozen=True)
class Permuted:
    """A tensor as it is stored, and which of its axes each axis of the operand is."""

    stored: Any
    order: tuple[int, ...]

    @classmethod
    def not_at_all(cls, tensor: Any) -> Permuted:
        """The operand is the tensor."""
        return cls(tensor, tuple(range(tensor.ty.ndim)))

    @property
    def is_permuted(self) -> bool:
        """Whether the operand is not the tensor."""
        return moves_axes(self.order)


def permuted_operands(function: relax.Function, activations: bool) -> dict[relax.Var, Permuted]:
    """What variables that only products read are permutes of, with vectors as long as before; weights in any order."""
    weights, results = transposed_weights(function), block_results(function)
    found = {}
    for binding in top_level_bindings(function):
        order = permute_order(binding.value)
        if not order:
            continue
        stored = binding.value.args[0]
        if isinstance(stored, ir.GenericConst):
            taken = binding.var in weights
        else:
            taken = activations and keeps_runs(order) and is_static_tensor(binding.value.ty)
            taken = taken and binding.var not in results
        if taken:
            found[binding.var] = Permuted(stored, order)
    uses = use_counts(function) if found else {}
    for binding in top_level_bindings(function) if found else ():
        if operator(binding.value) == "relax.matmul":
            for operand in leaves(binding.value):
                if operand in found:
                    uses[operand] -= 1
    return {var: permuted for var, permuted in found.items() if var in weights or not uses[var]}


def with_permuted_results(function: relax.Function, found: dict[relax.Var, Any]) -> dict[relax.Var, Any]:
    """What was found for variables, with the permutes that alone read them, by the variable of the permute.

    What was found has an `order`, which becomes that of the permute. Vectors stay as long as before.
    """
    uses, results = use_counts(function), block_results(function)
    for var, value in bound_values(function).items():
        order = permute_order(value)
        source = value.args[0] if order else None
        if source in found and source not in results and uses[source] == 1 and keeps_runs(order):
            found[var] = replace(found.pop(source), order=order)
    return found


def permute_order(value: Any) -> tuple[int, ...]:
    """Of a permute: which axis of its operand each of its axes is; () for anything else."""
    return tuple(permutation_of(value)) if operator(value) == "relax.permute_dims" else ()


def moves_axes(order: Sequence[int]) -> bool:
    """Whether an order is another than that of the tensor."""
    return list(order) != sorted(order)


def keeps_runs(order: Sequence[int]) -> bool:
    """Whether the last axis stays the last: vectors are as long as before, only further apart."""
    return len(order) > 1 and order[-1] == len(order) - 1


def element(tensor: te.Tensor, order: Sequence[int], index: Sequence[Any]) -> Any:
    """What a stored tensor has at an index of its operand, which may have more axes, and more places along an axis of
    one."""
    own = index[len(index) - len(order) :]
    stored: list[Any] = [0] * len(order)
    for place, axis in zip(own, order, strict=True):
        stored[axis] = 0 if int(tensor.shape[axis]) == 1 else place
    return tensor(*stored)
