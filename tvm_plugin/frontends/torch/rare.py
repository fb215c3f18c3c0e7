"""Operators that models rarely call, and that PyTorch itself does not decompose, in others that have converters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["RARE_DECOMPOSITIONS"]


def _sum_with_products(x: Tensor, left: Tensor, right: Tensor, *, beta: Any = 1, alpha: Any = 1) -> Tensor:
    """Of the matrices of two batches, all added up: one product."""
    left, right = left.transpose(0, 1).flatten(1), right.flatten(0, 1)
    return torch.addmm(x, left, right, beta=beta, alpha=alpha)


def _sum_with_vector(x: Tensor, matrix: Tensor, vector: Tensor, *, beta: Any = 1, alpha: Any = 1) -> Tensor:
    return torch.addmm(x.unsqueeze(-1), matrix, vector.unsqueeze(-1), beta=beta, alpha=alpha).squeeze(-1)


def _distance(x: Tensor, other: Tensor, p: float = 2) -> Tensor:
    return torch.linalg.vector_norm(x - other, p)


def _distances(x: Tensor, p: float = 2) -> Tensor:
    """Of each row to each one behind it."""
    one, other = torch.triu_indices(len(x), len(x), 1).unbind()
    return torch.linalg.vector_norm(x.index_select(0, one) - x.index_select(0, other), p, -1)


def _times_power_of_two(x: Tensor, exponent: Tensor) -> Tensor:
    return x * torch.pow(2.0, exponent)


def _bin_of(number: float, boundaries: Tensor, **options: Any) -> Tensor:
    return _place_of(boundaries, number, **options)


def _place_of(sequence: Tensor, number: float, **options: Any) -> Tensor:
    dtype = torch.result_type(sequence, number)
    return torch.searchsorted(sequence.to(dtype), torch.full((), number, dtype=dtype), **options)


def _scattered(x: Tensor, dim: int, index: Tensor, source: Any, *, reduce: str) -> Tensor:
    """Added to what is there, or multiplied by it: a tensor, or a number."""
    source = source if isinstance(source, Tensor) else x.new_full(index.shape, source)
    return x.scatter_add(dim, index, source) if reduce == "add" else x.scatter_reduce(dim, index, source, "prod")


def _rows_reduced(
    x: Tensor, dim: int, index: Tensor, source: Tensor, reduce: str, *, include_self: bool = True
) -> Tensor:
    shape = [-1 if axis == dim % x.ndim else 1 for axis in range(x.ndim)]
    places = index.reshape(shape).expand_as(source)
    return x.scatter_reduce(dim, places, source, reduce, include_self=include_self)


def _masked_scatter(x: Tensor, mask: Tensor, source: Tensor) -> Tensor:
    """The elements of a source, one after another, wherever a mask holds."""
    x, mask = torch.broadcast_tensors(x, mask)
    places = (mask.reshape(-1).cumsum(0) - 1).clamp(0, source.numel() - 1)
    return torch.where(mask, source.reshape(-1).index_select(0, places).reshape(x.shape), x)


def _put(x: Tensor, index: Tensor, source: Tensor, accumulate: bool = False) -> Tensor:
    """At places that count all elements."""
    written = x.reshape(-1).index_put((index.reshape(-1),), source.reshape(-1), accumulate)
    return written.reshape(x.shape)


def _diagonal_scatter(x: Tensor, source: Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Tensor:
    """What a write to a diagonal becomes. Of the source, each row, or each column, has the element of its number."""
    if not source.numel():
        return x.clone()
    matrices = x.movedim((dim1, dim2), (-2, -1))
    rows, columns = torch.arange(matrices.shape[-2]), torch.arange(matrices.shape[-1])
    taken = source.index_select(-1, (rows if offset >= 0 else columns).clamp(max=source.shape[-1] - 1))
    is_written = columns - rows[:, None] == offset
    written = torch.where(is_written, taken.unsqueeze(-1 if offset >= 0 else -2), matrices)
    return written.movedim((-2, -1), (dim1, dim2))


def _strided_scatter(
    x: Tensor, source: Tensor, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None
) -> Tensor:
    """What `fill_diagonal_` becomes, of a tensor that lies in memory in order."""
    if not x.is_contiguous() or x.storage_offset():
        return NotImplemented
    places = torch.full((), storage_offset or 0)
    for extent, step in zip(size, stride, strict=True):
        places = places.unsqueeze(-1) + step * torch.arange(extent)
    return _put(x, places, source)


def _leaky(
    x: Tensor, noise: Tensor, lower: float = 1 / 8, upper: float = 1 / 3, training: bool = False, generator: Any = None
) -> Any:
    """RReLU, whose slopes are random where it is trained."""
    del generator
    if training:
        return NotImplemented
    return torch.nn.functional.leaky_relu(x, (lower + upper) / 2), noise.clone()


RARE_DECOMPOSITIONS: dict[str, Callable[..., Any]] = {
    "aten.addbmm.default": _sum_with_products,
    "aten.addmv.default": _sum_with_vector,
    "aten.as_strided_scatter.default": _strided_scatter,
    "aten.bucketize.Scalar": _bin_of,
    "aten.diagonal_scatter.default": _diagonal_scatter,
    "aten.dist.default": _distance,
    "aten.index_reduce.default": _rows_reduced,
    "aten.ldexp.Tensor": _times_power_of_two,
    "aten.masked_scatter.default": _masked_scatter,
    "aten._pdist_forward.default": _distances,
    "aten.put.default": _put,
    "aten.rrelu_with_noise_functional.default": _leaky,
    "aten.scatter.reduce": _scattered,
    "aten.scatter.value_reduce": _scattered,
    "aten.searchsorted.Scalar": _place_of,
}
"""By what PyTorch prints of an operator."""
