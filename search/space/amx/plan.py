"""How a contraction is laid out for tiles of AMX; see `contraction.plan` for the parts that all plans share."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace

from ..access import Axis
from ..contraction.dot import whole_dimension
from ..contraction.plan import Plan
from .products import TileProduct

__all__ = ["TilePlan", "tile_plan"]


@dataclass(frozen=True)
class TilePlan(Plan):
    """A plan whose outermost reduction axis counts rows of tiles.

    Attributes
    ----------
    product : TileProduct
        What multiplies.
    grouped : Axis
        The reduction axis that is cut into rows of tiles, with its own extent.
    """

    product: TileProduct
    grouped: Axis

    @property
    def overlaps(self) -> bool:
        """Never: ragged tiles read zeros, and what they compute of them is not written."""
        return False

    @property
    def whole_rows(self) -> bool:
        """Whether rows of the left operand lie in memory as tiles want them: side by side, and no part of one."""
        left = self.contraction.left.access
        return left.stride(self.grouped.position) == 1 and self.grouped.extent % self.product.depth == 0

    @property
    def windowed(self) -> bool:
        """Whether tiles that are neighbours read some rows alike."""
        reduced = {
            axis.position for axis in self.reduction if axis.extent > 1 and axis.position != self.grouped.position
        }
        rows = {axis.position for axis in self.row_axes}
        return any(
            index is not None and index.coefficients.keys() & reduced and index.coefficients.keys() & rows
            for index in self.contraction.left.access.indices
        )


def tile_plan(plan: Plan, product: TileProduct) -> TilePlan | None:
    """The plan with its reduction in rows of tiles; None where that is not possible."""
    contraction = plan.contraction
    left, right = contraction.left.access, contraction.right.access
    if plan.name != "columns" or plan.panel is None or plan.groups > 1 or plan.left_vectorised or plan.scattered:
        return None
    if left.buffer == right.buffer:  # a copy of one is one of both
        return None
    if any(plan.kernel.block(name).write.buffer == right.buffer for name in plan.inlined):
        return None
    row = plan.unrolled[-1].position
    # A single row of each matrix of a batch: the axis that stands for rows picks the weights, too.
    if any(axis.position in right.axes() for axis in plan.row_axes):
        return None
    if sum(index is not None and row in index.coefficients for index in left.indices) != 1:
        return None
    grouped = max(
        (a for a in plan.reduction if whole_dimension(left, a) and whole_dimension(right, a)),
        key=lambda axis: axis.extent,
        default=None,
    )
    if grouped is None:
        return None
    steps = replace(grouped, extent=math.ceil(grouped.extent / product.depth))
    own = {field.name: getattr(plan, field.name) for field in fields(Plan)}
    own["reduction"] = (steps, *(a for a in plan.reduction if a != grouped))
    return TilePlan(**own, product=product, grouped=grouped)
