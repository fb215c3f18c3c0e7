"""Forms of a contraction that fit its kernel: which axes are vectorised and unrolled, and what surrounds the loops."""

from __future__ import annotations

from dataclasses import replace

from ..access import Access, Axis, Block, Linear
from ..analysis import Contraction, Kernel
from .pixels import merge_axes
from .plan import Plan, dimension_of

__all__ = ["make_plans", "spread_plan"]


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
    """Whether the block reads what derives from the contraction by a permutation of its own axes.

    Of one place of an axis alone, all tiles but one would be tiles of nothing: TVM finds no place for the block.
    """
    derived = {contraction.block.write.buffer} | {b.write.buffer for b in kernel.epilogue}
    reads = [read for read in block.reads if read.buffer in derived]
    return all(_is_permutation(read) and not _is_of_one_place(read, block) for read in reads)


def _is_of_one_place(read: Access, block: Block) -> bool:
    """Whether an axis of the buffer is longer than the one place of it that the block reads."""
    return any(
        size > 1 and index is not None and all(block.axes[position].extent == 1 for position in index.coefficients)
        for size, index in zip(read.shape, read.indices, strict=True)
    )
