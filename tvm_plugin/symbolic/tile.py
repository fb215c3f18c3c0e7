"""Tiles of a kernel: some of its stages, as a kernel of its own in which the sizes are known."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import tvm_ffi
from tvm import ir, s_tir, tirx

from ..search.space.analysis import ACCUMULATES
from ..search.space.expressions import substitute
from ..search.space.statements import function_of, looped, point
from .kernel import Size, Stage, SymbolicKernel, Window
from .part import changed_block

__all__ = ["Tile", "sums_parts", "tile_of", "windows_of"]


@dataclass(frozen=True, eq=False)
class Tile:
    """A static kernel, and which tensors of the symbolic one its parameters are tiles of.

    Attributes
    ----------
    function : tvm.tirx.PrimFunc
        Not scheduled.
    buffers : tuple
        For each parameter, the buffer of the symbolic kernel.
    outputs : int
        How many parameters, the last ones, are written.
    parts : frozenset of Buffer
        Of these buffers, those that are not whole in the tile.
    extents : mapping
        Of the sizes along which it is not the whole, how long it is.
    name : str
        For people.
    apart : mapping
        Of these buffers, those of which the tile is no single piece of memory: the last dimension along which it is a
        part.
    """

    function: tirx.PrimFunc
    buffers: tuple[Any, ...]
    outputs: int
    parts: frozenset[Any]
    extents: Mapping[Any, int]
    name: str = "tile"
    apart: Mapping[Any, int] = field(default_factory=dict)


def tile_of(
    kernel: SymbolicKernel,
    stages: Sequence[Stage],
    extents: Mapping[Size, int],
    inside: set[Any],
    blocks: Size | None = None,
) -> Tile:
    """Stages with these extents of symbolic sizes.

    Parameters
    ----------
    kernel : SymbolicKernel
    stages : sequence of Stage
    extents : mapping
        Of all symbolic sizes of these stages.
    inside : set of Buffer
        Buffers that only these stages read and write.
    blocks : Size, optional
        Of which `extents` has that of a block, which weights are packed in: blocks are whole.

    Where a stage sums over a part of a size only, the tile adds that to what its result is already: the result is
    a parameter, and an output.
    """
    windows = windows_of(stages)
    touched = [buffer for stage in stages for buffer in (*stage.reads, *stage.writes)]
    shapes = {buffer: _shape(kernel, buffer, extents, windows) for buffer in touched}
    buffers = {b: tirx.decl_buffer(shape, str(b.dtype), str(b.name)) for b, shape in shapes.items()}
    written = list(dict.fromkeys(buffer for stage in stages for buffer in stage.writes if buffer not in inside))
    read = [buffer for buffer in buffers if buffer not in inside and buffer not in written]
    read = [b for b in kernel.function.params if b in read] + [b for b in read if b not in kernel.function.params]
    parameters = [buffers[buffer] for buffer in (*read, *written)]
    statements = [_nest(stage, extents, buffers) for stage in stages]
    origins = [*read, *written]
    local = [buffers[buffer] for buffer in buffers if buffer in inside]
    attributes = {"tirx.noalias": True, "s_tir": True}
    if any(size.symbolic for stage in stages for size in stage.reduced):
        (stage,), (result,) = stages, written
        partial = tirx.decl_buffer(shapes[result], str(result.dtype), f"{result.name}_part")
        before = tirx.decl_buffer(shapes[result], str(result.dtype), f"{result.name}_before")
        statements = [_nest(stage, extents, buffers | {result: partial})]
        statements.append(_sum(stage, before, partial, buffers[result]))
        parameters.insert(len(read), before)
        origins.insert(len(read), result)
        local.append(partial)
        attributes[ACCUMULATES] = True
    function = function_of(parameters, statements, attributes, local)
    cut = [size for size in extents if size is not blocks]
    parts = frozenset(
        one
        for one in origins
        if any(size in cut for size in kernel.dimensions[one]) or any(buffer is one for buffer, _ in windows)
    )
    own = {size for stage in stages for size in stage.sizes}
    along = {size: extent for size, extent in extents.items() if size in own}
    apart: dict[Any, int] = {}
    for one in origins:
        sizes = enumerate(kernel.dimensions[one])
        last = max((place for place, size in sizes if size in cut or (one, place) in windows), default=0)
        if any(int(extent) > 1 for extent in shapes[one][:last]):
            apart[one] = last
    return Tile(function, tuple(origins), len(written), parts, along, apart=apart)


def sums_parts(stage: Stage) -> bool:
    """Whether partial results of the stage can be joined: it adds, multiplies, or takes the largest or smallest.

    No sketch joins single numbers.
    """
    return len(stage.block.body.buffer.shape) > 0 and _combination(stage) is not None


_NEUTRAL: Mapping[type, float] = {tirx.Add: 0.0, tirx.Mul: 1.0}


def _combination(stage: Stage) -> type | None:
    """tirx.Add, Mul, Max or Min, where the stage's result is that of itself and something else.

    Each part begins as the whole does: what sums and products begin with must not change them.
    """
    value, init = stage.block.body.value, stage.block.init
    if type(value) not in (tirx.Add, tirx.Mul, tirx.Max, tirx.Min):
        return None
    if init is None or not isinstance(init.value, tirx.FloatImm | tirx.IntImm):
        return None
    if float(init.value.value) != _NEUTRAL.get(type(value), float(init.value.value)):
        return None
    loads: list[Any] = []
    tvm_ffi.structural_walk(value, (ir.TensorLoad, loads.append))
    own = [load for load in loads if load.source.same_as(stage.block.body.buffer)]
    is_side = len(own) == 1 and any(own[0].same_as(side) for side in (value.a, value.b))
    return type(value) if is_side else None


def windows_of(stages: Sequence[Stage]) -> dict[tuple[Any, int], Window]:
    """By buffer and place of the dimension, what stages read in windows: the longest.

    Raises ValueError where windows of the same dimension move differently.
    """
    found: dict[tuple[Any, int], Window] = {}
    for stage in stages:
        for key, window in stage.windows.items():
            known = found.setdefault(key, window)
            if (known.size, known.stride) != (window.size, window.stride):
                raise ValueError(f"{key[0].name} is read in windows that move differently")
            found[key] = max(known, window, key=lambda one: one.reach)
    return found


def _shape(
    kernel: SymbolicKernel, buffer: Any, extents: Mapping[Size, int], windows: Mapping[tuple[Any, int], Window]
) -> list[Any]:
    shape = []
    for place, size in enumerate(kernel.dimensions[buffer]):
        window = windows.get((buffer, place))
        if window is None:
            shape.append(_extent(size, extents))
        else:
            shape.append(tirx.IntImm("int64", window.extent(extents[window.size])))
    return shape


def _extent(size: Size, extents: Mapping[Size, int]) -> Any:
    return tirx.IntImm("int64", extents[size] if size in extents else int(size.extent))


def _nest(stage: Stage, extents: Mapping[Size, int], buffers: Mapping[Any, Any]) -> Any:
    """The loops of a stage around its block, over other buffers."""
    block = stage.block
    replaced = list(buffers.items())
    axes: list[Any] = []
    loops: list[Any] = []
    for axis, size in zip(block.iter_vars, stage.sizes, strict=True):
        variable = tirx.Var(str(axis.var.name), "int64")
        replaced.append((axis.var, variable))
        domain = ir.Range.from_min_extent(tirx.IntImm("int64", 0), _extent(size, extents))
        axes.append(tirx.IterVar(domain, variable, axis.iter_type))
        loops.append(tirx.Var(f"i{len(loops)}", "int64"))

    def other(part: Any) -> Any:
        return substitute(part, replaced)

    inner = changed_block(block, axes, other, other)
    return looped(loops, [axis.dom.extent for axis in axes], s_tir.SBlockRealize(loops, True, inner))


def _sum(stage: Stage, before: Any, part: Any, result: Any) -> Any:
    """result = before + part, with the stage's operation."""
    shape = list(result.shape)
    operation = _combination(stage)
    assert operation is not None, "a reduction that was not looked at"
    axes = [
        tirx.IterVar(ir.Range.from_min_extent(tirx.IntImm("int64", 0), extent), tirx.Var(f"v{i}", "int64"), 0)
        for i, extent in enumerate(shape)
    ]
    at = [axis.var for axis in axes]
    loops = [tirx.Var(f"i{i}", "int64") for i in range(len(shape))]
    store = tirx.BufferStore(result, operation(tirx.BufferLoad(before, at), tirx.BufferLoad(part, at)), at)
    block = s_tir.SBlock(axes, [point(before, at), point(part, at)], [point(result, at)], "T_combine", store)
    return looped(loops, shape, s_tir.SBlockRealize(loops, True, block))
