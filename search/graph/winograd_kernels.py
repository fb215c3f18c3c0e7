"""The stages of Winograd's minimal filtering as tensor expressions, with channels last."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tvm import te, tirx

from ..space.marks import OUTPUTS_OF_TILE, TILE_GRID
from .attributes import WinogradData, WinogradResult
from .minimal_filtering import Matrix, matrices

__all__ = ["conv2d_kernel", "data_kernel", "result_kernel", "weight_kernel"]


def data_kernel(x: te.Tensor, a: WinogradData) -> te.Tensor:
    """(matrices, tiles, C) of an image (N, H, W, C), tile by tile."""
    batch, height, width, channels = (int(extent) for extent in x.shape)
    (down, across), (rows, columns) = a.grid(height, width), a.size
    by_row, by_column = (_parity(m.data) for m in map(matrices, a.outputs, a.kernel))
    tiles = batch * down * across
    padded = _padded(x, a)

    def pixel(tile: Any, row: Any, column: Any, channel: Any) -> Any:
        y, z = tile // across % down * a.outputs[0] + row, tile % across * a.outputs[1] + column
        return padded[tile // (down * across), y, z, channel]

    cut = te.compute((tiles, rows, columns, channels), pixel, name="winograd_tile")
    half = te.compute(
        (tiles, rows, columns, channels),
        lambda t, i, j, c: by_row(i, lambda k: cut[t, k, j, c]),
        name="winograd_rows",
    )
    return te.compute(
        (rows * columns, tiles, channels),
        lambda e, t, c: by_column(e % columns, lambda k: half[t, e // columns, k, c]),
        name="winograd_data",
        attrs={TILE_GRID: [batch, down, across]},
    )


def result_kernel(products: te.Tensor, a: WinogradResult) -> te.Tensor:
    """The image (N, height, width, C) of products (matrices, tiles, C)."""
    _, tiles, channels = (int(extent) for extent in products.shape)
    (rows, columns), (down, across) = a.outputs, a.grid
    by_row, by_column = (_pairs(m.result) for m in map(matrices, a.outputs, a.kernel))
    half = te.compute(
        (tiles, rows, a.size[1], channels),
        lambda t, i, j, c: by_row(i, lambda k: products[k * a.size[1] + j, t, c]),
        name="winograd_rows",
    )

    def pixel(n: Any, y: Any, z: Any, c: Any) -> Any:
        tile = (n * down + y // rows) * across + z // columns
        return by_column(z % columns, lambda k: half[tile, y % rows, k, c])

    return te.compute((tiles // (down * across), a.height, a.width, channels), pixel, name="winograd_result")


def conv2d_kernel(x: te.Tensor, weight: te.Tensor, a: WinogradData) -> te.Tensor:
    """The convolution of an image (N, H, W, C) with a transformed weight (matrices, C, O)."""
    batch, height, width, channels = (int(extent) for extent in x.shape)
    (down, across), (rows, columns), outputs = a.grid(height, width), a.size, int(weight.shape[2])
    of_dimensions = [matrices(m, r) for m, r in zip(a.outputs, a.kernel, strict=True)]
    (high, wide), padded = a.outputs, _padded(x, a)
    cut = te.compute(
        (batch, down, across, rows, columns, channels),
        lambda n, t, u, i, j, c: padded[n, t * high + i, u * wide + j, c],
        name="winograd_tile",
    )
    by_row, by_column = (_parity(m.data) for m in of_dimensions)
    data_rows = te.compute(
        (batch, down, across, rows, columns, channels),
        lambda n, t, u, i, j, c: by_row(i, lambda k: cut[n, t, u, k, j, c]),
        name="winograd_data_rows",
    )
    transformed = te.compute(
        (rows * columns, batch, down, across, channels),
        lambda e, n, t, u, c: by_column(e % columns, lambda k: data_rows[n, t, u, e // columns, k, c]),
        name="winograd_data",
        attrs={OUTPUTS_OF_TILE: list(a.outputs)},
    )
    k = te.reduce_axis((0, channels), name="k")
    products = te.compute(
        (rows * columns, batch, down, across, outputs),
        lambda e, n, t, u, c: te.sum(transformed[e, n, t, u, k] * weight[e, k, c], axis=k),
        name="winograd_products",
    )
    to_row, to_column = (_pairs(m.result) for m in of_dimensions)
    half = te.compute(
        (batch, down, across, high, columns, outputs),
        lambda n, t, u, i, j, c: to_row(i, lambda k: products[k * columns + j, n, t, u, c]),
        name="winograd_rows",
    )
    return te.compute(
        (batch, *a.image(height, width), outputs),
        lambda n, y, z, c: to_column(z % wide, lambda k: half[n, y // high, z // wide, y % high, k, c]),
        name="winograd_result",
    )


def weight_kernel(weight: te.Tensor, outputs: tuple[int, int]) -> te.Tensor:
    """The transformed weight (matrices, C, O) of one of (rows, columns, C, O), for so many outputs of a tile."""
    rows, columns, inputs, channels = (int(extent) for extent in weight.shape)
    of_dimensions = [matrices(m, r).weight for m, r in zip(outputs, (rows, columns), strict=True)]
    by_row, by_column = (_transform(matrix, [range(len(matrix[0]))]) for matrix in of_dimensions)
    high, wide = map(len, of_dimensions)
    half = te.compute(
        (high, columns, inputs, channels),
        lambda i, s, k, o: by_row(i, lambda r: weight[r, s, k, o]),
        name="winograd_weight_rows",
    )
    return te.compute(
        (high * wide, inputs, channels),
        lambda e, k, o: by_column(e % wide, lambda s: half[e // wide, s, k, o]),
        name="winograd_weight",
    )


def _padded(x: te.Tensor, a: WinogradData) -> te.Tensor:
    """The image with zeros around it, as far as tiles reach."""
    batch, height, width, channels = (int(extent) for extent in x.shape)
    (top, left), grid = a.padding[:2], a.grid(height, width)
    rows, columns = (count * m + r - 1 for count, m, r in zip(grid, a.outputs, a.kernel, strict=True))

    def pixel(n: Any, row: Any, column: Any, channel: Any) -> Any:
        y, z = row - top, column - left
        inside = tirx.all(y >= 0, y < height, z >= 0, z < width)
        return tirx.if_then_else(inside, x[n, y, z, channel], tirx.const(0.0, x.dtype))

    return te.compute((batch, rows, columns, channels), pixel, name="winograd_padded")


Transform = Callable[[Any, Callable[[int], Any]], Any]
"""(index, read) -> the sum of row `index` of a matrix of constants times what is read.

