"""A kernel as stages whose axes run along dimensions of its tensors, and which of their sizes are symbolic."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tvm_ffi
from tvm import ir, s_tir, sym, tirx

from ..search.space.expressions import substitute

__all__ = [
    "AXIS",
    "Size",
    "Stage",
    "SymbolicKernel",
    "Window",
    "axes_of",
    "grouped",
    "is_common",
    "number_at",
    "read_kernel",
    "symbols_of",
    "with_sizes",
]

AXIS = -1
"""The place of an axis, by its variable, where dimensions are known by buffer and place."""

Key = tuple[Any, int]


@dataclass(frozen=True, eq=False)
class Size:
    """Axes and dimensions that run together: each of the axes is the index of dimensions of several buffers.

    Attributes
    ----------
    extent : tvm.ir.Expr
        How many there are; in terms of the kernel's symbols where it is symbolic.
    """

    extent: Any

    @property
    def symbolic(self) -> bool:
        """Whether the extent is known only when the kernel runs."""
        return not isinstance(self.extent, tirx.IntImm)


@dataclass(frozen=True)
class Window:
    """What a stage reads along a dimension for each place of a size, as convolutions and pooling do.

    Attributes
    ----------
    size : Size
    stride : int
        From the window of one place to that of the next.
    reach : int
        How long a window is.
    """

    size: Size
    stride: int
    reach: int

    def extent(self, places: Any) -> Any:
        """What so many places read."""
        return (places - 1) * self.stride + self.reach


@dataclass(frozen=True, eq=False)
class Stage:
    """One block of a kernel.

    Attributes
    ----------
    block : tvm.s_tir.SBlock
    sizes : tuple of Size
        Along which each axis of the block runs.
    whole : frozenset of Size
        Along which places differ in more than where they are: what is computed there depends on the index, or reads
        other places. Tiles of these cannot be computed alone.
    needs_symbols : bool
        Whether no tile of known sizes can compute it: it computes with a symbol, as the mean over a symbolic size does,
        or a dimension of what it reads is one along which none of its axes runs.
    windows : mapping
        By buffer and place of the dimension, of those that it reads in windows.
    """

    block: Any
    sizes: tuple[Size, ...]
    whole: frozenset[Size]
    needs_symbols: bool
    windows: Mapping[Key, Window]

    @property
    def reduced(self) -> tuple[Size, ...]:
        """The sizes that it sums (or takes the maximum) over."""
        axes = zip(self.block.iter_vars, self.sizes, strict=True)
        return tuple(size for axis, size in axes if int(axis.iter_type) == tirx.IterVar.CommReduce)

    @property
    def free(self) -> tuple[Size, ...]:
        """The sizes of which places can be computed alone, in this stage."""
        reduced = self.reduced
        return tuple(size for size in self.sizes if size not in self.whole and size not in reduced)

    @property
    def reads(self) -> list[Any]:
        """The buffers that it reads, each once."""
        return _distinct(region.source for region in self.block.reads)

    @property
    def writes(self) -> list[Any]:
        """The buffers that it writes, each once."""
        return _distinct(region.source for region in self.block.writes)


@dataclass(frozen=True, eq=False)
class SymbolicKernel:
    """A kernel with symbolic sizes.

    Attributes
    ----------
    function : tvm.tirx.PrimFunc
    stages : tuple of Stage
        In the order in which they run.
    dimensions : mapping
        The sizes of a buffer's dimensions, by buffer.
    """

    function: Any
    stages: tuple[Stage, ...]
    dimensions: Mapping[Any, tuple[Size, ...]]

    def columns(self, stages: Sequence[Stage]) -> Size | None:
        """The size along which elements of the last stage's result lie side by side; None where it is one number."""
        return next(reversed(self.dimensions[stages[-1].block.body.buffer]), None)

    @property
    def overwrites(self) -> bool:
        """Whether it writes an argument that it also reads: no place may be computed twice."""
        written = {buffer for stage in self.stages for buffer in stage.writes}
        read = {buffer for stage in self.stages for buffer in stage.reads}
        return any(parameter in written and parameter in read for parameter in self.function.params)


def symbols_of(function: tirx.PrimFunc) -> list[Any]:
    """The variables that a kernel's sizes, and numbers that are known only when it runs, are made of."""
    symbols = [parameter for parameter in function.params if not hasattr(parameter.ty, "shape")]
    for parameter in function.params:
        for extent in getattr(parameter.ty, "shape", ()):
            tvm_ffi.structural_walk(extent, (ir.Var, symbols.append))
    return list(dict.fromkeys(symbols))


def number_at(expression: Any, sizes: Mapping[str, int], usual: int) -> int:
    """An expression where its symbols are these numbers, by their names; `usual` those without one."""
    symbols: list[Any] = []
    tvm_ffi.structural_walk(expression, (ir.Var, symbols.append))
    values = [(s, tirx.IntImm(str(s.ty.dtype), sizes.get(str(s.name), usual))) for s in dict.fromkeys(symbols)]
    return int(sym.Analyzer().simplify(substitute(expression, values)))


