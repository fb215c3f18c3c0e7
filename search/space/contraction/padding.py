"""Leaves out the products with rows, and columns, of zeros that padding puts around an image.

    for y in range(14):                       for y in range(14):
        for ry in range(3):              ->       for ry in range(max(0, 1 - y), min(3, 15 - y)):
            sum += pad[y + ry] * w[ry]                sum += pad[y + ry] * w[ry]

A twentieth of the work of a 3 x 3 convolution over 14 x 14, a tenth over 7 x 7, a third where it is dilated by 18 over
32 x 32. Only where all sums of a register tile are of one row of the output.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import tvm_ffi
from tvm import s_tir, tirx
from tvm.ir.expr import TensorLoad

from ..expressions import binding_of, is_conditional, is_zero, nodes_of, substitute, uses
from ..marks import IMAGE_ROWS
from ..statements import annotations_without, block_with, rewrite_marked_loops, with_body
from .plan import Plan

__all__ = ["ImageRows", "image_rows", "misses_image", "skip_padding"]


@dataclass(frozen=True)
class ImageRows:
    """The rows (or columns) `first` to `end` of `extent` in one `dimension` of a padded image: all others are zero.

    The window reads rows that are `dilation` apart.
    """

    dimension: int
    extent: int
    first: int
    end: int
    dilation: int


def image_rows(sch: Any, plan: Plan) -> Mapping[int, ImageRows]:
    """For each reduction axis that slides over a padded image: which rows or columns are worth multiplying."""
    if not plan.staged:
        return {}
    block = sch.get(sch.get_sblock(plan.staged))
    value: Any = block.body.value if isinstance(block.body, tirx.BufferStore) else None
    if not is_conditional(value) or not is_zero(value.args[2]):
        return {}
    variables = [axis.var for axis in block.iter_vars]
    bounds = [_bounds(value.args[0], variable) for variable in variables]
    found: dict[int, ImageRows] = {}
    for window in plan.windows:
        extent = plan.contraction.left.access.shape[window.dimension]
        first, end = bounds[window.dimension]
        rows = ImageRows(window.dimension, extent, first, min(end, extent), window.dilation)
        found[window.tap.position] = rows
    return found


def misses_image(sch: Any, staged: Any, plan: Plan) -> bool:
    """Whether a part of the padded operand that is copied on its own may lie beside the image, padding being wider than
    the window. TVM does not partition loops over such parts correctly: it copies rows in front of the first.

    Of what is no image with something around it, as a selection of one of several values, it may.
    """
    block = sch.get(staged)
    if not is_conditional(block.body.value):
        return True
    loops = sch.get_loops(staged)[-len(block.iter_vars) :]
    reach = {window.dimension: (window.tap.extent - 1) * window.dilation + 1 for window in plan.windows}
    for dimension, (loop, axis) in enumerate(zip(loops, block.iter_vars, strict=True)):
        extent, copied = int(axis.dom.extent), sch.get(loop).extent
        first, end = _bounds(block.body.value.args[0], axis.var)
        is_whole = isinstance(copied, tirx.IntImm) and int(copied) == extent
        if not is_whole and max(first, extent - end) > reach.get(dimension, 1):
            return True
    return False


def skip_padding(func: Any) -> Any:
    """Rewrite the loops of a scheduled PrimFunc that are marked IMAGE_ROWS; the same object when there is none."""
    return rewrite_marked_loops(func, IMAGE_ROWS, _shorter)


def _shorter(loop: Any) -> Any:
    rows = ImageRows(*(int(value) for value in loop.annotations[IMAGE_ROWS]))
    read = _rows_of_first(loop, rows)
    if read is None:
        return with_body(loop, loop.body, IMAGE_ROWS)
    lowest, highest = read

    def constant(value: int) -> Any:
        return tirx.IntImm(str(loop.loop_var.ty.dtype), value)

    def steps(distance: Any) -> Any:
        return tirx.floordiv(distance + constant(rows.dilation - 1), constant(rows.dilation))

    first = tirx.Max(constant(0), steps(constant(rows.first) - highest))
    end = tirx.Min(loop.extent, steps(constant(rows.end) - lowest))
    variable = tirx.Var(loop.loop_var.name, loop.loop_var.ty)
    body = substitute(_without_reduction(loop), [(loop.loop_var, variable + first)])
    extent = tirx.Max(constant(0), end - first)
    kept = annotations_without(loop, IMAGE_ROWS)
    return tirx.For(variable, constant(0), extent, loop.kind, body, annotations=kept)


def _without_reduction(loop: Any) -> Any:
    """The loop's body, in whose blocks no axis that is bound to the loop counts as one of a reduction.

    The binding will begin at what depends on loops around. TVM keeps what is reduced outside of all loops that an axis
    of the reduction is bound to: all sums of the kernel in one buffer, ragged tiles of which threads write over others.
    """

    def realized(realize: Any) -> Any:
        block = realize.block
        axes = [
            tirx.IterVar(axis.dom, axis.var, tirx.IterVar.DataPar) if uses(value, loop.loop_var) else axis
            for axis, value in zip(block.iter_vars, realize.iter_values, strict=True)
        ]
        return s_tir.SBlockRealize(realize.iter_values, realize.predicate, block_with(block, iter_vars=axes))

    return tvm_ffi.structural_map(loop.body, (s_tir.SBlockRealize, realized))


def _rows_of_first(loop: Any, rows: ImageRows) -> tuple[Any, Any] | None:
    """The lowest and the highest row of the padded image that the loop's first iteration reads; None if it reads none.

    Rows grow with every loop inside.
    """
    inside = nodes_of(loop.body, tirx.For)
    counted = [inner for inner in inside if isinstance(inner.extent, tirx.IntImm)]
    others = [inner.loop_var for inner in inside if not isinstance(inner.extent, tirx.IntImm)]
    dtype = str(loop.loop_var.ty.dtype)
    lowest = [(one.loop_var, tirx.IntImm(dtype, 0)) for one in (loop, *counted)]
    highest = [lowest[0], *((one.loop_var, tirx.IntImm(dtype, int(one.extent) - 1)) for one in counted)]
    for realize in nodes_of(loop.body, s_tir.SBlockRealize):
        for load in nodes_of(realize.block.body, TensorLoad):
            if len(load.indices) <= rows.dimension or int(load.source.shape[rows.dimension]) != rows.extent:
                continue
            row = substitute(load.indices[rows.dimension], binding_of(realize))
            if uses(row, loop.loop_var) and not uses(row, *others):
                return substitute(row, lowest), substitute(row, highest)
    return None


def _bounds(condition: Any, variable: Any) -> tuple[int, int]:
    """First value of the variable that a conjunction of bounds allows, and the one behind the last."""
    first, end = 0, 2**31 - 1
    if isinstance(condition, tirx.And):
        parts = [_bounds(condition.a, variable), _bounds(condition.b, variable)]
        return max(low for low, _ in parts), min(high for _, high in parts)
    if isinstance(condition, tirx.LE) and isinstance(condition.a, tirx.IntImm) and condition.b.same_as(variable):
        first = int(condition.a)
    elif isinstance(condition, tirx.LT) and isinstance(condition.b, tirx.IntImm) and condition.a.same_as(variable):
        end = int(condition.b)
    return first, end
