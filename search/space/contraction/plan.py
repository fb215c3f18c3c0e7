"""How one contraction is laid out for a tiled sketch: which axes are tiled, and what surrounds the loops."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from ..access import Access, Axis, dtype_bytes
from ..analysis import Contraction, Kernel

__all__ = ["Plan", "Window", "dimension_of", "whole_width"]


@dataclass(frozen=True)
class Window:
    """The index `step * place + dilation * tap` in one `dimension` of the left operand.

    `tiled`: a register tile has several places.
    """

    dimension: int
    place: Axis
    tap: Axis
    step: int
    dilation: int
    tiled: bool


@dataclass(frozen=True)
class Plan:
    """The fixed part of a tiled schedule; everything that its knobs do not decide.

    Attributes
    ----------
    name : str
        Which form this is, by what is vectorised: `columns`, `rows`, `pixels` (several rows, as one axis), `channels`,
        or `groups` (columns of several).
    kernel, contraction
        What is scheduled; of `pixels`, the contraction as if they were one axis (`merge_axes`).
    vector : Axis
        The axis whose elements fill vector registers.
    unrolled : tuple of Axis
        Axes fused into the one that register tiles unroll; several only where they are contiguous in every access.
    pixels : tuple of Axis
        The kernel's axes that are one in `contraction`, outermost first; none in other forms.
    second : Axis or None
        Another unrolled axis, for images whose rows are shorter than a good tile.
    outer : tuple of Axis
        All other spatial axes.
    reduction : tuple of Axis
        Reduction axes, outermost first, those of extent one before all others; the last one is unrolled.
    groups : int
        The column axis is split into this many runs first; the runs count as an outer axis. One where vectors span
        several groups.
    spread : Axis or None
        Where they do: the reduction axis over the inputs of a group (`spread_groups`), the last but one.
    staged : str
        Name of the producer of the left operand that may be computed ahead of the contraction ("" for none).
    inlined : tuple of str
        Producers that are always computed where they are used.
    epilogue_inlined : tuple of str
        Epilogue blocks that are folded into the following one.
    epilogue : str
        The block that writes the result; "" when the contraction itself does.
    epilogue_fusable : bool
        Whether the epilogue maps each register tile to a tile of the result.
    panel : Access or None
        The vectorised operand if it can be packed: the right one of the `columns` form.
    panel_is_weight : bool
        Whether it is packed ahead of time.
    """

    name: str
    kernel: Kernel
    contraction: Contraction
    vector: Axis
    unrolled: tuple[Axis, ...]
    pixels: tuple[Axis, ...]
    second: Axis | None
    outer: tuple[Axis, ...]
    reduction: tuple[Axis, ...]
    groups: int
    spread: Axis | None
    staged: str
    inlined: tuple[str, ...]
    epilogue_inlined: tuple[str, ...]
    epilogue: str
    epilogue_fusable: bool
    panel: Access | None
    panel_is_weight: bool

    @property
    def merged(self) -> tuple[Axis, ...]:
        """The kernel's axes that the schedule makes one; none where there is nothing to merge."""
        return self.pixels or (self.unrolled if len(self.unrolled) > 1 else ())

    @property
    def vector_dimension(self) -> int:
        """The output's dimension along the vectorised axis."""
        return dimension_of(self.contraction.block.write, self.vector)

    @property
    def fused_dimensions(self) -> tuple[int, ...]:
        """The output's dimensions along the unrolled axes."""
        return tuple(dimension_of(self.contraction.block.write, axis) for axis in self.unrolled)

    @property
    def vector_extent(self) -> int:
        """Extent of the vectorised axis, within one group."""
        return self.vector.extent // (self.groups if self.vector in self.contraction.columns else 1)

    @property
    def unrolled_extent(self) -> int:
        """Extent of the fused unrolled axes, within one group."""
        extent = math.prod(axis.extent for axis in self.unrolled)
        return extent // (self.groups if any(a in self.contraction.columns for a in self.unrolled) else 1)

    @property
    def row_axes(self) -> tuple[Axis, ...]:
        """The unrolled axes and the second one, if there is one."""
        return (*self.unrolled, self.second) if self.second else self.unrolled

    @property
    def second_extent(self) -> int:
        """Extent of the second unrolled axis; 1 without one."""
        return self.second.extent if self.second else 1

    def vector_width(self, nr: int, lanes: int) -> tuple[int, bool]:
        """Elements of one vector in tiles of `nr`, and whether a ragged tail must be computed element by element.

        A tail of whole, narrower vectors costs little: widths down to a quarter of a register are used for that.
        """
        width, extent = whole_width(nr, lanes), self.vector_extent
        if extent % nr == 0:
            return width, False
        narrow = width
        while extent % narrow:
            narrow //= 2
        return (narrow, False) if 4 * narrow >= lanes else (width, True)

    def joins_vectors(self, nr: int, lanes: int) -> bool:
        """Whether tiles of `nr` have full vectors and a narrower rest (`join_vectors`): the columns of one group, which
        nothing may be computed beyond.
        """
        grouped = self.groups > 1 and self.vector in self.contraction.columns and not self.scattered
        return grouped and nr > lanes > self.vector_width(nr, lanes)[0]

    def pads_columns(self, nr: int, lanes: int) -> bool:
        """Whether packed tiles of `nr` compute the ragged last one whole: else all vectors would have to be narrower.

        The panel has zeros there; narrow vectors write back what exists. An image has none: its channels end.
        """
        if self.panel is None or self.groups > 1 or self.left_vectorised:
            return False
        width, scalar = self.vector_width(nr, lanes)
        return not scalar and width < whole_width(nr, lanes)

    @property
    def row_loops(self) -> bool:
        """Whether loops stand outside the one over chunks of rows, columns aside."""
        return self.outer_extent > 1 or self.second is not None

    @property
    def overlaps(self) -> bool:
        """Whether ragged last tiles may begin earlier, so that they are whole: two tiles compute some results alike."""
        return not self.kernel.accumulates

    def transposed_tile(self, mr: int, nr: int) -> int:
        """Rows, and columns, of the squares in which a tile is written across the output's rows; 0 for elements.

        The last square of the rows begins earlier where they are no multiple: the largest with the least in common.
        """
        sizes = [size for size in (16, 8, 4) if size <= mr and nr % size == 0 and (self.overlaps or mr % size == 0)]
        return min(sizes, key=lambda size: -mr % size, default=0) if self.scattered else 0

    @cached_property
    def windows(self) -> tuple[Window, ...]:
        """Windows over the left operand of which single tiles may leave out taps (`padding.skip_padding`).

        Those have a loop, and slide over rows that tiles do not span, or in steps so long that some tiles of columns
        lie beside the image for a tap.
        """
        found = []
        axes = {axis.position: axis for axis in self.contraction.block.axes}
        looped = {axis.position for axis in self.reduction[:-1] if axis.extent > 1}
        unrolled = {axis.position for axis in self.unrolled}
        for dimension, index in enumerate(self.contraction.left.access.indices):
            if index is None or len(index.coefficients) != 2:
                continue
            (place, step), (tap, dilation) = sorted(index.coefficients.items(), key=lambda c: axes[c[0]].reduction)
            tiled = place in unrolled
            if tap in looped and place != self.vector.position and step > 0 and dilation > (1 if tiled else 0):
                found.append(Window(dimension, axes[place], axes[tap], step, dilation, tiled))
        return tuple(found)

    def skipped_share(self, mr: int) -> float:
        """Share of the products with zeros around an image that tiles of `mr` columns of one row leave out.

        Images are taken to be padded alike on both sides.
        """
        width = mr if any(window.tiled for window in self.windows) else 1
        if width not in self._skipped_shares:
            self._skipped_shares[width] = self._skipped_share(width)
        return self._skipped_shares[width]

    @cached_property
    def _skipped_shares(self) -> dict[int, float]:
        """What `skipped_share` found: estimates ask again and again."""
        return {}

    def _skipped_share(self, mr: int) -> float:
        share = 1.0
        padded = self.contraction.left.access.shape
        inside = self.kernel.block(self.staged).reads[0].shape if self.staged else padded
        for window in self.windows:
            first = (padded[window.dimension] - inside[window.dimension]) // 2
            end = first + inside[window.dimension]
            width = mr if window.tiled else 1
            tiles = [
                (start * window.step, (min(start + width, window.place.extent) - 1) * window.step)
                for start in range(0, window.place.extent, width)
            ]
            taps = [tap * window.dilation for tap in range(window.tap.extent)]
            read = [first <= high + tap and low + tap < end for low, high in tiles for tap in taps]
            share *= sum(read) / len(read)
        return 1.0 - share

    @property
    def rows_share_taps(self) -> bool:
        """Whether the innermost reduction slides along a tile's rows, which read the same elements one tap apart."""
        tap, place = self.reduction[-1].position, self.unrolled[-1].position
        indices = (index for index in self.contraction.left.access.indices if index is not None)
        return any(tap in index.coefficients and place in index.coefficients for index in indices)

    @property
    def outer_extent(self) -> int:
        """Iterations of all other spatial loops, groups included."""
        return self.groups * math.prod(axis.extent for axis in self.outer)

    @property
    def reduction_extent(self) -> int:
        """Length of the whole reduction."""
        return math.prod(axis.extent for axis in self.reduction)

    @property
    def element_bytes(self) -> int:
        """Bytes of one accumulator."""
        return dtype_bytes(self.contraction.block.write.dtype)

    @property
    def spread_cost(self) -> float:
        """Vector-instruction times, beside the multiply-adds, of spreading one element of the left operand."""
        return 0.5

    @property
    def row_corrections(self) -> int:
        """Vector instructions that each row of a tile takes in each reduction step beside its multiply-adds."""
        return 0

    @property
    def copied_elements(self) -> int:
        """Elements of operands that each call rearranges one by one."""
        return 0

    @property
    def left_vectorised(self) -> bool:
        """Whether the left operand is read by vectors, as well as or instead of the right one."""
        return self.vector.position in self.contraction.left.access.axes()

    @property
    def right_vectorised(self) -> bool:
        """Whether the right operand is read by vectors."""
        return self.vector.position in self.contraction.right.access.axes()

    @property
    def slides_over_channels(self) -> bool:
        """Whether it is a window of which vectors lie along both operands: each channel has weights of its own."""
        return self.left_vectorised and self.right_vectorised

    @property
    def vectors_over_image(self) -> bool:
        """Whether vectors lie along the left operand alone: the right one is read element by element, in chunks."""
        return self.left_vectorised and not self.right_vectorised

    @property
    def scattered(self) -> bool:
        """Whether vectors are written across the output's contiguous axis, element by element."""
        return self.contraction.block.write.stride(self.vector.position) != 1 and self.vector.extent > 1


def whole_width(extent: int, lanes: int) -> int:
    """Elements of the widest vector, at most `lanes`, that divides an extent: a power of two."""
    width = lanes
    while extent % width:
        width //= 2
    return width


def dimension_of(access: Access, axis: Axis) -> int:
    """The dimension that an axis runs along."""
    return next(d for d, i in enumerate(access.indices) if i is not None and axis.position in i.coefficients)
