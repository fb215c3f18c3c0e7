"""Converters for PyTorch operators that resample, pool or shuffle images."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from tvm import relax
from tvm.relax import op

from ...dtypes import is_floating
from ...errors import UnsupportedModelError
from ...relax_ir.tensors import shape_of
from ...repairs.bins import max_of_bins
from ..antialiased import cubic, linear, resized
from ..empty_boxes import zeros_of_empty_boxes
from ..imported import KNOWN_SHAPES
from ..overlap import add_up, fold
from ..pooled_places import places_of_maxima
from .nodes import Converter, arguments, scalar, shape_in_torch
from .sizes import is_size

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


def _pad(node: Any, importer: Any) -> relax.Expr:
    """What is cut off is cut first where a tensor is repeated beside itself, which TVM does not."""
    x, pads, mode, _ = arguments(node, importer, ("input", "pad", "mode", "value"), ("constant", None))
    if mode != "circular" or min(pads) >= 0:
        return importer._pad(node)
    emit, shape = importer.block_builder.emit, shape_of(x)
    around = [pads[place : place + 2] for place in reversed(range(0, len(pads), 2))]
    outer = len(shape) - len(around)
    begin = [max(0, -before) for before, _ in around]
    end = [extent + min(0, behind) for extent, (_, behind) in zip(shape[outer:], around, strict=True)]
    x = emit(op.strided_slice(x, list(range(outer, len(shape))), begin, end))
    widths = [max(0, width) for both in around for width in both]
    return emit(op.nn.pad(x, [0] * (2 * outer) + widths, "circular"))


def _adaptive_max_pool(node: Any, importer: Any) -> tuple[relax.Expr, ...]:
    """By one pooling where all bins are equal."""
    if _gives_places(node):
        raise UnsupportedModelError(f"{node.name} is an adaptive max pooling whose indices are used")
    x, sizes = arguments(node, importer, ("input", "output_size"), ())
    emit, shape = importer.block_builder.emit, shape_of(x)
    if len(shape) == 4 and len(sizes) == 2 and not any(h % o for h, o in zip(shape[2:], sizes, strict=True)):
        window = [h // o for h, o in zip(shape[2:], sizes, strict=True)]
        return (emit(op.nn.max_pool2d(x, window, strides=window)),)
    return (max_of_bins(emit, x, range(len(shape) - len(sizes), len(shape)), sizes),)


def _gives_places(node: Any) -> bool:
    """Whether somebody uses the second result of a pooling: where the maxima are."""
    return any(user.target is operator.getitem and user.args[1] == 1 for user in node.users)


def _adaptive_avg_pool(rank: int) -> Converter:
    def convert(node: Any, importer: Any) -> relax.Expr:
        result = getattr(importer, f"_adaptive_avg_pool{rank}d")(node)
        return importer.block_builder.emit(result) if isinstance(result, relax.Call) else result  # without a batch

    return convert


def _avg_pool(rank: int) -> Converter:
    """TVM's importer does not look at `divisor_override`."""

    def convert(node: Any, importer: Any) -> relax.Expr:
        names = ("input", "kernel_size", "stride", "padding", "ceil_mode", "count_include_pad", "divisor_override")
        x, window, strides, padding, ceil, _, divisor = arguments(node, importer, names, ((), 0, False, True, None))
        if divisor is None:
            return importer.block_builder.emit(getattr(importer, f"_avg_pool{rank}d")(node))
        if ceil:
            raise UnsupportedModelError(f"{node.name} is a pooling with divisor_override and ceil_mode")
        mean = getattr(importer, f"_avg_pool{rank}d_impl")(x, window, strides or None, padding, False, True)
        count = int(np.prod(np.broadcast_to(window, rank)))
        return importer.block_builder.emit(op.multiply(mean, relax.const(count / divisor, str(x.ty.dtype))))

    return convert


def _max_pool(rank: int) -> Converter:
    """TVM's importer takes strides that are left out for none, where an option follows."""

    def convert(node: Any, importer: Any) -> relax.Expr:
        x, window, strides, *others = arguments(node, importer, _MAX_POOL, ((), 0, 1, False))
        result = getattr(importer, f"_max_pool{rank}d_impl")(x, window, strides or None, *others)
        return importer.block_builder.emit(result)  # without a batch, it is a view

    return convert


