"""How one contraction is laid out for a tiled sketch: which axes are tiled, and what surrounds the loops."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

from ..access import Access, Axis, Block, Linear, dtype_bytes
from ..analysis import Contraction, Kernel
from .pixels import merge_axes

__all__ = ["Plan", "Window", "dimension_of", "make_plans", "spread_plan", "whole_width"]


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
        return True

    def transposed_tile(self, mr: int, nr: int) -> int:
        """Rows, and columns, of the squares in which a tile is written across the output's rows; 0 for elements.

        The last square of the rows begins earlier where they are no multiple: the largest with the least in common.
        """
        sizes = [size for size in (16, 8, 4) if size <= mr and nr % size == 0]
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


def make_plans(kernel: Kernel) -> list[Plan]:
    """Every form that fits the kernel's contraction; empty when its surroundings cannot be scheduled around tiles."""
    whole = kernel.contraction
    if whole is None or len(kernel.outputs) != 1:
        return []
    surroundings = _surroundings(kernel, whole)
    if surroundings is None:
        return []
    staged, inlined, epilogue_inlined, epilogue, fusable = surroundings
    identity = all(_reads_in_place(block, kernel) for block in kernel.epilogue)
    plans = []
    for name, vector in _vector_axes(whole):
        contraction, pixels = whole, tuple[Axis, ...]()
        if name == "rows" and identity and not staged:
            contraction, pixels = _over_pixels(whole, vector)
        if pixels:
            name, vector = "pixels", next(a for a in contraction.rows if a.position == pixels[0].position)
        others = [a for a in contraction.block.spatial if a != vector]
        if name in ("rows", "pixels"):
            unrolled_choices = [a for a in contraction.columns if a != vector] or [
                a for a in contraction.rows if a != vector
            ]
            unrolled = _largest(unrolled_choices)
            second = None
        else:
            rows = [a for a in contraction.rows if a != vector and a.extent > 1]
            unrolled = _contiguous_run(rows, contraction, identity)
            second = rows[-2] if len(unrolled) == 1 and len(rows) > 1 and contraction.window else None
        if not unrolled:
            unrolled = _largest(others[::-1])
        if not unrolled:
            continue
        outer = tuple(a for a in others if a not in unrolled and a != second)
        panel = contraction.right.access if vector.position in contraction.right.access.axes() else None
        if panel is not None and not _is_permutation(panel, contraction.block):
            panel = None
        plans.append(
            Plan(
                name=name,
                kernel=kernel,
                contraction=contraction,
                vector=vector,
                unrolled=unrolled,
                pixels=pixels,
                second=second,
                outer=outer,
                reduction=tuple(sorted(contraction.reduction, key=lambda axis: axis.extent > 1)),
                groups=contraction.groups,
                spread=None,
                staged=staged,
                inlined=inlined,
                epilogue_inlined=epilogue_inlined,
                epilogue=epilogue,
                epilogue_fusable=fusable,
                panel=panel,
                panel_is_weight=contraction.right.weight,
            )
        )
    return plans


def spread_plan(plan: Plan) -> Plan | None:
    """The same with vectors that span several groups; None where image or result lacks channels last, side by side."""
    contraction = plan.contraction
    left, channels = contraction.left.access, contraction.left.access.indices[-1]
    if plan.groups == 1 or channels is None or plan.scattered or channels.offset:
        return None
    size = plan.vector_extent
    inputs = [axis for axis in plan.reduction if channels.coefficients == {axis.position: 1}]
    others = [axis for axis in plan.reduction if axis not in inputs]
    if not inputs or not others or channels.quotients != {plan.vector.position: (size, size)}:
        return None
    if left.shape[-1] != plan.vector.extent or inputs[0].extent != size:
        return None
    if plan.panel is None and contraction.right.access.stride(plan.vector.position) != 1:
        return None
    return replace(plan, name="groups", groups=1, spread=inputs[0], reduction=(*others[:-1], inputs[0], others[-1]))


def _vector_axes(contraction: Contraction) -> list[tuple[str, Axis]]:
    """Names and vectorised axes of the forms that fit."""
    found = []
    columns = [a for a in contraction.columns if a.extent > 1]
    if columns:
        found.append(("columns", max(columns, key=lambda a: a.extent)))
    contiguous = contraction.contiguous
    if contiguous is None or contiguous.extent < 2:
        contiguous = max(contraction.rows, key=lambda a: a.extent, default=None)
    left = contraction.left.access
    if contiguous in contraction.rows and contiguous.extent > 1 and left.stride(contiguous.position) == 1:
        found.append(("rows", contiguous))
    if contiguous in contraction.batch and contiguous.extent > 1:
        found.append(("channels", contiguous))
    if not found:
        spatial = max(contraction.block.spatial, key=lambda a: a.extent, default=None)
        if spatial is not None and spatial not in contraction.columns:
            found.append(("rows", spatial))
        elif spatial is not None:
            found.append(("columns", spatial))
    return found


