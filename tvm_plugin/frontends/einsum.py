"""Einstein sums of two tensors as products of matrices, which rules, attention and sketches know."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from tvm import ir, relax
from tvm.relax import op
from tvm.relax.expr_functor import PyExprMutator, mutator

from ..relax_ir.constants import is_static_tensor
from ..relax_ir.functions import map_functions, operator
from ..relax_ir.tensors import extents

__all__ = ["with_einsum_products"]


def with_einsum_products(mod: ir.IRModule) -> ir.IRModule:
    """Write einsum("bqhd,bkhd->bhqk", x, y) as matmul(permute_dims(x), permute_dims(y)), reshaped and permuted.

    Products of elements and of rows are multiplications and sums. What is no product of two tensors stays: one operand
    or three, diagonals, extents of one that are repeated.
    """
    return map_functions(mod, lambda function: _Products().visit_expr(function))


@mutator
class _Products(PyExprMutator):
    def visit_call_(self, call: relax.Call) -> relax.Expr:
        call = self.visit_expr_post_order(call)
        if operator(call) != "relax.einsum":
            return call
        given: Any = call.args[0]
        known = self.lookup_binding(given) if isinstance(given, relax.Var) else given
        operands = list(known.fields) if isinstance(known, relax.Tuple) else []
        if len(operands) != 2 or not all(is_static_tensor(operand.ty) for operand in operands):
            return call
        labels = _labels(str(call.attrs.subscripts), [operand.ty.ndim for operand in operands])
        if labels is None:
            return call
        left, right, result = labels
        sizes = dict(zip(left, extents(operands[0].ty), strict=True))
        if any(sizes.setdefault(label, n) != n for label, n in zip(right, extents(operands[1].ty), strict=True)):
            return call
        if 0 in sizes.values():
            return call
        terms = [(operands[0], left), (operands[1], right)]
        if _is_turned(left, right, result, sizes):
            terms.reverse()
        return self._product(*terms[0], *terms[1], result, sizes)

    def _product(
        self, x: Any, left: Sequence[str], y: Any, right: Sequence[str], result: Sequence[str], sizes: dict[str, int]
    ) -> relax.Expr:
        emit = self.builder_.emit
        x, left = self._summed(x, left, {*right, *result})
        y, right = self._summed(y, right, {*left, *result})
        batch = [label for label in left if label in right and label in result]
        inner = [label for label in left if label in right and label not in result]
        rows = [label for label in left if label not in right]
        columns = [label for label in right if label not in left]

        def matrices(value: Any, labels: Sequence[str], first: list[str], second: list[str]) -> Any:
            order = [labels.index(label) for label in (*batch, *first, *second)]
            value = value if _is_in_order(order, labels, sizes) else emit(op.permute_dims(value, order))
            shape = [*(sizes[label] for label in batch), _count(first, sizes), _count(second, sizes)]
            return value if extents(value.ty) == shape else emit(op.reshape(value, shape))

        if rows or columns:
            multiply = op.matmul if inner else op.multiply
            product = emit(multiply(matrices(x, left, rows, inner), matrices(y, right, inner, columns)))
        else:
            product = emit(op.multiply(matrices(x, left, [], inner), matrices(y, right, [], inner)))
            product = emit(op.sum(product, [-2, -1])) if inner else product
        found = [*batch, *rows, *columns]
        shape = [sizes[label] for label in found]
        product = product if extents(product.ty) == shape else emit(op.reshape(product, shape))
        order = [found.index(label) for label in result]
        if order == sorted(order):
            return product
        if _is_in_order(order, found, sizes):
            return self.builder_.normalize(op.reshape(product, [sizes[label] for label in result]))
        return self.builder_.normalize(op.permute_dims(product, order))

    def _summed(self, value: Any, labels: Sequence[str], wanted: set[str]) -> tuple[Any, list[str]]:
        """Without the axes that no one else has."""
        axes = [axis for axis, label in enumerate(labels) if label not in wanted]
        kept = [label for label in labels if label in wanted]
        return (self.builder_.emit(op.sum(value, axes)), kept) if axes else (value, kept)


def _is_turned(left: Sequence[str], right: Sequence[str], result: Sequence[str], sizes: dict[str, int]) -> bool:
    """Whether the result has the axes of the right operand alone before those of the left one alone."""
    rows, columns = (
        [place for place, label in enumerate(result) if label in own and label not in other and sizes[label] > 1]
        for own, other in ((left, right), (right, left))
    )
    return bool(rows and columns) and max(columns) < min(rows)


def _is_in_order(order: Sequence[int], labels: Sequence[str], sizes: dict[str, int]) -> bool:
    """Whether axes lie in memory in this order already: those of one element may lie anywhere."""
    moved = [axis for axis in order if sizes[labels[axis]] > 1]
    return moved == sorted(moved)


def _count(labels: Sequence[str], sizes: dict[str, int]) -> int:
    return math.prod(sizes[label] for label in labels)


def _labels(subscripts: str, ranks: Sequence[int]) -> list[list[str]] | None:
    """The labels of each operand's axes and of the result's, each once in one; those of "..." are numbers."""
    terms, arrow, result = subscripts.replace(" ", "").partition("->")
    operands = terms.split(",")
    if len(operands) != len(ranks):
        return None
    hidden = max(
        rank - len(term.replace("...", "")) if "..." in term else 0 for term, rank in zip(operands, ranks, strict=True)
    )
    if not arrow:  # in alphabetical order, those that are there once
        letters = [letter for letter in terms if letter.isalpha()]
        result = ("..." if "..." in terms else "") + "".join(sorted(c for c in set(letters) if letters.count(c) == 1))
    found = []
    for term, rank in zip([*operands, result], [*ranks, None], strict=True):
        before, dots, after = term.partition("...")
        count = 0 if not dots else hidden if rank is None else rank - len(before) - len(after)
        labels = [*before, *(str(number) for number in range(hidden - count, hidden)), *after]
        if len(set(labels)) != len(labels) or (rank is not None and len(labels) != rank):
            return None
        found.append(labels)
    return found if set(found[-1]) <= {*found[0], *found[1]} else None