def _max_pool_with_indices(rank: int) -> Converter:
    """TVM's importer has zeros as indices."""

    def convert(node: Any, importer: Any) -> tuple[relax.Expr, ...]:
        if not _gives_places(node):
            return (_max_pool(rank)(node, importer),)
        return _max_pool_and_places(rank, node, importer)

    return convert


_MAX_POOL = ("input", "kernel_size", "stride", "padding", "dilation", "ceil_mode")


def _max_pool_and_places(rank: int, node: Any, importer: Any) -> tuple[relax.Expr, ...]:
    x, *options = arguments(node, importer, _MAX_POOL, ((), 0, 1, False))
    four = [options[0], options[1] or options[0], *options[2:4]]
    window, strides, padding, dilation = ([int(n) for n in np.broadcast_to(option, rank)] for option in four)
    values = _max_pool(rank)(node, importer)
    emit, size = importer.block_builder.emit, shape_of(values)[-rank:]
    return values, places_of_maxima(emit, x, size, window, strides, padding, dilation)


def _upsample_nearest(node: Any, importer: Any) -> relax.Expr:
    """Where each pixel is repeated as often, as TVM's importer does; else pixel by pixel."""
    x, _, factors = arguments(node, importer, ("input", "output_size", "scale_factors"), (None,))
    emit, before, after = importer.block_builder.emit, shape_of(x)[2:], list(node.meta["val"].shape[2:])
    if _is_open(node, importer, before):
        return _repeated_pixels(node, importer, x, factors)
    pixels = [_nearest(*axis) for axis in zip(before, after, factors or (None, None), strict=True)]
    repeated = [np.repeat(np.arange(i), o // i) for i, o in zip(before, after, strict=True)]
    if all(map(np.array_equal, pixels, repeated)):
        return importer._upsample_nearest2d(node)
    for axis, chosen in enumerate(pixels, start=2):
        x = emit(op.take(x, relax.const(chosen), axis=axis))
    return x


def _repeated_pixels(node: Any, importer: Any, x: relax.Expr, factors: Any) -> relax.Expr:
    """Of images of open sizes, as often as whole factors say; to other sizes without factors."""
    if not factors:
        return _nearest_pixels(node, importer, x)
    _check_whole(node, factors)
    emit, (batch, channels, *extents) = importer.block_builder.emit, shape_of(x)
    apart = [batch, channels, *(part for extent in extents for part in (extent, 1))]
    repeated = [part for pair in zip(extents, map(int, factors), strict=True) for part in pair]
    pixels = emit(op.broadcast_to(emit(op.reshape(x, apart)), [batch, channels, *repeated]))
    return emit(op.reshape(pixels, shape_in_torch(node, importer)))


def _is_open(node: Any, importer: Any, before: Sequence[Any]) -> bool:
    """Whether the height or width of an image, or of what it is resized to, is known only when the model runs."""
    return any(map(is_size, (*before, *shape_in_torch(node, importer)[-2:])))


def _nearest_pixels(node: Any, importer: Any, x: relax.Expr) -> relax.Expr:
    """Rows and columns floor(i H / O), as `_nearest`, of images of open sizes."""
    emit, before, after = importer.block_builder.emit, shape_of(x), shape_in_torch(node, importer)
    for axis in (2, 3):
        extent, size = (scalar(one, "float32", importer) for one in (before[axis], after[axis]))
        places = emit(op.astype(emit(op.arange(0, after[axis], 1, "int64")), "float32"))
        places = emit(op.floor(emit(op.multiply(places, emit(op.divide(extent, size))))))
        last = scalar(before[axis] - 1, "int64", importer)
        x = emit(op.take(x, emit(op.minimum(emit(op.astype(places, "int64")), last)), axis=axis))
    return x


def _between_pixels(node: Any, importer: Any, x: relax.Expr, mode: str) -> relax.Expr:
    """Linear, to sizes that are known only when a model runs, or from such."""
    size = relax.ShapeExpr(shape_in_torch(node, importer)[-2:])
    options = {"layout": "NCHW", "method": "linear", "coordinate_transformation_mode": mode}
    return importer.block_builder.emit(op.image.resize2d(x, size, **options))


def _check_whole(node: Any, factors: Sequence[float]) -> None:
    """Of others, pixels are not as far apart as the quotient of the sizes says."""
    if any(factor != int(factor) for factor in factors):
        raise UnsupportedModelError(f"{node.name} resizes images of open sizes by no whole factors; {KNOWN_SHAPES}")


def _nearest(extent: int, size: int, factor: float | None) -> Any:
    """Pixel floor(i / factor), or floor(i H / O) where the size is given, or is once or twice that of the image."""
    if size in (extent, 2 * extent):
        return np.arange(size) * extent // size
    step = np.float32(extent) / np.float32(size) if factor is None else np.float32(1.0 / factor)
    return np.minimum(np.floor(np.arange(size, dtype=np.float32) * step).astype(np.int64), extent - 1)


def _grid_sample(node: Any, importer: Any) -> relax.Expr:
    """Of images, or of volumes."""
    names = ("input", "grid", "interpolation_mode", "padding_mode", "align_corners")
    x, grid, method, padding, corners = arguments(node, importer, names, ())
    emit, last = importer.block_builder.emit, len(shape_of(grid)) - 1
    options = {
        "method": ("bilinear", "nearest", "bicubic")[method],
        "padding_mode": ("zeros", "border", "reflection")[padding],
        "layout": "NCHW" if last == 3 else "NCDHW",
    }
    if last == 4 and padding == 2:  # TVM's kernel of it takes 15 s to compile
        grid, options["padding_mode"] = _reflected(emit, grid), "border"
    grid = emit(op.permute_dims(grid, [0, last, *range(1, last)]))
    return emit(op.image.grid_sample(x, grid, align_corners=corners, **options))


def _reflected(emit: Callable[[Any], Any], grid: Any) -> Any:
    """Places between -1 and 1, where the edges of an image are: those beyond are reflected."""
    one, two, four = (relax.const(number, str(grid.ty.dtype)) for number in (1, 2, 4))
    turn = emit(op.floor_mod(emit(op.add(grid, one)), four))
    return emit(op.subtract(one, emit(op.abs(emit(op.subtract(turn, two))))))


def _affine_grid(node: Any, importer: Any) -> relax.Expr:
    """The coordinates of each pixel, (x, y, 1), or of those of a volume, times the transposed matrices."""
    theta, size, corners = arguments(node, importer, ("theta", "size", "align_corners"), ())
    emit, dtype, extents = importer.block_builder.emit, str(theta.ty.dtype), size[2:]

    def places(count: int) -> Any:
        if count == 1:
            return np.zeros(1)
        return np.linspace(-1, 1, count) * (1.0 if corners else (count - 1) / count)

    along = np.meshgrid(*map(places, extents), indexing="ij")
    pixels = np.stack([*reversed(along), np.ones(extents)], -1).reshape(-1, len(extents) + 1)
    grid = emit(op.matmul(relax.const(pixels.astype(dtype)), emit(op.permute_dims(theta, [0, 2, 1])), out_dtype=dtype))
    return emit(op.reshape(grid, (-1, *extents, len(extents))))


def _roi_align(node: Any, importer: Any) -> relax.Expr:
    """torchvision's. Half a pixel is one of the image that is sampled; TVM moves boxes before they are scaled."""
    names = ("input", "rois", "spatial_scale", "pooled_height", "pooled_width", "sampling_ratio", "aligned")
    x, boxes, scale, height, width, samples, aligned = arguments(node, importer, names, ())
    emit, given = importer.block_builder.emit, boxes
    if aligned:
        half = 0.5 / scale
        moved = relax.const(np.array([0.0, half, half, half, half]), str(boxes.ty.dtype))  # not the number of the image
        boxes = emit(op.subtract(boxes, moved))
    pooled = emit(op.vision.roi_align(x, boxes, (height, width), scale, samples, bool(aligned), "NCHW", "avg"))
    return emit(zeros_of_empty_boxes(emit, pooled, given)) if aligned and samples <= 0 else pooled


def _fold(node: Any, importer: Any) -> relax.Expr:
    names = ("input", "output_size", "kernel_size", "dilation", "padding", "stride")
    x, *axes = arguments(node, importer, names, ())
    emit = importer.block_builder.emit
    image = fold(emit, x, list(zip(*axes, strict=True)))
    return emit(op.reshape(image, list(node.meta["val"].shape)))


def _unfold_backward(node: Any, importer: Any) -> relax.Expr:
    """The windows of `x.unfold(axis, size, step)`, their elements last, added up where they lie along the axis."""
    x, sizes, axis, size, step = arguments(node, importer, ("grad", "input_sizes", "dim", "size", "step"), ())
    emit, rank = importer.block_builder.emit, len(sizes)
    axis %= rank
    others = [a for a in range(rank) if a != axis]
    lines = emit(op.permute_dims(x, [*others, rank, axis]))
    total = add_up(emit, lines, sizes[axis], size, 1, 0, step)
    return emit(op.permute_dims(total, [*range(axis), rank - 1, *range(axis, rank - 1)]))


def _check_floats(node: Any, x: relax.Expr) -> None:
    """Of bytes, PyTorch rounds weights, in ways that depend on the CPU."""
    dtype = str(x.ty.dtype)
    if not is_floating(dtype):
        raise UnsupportedModelError(f"{node.name} resizes images of {dtype}; convert them to float32 before")


def _antialiased(weigh: Callable[..., Any], reach: int) -> Converter:
    def convert(node: Any, importer: Any) -> relax.Expr:
        names = ("input", "output_size", "align_corners", "scale_factors")
        x, _, corners, factors = arguments(node, importer, names, (False, None))
        _check_floats(node, x)
        before, after = shape_of(x)[-2:], list(node.meta["val"].shape[-2:])
        if corners:
            steps = [(i - 1) / (o - 1) if o > 1 else 0.0 for i, o in zip(before, after, strict=True)]
        else:
            steps = [1 / f for f in factors] if factors else [i / o for i, o in zip(before, after, strict=True)]
        return resized(importer.block_builder.emit, x, after, steps, weigh, reach)

    return convert


def _upsample(name: str, weigh: Callable[..., Any], reach: int) -> Converter:
    """TVM's importer does not look at factors, which may be others than the quotients of the sizes."""

    def convert(node: Any, importer: Any) -> relax.Expr:
        names = ("input", "output_size", "align_corners", "scale_factors")
        x, _, corners, factors = arguments(node, importer, names, (False, None))
        _check_floats(node, x)
        before, after = shape_of(x)[-2:], list(node.meta["val"].shape[-2:])
        if _is_open(node, importer, before):
            if weigh is not linear:
                raise UnsupportedModelError(
                    f"{node.name} resizes images of open sizes by cubic weights; {KNOWN_SHAPES}"
                )
            _check_whole(node, [] if corners else factors or [])
            return _between_pixels(node, importer, x, "align_corners" if corners else "half_pixel")
        steps = [1 / f for f in factors or ()]
        if corners or not steps or np.allclose(steps, np.divide(before, after), rtol=1e-6):
            return getattr(importer, name)(node)
        emit = importer.block_builder.emit
        return resized(emit, x, after, steps, weigh, reach, repeat_edges=True, antialias=False)

    return convert


IMAGE_CONVERTERS: dict[str, Converter] = {
    "pad.default": _pad,
    "pixel_shuffle.default": _pixel_shuffle,
    "adaptive_max_pool2d.default": _adaptive_max_pool,
    **{f"{kind}adaptive_avg_pool{rank}d.default": _adaptive_avg_pool(rank) for kind in ("", "_") for rank in (1, 2, 3)},
    "avg_pool1d.default": _avg_pool(1),
    "avg_pool2d.default": _avg_pool(2),
    "avg_pool3d.default": _avg_pool(3),
    **{f"max_pool{rank}d.default": _max_pool(rank) for rank in (1, 2, 3)},
    **{f"max_pool{rank}d_with_indices.default": _max_pool_with_indices(rank) for rank in (2, 3)},
    "adaptive_max_pool3d.default": _adaptive_max_pool,
    "col2im.default": _fold,
    "unfold_backward.default": _unfold_backward,
    "_upsample_bilinear2d_aa.vec": _antialiased(linear, 1),
    "_upsample_bicubic2d_aa.vec": _antialiased(cubic(-0.5), 2),
    "upsample_nearest2d.vec": _upsample_nearest,
    "upsample_bilinear2d.vec": _upsample("_upsample_bilinear2d", linear, 1),
    "upsample_bicubic2d.vec": _upsample("_upsample_bicubic2d", cubic(-0.75), 2),
    "grid_sampler_2d.default": _grid_sample,
    "grid_sampler_3d.default": _grid_sample,
    "affine_grid_generator.default": _affine_grid,
    "roi_align.default": _roi_align,
}
