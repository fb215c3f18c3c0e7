"""Images: resizing, upsampling, sampling by a grid, regions of interest."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from tvm.relax import op

from ..builder import Builder
from .operator import Operator, row

__all__ = ["IMAGE"]


def _resize2d(b: Builder, args: Sequence[Any], attrs: SimpleNamespace) -> Any:
    size = attrs.size if len(args) == 1 else b.integers(args[1], "the size")
    return op.image.resize2d(args[0], [int(extent) for extent in size], **_resize_options(attrs))


def _resize3d(b: Builder, args: Sequence[Any], attrs: SimpleNamespace) -> Any:
    return op.image.resize3d(args[0], [int(extent) for extent in attrs.size], **_resize_options(attrs))


def _resize1d(b: Builder, args: Sequence[Any], attrs: SimpleNamespace) -> Any:
    """As an image of height one, which no method changes."""
    if attrs.layout != "NCW":
        raise ValueError(f"the layout {attrs.layout}; NCW is expected")
    options = _resize_options(attrs) | {"layout": "NCHW"}
    image = b.emit(op.expand_dims(args[0], 2))
    return op.squeeze(b.emit(op.image.resize2d(image, [1, int(attrs.size[0])], **options)), [2])


def _resize_options(attrs: SimpleNamespace) -> dict[str, Any]:
    return {
        "layout": attrs.layout,
        "method": attrs.method,
        "coordinate_transformation_mode": attrs.coordinate_transformation_mode,
        "rounding_method": attrs.rounding_method,
        "cubic_alpha": attrs.cubic_alpha,
        "cubic_exclude": attrs.cubic_exclude,
        "extrapolation_value": attrs.extrapolation_value,
        "out_dtype": attrs.out_dtype,
    }


_METHODS = {"nearest_neighbor": "nearest_neighbor", "bilinear": "linear", "bicubic": "cubic", "trilinear": "linear"}


def _upsampling(b: Builder, args: Sequence[Any], attrs: SimpleNamespace) -> Any:
    """A resize to the rounded product of extents and scales."""
    scales = {"H": attrs.scale_h, "W": attrs.scale_w}
    extents = dict(zip(attrs.layout, b.shape(args[0]), strict=True))
    size = [round(extents[axis] * scale) for axis, scale in scales.items()]
    nearest = attrs.method == "nearest_neighbor"
    mode = "asymmetric" if nearest else "align_corners" if attrs.align_corners else "half_pixel"
    return op.image.resize2d(
        args[0],
        size,
        layout=attrs.layout,
        method=_method(attrs.method),
        coordinate_transformation_mode=mode,
        rounding_method="floor" if nearest else "",
        cubic_alpha=-0.5,
    )


def _method(name: str) -> str:
    if name not in _METHODS:
        raise ValueError(f"method is {name!r}, expected {', '.join(_METHODS)}")
    return _METHODS[name]


def _grid_sample(b: Builder, args: Sequence[Any], attrs: SimpleNamespace) -> Any:
    return op.image.grid_sample(
        args[0],
        args[1],
        method=attrs.method,
        layout=attrs.layout,
        padding_mode=attrs.padding_mode,
        align_corners=attrs.align_corners,
    )


def _affine_grid(b: Builder, args: Sequence[Any], attrs: SimpleNamespace) -> Any:
    return op.image.affine_grid(args[0], [int(extent) for extent in attrs.target_shape])


def _roi_align(b: Builder, args: Sequence[Any], attrs: SimpleNamespace) -> Any:
    return op.vision.roi_align(
        args[0],
        args[1],
        pooled_size=[int(extent) for extent in attrs.pooled_size],
        spatial_scale=attrs.spatial_scale,
        sample_ratio=attrs.sample_ratio,
        layout=attrs.layout,
        mode=attrs.mode,
    )


def _roi_pool(b: Builder, args: Sequence[Any], attrs: SimpleNamespace) -> Any:
    return op.vision.roi_pool(
        args[0],
        args[1],
        pooled_size=[int(extent) for extent in attrs.pooled_size],
        spatial_scale=attrs.spatial_scale,
        layout=attrs.layout,
    )


IMAGE: list[Operator] = [
    row("image.resize1d", 1, "Resize1DAttrs", _resize1d),
    row("image.resize2d", 1, "Resize2DAttrs", _resize2d),
    row("dyn.image.resize2d", (2, 3), "Resize2DAttrs", _resize2d),
    row("image.resize3d", 1, "Resize3DAttrs", _resize3d),
    row("image.grid_sample", 2, "GridSampleAttrs", _grid_sample),
    row("image.affine_grid", 1, "AffineGridAttrs", _affine_grid),
    row("nn.upsampling", 1, "UpSamplingAttrs", _upsampling),
    row("vision.roi_align", 2, "ROIAlignAttrs", _roi_align),
    row("vision.roi_pool", 2, "ROIPoolAttrs", _roi_pool),
]
