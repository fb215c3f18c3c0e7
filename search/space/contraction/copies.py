"""Copies that a contraction reads: panels of the vectorised operand, and the padded left one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..access import Access
from ..hardware import MASKED_BYTES
from ..marks import AHEAD_OF_TIME
from ..nest import fuse, index_map, partition
from .padding import misses_image
from .plan import Plan, whole_width

__all__ = [
    "AHEAD",
    "AT_CHUNK",
    "AT_ROOT",
    "PAD_AT_CHUNK",
    "PAD_AT_OUTER",
    "PAD_AT_ROOT",
    "PAD_INLINE",
    "UNPACKED",
    "pack_panels",
    "panel_dimensions",
    "read_of",
    "schedule_copy",
    "schedule_padding",
    "split_lanes",
    "zero_of",
]

AHEAD, UNPACKED, AT_CHUNK, AT_ROOT = 3, 0, 1, 2
"""Values of the `pack` knob: by a separate kernel that runs once, not at all, in each chunk, once in each call."""

PAD_AT_ROOT, PAD_AT_OUTER, PAD_AT_CHUNK, PAD_INLINE = 0, 1, 2, 3
"""Values of the `pad` knob: the padded left operand is computed once, in each iteration of the outermost (parallel)
loop, in each chunk of rows, or wherever it is read."""

LONG_RUN = 4
"""Vectors of channels a pixel from which the loop over padded pixels is not partitioned."""


def pack_panels(sch: Any, block: Any, plan: Plan, values: Mapping[str, int]) -> Any:
    """Copy the vectorised operand into panels `[.., columns / nr, reduction.., nr]`; the copying block, or None."""
    if plan.panel is None or values["pack"] == UNPACKED:
        return None
    nr, panel = values["nr"], plan.panel
    copy = sch.cache_read(block, read_of(sch, block, plan, panel), "global")
    rest, column, reduced = panel_dimensions(panel, plan)

    def layout(*index: Any) -> list[Any]:
        j = index[column]
        return [*(index[d] for d in rest), j // nr, *(index[d] for d in reduced), j % nr]

    pad_value = zero_of(panel.dtype) if panel.shape[column] % nr != 0 else None
    panels = index_map(sch, block, layout, len(panel.shape))
    sch.transform_layout(copy, ("write", 0), panels, pad_value=pad_value)
    if values["pack"] == AHEAD:
        sch.annotate(copy, AHEAD_OF_TIME, True)
    return copy


def panel_dimensions(panel: Access, plan: Plan) -> tuple[list[int], int, list[int]]:
    """Of the operand that is packed: its dimensions before columns, that of columns, those of the reduction."""
    # Of an axis that is cut in two, the inner part stands for both.
    steps = [index.coefficients for index in panel.indices if index is not None]
    axis_of = [min(step, key=step.__getitem__, default=None) for step in steps]
    column = axis_of.index(plan.vector.position)
    reduced = [axis_of.index(a.position) for a in plan.reduction if a.position in axis_of]
    return [d for d in range(len(axis_of)) if d != column and d not in reduced], column, reduced


def schedule_padding(sch: Any, staged: Any, plan: Plan, lanes: int, parallel: bool) -> None:
    """The padded operand: loops are partitioned into border and interior, so that the interior is a plain copy.

    Not where each pixel is a long run of channels: a branch a pixel costs nothing there, and LLVM would unroll the
    interior wholly, rows and channels alike (896 vectors of a 16 x 16 x 1024 image: 1.7 s of compiling instead of 0.1).
    Nor where rows of pixels are copied and the machine has masks: LLVM makes masked vectors of the whole row, as fast
    and in 5 to 70 % less time to compile.
    Channels of one group, where they are last and not padded, are copied by narrower vectors, too: element by element,
    a copy of 28 x 28 x 256 in 32 groups takes a third as long as the convolution.
    """
    copy = plan.kernel.block(plan.staged)
    rank = len(copy.axes)
    loops = sch.get_loops(staged)
    own = loops[-rank:]
    conditional = copy.conditional
    run = int(sch.get(own[-1]).extent)
    width = whole_width(run, lanes)
    partitioned = conditional and not misses_image(sch, staged, plan)
    inside = conditional and copy.write.shape[-1] == copy.reads[0].shape[-1]
    whole_vectors = width == lanes or (inside and 4 * width >= lanes)
    long_runs = inside and whole_vectors and run >= LONG_RUN * width
    masked = not inside and lanes * plan.element_bytes >= MASKED_BYTES
    if parallel and rank > 2 and not long_runs:
        sch.parallel(sch.fuse(*own[:-2], preserve_unit_iters=True))
        own = own[-2:]
    if long_runs:
        pixels = sch.fuse(*own[:-1], preserve_unit_iters=True)
        if parallel:
            sch.parallel(pixels)
    elif partitioned and not masked:
        for loop in own[-3:-1] if whole_vectors else own[-2:]:
            partition(sch, loop)
    if whole_vectors or not conditional:
        sch.vectorize(split_lanes(sch, own[-1], lanes)[1])


def schedule_copy(sch: Any, block: Any, lanes: int, parallel: bool) -> None:
    """An element-wise block on its own: outer loops parallel, innermost vectorised."""
    loops = sch.get_loops(block)
    _, lane = split_lanes(sch, loops[-1], lanes)
    if parallel and len(loops) > 1:
        sch.parallel(fuse(sch, loops[:-1]))
    sch.vectorize(lane)


def split_lanes(sch: Any, loop: Any, lanes: int, extent: int | None = None) -> Any:
    """Split a loop into whole vectors that divide its extent: the loop over vectors, and the one over lanes."""
    extent = int(sch.get(loop).extent) if extent is None else extent
    return sch.split(loop, [None, whole_width(extent, lanes)])


def read_of(sch: Any, block: Any, plan: Plan, access: Access) -> int:
    """Which of the block's reads an access is. Parameters may have equal names: those of a model's variables."""
    parameters = [parameter for parameter in sch.mod["main"].params if hasattr(parameter.ty, "shape")]
    reads = [read.source for read in sch.get(block).reads]
    if access.buffer < len(parameters):
        return next(place for place, source in enumerate(reads) if source.same_as(parameters[access.buffer]))
    own = ["" if source in parameters else str(source.name) for source in reads]
    return own.index(plan.kernel.buffers[access.buffer])


def zero_of(dtype: str) -> float | int:
    """What fills up an operand."""
    return 0.0 if "float" in dtype else 0
