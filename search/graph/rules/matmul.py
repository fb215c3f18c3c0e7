"""Matrix products: association, merging, and what weights can absorb."""

from __future__ import annotations

from math import prod

from ..attributes import Axis, Shape, Slice
from .pattern import add, concat, full, matmul, multiply, permute, reshape, slice_, tensors, weights
from .rule import Group, Match, Rule, both_ways
from .shapes import (
    axis_of,
    block,
    box,
    broadcasts_to,
    columns_only,
    keeps_range,
    keeps_sums_after_scale_small,
    keeps_sums_before_scale_small,
    numbered,
    transposition,
)

__all__ = ["MATMUL_LAWS", "MATMUL_RULES"]

x, y, z, v = tensors("x y z v")
w, s = weights("w s")
c = full("c")


def same_rows(m: Match) -> bool:
    """x and y can be concatenated along their columns, and z and v along their rows."""
    same_columns = m.z.shape[:-2] == m.v.shape[:-2] and m.z.shape[-1] == m.v.shape[-1]
    return bool(same_columns and m.x.shape[:-1] == m.y.shape[:-1])


def columns_joined(m: Match) -> bool:
    """The concatenation is along the columns, of operands whose batch is that of x."""
    rank = len(m.x.shape)
    return bool(m.j.axis == rank - 1 and m.z.shape[:-2] == m.v.shape[:-2] and len(m.z.shape) <= rank)


def rows_joined(m: Match) -> bool:
    """The concatenation is along the rows, and z has no batch that x and y lack."""
    same = m.x.shape[:-2] == m.y.shape[:-2]
    return bool(m.j.axis == len(m.x.shape) - 2 and same and broadcasts_to(m.z.shape[:-2], m.x.shape[:-2]))


def blocks_meet(m: Match) -> bool:
    """Columns are joined where rows are: x meets z, and y meets v."""
    left, right = len(m.x.shape) - 1, len(m.z.shape) - 2
    return bool(right >= 0 and m.j.axis == left and m.k.axis == right and m.x.shape[-1] == m.z.shape[-2])


def columns_of_right(m: Match) -> bool:
    """The concatenation is along the columns."""
    return bool(m.j.axis == len(m.y.shape) - 1)


def rows_of_left(m: Match) -> bool:
    """The concatenation is along the rows, and z adds no dimensions."""
    return bool(m.j.axis == len(m.x.shape) - 2 and len(m.z.shape) <= len(m.x.shape))


def keeps_rows(m: Match) -> bool:
    """The slice cuts columns only."""
    rows = m.type(_ANY_PRODUCT).shape[:-1]
    return bool(not any(m.s.begin[:-1]) and m.s.end[:-1] == rows)


def keeps_columns(m: Match) -> bool:
    """The slice cuts rows only."""
    *batch, _, columns = m.type(_ANY_PRODUCT).shape
    first, last = m.s.begin, m.s.end
    return not any(first[:-2]) and list(last[:-2]) == batch and (first[-1], last[-1]) == (0, columns)


def scales_columns(m: Match) -> bool:
    """s holds one number for each column of the product, and adds no dimensions."""
    return columns_only(m.s.shape) and broadcasts_to(m.s.shape, m.type(_PRODUCT).shape)


def scales_input_columns(m: Match) -> bool:
    """s holds one number for each column of x, and adds no dimensions."""
    return columns_only(m.s.shape) and broadcasts_to(m.s.shape, m.x.shape)


def one_number(m: Match) -> bool:
    """The factor is a single number, without dimensions of its own."""
    return bool(prod(m.c.shape) == 1 and len(m.c.shape) <= 2)


def is_half_precision(m: Match) -> bool:
    """Numbers end at 65504: other rules leave products of products as they are."""
    return bool(m.x.dtype == "float16")


def swaps_rows_and_columns(m: Match) -> bool:
    """The permutation exchanges rows and columns, and nothing else, of operands of one rank."""
    rank = len(m.x.shape)
    return bool(len(m.y.shape) == rank and m.p == transposition(rank))


def permutes_batch(m: Match) -> bool:
    """The permutation leaves rows and columns in place, of operands of one rank."""
    rank = len(m.x.shape)
    return bool(len(m.y.shape) == rank and m.p.axes[-2:] == (rank - 2, rank - 1))


def regroups_rows(m: Match) -> bool:
    """The reshape leaves the columns alone, and w is a matrix."""
    before, after = m.x.shape, m.r.shape
    return bool(len(m.w.shape) == 2 and min(len(before), len(after)) >= 2 and before[-1] == after[-1])


def regroups_product_rows(m: Match) -> bool:
    """The reshape leaves the columns of the product alone, and w is a matrix."""
    return bool(len(m.w.shape) == 2 and len(m.r.shape) >= 2 and m.r.shape[-1] == m.w.shape[-1])


_PRODUCT = matmul(x, w)
_ANY_PRODUCT = matmul(x, y)


def _column_of_s(m: Match) -> Shape:
    """s as a column, to scale the rows of w."""
    return Shape((m.s.elements, 1))