def with_sizes(mod: ir.IRModule, size: int, sizes: Mapping[str, int] | None = None) -> ir.IRModule:
    """A module of one kernel, "main", in which each symbol is this number, or what `sizes` has of its name."""
    given, symbols = mod["main"], symbols_of(mod["main"])
    buffers = [parameter for parameter in given.params if hasattr(parameter.ty, "shape")]
    function = tirx.PrimFunc(buffers, given.body).with_attr(dict(given.attrs))

    def value_of(variable: Any) -> Any:
        value = (sizes or {}).get(str(variable.name), size)
        return tirx.IntImm(str(variable.ty.dtype), value) if variable in symbols else variable

    return ir.IRModule({"main": tvm_ffi.structural_map(function, (ir.Var, value_of))})


def read_kernel(function: tirx.PrimFunc) -> SymbolicKernel | None:
    """The kernel as stages; None where it is not a sequence of loop nests around one block each."""
    realized = _blocks(function)
    if realized is None:
        return None
    groups = _Groups()
    found = [_join(block, groups) for block in realized]
    sizes = groups.sizes()
    stages = tuple(_stage(block, *of_block, sizes) for block, of_block in zip(realized, found, strict=True))
    dimensions = {
        buffer: tuple(sizes[buffer, place] for place in range(len(buffer.shape))) for buffer in groups.buffers
    }
    return SymbolicKernel(function, stages, dimensions)


def _stage(
    block: Any, inexact: set[Key], windows: Mapping[Key, tuple[Any, int, int]], sizes: Mapping[Key, Size]
) -> Stage:
    own = tuple(sizes[axis.var, AXIS] for axis in block.iter_vars)
    twice = {size for size in own if own.count(size) > 1}  # what two axes do along one size is more than a tile
    variables = {axis.var for axis in block.iter_vars}
    whole = {sizes[key] for key in inexact if key in sizes}
    computes = any(place == AXIS and variable not in variables for variable, place in inexact)
    elsewhere = any(size.symbolic and size not in own for size in whole)
    reads = {key: Window(sizes[axis, AXIS], stride, reach) for key, (axis, stride, reach) in windows.items()}
    return Stage(block, own, frozenset(whole | twice), computes or elsewhere, reads)


def is_common(size: Size, stages: Sequence[Stage]) -> bool:
    """Whether places of a size can be computed alone, in all stages."""
    return all(size in stage.free for stage in stages)


def grouped(stages: Sequence[Stage]) -> list[list[Stage]]:
    """Stages that can be computed in tiles of the same symbolic sizes, together; the others alone. In order."""
    groups: list[list[Stage]] = []
    for stage in stages:
        needed = [place for place, group in enumerate(groups) if _depends(stage, group)]
        first = max(needed, default=0)
        same = [place for place in range(first, len(groups)) if _alike(stage, groups[place][0])]
        if same:
            groups[same[-1]].append(stage)
        else:
            groups.append([stage])
    return groups


def _depends(stage: Stage, others: Sequence[Stage]) -> bool:
    """Whether it reads what one of the others writes, or overwrites what one reads or writes."""
    return any(
        any(buffer in other.writes for buffer in (*stage.reads, *stage.writes))
        or any(buffer in other.reads for buffer in stage.writes)
        for other in others
    )


def _alike(one: Stage, other: Stage) -> bool:
    sizes = [{size for size in stage.sizes if size.symbolic} for stage in (one, other)]
    free = [{size for size in stage.free if size.symbolic} for stage in (one, other)]
    return sizes[0] == sizes[1] == free[0] == free[1] and not (one.needs_symbols or other.needs_symbols)


def _blocks(function: tirx.PrimFunc) -> list[Any] | None:
    """The blocks under the root, where each is alone in loops over its own axes."""
    root = function.body
    if not isinstance(root, s_tir.SBlockRealize) or len(root.block.iter_vars) or len(root.block.match_buffers):
        return None
    body = root.block.body
    blocks = []
    for statement in body.seq if isinstance(body, tirx.SeqStmt) else [body]:
        loops = []
        while isinstance(statement, tirx.For):
            loops.append(statement)
            statement = statement.body
        if not isinstance(statement, s_tir.SBlockRealize) or not _runs_over(statement, loops):
            return None
        blocks.append(statement.block)
    return blocks


def _runs_over(realize: Any, loops: Sequence[Any]) -> bool:
    """Whether the axes of a block, sums or places in any order, are the loops around it, and it is one store."""
    block = realize.block
    if not {int(axis.iter_type) for axis in block.iter_vars} <= {tirx.IterVar.DataPar, tirx.IterVar.CommReduce}:
        return False
    plain = isinstance(realize.predicate, tirx.IntImm) and int(realize.predicate) == 1
    alone = isinstance(block.body, tirx.BufferStore) and not len(block.alloc_buffers) and not len(block.match_buffers)
    if not plain or not alone or len(loops) != len(block.iter_vars):
        return False
    return all(
        value.same_as(loop.loop_var) and _is_zero(loop.min) and tvm_ffi.structural_equal(loop.extent, axis.dom.extent)
        for value, loop, axis in zip(realize.iter_values, loops, block.iter_vars, strict=True)
    )


