"""The transforms of Winograd's minimal filtering as Relax operators, with channels last.

    eqtune.winograd_data(image (N, H, W, C), (m, top, left, bottom, right)) -> (size * size, tiles, C)
    eqtune.winograd_result(products (size * size, tiles, C), (m, height, width)) -> image (N, height, width, C)
    eqtune.winograd_conv2d(image (N, H, W, C), weight (size * size, C, O), (m, top, left, bottom, right)) -> image

Each is one kernel: tiles are cut, padded and transformed in registers; what follows the last two, a bias or a relu, is
fused into them. As matrix products, or as padding, slices and concatenations, transforms take longer than the
convolution. The last is a whole convolution: its kernel takes some tiles at a time through all stages, so that what
lies between the stages stays in the cache of one core.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from tvm import relax, te, tirx
from tvm.ir import Op, register_op_attr

from .minimal_filtering import MATRICES, Matrix
from .terms import TensorType, WinogradData, WinogradResult, infer

__all__ = ["winograd_conv2d", "winograd_data", "winograd_result"]

DATA, RESULT, CONV2D = "eqtune.winograd_data", "eqtune.winograd_result", "eqtune.winograd_conv2d"

TILE_GRID = "eqtune.tile_grid"
"""Annotation of the block that writes transformed data: what its axis of tiles is made of, (batch, down, across)."""

FUSES_WITH_USERS, FUSES_WITH_NOTHING = 4, 8
"""TVM's kOutEWiseFusable and kOpaque."""


def winograd_data(x: Any, outputs: int, padding: Sequence[int]) -> relax.Call:
    """B' d B of each tile d of an image (N, H, W, C)."""
    return relax.Call(Op.get(DATA), [x, relax.ShapeExpr([outputs, *padding])])


def winograd_result(x: Any, outputs: int, height: int, width: int) -> relax.Call:
    """The image (N, height, width, C) of A' M A of all products M."""
    return relax.Call(Op.get(RESULT), [x, relax.ShapeExpr([outputs, height, width])])


def winograd_conv2d(x: Any, weight: Any, outputs: int, padding: Sequence[int]) -> relax.Call:
    """The 3x3 convolution of an image (N, H, W, C) with a transformed weight (size * size, C, O)."""
    return relax.Call(Op.get(CONV2D), [x, weight, relax.ShapeExpr([outputs, *padding])])


def _numbers(call: relax.Call) -> list[int]:
    return [int(value) for value in call.args[-1].values]


def _data_attrs(call: relax.Call) -> WinogradData:
    outputs, top, left, bottom, right = _numbers(call)
    return WinogradData(outputs, (top, left, bottom, right))


