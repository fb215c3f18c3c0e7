"""Products of permuted operands: one kernel that reads, and writes, tensors as they are stored.

matmul(x, permute_dims(W)), for constants W that `FoldWeights` left transposed: a schedule that packs the weight makes
the only copy of it; one that does not reads rows of W. On CPUs also where activations are permuted, or the product is,
and the last axis stays the last, as where heads of attention are told apart and put together again: vectors are as long
as before, only further apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tvm import ir, relax, te

from ..relax_ir.constants import is_static_tensor
from ..relax_ir.functions import operator, top_level_bindings
from ..relax_ir.te_kernels import with_te_kernels
from .permuted import Permuted, element, moves_axes, permuted_operands, with_permuted_results

__all__ = ["legalize_permuted_products"]


def legalize_permuted_products(mod: ir.IRModule, activations: bool) -> ir.IRModule:
    """One kernel of each product and the permutes around it.

    Parameters
    ----------
    mod : tvm.ir.IRModule
    activations : bool
        Whether permutes of activations count, or those of weights only.
    """
    return with_te_kernels(mod, "matmul", lambda function: _products(function, activations))


@dataclass(frozen=True)
class _Product:
    """`order` says which axis of the product each axis of the result is."""

    left: Permuted
    right: Permuted
    dtype: str
    order: tuple[int, ...]

    @property
    def arguments(self) -> list[Any]:
        """The operands as they are stored."""
        return [self.left.stored, self.right.stored]

    def compute(self, *arguments: te.Tensor) -> te.Tensor:
        """The product, summed in its type, of operands `[..., M, K]` and `[..., K, N]`."""
        left, right = arguments
        rows, columns = ([t.shape[axis] for axis in p.order] for t, p in ((left, self.left), (right, self.right)))
        k = te.reduce_axis((0, rows[-1]), name="k")
        rank = len(self.order)
        batch = [_wider(rows, columns, axis - rank) for axis in range(rank - 2)]
        shape = [*batch, rows[-2], columns[-1]]

        def at(*result: Any) -> Any:
            index = [result[self.order.index(axis)] for axis in range(rank)]
            return te.sum(
                element(left, self.left.order, [*index[:-1], k]).astype(self.dtype)
                * element(right, self.right.order, [*index[:-2], k, index[-1]]).astype(self.dtype),
                axis=k,
            )

        return te.compute([shape[axis] for axis in self.order], at, name="matmul")


def _products(function: relax.Function, activations: bool) -> dict[relax.Var, _Product]:
    """The products that have a permute to take in, by the variable of their (permuted) result."""
    permutes = permuted_operands(function, activations)
    products = {}
    for binding in top_level_bindings(function):
        call = binding.value
        if operator(call) == "relax.matmul" and all(is_static_tensor(a.ty) and a.ty.ndim > 1 for a in call.args):
            left, right = (permutes.get(argument) or Permuted.not_at_all(argument) for argument in call.args)
            products[binding.var] = _Product(left, right, str(call.ty.dtype), tuple(range(call.ty.ndim)))
    if products and activations:
        products = with_permuted_results(function, products)
    return {var: p for var, p in products.items() if p.left.is_permuted or p.right.is_permuted or moves_axes(p.order)}


def _wider(left: Sequence[Any], right: Sequence[Any], axis: int) -> Any:
    """The extent of an axis, counted from the last one, of which either may have none, or one place."""
    found = [shape[axis] for shape in (left, right) if -axis <= len(shape)]
    return next((extent for extent in found if int(extent) != 1), found[0])  # of 0 and 1 it is 0
