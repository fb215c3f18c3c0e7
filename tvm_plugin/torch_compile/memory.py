"""Where tensors lie: layouts, views, and what shares memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .stays import Stays

__all__ = ["InOrder", "Layout", "View", "copy_of", "extent", "is_dense", "meet", "memory", "plain", "shares_storage"]

ALIGNMENT = 64
"""Bytes."""


def memory(tensor: torch.Tensor) -> tuple[int, int]:
    """The addresses from its first element to behind its last one."""
    return tensor.data_ptr(), tensor.data_ptr() + extent(tensor)


def extent(tensor: torch.Tensor) -> int:
    """The bytes from its first element to behind its last one."""
    if not tensor.numel():
        return 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


def meet(one: tuple[int, int], other: tuple[int, int]) -> bool:
    """Whether two pieces of memory have bytes in common."""
    return one[0] < other[1] and other[0] < one[1]


def shares_storage(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether one is a view of the other, or both are of a third."""
    address = tensor.untyped_storage().data_ptr()
    return address != 0 and address == other.untyped_storage().data_ptr()


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether no memory lies between its elements, and no element in two places."""
    return extent(tensor) == tensor.numel() * tensor.element_size()


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """As TVM's kernels read tensors: in C order, beginning at a multiple of 64 bytes."""
    tensor = tensor.detach().resolve_neg().contiguous()
    return tensor if tensor.data_ptr() % ALIGNMENT == 0 else tensor.clone()


def copy_of(tensor: Any) -> Any:
    """With the same strides, and gradients where it has them, also where only the graph itself asks for them.

    A number as it is.
    """
    if not isinstance(tensor, torch.Tensor):
        return tensor
    given = tensor.detach()
    result = given.clone() if is_dense(given) else Layout.of(given).copied(given)
    return result.requires_grad_(tensor.requires_grad and not torch.is_inference_mode_enabled())


@dataclass(frozen=True)
class Layout:
    """How PyTorch lays out a tensor, which code behind the graph may count on."""

    shape: torch.Size
    strides: tuple[int, ...]

    @staticmethod
    def of(tensor: torch.Tensor) -> Layout:
        """That of a tensor."""
        return Layout(tensor.shape, tensor.stride())

    def laid_out(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor itself where it lies so, or a copy."""
        return tensor if tensor.stride() == self.strides else self.copied(tensor)

    def copied(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy; an axis along which all elements are one stays so."""
        once = tensor[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in self.strides)]
        return torch.empty_strided(once.shape, self.strides, dtype=tensor.dtype).copy_(once).expand(self.shape)


@dataclass(frozen=True)
class InOrder:
    """A tensor of any shape without gaps, and the order in which its axes lie in memory, the outermost first."""

    axes: tuple[int, ...]

    @staticmethod
    def of(layout: Layout) -> InOrder:
        """That of a layout. Raises Stays where elements have gaps between them, or are stored once for several."""
        axes = sorted(range(len(layout.shape)), key=lambda axis: (-layout.strides[axis], axis))
        shape = [layout.shape[axis] for axis in axes]
        if [layout.strides[axis] for axis in axes] != list(torch.empty(shape, device="meta").stride()):
            raise Stays("it returns tensors with gaps, and sizes differ from call to call")
        return InOrder(tuple(axes))

    def laid_out(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor itself where it lies so, or a copy."""
        back = [self.axes.index(axis) for axis in range(len(self.axes))]
        return tensor.permute(self.axes).contiguous().permute(back)


@dataclass(frozen=True)
class View:
    """An output that is an argument or another output, or a part of one: shape, strides and offset in elements."""

    layout: Layout
    offset: int
    base: int
    of_output: bool = False

    @staticmethod
    def of(tensor: torch.Tensor, base: torch.Tensor, index: int, of_output: bool = False) -> View:
        """What a tensor is of the one that it is a view of. Raises Stays where that has another dtype."""
        if tensor.dtype != base.dtype:
            raise Stays("it returns a view of what it is given, as another dtype")
        return View(Layout.of(tensor), tensor.storage_offset() - base.storage_offset(), index, of_output)

    def made_of(self, arguments: Sequence[torch.Tensor], outputs: Sequence[Any]) -> torch.Tensor:
        """The same view of what is given, or was computed, this time."""
        base: torch.Tensor = (outputs if self.of_output else arguments)[self.base]
        base = base.detach() if base.requires_grad else base
        if self.layout == Layout.of(base) and self.offset == 0 and not self.of_output:
            return base
        return base.as_strided(self.layout.shape, self.layout.strides, base.storage_offset() + self.offset)