def _row_of_s(m: Match) -> Shape:
    return Shape((1, m.s.elements))


def _product_rows(m: Match) -> Shape:
    return Shape((*m.r.shape[:-1], m.w.shape[-1]))


def _operand_rows(m: Match) -> Shape:
    return Shape((*m.r.shape[:-1], m.x.shape[-1]))


def _columns_of_product(m: Match) -> Axis:
    return Axis(len(m.out[0].shape) - 1)


def _columns_of_y(m: Match) -> Slice:
    return box(m.y.shape, len(m.y.shape) - 1, m.s.begin[-1], m.s.end[-1])


def _rows_of_x(m: Match) -> Slice:
    return box(m.x.shape, len(m.x.shape) - 2, m.s.begin[-2], m.s.end[-2])


def merge_shared_input(count: int) -> Rule:
    """x @ w1, ..., x @ wn -> the column blocks of x @ concat(w1, ..., wn)."""
    parts = numbered(w, count)
    merged = matmul(x, concat(parts, axis_of("w1", 1)))
    return Rule(
        f"merge-matmul-shared-input-{count}",
        before=tuple(matmul(x, part) for part in parts),
        after=tuple(block(merged, i, -1) for i in range(count)),
        reason=_MERGE_INPUT,
        source="TASO; Tensat's multi-pattern rule, for any number of products at once",
    )


def merge_shared_weight(count: int) -> Rule:
    """x1 @ w, ..., xn @ w -> the row blocks of concat(x1, ..., xn) @ w."""
    parts = numbered(x, count)
    merged = matmul(concat(parts, axis_of("x1", 2)), w)
    return Rule(
        f"merge-matmul-shared-weight-{count}",
        before=tuple(matmul(part, w) for part in parts),
        after=tuple(block(merged, i, -2) for i in range(count)),
        reason=_MERGE_WEIGHT,
        source="TASO; the time steps of a recurrent network",
    )


_MERGE_INPUT = "one wide product reads x once and fills the machine better"
_MERGE_WEIGHT = "one tall product reads w once"
_ORDER = "the other order may need fewer multiplications, or be a product of weights"
_FREE_SCALE = "weights absorb the scale ahead of time"

MATMUL_RULES: tuple[Rule | Group, ...] = (
    *both_ways(
        "matmul-associate-right",
        matmul(matmul(x, y), z),
        "matmul-associate-left",
        matmul(x, matmul(y, z)),
        worth=(keeps_range,),
        reason=_ORDER,
        source="TASO",
    ),
    Rule(
        "matmul-of-weights",
        before=matmul(_PRODUCT, s),
        after=matmul(x, matmul(w, s)),
        worth=(is_half_precision,),
        reason="a product of weights is computed ahead of time: of such, unlike of inputs, float16 has the numbers",
        source="TASO",
    ),
    Rule(
        "sum-of-matmuls",
        before=add(matmul(x, z), matmul(y, v)),
        after=matmul(concat((x, y), axis_of("x", 1)), concat((z, v), axis_of("z", 2))),
        when=(same_rows,),
        reason="one product with a longer sum instead of two products and an addition",
        source="TASO",
    ),
    Rule(
        "sum-of-matmuls-shared-input",
        before=add(matmul(x, z), matmul(x, v)),
        after=matmul(x, add(z, v)),
        worth=(keeps_range,),
        reason="one product instead of two; weights are added ahead of time",
        source="TASO",
    ),
    Rule(
        "sum-of-matmuls-shared-weight",
        before=add(matmul(x, z), matmul(y, z)),
        after=matmul(add(x, y), z),
        worth=(keeps_range,),
        reason="one product instead of two",
        source="TASO",
    ),
    Rule(
        "concat-of-matmuls-shared-input",
        before=concat((matmul(x, z), matmul(x, v)), "j"),
        after=matmul(x, concat((z, v), axis_of("z", 1))),
        when=(columns_joined,),
        reason=_MERGE_INPUT,
        source="TASO",
    ),
    Rule(
        "concat-of-matmuls-shared-weight",
        before=concat((matmul(x, z), matmul(y, z)), "j"),
        after=matmul(concat((x, y), "j"), z),
        when=(rows_joined,),
        reason=_MERGE_WEIGHT,
        source="TASO",
    ),
    Rule(
        "scale-of-matmul",
        before=multiply(_PRODUCT, s),
        after=matmul(x, multiply(w, reshape(s, _row_of_s))),
        when=(scales_columns,),
        worth=(keeps_range,),
        reason=_FREE_SCALE,
        source="TASO",
    ),
    Rule(
        "matmul-of-scaled",
        before=matmul(multiply(x, s), w),
        after=matmul(x, multiply(w, reshape(s, _column_of_s))),
        when=(scales_input_columns,),
        worth=(keeps_range,),
        reason=_FREE_SCALE,
    ),
    Rule(
        "matmul-of-biased",
        before=matmul(add(x, s), w),
        after=add(_PRODUCT, matmul(reshape(s, _row_of_s), w)),
        when=(scales_input_columns,),
        worth=(keeps_range,),
        reason="a product of weights is computed ahead of time, and biases meet",
    ),
    Rule(
        "scale-of-left-operand",
        before=multiply(matmul(x, y), c),
        after=matmul(multiply(x, c), y),
        when=(one_number,),
        worth=(keeps_sums_after_scale_small,),
        reason="the scale can reach the weights that x was computed with, as in attention",
        source="TASO",
    ),
    Rule(
        "matmul-of-scaled-by-one-number",
        before=matmul(multiply(x, c), y),
        after=multiply(matmul(x, y), c),
        when=(one_number,),
        worth=(keeps_sums_before_scale_small,),
        reason="the scale can meet others, or fuse behind the product",
        source="TASO",
    ),
    *both_ways(
        "matmul-of-permuted-batch",
        matmul(permute(x, "p"), permute(y, "p")),
        "permute-of-batched-matmul",
        permute(matmul(x, y), "p"),
        when=(permutes_batch,),
        reason="one permutation instead of two, or permutations meet",
    ),
    Rule(
        "matmul-of-reshaped-rows",
        before=matmul(reshape(x, "r"), w),
        after=reshape(_PRODUCT, _product_rows),
        when=(regroups_rows,),
        reason="reshapes meet, and products with one input merge",
    ),
    Rule(
        "reshape-of-matmul-rows",
        before=reshape(_PRODUCT, "r"),
        after=matmul(reshape(x, _operand_rows), w),
        when=(regroups_product_rows,),
        reason="reshapes meet, and products with one input merge",
    ),
    Group(
        "merge-matmul-shared-input",
        member=matmul(x, w),
        shared=("x",),
        make=merge_shared_input,
        reason=_MERGE_INPUT,
        source="TASO",
        alike=lambda types, _: types["w"].shape[:-1],
    ),
    Group(
        "merge-matmul-shared-weight",
        member=matmul(x, w),
        shared=("w",),
        make=merge_shared_weight,
        reason=_MERGE_WEIGHT,
        source="TASO",
        alike=lambda types, _: (types["x"].shape[:-2], types["x"].shape[-1:]),
    ),
)
"""Rules that pay in models as people write them."""