The sum is made of partial sums that rows have in common, up to a factor, so that LLVM computes each once. Once `index`
is unrolled, one row is left.
"""


def _parity(matrix: Matrix) -> Transform:
    """That of data: the rows of p and -p are x R(x**2) times x and p, R as for all other points; even and odd apart."""
    size = len(matrix[0])
    return _transform(matrix, [range(0, size, 2), range(1, size, 2)])


def _pairs(matrix: Matrix) -> Transform:
    """That of results: each row has the sum or the difference of the columns of p and -p, times a power of p."""
    size = len(matrix[0])
    return _transform(matrix, [(0,), *((k, k + 1) for k in range(1, size - 1, 2)), (size - 1,)][:size])


def _transform(matrix: Matrix, groups: Sequence[Sequence[int]]) -> Transform:
    def transform(index: Any, read: Callable[[int], Any]) -> Any:
        sums = [_sum(row, groups, read) for row in matrix]
        result = sums[-1]
        for i in range(len(sums) - 2, -1, -1):
            result = tirx.Select(index == i, sums[i], result)
        return result

    return transform


def _sum(row: Sequence[float], groups: Sequence[Sequence[int]], read: Callable[[int], Any]) -> Any:
    """Columns by groups; within one, divided by its last factor."""
    partial = []
    for columns in groups:
        used = [k for k in columns if row[k]]
        if used:
            last = row[used[-1]]
            partial.append((last, _combined([(row[k] / last, read(k)) for k in reversed(used)])))
    return _combined(partial)


def _combined(terms: Sequence[tuple[float, Any]]) -> Any:
    """The sum of factors times values. What needs no factor comes first: each other term is one multiply-add."""
    (first, result), *others = sorted(terms, key=lambda term: (term[0] < 0, abs(term[0]) != 1))
    result = _scaled(first, result)
    for factor, value in others:
        result = result + _scaled(factor, value) if factor > 0 else result - _scaled(-factor, value)
    return result


def _scaled(factor: float, value: Any) -> Any:
    return value if factor == 1 else value * factor
