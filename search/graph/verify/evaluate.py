"""Evaluate a `TermGraph` over any algebra: what moves data is here, what computes is the algebra's.

`field.py` computes modulo a prime, to verify rules; `floats.py` in floating point, to see what rounding does to them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ..attributes import Conv2d, Full, Pool2d, WinogradData, WinogradResult
from ..minimal_filtering import Matrix, matrices
from ..terms import TermGraph

__all__ = ["Algebra", "Array", "evaluate"]

Array = NDArray[Any]


class Algebra(Protocol):
    """Numbers as arrays, and what can be done with them. `axis` is always the last one, which a reduction removes."""

    lowest: Any
    """Less than every number: what maximum pooling is padded with."""

    def constant(self, value: float | int | bool) -> Array:
        """A number of a model, without dimensions."""

    def unary(self, kind: str, x: Array) -> Array:
        """An element-wise function (attributes.UNARY_KINDS)."""

    def binary(self, kind: str, x: Array, y: Array) -> Array:
        """An element-wise function of two arrays (attributes.BINARY_KINDS)."""

    def matmul(self, x: Array, y: Array) -> Array:
        """Matrix product, with numpy's broadcasting of batches."""

    def reduce(self, kind: str, x: Array) -> Array:
        """Reduction along the last axis (attributes.REDUCE_KINDS)."""

    def softmax(self, x: Array) -> Array:
        """Softmax along the last axis."""


def evaluate(graph: TermGraph, leaves: Sequence[Array], algebra: Algebra) -> list[Array]:
    """The values of the graph's outputs.

    Parameters
    ----------
    graph : TermGraph
        Without opaque terms.
    leaves : sequence of arrays
        The value of each leaf, by its index.
    algebra : Algebra
        What computes.
    """
    values: dict[int, Array] = {}
    for index in graph.live():
        term = graph.terms[index]
        if term.op == "leaf":
            values[index] = leaves[term.attrs.index]
        else:
            values[index] = _OPERATORS[term.op](algebra, term.attrs, *(values[argument] for argument in term.args))
    return [values[output] for output in graph.outputs]


def _full(algebra: Algebra, a: Full) -> Array:
    return np.broadcast_to(algebra.constant(a.value), a.shape)


def _moved(x: Array, before: str, after: str) -> Array:
    return x.transpose([before.index(letter) for letter in after])


def _windows(
    x: Array, kernel: tuple[int, int], strides: tuple[int, int], dilation: tuple[int, int], size: tuple[int, int]
) -> Array:
    """From (N, C, H, W), what each window sees: (N, C, *size, *kernel)."""
    sn, sc, sh, sw = x.strides
    steps = (sn, sc, sh * strides[0], sw * strides[1], sh * dilation[0], sw * dilation[1])
    return np.lib.stride_tricks.as_strided(x, (*x.shape[:2], *size, *kernel), steps, writeable=False)


def _count(size: int, kernel: int, stride: int, dilation: int) -> int:
    return (size - dilation * (kernel - 1) - 1) // stride + 1


