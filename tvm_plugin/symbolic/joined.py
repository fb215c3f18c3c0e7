"""Sizes that lie next to each other in all tensors, as one: pixels instead of rows and columns, words of a batch."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import tvm_ffi
from tvm import ir, s_tir, sym, tirx

from ..search.space.expressions import substitute
from ..search.space.statements import function_of, looped
from .kernel import Size, Stage, SymbolicKernel, read_kernel
from .part import changed_block, number

__all__ = ["seen_as_given", "with_sizes_joined"]


def with_sizes_joined(function: tirx.PrimFunc) -> tuple[tirx.PrimFunc, dict[Any, Any]]:
    """A kernel in which two symbolic sizes that are always side by side are one, as the height and width of images in a
    1 x 1 convolution: tiles then are not as long as what is left of a row. And without sums over single places, which
    make a channel of a depthwise convolution look as if it was computed of others.

    Returns
    -------
    function : tvm.tirx.PrimFunc
    given : dict
        The parameters that it has in place of others, with fewer dimensions: to these, from the former.
    """
    function = _without_single_sums(function)
    kernel = read_kernel(function)
    pair = None if kernel is None else _side_by_side(kernel)
    given: dict[Any, Any] = {}
    while kernel is not None and pair is not None:
        function, renamed = _joined(kernel, *pair)
        given = {renamed.get(new, new): old for new, old in given.items()} | {
            new: old for old, new in renamed.items() if old not in given
        }
        kernel = read_kernel(function)
        pair = None if kernel is None else _side_by_side(kernel)
    return function, given


def seen_as_given(function: tirx.PrimFunc, given: Mapping[Any, Any]) -> tirx.PrimFunc:
    """A kernel of these parameters, whose body sees them with fewer dimensions."""
    root = function.body.block
    views = [tirx.DeclBuffer(new, data=tirx.buffer_data(old)) for new, old in given.items() if new in function.params]
    parameters = [given.get(parameter, parameter) for parameter in function.params]
    return function_of(parameters, [*views, root.body], function.attrs, root.alloc_buffers)


def _side_by_side(kernel: SymbolicKernel) -> tuple[Size, Size] | None:
    """Two symbolic sizes that are next to each other in all buffers, and that all stages treat alike, if there are."""
    pairs = dict.fromkeys(pair for sizes in kernel.dimensions.values() for pair in itertools.pairwise(sizes))
    return next((pair for pair in pairs if _can_be_joined(kernel, *pair)), None)


def _can_be_joined(kernel: SymbolicKernel, one: Size, other: Size) -> bool:
    def are_together(sizes: Sequence[Size]) -> bool:
        if one not in sizes and other not in sizes:
            return True
        there = [place for place, size in enumerate(sizes) if size in (one, other)]
        return len(there) == 2 and sizes[there[0]] is one and there[1] == there[0] + 1

    def are_free(stage: Stage) -> bool:
        touched = [size for buffer in (*stage.reads, *stage.writes) for size in kernel.dimensions[buffer]]
        if not any(size in (one, other) for size in (*touched, *stage.sizes)):
            return True
        seen = any(window.size in (one, other) for window in stage.windows.values())
        once = all(stage.sizes.count(size) == 1 for size in (one, other))
        return not seen and once and any(one in alike and other in alike for alike in (stage.free, _summed(stage)))

    return (
        one.symbolic
        and other.symbolic
        and all(map(are_together, kernel.dimensions.values()))
        and all(map(are_free, kernel.stages))
    )


def _summed(stage: Stage) -> list[Size]:
    return [size for size in stage.reduced if size not in stage.whole]


def _joined(kernel: SymbolicKernel, one: Size, other: Size) -> tuple[tirx.PrimFunc, dict[Any, Any]]:
    """The kernel with both as one size; what its buffers became."""
    places = {buffer: sizes.index(one) for buffer, sizes in kernel.dimensions.items() if one in sizes}
    extent = one.extent * other.extent
    renamed = {}
    for buffer, place in places.items():
        shape = [number(size) for size in buffer.shape]
        shape[place : place + 2] = [extent]
        renamed[buffer] = tirx.decl_buffer(shape, str(buffer.dtype), str(buffer.name))
    nests = [_nest(stage, one, other, places, renamed) for stage in kernel.stages]
    given = kernel.function
    parameters, own = (
        [renamed.get(buffer, buffer) for buffer in buffers]
        for buffers in (given.params, given.body.block.alloc_buffers)
    )
    return function_of(parameters, nests, given.attrs, own), renamed


def _nest(stage: Stage, one: Size, other: Size, places: Mapping[Any, int], renamed: Mapping[Any, Any]) -> Any:
    """The loops of a stage around its block, over both sizes as one."""
    block, variable = stage.block, tirx.Var("both", "int64")

    def indices(buffer: Any, given: Sequence[Any]) -> list[Any]:
        place = places[buffer]
        return [*given[:place], variable, *given[place + 2 :]]

    def load(node: Any) -> Any:
        if node.source not in places:
            return node
        return tirx.BufferLoad(renamed[node.source], indices(node.source, list(node.indices)))

    def store(node: Any) -> Any:
        if node.buffer not in places:
            return node
        return tirx.BufferStore(renamed[node.buffer], node.value, indices(node.buffer, list(node.indices)))

    def rewritten(part: Any) -> Any:
        return tvm_ffi.structural_map(part, [(ir.TensorLoad, load), (tirx.BufferStore, store)])

    def region(given: Any) -> Any:
        if given.source not in places:  # a table, perhaps, at places that a tensor over both sizes tells
            return tirx.BufferRegion(given.source, [rewritten(span) for span in given.region])
        ranges, place = list(given.region), places[given.source]
        ranges[place : place + 2] = [ir.Range.from_min_extent(variable, number(1))]
        return tirx.BufferRegion(renamed[given.source], ranges)

    axes = []
    for axis, size in zip(block.iter_vars, stage.sizes, strict=True):
        if size is one:
            domain = ir.Range.from_min_extent(number(0), one.extent * other.extent)
            axes.append(tirx.IterVar(domain, variable, axis.iter_type))
        elif size is not other:
            axes.append(axis)
    return _looped(changed_block(block, axes, region, rewritten))


def _looped(block: Any) -> Any:
    loops = [tirx.Var(f"i{place}", "int64") for place in range(len(block.iter_vars))]
    extents = [number(axis.dom.extent) for axis in block.iter_vars]
    return looped(loops, extents, s_tir.SBlockRealize(loops, True, block))


def _without_single_sums(function: tirx.PrimFunc) -> tirx.PrimFunc:
    """A kernel whose stages do not sum over a single place, as those of 1 x 1 convolutions do; itself where it has
    other statements than `read_kernel` knows."""
    kernel = read_kernel(function)
    if kernel is None:
        return function
    nests = [_looped(_without_single_axes(stage.block)) for stage in kernel.stages]
    return function_of(function.params, nests, function.attrs, function.body.block.alloc_buffers)


def _without_single_axes(block: Any) -> Any:
    sums = [axis for axis in block.iter_vars if int(axis.iter_type) == tirx.IterVar.CommReduce]
    single = [axis for axis in sums if isinstance(axis.dom.extent, tirx.IntImm) and int(axis.dom.extent) == 1]
    if not single or len(single) == len(sums):
        return block
    analyzer = sym.Analyzer()
    zeros = [(axis.var, number(0)) for axis in single]

    def simple(indices: Sequence[Any]) -> list[Any]:
        return [analyzer.simplify(index) for index in indices]

    def load(node: Any) -> Any:
        return tirx.BufferLoad(node.source, simple(node.indices))

    def store(node: Any) -> Any:
        return tirx.BufferStore(node.buffer, node.value, simple(node.indices))

    def zero(part: Any) -> Any:
        return tvm_ffi.structural_map(substitute(part, zeros), [(ir.TensorLoad, load), (tirx.BufferStore, store)])

    def region(given: Any) -> Any:
        ranges = substitute(given, zeros).region
        simpler = [ir.Range.from_min_extent(analyzer.simplify(one.min), one.extent) for one in ranges]
        return tirx.BufferRegion(given.source, simpler)

    return changed_block(block, [axis for axis in block.iter_vars if axis not in single], region, zero)