def _is_zero(value: Any) -> bool:
    return isinstance(value, tirx.IntImm) and int(value) == 0


def _join(block: Any, groups: _Groups) -> tuple[set[Key], dict[Key, tuple[Any, int, int]]]:
    """Join the axes and dimensions that one block says run together; those that it uses in other ways, and symbols.

    And dimensions that it reads in windows: of which axis, with what stride and reach.
    """
    axes = {axis.var for axis in block.iter_vars}
    inexact: set[Key] = set()
    windows: dict[Key, tuple[Any, int, int]] = {}
    for axis in block.iter_vars:
        groups.add((axis.var, AXIS), axis.dom.extent)
    for statement in (block.body, block.init):
        accesses: list[Any] = []
        if statement is not None:
            tvm_ffi.structural_walk(statement, ((tirx.BufferStore, ir.TensorLoad), accesses.append))
            inexact |= set(axes_of(statement.value))
        for access in accesses:
            buffer = access.buffer if isinstance(access, tirx.BufferStore) else access.source
            groups.add_buffer(buffer)
            for place, index in enumerate(access.indices):
                dimension = (buffer, place)
                alone = isinstance(index, ir.Var) and index in axes
                if alone and groups.unite((index, AXIS), dimension):
                    continue
                window = None if alone else _window(index, buffer.shape[place], block)
                if window is not None and windows.setdefault(dimension, window) == window:
                    continue
                inexact |= {dimension, *axes_of(index)}
    return inexact, {key: window for key, window in windows.items() if key not in inexact}


def _window(index: Any, extent: Any, block: Any) -> tuple[Any, int, int] | None:
    """v * stride + k * step + .. along a dimension of symbolic extent: the axis v, its stride, how far the ks reach.

    The extent of v is symbolic, too: of others, there are no tiles.
    """
    factors = _factors(index)
    if isinstance(extent, tirx.IntImm) or factors is None:
        return None
    free, reach = [], 1
    for axis in block.iter_vars:
        factor = factors.pop(axis.var, 0)
        is_known, is_free = isinstance(axis.dom.extent, tirx.IntImm), int(axis.iter_type) == tirx.IterVar.DataPar
        if factor and is_free and not is_known:
            free.append((axis.var, factor))
        elif factor and is_known and not is_free:
            reach += factor * (int(axis.dom.extent) - 1)
        elif factor:
            return None
    if factors or len(free) != 1 or min(factor for _, factor in free) < 1:
        return None
    return (*free[0], reach)


def _factors(index: Any) -> dict[Any, int] | None:
    """What each variable of a sum is multiplied by; None where it is more than such a sum, or a factor is negative."""
    if isinstance(index, ir.Var):
        return {index: 1}
    if isinstance(index, tirx.Mul) and isinstance(index.a, ir.Var) and isinstance(index.b, tirx.IntImm):
        return {index.a: int(index.b)} if int(index.b) > 0 else None
    if isinstance(index, tirx.Add):
        left, right = _factors(index.a), _factors(index.b)
        if left is None or right is None or left.keys() & right.keys():
            return None
        return left | right
    return None


def axes_of(value: Any) -> list[Key]:
    """The axes and symbols that a value is computed with, besides what is loaded."""

    def number(load: Any) -> Any:
        return tirx.const(0, str(load.ty.dtype))

    found: list[Any] = []
    tvm_ffi.structural_walk(tvm_ffi.structural_map(value, (ir.TensorLoad, number)), (ir.Var, found.append))
    return [(variable, AXIS) for variable in found]


def _distinct(buffers: Iterable[Any]) -> list[Any]:
    return list(dict.fromkeys(buffers))


class _Groups:
    """Axes and dimensions that are joined step by step."""

    def __init__(self) -> None:
        self._parent: dict[Key, Key] = {}
        self._extent: dict[Key, Any] = {}
        self.buffers: list[Any] = []

    def add(self, key: Key, extent: Any) -> None:
        """Know an axis or a dimension of this extent."""
        if key not in self._parent:
            self._parent[key] = key
            self._extent[key] = extent

    def add_buffer(self, buffer: Any) -> None:
        """Know a buffer and its dimensions."""
        if buffer not in self.buffers:
            self.buffers.append(buffer)
            for place, extent in enumerate(buffer.shape):
                self.add((buffer, place), extent)

    def unite(self, one: Key, other: Key) -> bool:
        """Both run together, if they are equally long."""
        one, other = self._root(one), self._root(other)
        if one != other and tvm_ffi.structural_equal(self._extent[one], self._extent[other]):
            self._parent[other] = one
        return self._root(one) == self._root(other)

    def sizes(self) -> dict[Key, Size]:
        """The size of each axis and dimension."""
        made = {root: Size(self._extent[root]) for root in map(self._root, self._parent)}
        return {key: made[self._root(key)] for key in self._parent}

    def _root(self, key: Key) -> Key:
        while self._parent[key] != key:
            key = self._parent[key]
        return key
