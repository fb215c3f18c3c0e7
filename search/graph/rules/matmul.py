"""Matrix products: association, and merging products that share an input or a sum."""

from __future__ import annotations

from ..terms import Axis, Slice
from .rule import Group, Match, Pattern, Rule, add, concat, matmul, slice_, tensors, weights

__all__ = ["MATMUL_RULES"]

x, y, z = tensors("x y z")
a, b, w = weights("a b w")


def weights_are_matrices(m: Match) -> bool:
    """a and b have no batch dimensions."""
    return len(m.a.shape) == len(m.b.shape) == 2


def same_rows(m: Match) -> bool:
    """x and y differ in their last dimension only, so that they can be concatenated along it."""
    return m.x.shape[:-1] == m.y.shape[:-1]


def _columns(index: int, count: int) -> Pattern:
    """The columns of a merged product that belong to weight `index`, 1 to count."""

    def box(m: Match) -> Slice:
        begin = sum(getattr(m, f"w{i}").shape[-1] for i in range(1, index))
        shape = m.out[index - 1].shape
        return Slice((0,) * (len(shape) - 1) + (begin,), (*shape[:-1], begin + shape[-1]))

    parts = weights(" ".join(f"w{i}" for i in range(1, count + 1)))
    return slice_(matmul(x, concat(parts, _last_axis_of_w1)), box)


def _last_axis_of_w1(m: Match) -> Axis:
    return Axis(len(m.w1.shape) - 1)


def merge_shared_input(count: int) -> Rule:
    """x @ w1, ..., x @ wn -> the column blocks of x @ concat(w1, ..., wn)."""
    parts = weights(" ".join(f"w{i}" for i in range(1, count + 1)))
    return Rule(
        f"merge-matmul-shared-input-{count}",
        before=tuple(matmul(x, part) for part in parts),
        after=tuple(_columns(i, count) for i in range(1, count + 1)),
        reason="one wide product reads x once and fills the machine better",
        source="TASO; Tensat's multi-pattern rule, for any number of products at once",
    )


MATMUL_RULES: tuple[Rule | Group, ...] = (
    Rule(
        "matmul-associate-right",
        before=matmul(matmul(x, y), z),
        after=matmul(x, matmul(y, z)),
        reason="the other order may need fewer multiplications, or be a product of weights",
        source="TASO",
    ),
    Rule(
        "matmul-associate-left",
        before=matmul(x, matmul(y, z)),
        after=matmul(matmul(x, y), z),
        reason="the other order may need fewer multiplications, or be a product of weights",
        source="TASO",
    ),
    Rule(
        "sum-of-matmuls",
        before=add(matmul(x, a), matmul(y, b)),
        after=matmul(
            concat((x, y), lambda m: Axis(len(m.x.shape) - 1)),
            concat((a, b), Axis(0)),
        ),
        when=(weights_are_matrices, same_rows),
        reason="one product with a longer sum instead of two products and an addition",
        source="TASO",
    ),
    Group(
        "merge-matmul-shared-input",
        member=matmul(x, w),
        shared=("x",),
        make=merge_shared_input,
        reason="one wide product reads x once and fills the machine better",
        source="TASO",
    ),
)