_LAW = "needed to prove other equalities, or where weights are computed"

MATMUL_LAWS: tuple[Rule, ...] = (
    Rule("matmul-of-sum", matmul(add(x, y), z), add(matmul(x, z), matmul(y, z)), _LAW, source="TASO"),
    Rule("matmul-with-sum", matmul(x, add(y, z)), add(matmul(x, y), matmul(x, z)), _LAW, source="TASO"),
    Rule(
        "sum-of-blocks",
        before=matmul(concat((x, y), "j"), concat((z, v), "k")),
        after=add(matmul(x, z), matmul(y, v)),
        when=(blocks_meet,),
        reason=_LAW,
        source="TASO",
    ),
    Rule(
        "matmul-with-concat",
        before=matmul(x, concat((y, z), "j")),
        after=concat((matmul(x, y), matmul(x, z)), _columns_of_product),
        when=(columns_of_right,),
        reason=_LAW,
        source="TASO",
    ),
    Rule(
        "matmul-of-concat",
        before=matmul(concat((x, y), "j"), z),
        after=concat((matmul(x, z), matmul(y, z)), "j"),
        when=(rows_of_left,),
        reason=_LAW,
        source="TASO",
    ),
    Rule(
        "scale-of-right-operand",
        before=multiply(matmul(x, y), c),
        after=matmul(x, multiply(y, c)),
        when=(one_number,),
        worth=(keeps_sums_after_scale_small,),
        reason=_LAW,
        source="TASO",
    ),
    Rule(
        "matmul-with-scaled-by-one-number",
        before=matmul(x, multiply(y, c)),
        after=multiply(matmul(x, y), c),
        when=(one_number,),
        worth=(keeps_sums_before_scale_small,),
        reason=_LAW,
        source="TASO",
    ),
    Rule(
        "transpose-of-matmul",
        before=permute(matmul(x, y), "p"),
        after=matmul(permute(y, "p"), permute(x, "p")),
        when=(swaps_rows_and_columns,),
        reason=_LAW,
        source="TASO",
    ),
    Rule(
        "matmul-of-transposes",
        before=matmul(permute(x, "p"), permute(y, "p")),
        after=permute(matmul(y, x), "p"),
        when=(swaps_rows_and_columns,),
        reason=_LAW,
        source="TASO",
    ),
    Rule(
        "slice-of-matmul-columns",
        before=slice_(_ANY_PRODUCT, "s"),
        after=matmul(x, slice_(y, _columns_of_y)),
        when=(keeps_rows,),
        reason="what is not needed is not computed",
    ),
    Rule(
        "slice-of-matmul-rows",
        before=slice_(_ANY_PRODUCT, "s"),
        after=matmul(slice_(x, _rows_of_x), y),
        when=(keeps_columns,),
        reason="what is not needed is not computed",
    ),
)
"""Bilinearity, transposition and blocks: right, but they take apart what the other rules join."""