def _over_pixels(contraction: Contraction, vector: Axis) -> tuple[Contraction, tuple[Axis, ...]]:
    """The contraction with the rows that end in `vector` as one axis, and which these are.

    As it is, and none, where no others can join it, or tiles would have nothing else to unroll.
    """
    run = _contiguous_run([axis for axis in contraction.rows if axis.extent > 1], contraction, identity=True)
    if run[-1:] == (vector,) and any(axis.extent > 1 for axis in contraction.columns):
        for start in range(len(run) - 1):
            merged = merge_axes(contraction, run[start:])
            if merged is not None:
                return merged, run[start:]
    return contraction, ()


def _largest(axes: list[Axis]) -> tuple[Axis, ...]:
    return (max(axes, key=lambda axis: axis.extent),) if axes else ()


def _contiguous_run(rows: list[Axis], contraction: Contraction, identity: bool) -> tuple[Axis, ...]:
    """The last rows, as many as make one contiguous axis in the left operand and the output.

    Only neighbours, in the block and in the output, and only where the epilogue keeps the output's shape (`identity`).
    """
    output = contraction.block.write
    run: list[Axis] = rows[-1:]
    if not identity:
        return tuple(run)
    for axis in reversed(rows[:-1]):
        first = run[0]
        dimensions = dimension_of(output, axis), dimension_of(output, first)
        neighbours = axis.position + 1 == first.position and dimensions[0] + 1 == dimensions[1]
        if not neighbours or _in_window(first, contraction):
            break
        strides = [(a.stride(axis.position), a.stride(first.position)) for a in (contraction.left.access, output)]
        if any(inner is None or outer != inner * first.extent for outer, inner in strides):
            break
        run.insert(0, axis)
    return tuple(run)


def _reads_in_place(block: Block, kernel: Kernel) -> bool:
    """Whether an epilogue block reads what derives from the contraction at its own axes, unpermuted."""
    derived = {kernel.contraction.block.write.buffer} if kernel.contraction else set()
    derived |= {other.write.buffer for other in kernel.epilogue}
    own = tuple(index and replace(index, offset=0) for index in block.write.indices)
    return all(read.shape == block.extents and read.indices == own for read in block.reads if read.buffer in derived)


def _in_window(axis: Axis, contraction: Contraction) -> bool:
    """Whether a reduction axis of extent above one slides along `axis`."""
    extents = {a.position: a.extent for a in contraction.reduction}
    return any(
        index is not None
        and axis.position in index.coefficients
        and any(extents.get(other, 1) > 1 for other in index.coefficients)
        for index in contraction.left.access.indices
    )


def _is_permutation(access: Access, block: Block | None = None) -> bool:
    """Whether every index is one axis (or zero): the buffer is its axes in some order.

    With a `block`, an index may be two of its axes that a cut has made of one: `outer * extent of inner + inner`.
    """

    def one_axis(index: Linear) -> bool:
        steps = sorted(index.coefficients.values())
        if block is not None and len(steps) == 2 and steps[0] == 1:
            inner = next(position for position, step in index.coefficients.items() if step == 1)
            return steps[1] == block.axes[inner].extent
        return steps in ([], [1])

    return all(
        index is not None and not index.quotients and index.offset == 0 and one_axis(index) for index in access.indices
    )


def _surroundings(
    kernel: Kernel, contraction: Contraction
) -> tuple[str, tuple[str, ...], tuple[str, ...], str, bool] | None:
    """Staged producer, inlined producers, inlined epilogue, last block, whether that fuses; None when unknown."""
    producers = kernel.producers
    if not all(block.is_elementwise for block in producers):
        return None
    direct = kernel.writer(contraction.left.access.buffer)
    staged = direct.name if direct is not None and not _is_copy(direct) else ""
    inlined = tuple(block.name for block in producers if block.name != staged)
    epilogue = kernel.epilogue
    if not epilogue:
        return staged, inlined, (), "", True
    if not all(block.is_elementwise for block in epilogue):
        return None
    *folded, last = epilogue
    if last.write.buffer not in kernel.outputs:
        return None
    fusable = all(_keeps_tiles(block, kernel, contraction) for block in epilogue)
    return staged, inlined, tuple(block.name for block in folded), last.name, fusable


def _is_copy(block: Block) -> bool:
    """Whether the block only moves elements, each by the same distance (a padding of nothing)."""
    return block.operations == 0 and not block.conditional and len(block.reads) == 1 and block.reads[0].linear


def _keeps_tiles(block: Block, kernel: Kernel, contraction: Contraction) -> bool:
    """Whether the block reads what derives from the contraction by a permutation of its own axes."""
    derived = {contraction.block.write.buffer} | {b.write.buffer for b in kernel.epilogue}
    return all(_is_permutation(read) for read in block.reads if read.buffer in derived)
