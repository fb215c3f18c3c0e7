"""The transforms of Winograd's minimal filtering as Relax operators, with channels last.

    eqtune.winograd_data(image (N, H, W, C), (m, r, padding)) -> (matrices, tiles, C)
    eqtune.winograd_result(products (matrices, tiles, C), (m, r, height, width)) -> image (N, height, width, C)
    eqtune.winograd_conv2d(image (N, H, W, C), weight (matrices, C, O), (m, r, padding)) -> image

m and r are two numbers each, down and across (attributes.WinogradData). Each is one kernel: tiles are cut, padded and
transformed in registers; what follows the last two, a bias or a relu, is fused into them. As matrix products, or as
padding, slices and concatenations, transforms take longer than the convolution. The last is a whole convolution: its
kernel takes some tiles at a time through all stages, so that what lies between the stages stays in the cache of one
core.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tvm import relax, te, tirx
from tvm.ir import Op, register_op_attr

from .attributes import TensorType, WinogradData, WinogradResult
from .minimal_filtering import Matrix, matrices
from .operators import infer

__all__ = ["winograd_conv2d", "winograd_data", "winograd_result"]

DATA, RESULT, CONV2D = "eqtune.winograd_data", "eqtune.winograd_result", "eqtune.winograd_conv2d"

TILE_GRID = "eqtune.tile_grid"
"""Annotation of the block that writes transformed data: what its axis of tiles is made of, (batch, down, across)."""

OUTPUTS = "eqtune.outputs_of_tile"
"""Annotation of a convolution's block that writes transformed data: rows and columns that a tile gives."""

FUSES_WITH_USERS, FUSES_WITH_NOTHING = 4, 8
"""TVM's kOutEWiseFusable and kOpaque."""


def winograd_data(x: Any, attrs: WinogradData) -> relax.Call:
    """B' d B of each tile d of an image (N, H, W, C)."""
    return relax.Call(Op.get(DATA), [x, relax.ShapeExpr([*attrs.outputs, *attrs.kernel, *attrs.padding])])


def winograd_result(x: Any, attrs: WinogradResult) -> relax.Call:
    """The image (N, height, width, C) of A' M A of all products M."""
    return relax.Call(Op.get(RESULT), [x, relax.ShapeExpr([*attrs.outputs, *attrs.kernel, attrs.height, attrs.width])])


def winograd_conv2d(x: Any, weight: Any, attrs: WinogradData) -> relax.Call:
    """The convolution of an image (N, H, W, C) with a transformed weight (matrices, C, O)."""
    return relax.Call(Op.get(CONV2D), [x, weight, relax.ShapeExpr([*attrs.outputs, *attrs.kernel, *attrs.padding])])


def _numbers(call: relax.Call) -> list[int]:
    return [int(value) for value in call.args[-1].values]


def _data_attrs(call: relax.Call) -> WinogradData:
    down, across, rows, columns, top, left, bottom, right = _numbers(call)
    return WinogradData((down, across), (rows, columns), (top, left, bottom, right))


def _result_attrs(call: relax.Call) -> WinogradResult:
    down, across, rows, columns, height, width = _numbers(call)
    return WinogradResult((down, across), (rows, columns), height, width)


def _static(ty: Any) -> TensorType:
    return TensorType(tuple(int(extent) for extent in ty.shape.values), str(ty.dtype))


def _data_type(call: relax.Call, _builder: Any) -> relax.TensorType:
    image = _static(call.args[0].ty)
    batch, height, width, channels = image.shape
    result = infer("winograd_data", _data_attrs(call), TensorType((batch, channels, height, width), image.dtype))
    return relax.TensorType(result.shape, result.dtype)


def _result_type(call: relax.Call, _builder: Any) -> relax.TensorType:
    result = infer("winograd_result", _result_attrs(call), _static(call.args[0].ty))
    batch, channels, height, width = result.shape
    return relax.TensorType((batch, height, width, channels), result.dtype)


def _conv2d_type(call: relax.Call, _builder: Any) -> relax.TensorType:
    image, weight = (_static(argument.ty) for argument in call.args[:2])
    batch, height, width, channels = image.shape
    image = TensorType((batch, channels, height, width), image.dtype)
    batch, channels, height, width = infer("winograd_conv2d", _data_attrs(call), image, weight).shape
    return relax.TensorType((batch, height, width, channels), image.dtype)


def _data_kernel(x: te.Tensor, a: WinogradData) -> te.Tensor:
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


def _result_kernel(products: te.Tensor, a: WinogradResult) -> te.Tensor:
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


def _conv2d_kernel(x: te.Tensor, weight: te.Tensor, a: WinogradData) -> te.Tensor:
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
        attrs={OUTPUTS: list(a.outputs)},
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


def _legalize(
    kernel: Callable[..., te.Tensor], attrs: Callable[[relax.Call], Any], pattern: int
) -> Callable[[relax.BlockBuilder, relax.Call], relax.Expr]:
    def legalize(builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
        name = str(call.op.name).removeprefix("eqtune.")
        return builder.call_te(
            lambda *tensors: kernel(*tensors, attrs(call)),
            *call.args[:-1],
            primfunc_name_hint=name,
            primfunc_attrs={"op_pattern": pattern},
        )

    return legalize


def _register() -> None:
    for name, of_type, kernel, attrs, pattern in (
        (DATA, _data_type, _data_kernel, _data_attrs, FUSES_WITH_NOTHING),
        (RESULT, _result_type, _result_kernel, _result_attrs, FUSES_WITH_USERS),
        (CONV2D, _conv2d_type, _conv2d_kernel, _data_attrs, FUSES_WITH_USERS),
    ):
        register_op_attr(name, "FInferType", of_type)
        register_op_attr(name, "FPurity", True)
        register_op_attr(name, "FLegalize", _legalize(kernel, attrs, pattern))


_register()