def _conv2d(algebra: Algebra, a: Conv2d, x: Array, w: Array) -> Array:
    x, w = _moved(x, a.data_layout, "NCHW"), _moved(w, a.kernel_layout, "OIHW")
    top, left, bottom, right = a.padding
    padded = _pad(algebra.constant(0), x, (0, 0, top, left), (0, 0, bottom, right))
    kernel = w.shape[2:]
    size = tuple(map(_count, padded.shape[2:], kernel, a.strides, a.dilation))
    seen = _windows(padded, kernel, a.strides, a.dilation, size)  # type: ignore[arg-type]
    batch, groups, depth = x.shape[0], a.groups, w[0].size
    # (N, G, C/G, Y, X, KH, KW) -> (N, G, C/G * KH * KW, Y * X)
    columns = seen.reshape(batch, groups, w.shape[1], *size, *kernel).transpose(0, 1, 2, 5, 6, 3, 4)
    columns = columns.reshape(batch, groups, depth, size[0] * size[1])
    result = algebra.matmul(w.reshape(groups, w.shape[0] // groups, depth), columns)
    return _moved(result.reshape(batch, w.shape[0], *size), "NCHW", a.out_layout)


def _blocked_conv2d(algebra: Algebra, a: Conv2d, x: Array, w: Array) -> Array:
    (n, c, *size, i), (o, k, *kernel, _, b) = x.shape, w.shape
    data = x.transpose(0, 1, 4, 2, 3).reshape(n, c * i, *size)
    weight = w.transpose(0, 5, 1, 4, 2, 3).reshape(o * b, k * i, *kernel)
    result = _conv2d(algebra, a, data, weight)
    return result.reshape(n, o, b, *result.shape[2:]).transpose(0, 1, 3, 4, 2)


def _pool2d(algebra: Algebra, a: Pool2d, x: Array) -> Array:
    x = _moved(x, a.layout, "NCHW")
    top, left, bottom, right = a.padding
    outside = algebra.constant(0) if a.kind == "avg" else algebra.lowest
    padded = _pad(outside, x, (0, 0, top, left), (0, 0, bottom, right))
    # Where windows are rounded up, the last one hangs over: what lies there never counts.
    spans = [d * (k - 1) + 1 for k, d in zip(a.pool_size, a.dilation, strict=True)]
    over = [
        -(size - span) % stride if a.ceil_mode else 0
        for size, span, stride in zip(padded.shape[2:], spans, a.strides, strict=True)
    ]
    ones = _pad(int(a.count_include_pad), np.ones(x.shape[2:], int), (top, left), (bottom, right))
    padded, ones = _pad(outside, padded, (0,) * 4, (0, 0, *over)), _pad(0, ones, (0, 0), tuple(over))
    size = tuple(map(_count, padded.shape[2:], a.pool_size, a.strides, a.dilation))
    seen = _windows(padded, a.pool_size, a.strides, a.dilation, size)  # type: ignore[arg-type]
    seen = seen.reshape(*seen.shape[:4], -1)
    if a.kind == "max":
        result = algebra.reduce("max", seen)
    else:
        counts = _windows(ones[None, None], a.pool_size, a.strides, a.dilation, size)  # type: ignore[arg-type]
        divisors = np.vectorize(algebra.constant, otypes=[seen.dtype])(np.maximum(counts.sum((-1, -2)), 1))
        result = algebra.binary("divide", algebra.reduce("sum", seen), np.broadcast_to(divisors, seen.shape[:4]))
    return _moved(result, "NCHW", a.layout)


def _pad(outside: Any, x: Array, before: Sequence[int], after: Sequence[int]) -> Array:
    shape = [b + n + c for b, n, c in zip(before, x.shape, after, strict=True)]
    result = np.full(shape, outside, x.dtype)
    result[tuple(slice(b, b + n) for b, n in zip(before, x.shape, strict=True))] = x
    return result


def _winograd_data(algebra: Algebra, a: WinogradData, x: Array) -> Array:
    batch, channels, height, width = x.shape
    (down, across), (top, left), size = a.grid(height, width), a.padding[:2], a.size
    reach = [(count - 1) * m + n for count, m, n in zip((down, across), a.outputs, size, strict=True)]
    after = (0, 0, max(0, reach[0] - height - top), max(0, reach[1] - width - left))
    padded = _pad(algebra.constant(0), x, (0, 0, top, left), after)
    seen = _windows(padded, size, a.outputs, (1, 1), (down, across))
    tiles = seen.transpose(4, 5, 0, 2, 3, 1).reshape(size[0] * size[1], batch * down * across * channels)
    result = algebra.matmul(_kronecker(algebra, *(m.data for m in map(matrices, a.outputs, a.kernel))), tiles)
    return result.reshape(-1, batch * down * across, channels)


def _winograd_result(algebra: Algebra, a: WinogradResult, x: Array) -> Array:
    (down, across), channels = a.grid, x.shape[2]
    transform = _kronecker(algebra, *(m.result for m in map(matrices, a.outputs, a.kernel)))
    tiles = algebra.matmul(transform, x.reshape(x.shape[0], -1))
    boxes = tiles.reshape(*a.outputs, -1, down, across, channels).transpose(2, 5, 3, 0, 4, 1)
    image = boxes.reshape(-1, channels, down * a.outputs[0], across * a.outputs[1])
    return image[:, :, : a.height, : a.width]


def _winograd_conv2d(algebra: Algebra, a: WinogradData, x: Array, weight: Array) -> Array:
    products = algebra.matmul(_winograd_data(algebra, a, x), weight)
    return _winograd_result(algebra, WinogradResult(a.outputs, a.kernel, *a.image(*x.shape[2:])), products)


def _kronecker(algebra: Algebra, *matrices_of_dimensions: Matrix) -> Array:
    """The Kronecker product of two matrices: it transforms both dimensions of flattened tiles."""
    down, across = (
        np.stack([np.stack([algebra.constant(value) for value in row]) for row in matrix])
        for matrix in matrices_of_dimensions
    )
    products = algebra.binary("multiply", *np.broadcast_arrays(down[:, None, :, None], across[None, :, None, :]))
    return products.reshape(len(down) * len(across), -1)


def _along(x: Array, axes: Sequence[int], function: Callable[[Array], Array]) -> Array:
    """A reduction along several axes: they become the last one."""
    kept = [i for i in range(x.ndim) if i not in axes]
    moved = x.transpose(*kept, *axes)
    return function(moved.reshape(*(x.shape[i] for i in kept), int(np.prod([x.shape[i] for i in axes], dtype=int))))


def _reduce(algebra: Algebra, a: Any, x: Array) -> Array:
    result = _along(x, a.axes, lambda rows: algebra.reduce(a.kind, rows))
    return np.expand_dims(result, a.axes) if a.keepdims else result


def _softmax(algebra: Algebra, a: Any, x: Array) -> Array:
    return np.moveaxis(algebra.softmax(np.moveaxis(x, a.axis, -1)), -1, a.axis)


_OPERATORS: Mapping[str, Callable[..., Array]] = {
    "full": _full,
    "unary": lambda algebra, a, x: algebra.unary(a.name, x),
    "binary": lambda algebra, a, x, y: algebra.binary(a.name, *np.broadcast_arrays(x, y)),
    "matmul": lambda algebra, a, x, y: algebra.matmul(x, y),
    "conv2d": _conv2d,
    "blocked_conv2d": _blocked_conv2d,
    "pool2d": _pool2d,
    "permute": lambda algebra, a, x: x.transpose(a.axes),
    "reshape": lambda algebra, a, x: x.reshape(a.shape),
    "broadcast": lambda algebra, a, x: np.broadcast_to(x, a.shape),
    "slice": lambda algebra, a, x: x[tuple(map(slice, a.begin, a.end))],
    "concat": lambda algebra, a, *parts: np.concatenate(parts, a.axis),
    "pad": lambda algebra, a, x: _pad(algebra.constant(0), x, a.before, a.after),
    "winograd_data": _winograd_data,
    "winograd_conv2d": _winograd_conv2d,
    "winograd_result": _winograd_result,
    "reduce": _reduce,
    "softmax": _softmax,
}
