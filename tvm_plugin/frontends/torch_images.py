"""Converters for PyTorch operators that resample, pool or shuffle images."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np
from tvm import relax
from tvm.relax import op

from ..errors import UnsupportedModelError
from .torch_nodes import Converter, arguments, shape_of

__all__ = ["IMAGE_CONVERTERS"]


def _pixel_shuffle(node: Any, importer: Any) -> relax.Expr:
    x, factor = arguments(node, importer, ("input", "upscale_factor"), ())
    *batch, channels, height, width = shape_of(x)
    emit = importer.block_builder.emit
    rank = len(batch)
    split = emit(op.reshape(x, (*batch, channels // factor**2, factor, factor, height, width)))
    axes = [*range(rank), rank, rank + 3, rank + 1, rank + 4, rank + 2]
    interleaved = emit(op.permute_dims(split, axes))
    return emit(op.reshape(interleaved, (*batch, channels // factor**2, height * factor, width * factor)))


def _adaptive_max_pool(node: Any, importer: Any) -> tuple[relax.Expr, ...]:
    """The largest value of each bin [floor(i H / O), ceil((i + 1) H / O)), axis by axis; bins may overlap."""
    if any(user.target is operator.getitem and user.args[1] == 1 for user in node.users):
        raise UnsupportedModelError(f"{node.name} is an adaptive max pooling whose indices are used")
    x, sizes = arguments(node, importer, ("input", "output_size"), ())
    emit, shape = importer.block_builder.emit, shape_of(x)
    first = len(shape) - len(sizes)
    if len(shape) == 4 and len(sizes) == 2 and not any(h % o for h, o in zip(shape[2:], sizes, strict=True)):
        window = [h // o for h, o in zip(shape[2:], sizes, strict=True)]
        return (emit(op.nn.max_pool2d(x, window, strides=window)),)
    for axis, size in enumerate(sizes, start=first):
        extent = shape[axis]
        bins = [(i * extent // size, -(-(i + 1) * extent // size)) for i in range(size)]
        parts = [emit(op.strided_slice(x, axes=[axis], begin=[begin], end=[end])) for begin, end in bins]
        x = emit(op.concat([emit(op.max(part, axis=[axis], keepdims=True)) for part in parts], axis=axis))
    return (x,)


def _upsample_nearest(node: Any, importer: Any) -> relax.Expr:
    """Pixel floor(i / factor), or floor(i H / O) where the size is given; whole factors as TVM's importer does."""
    x, _, factors = arguments(node, importer, ("input", "output_size", "scale_factors"), (None,))
    emit, before, after = importer.block_builder.emit, shape_of(x)[2:], list(node.meta["val"].shape[2:])
    if not any(o % i for i, o in zip(before, after, strict=True)):
        return importer._upsample_nearest2d(node)
    for axis, (extent, size) in enumerate(zip(before, after, strict=True)):
        step = np.float32(extent) / np.float32(size) if factors is None else np.float32(1.0 / factors[axis])
        pixels = np.minimum(np.floor(np.arange(size, dtype=np.float32) * step).astype(np.int64), extent - 1)
        x = emit(op.take(x, relax.const(pixels), axis=2 + axis))
    return x


def _grid_sample(node: Any, importer: Any) -> relax.Expr:
    names = ("input", "grid", "interpolation_mode", "padding_mode", "align_corners")
    x, grid, method, padding, corners = arguments(node, importer, names, ())
    emit = importer.block_builder.emit
    options = {
        "method": ("bilinear", "nearest", "bicubic")[method],
        "padding_mode": ("zeros", "border", "reflection")[padding],
    }
    grid = emit(op.permute_dims(grid, [0, 3, 1, 2]))
    return emit(op.image.grid_sample(x, grid, layout="NCHW", align_corners=corners, **options))


def _affine_grid(node: Any, importer: Any) -> relax.Expr:
    """The coordinates of each pixel, (x, y, 1), times the transposed matrices."""
    theta, (_, _, height, width), corners = arguments(node, importer, ("theta", "size", "align_corners"), ())
    emit, dtype = importer.block_builder.emit, str(theta.ty.dtype)

    def places(count: int) -> Any:
        return np.linspace(-1, 1, count) * (1.0 if corners else (count - 1) / count)

    y, x = np.meshgrid(places(height), places(width), indexing="ij")
    pixels = relax.const(np.stack([x, y, np.ones_like(x)], -1).reshape(-1, 3).astype(dtype))
    grid = emit(op.matmul(pixels, emit(op.permute_dims(theta, [0, 2, 1])), out_dtype=dtype))
    return emit(op.reshape(grid, (-1, height, width, 2)))


IMAGE_CONVERTERS: dict[str, Converter] = {
    "pixel_shuffle.default": _pixel_shuffle,
    "adaptive_max_pool2d.default": _adaptive_max_pool,
    "adaptive_max_pool3d.default": _adaptive_max_pool,
    "upsample_nearest2d.vec": _upsample_nearest,
    "grid_sampler_2d.default": _grid_sample,
    "affine_grid_generator.default": _affine_grid,
}
