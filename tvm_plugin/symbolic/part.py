"""Which part of a kernel is computed, and where its buffers are."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import tvm_ffi
from tvm import ir, s_tir, tirx

from ..search.space.access import dtype_bytes
from ..search.space.expressions import substitute
from .kernel import Size, Stage, SymbolicKernel, Window

__all__ = ["Part", "alike", "bytes_of", "changed_block", "number"]

_LAYOUT_FREE = "layout_free_placeholders"
"""Annotation of TVM's operator library that names tensors of another function."""


@dataclass(frozen=True)
class Part:
    """A part of a kernel.

    Attributes
    ----------
    kernel : SymbolicKernel
    buffers : mapping
        What a buffer of the kernel is here, with the sizes along which it holds this part only.
    lengths, starts : mapping
        Of sizes: how long the part is, and where it begins. Along others it is the whole.
    parallel : bool
        Whether threads share such parts, so that each is computed by one.
    runs : tvm.ir.Expr
        How often it is computed, one after another, about.
    """

    kernel: SymbolicKernel
    buffers: Mapping[Any, tuple[Any, frozenset[Size]]]
    lengths: Mapping[Size, int] = field(default_factory=dict)
    starts: Mapping[Size, Any] = field(default_factory=dict)
    parallel: bool = False
    runs: Any = 1

    @staticmethod
    def whole(kernel: SymbolicKernel) -> Part:
        """All of the kernel, with the buffers that it is given."""
        return Part(kernel, {one: (one, frozenset()) for one in kernel.function.params if hasattr(one.ty, "shape")})

    def at(self, size: Size, length: int, start: Any, runs: Any = 1) -> Part:
        """A part of it, one of so many."""
        lengths, starts = {**self.lengths, size: length}, {**self.starts, size: start}
        return replace(self, lengths=lengths, starts=starts, runs=self.runs * runs)

    def where(self, condition: Any) -> Part:
        """The same, where it is computed under a condition only."""
        return replace(self, runs=self.runs * tirx.Select(condition, number(1), number(0)))

    def with_buffers(self, buffers: Sequence[Any]) -> tuple[Part, list[Any]]:
        """The same with buffers that hold this part only; these."""
        made = {}
        for buffer in buffers:
            shape = [number(self.lengths.get(size, size.extent)) for size in self.kernel.dimensions[buffer]]
            made[buffer] = tirx.decl_buffer(shape, str(buffer.dtype), str(buffer.name))
        local = frozenset(self.lengths)
        known = {**self.buffers, **{buffer: (own, local) for buffer, own in made.items()}}
        return replace(self, buffers=known), list(made.values())

    def left(self, stages: Sequence[Stage]) -> list[Size]:
        """The symbolic sizes of stages along which this is the whole."""
        sizes = dict.fromkeys(size for stage in stages for size in stage.sizes)
        return [size for size in sizes if size.symbolic and size not in self.lengths]

    def region(self, buffer: Any, windows: Mapping[tuple[Any, int], Window] | None = None) -> Any:
        """Where it is in a buffer of the kernel, some of which is read in windows."""
        own, local = self.buffers[buffer]
        ranges = []
        for place, size in enumerate(self.kernel.dimensions[buffer]):
            window = (windows or {}).get((buffer, place))
            if window is not None and window.size in self.lengths:
                begin = number(0) if size in local else self.starts[window.size] * window.stride
                length = number(window.extent(self.lengths[window.size]))
                ranges.append(ir.Range.from_min_extent(begin, length))
                continue
            start = number(0) if size not in self.starts or size in local else self.starts[size]
            ranges.append(ir.Range.from_min_extent(start, number(self.lengths.get(size, size.extent))))
        return tirx.BufferRegion(own, ranges)

    def statement(self, given: Any, at: Sequence[tuple[Any, Any]]) -> Any:
        """A statement of the kernel over the buffers of the part, with values for its axes."""

        def places(buffer: Any, indices: Sequence[Any]) -> tuple[Any, list[Any]]:
            own, local = self.buffers[buffer]
            pairs = zip(self.kernel.dimensions[buffer], indices, strict=True)
            return own, [index - self.starts[size] if size in local else index for size, index in pairs]

        def load(node: Any) -> Any:
            return tirx.BufferLoad(*places(node.source, node.indices))

        def store(node: Any) -> Any:
            buffer, indices = places(node.buffer, node.indices)
            return tirx.BufferStore(buffer, node.value, indices)

        return tvm_ffi.structural_map(substitute(given, at), [(ir.TensorLoad, load), (tirx.BufferStore, store)])


def number(value: Any) -> Any:
    """A 64-bit constant; any other expression as it is."""
    return tirx.IntImm("int64", int(value)) if isinstance(value, int | tirx.IntImm) else value


def alike(buffer: Any, *outer: int) -> Any:
    """Another buffer of the same shape, or with more axes before those."""
    shape = [number(extent) for extent in (*outer, *buffer.shape)]
    return tirx.decl_buffer(shape, str(buffer.dtype), str(buffer.name))


def bytes_of(buffer: Any) -> float:
    """Of a buffer of known shape."""
    return math.prod(int(extent) for extent in buffer.shape) * dtype_bytes(str(buffer.dtype))


def changed_block(
    block: Any, axes: Sequence[Any], region: Callable[[Any], Any], statement: Callable[[Any], Any]
) -> Any:
    """A block with other axes, each of its regions and statements rewritten."""
    return s_tir.SBlock(
        axes,
        [region(one) for one in block.reads],
        [region(one) for one in block.writes],
        block.name_hint,
        statement(block.body),
        None if block.init is None else statement(block.init),
        annotations={name: value for name, value in block.annotations.items() if name != _LAYOUT_FREE},
    )