def _result_attrs(call: relax.Call) -> WinogradResult:
    return WinogradResult(*_numbers(call))


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
    size, matrix = a.outputs + 2, MATRICES[a.outputs].data
    (down, across), (top, left) = a.grid(height, width), a.padding[:2]
    tiles = batch * down * across

    def pixel(tile: Any, row: Any, column: Any, channel: Any) -> Any:
        y = tile // across % down * a.outputs + row - top
        z = tile % across * a.outputs + column - left
        inside = tirx.all(y >= 0, y < height, z >= 0, z < width)
        return tirx.if_then_else(inside, x[tile // (down * across), y, z, channel], tirx.const(0.0, x.dtype))

    cut = te.compute((tiles, size, size, channels), pixel, name="winograd_tile")
    rows = te.compute(
        (tiles, size, size, channels),
        lambda t, i, j, c: _row(matrix, i, lambda k: cut[t, k, j, c]),
        name="winograd_rows",
    )
    return te.compute(
        (size**2, tiles, channels),
        lambda e, t, c: _row(matrix, e % size, lambda k: rows[t, e // size, k, c]),
        name="winograd_data",
        attrs={TILE_GRID: [batch, down, across]},
    )


def _result_kernel(products: te.Tensor, a: WinogradResult) -> te.Tensor:
    _, tiles, channels = (int(extent) for extent in products.shape)
    size, matrix, (down, across) = a.outputs + 2, MATRICES[a.outputs].result, a.grid
    rows = te.compute(
        (tiles, a.outputs, size, channels),
        lambda t, i, j, c: _row(matrix, i, lambda k: products[k * size + j, t, c]),
        name="winograd_rows",
    )

    def pixel(n: Any, y: Any, z: Any, c: Any) -> Any:
        tile = (n * down + y // a.outputs) * across + z // a.outputs
        return _row(matrix, z % a.outputs, lambda k: rows[tile, y % a.outputs, k, c])

    return te.compute((tiles // (down * across), a.height, a.width, channels), pixel, name="winograd_result")


def _conv2d_kernel(x: te.Tensor, weight: te.Tensor, a: WinogradData) -> te.Tensor:
    batch, height, width, channels = (int(extent) for extent in x.shape)
    (down, across), (top, left, bottom, right) = a.grid(height, width), a.padding
    m, size, columns = a.outputs, a.outputs + 2, int(weight.shape[2])
    data, result = MATRICES[m].data, MATRICES[m].result

    def pixel(n: Any, t: Any, u: Any, row: Any, column: Any, channel: Any) -> Any:
        y, z = t * m + row - top, u * m + column - left
        inside = tirx.all(y >= 0, y < height, z >= 0, z < width)
        return tirx.if_then_else(inside, x[n, y, z, channel], tirx.const(0.0, x.dtype))

    cut = te.compute((batch, down, across, size, size, channels), pixel, name="winograd_tile")
    data_rows = te.compute(
        (batch, down, across, size, size, channels),
        lambda n, t, u, i, j, c: _row(data, i, lambda k: cut[n, t, u, k, j, c]),
        name="winograd_data_rows",
    )
    transformed = te.compute(
        (size**2, batch, down, across, channels),
        lambda e, n, t, u, c: _row(data, e % size, lambda k: data_rows[n, t, u, e // size, k, c]),
        name="winograd_data",
    )
    k = te.reduce_axis((0, channels), name="k")
    products = te.compute(
        (size**2, batch, down, across, columns),
        lambda e, n, t, u, c: te.sum(transformed[e, n, t, u, k] * weight[e, k, c], axis=k),
        name="winograd_products",
    )
    rows = te.compute(
        (batch, down, across, m, size, columns),
        lambda n, t, u, i, j, c: _row(result, i, lambda k: products[k * size + j, n, t, u, c]),
        name="winograd_rows",
    )
    return te.compute(
        (batch, height + top + bottom - 2, width + left + right - 2, columns),
        lambda n, y, z, c: _row(result, z % m, lambda k: rows[n, y // m, z // m, y % m, k, c]),
        name="winograd_result",
    )


def _row(matrix: Matrix, index: Any, read: Callable[[int], Any]) -> Any:
    """The sum of row `index` of a matrix of constants times what is read. Once `index` is unrolled, one row is left."""
    sums = [_sum(row, read) for row in matrix]
    result = sums[-1]
    for i in range(len(sums) - 2, -1, -1):
        result = tirx.Select(index == i, sums[i], result)
    return result


def _sum(row: Sequence[float], read: Callable[[int], Any]) -> Any:
    """Even and odd terms apart: rows that belong to the points p and -p then share both parts.

    B of F(4, 3) takes 12 operations in place of 22, most of them multiply-adds.
    """
    parts = [part for start in (0, 1) if (part := _part(row, range(start, len(row), 2), read))]
    (positive, result), *others = sorted(parts, key=lambda part: not part[0])
    for also_positive, other in others:
        result = result + other if also_positive == positive else result - other
    return result if positive else tirx.const(0.0, str(read(0).dtype)) - result


def _part(row: Sequence[float], columns: Iterable[int], read: Callable[[int], Any]) -> tuple[bool, Any] | None:
    """The sum over some columns, or its negative: whether it is the sum itself, and the term; None where all are zero.

    The smallest factor, mostly one, comes first and counts as positive: each other term is one multiply-add.
    """
    terms = sorted(((row[k], k) for k in columns if row[k]), key=lambda term: abs(term[0]))
    if not terms:
        return None

    def scaled(factor: float, k: int) -> Any:
        value = read(k)
        return value if abs(factor) == 1 else value * tirx.const(float(abs(factor)), str(value.dtype))

    positive, result = terms[0][0] > 0, scaled(*terms[0])
    for factor, k in terms[1:]:
        result = result + scaled(factor, k) if (factor > 0) == positive else result - scaled(factor, k)
    return positive, result


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
