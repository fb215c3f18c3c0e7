"""Products of permuted operands: one kernel that reads, and writes, tensors as they are stored.

matmul(x, permute_dims(W)), for constants W that `FoldWeights` left transposed: a schedule that packs the weight makes
the only copy of it; one that does not reads rows of W. On CPUs also where activations are permuted, or the product is,
and the last axis stays the last, as where heads of attention are told apart and put together again: vectors are as long
as before, only further apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from tvm import ir, relax, te

from ..transform.constants import is_static_tensor
from ..transform.functions import operator, rewrite_calls, top_level_bindings, use_counts
from .permuted import Permuted, element, keeps_runs, permute_order, permuted_operands

__all__ = ["legalize_permuted_products"]


def legalize_permuted_products(mod: ir.IRModule, activations: bool) -> ir.IRModule:
    """One kernel of each product and the permutes around it.

    Parameters
    ----------
    mod : tvm.ir.IRModule
    activations : bool
        Whether permutes of activations count, or those of weights only.
    """
    builder = relax.BlockBuilder(mod)
    rewritten = {}
    for variable, function in mod.functions_items():
        if isinstance(function, relax.Function):
            products = _products(function, activations)
            if products:
                rewritten[variable] = _with_kernels(function, products, builder)
    if not rewritten:
        return mod
    result = builder.get()
    for variable, function in rewritten.items():
        result.update_func(variable, function)
    return result


@dataclass(frozen=True)
class _Product:
    """`order` says which axis of the product each axis of the result is."""

    left: Permuted
    right: Permuted
    dtype: str
    order: tuple[int, ...]


def _products(function: relax.Function, activations: bool) -> dict[relax.Var, _Product]:
    """The products that have a permute to take in, by the variable of their (permuted) result."""
    permutes = permuted_operands(function, activations)
    products = {}
    for binding in top_level_bindings(function):
        call = binding.value
        if operator(call) == "relax.matmul" and is_static_tensor(call.ty) and min(a.ty.ndim for a in call.args) > 1:
            left, right = (permutes.get(argument) or Permuted.not_at_all(argument) for argument in call.args)
            products[binding.var] = _Product(left, right, str(call.ty.dtype), tuple(range(call.ty.ndim)))
    uses = use_counts(function) if products and activations else {}
    for binding in top_level_bindings(function):
        order = permute_order(binding.value) if activations else ()
        if order and binding.value.args[0] in products and uses[binding.value.args[0]] == 1 and keeps_runs(order):
            products[binding.var] = replace(products.pop(binding.value.args[0]), order=order)
    return {var: p for var, p in products.items() if p.left.is_permuted or p.right.is_permuted or _moves(p.order)}


def _moves(order: Sequence[int]) -> bool:
    return list(order) != sorted(order)


def _with_kernels(
    function: relax.Function, products: dict[relax.Var, _Product], builder: relax.BlockBuilder
) -> relax.Function:
    def rewrite(binding: relax.VarBinding) -> relax.VarBinding:
        product = products.get(binding.var)
        if product is None:
            return binding
        call = builder.call_te(
            lambda left, right: _compute(left, right, product),
            product.left.stored,
            product.right.stored,
            primfunc_name_hint="matmul",
        )
        return relax.VarBinding(binding.var, builder.normalize(call))

    return relax.analysis.remove_all_unused(rewrite_calls(function, rewrite))


def _compute(left: te.Tensor, right: te.Tensor, product: _Product) -> te.Tensor:
    """The product, summed in its type, of operands `[..., M, K]` and `[..., K, N]` as they are stored."""
    rows, columns = ([t.shape[axis] for axis in p.order] for t, p in ((left, product.left), (right, product.right)))
    k = te.reduce_axis((0, rows[-1]), name="k")
    rank = len(product.order)
    batch = [_wider(rows, columns, axis - rank) for axis in range(rank - 2)]
    shape = [*batch, rows[-2], columns[-1]]

    def at(*result: Any) -> Any:
        index = [result[product.order.index(axis)] for axis in range(rank)]
        return te.sum(
            element(left, product.left.order, [*index[:-1], k]).astype(product.dtype)
            * element(right, product.right.order, [*index[:-2], k, index[-1]]).astype(product.dtype),
            axis=k,
        )

    return te.compute([shape[axis] for axis in product.order], at, name="matmul")


def _wider(left: Sequence[Any], right: Sequence[Any], axis: int) -> Any:
    """The extent of an axis, counted from the last one, of which either may have none, or one place."""
    found = [shape[axis] for shape in (left, right) if -axis <= len(shape)]
    return max(found, key=int)
