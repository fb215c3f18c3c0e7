"""Images: resizing, upsampling, sampling by a grid."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from tvm.relax import op

from ..builder import Builder
from .layouts import change_layout, plain_layout
from .operator import Operator, row

__all__ = ["IMAGE"]

_CROP = "tf_crop_and_resize"


def _resize2d(b: Builder, args: Sequence[Any], attrs: SimpleNamespace) -> Any:
    size = attrs.size if len(args) == 1 else b.integers(args[1], "the size")
    if len(args) > 2 and attrs.coordinate_transformation_mode == _CROP:
        known = b.known(args[2])
        if known is None:
            raise ValueError("roi is computed when the program runs; only a constant can be converted")
        attrs.roi = known.tolist()
    return op.image.resize2d(args[0], [int(extent) for extent in size], **_resize_options(attrs, 2))


def _resize3d(b: Builder, args: Sequence[Any], attrs: SimpleNamespace) -> Any:
    return op.image.resize3d(args[0], [int(extent) for extent in attrs.size], **_resize_options(attrs, 3))


def _resize1d(b: Builder, args: Sequence[Any], attrs: SimpleNamespace) -> Any:
    """As an image of height one, which no method changes."""
    if attrs.layout != "NCW":
        raise ValueError(f"the layout {attrs.layout}; NCW is expected")
    if attrs.coordinate_transformation_mode == _CROP:
        raise ValueError(f"{_CROP}; TVM cannot compile it for an image of height one")
    options = _resize_options(attrs, 2) | {"layout": "NCHW"}
    image = b.emit(op.expand_dims(args[0], 2))
    return op.squeeze(b.emit(op.image.resize2d(image, [1, int(attrs.size[0])], **options)), [2])


def _resize_options(attrs: SimpleNamespace, rank: int) -> dict[str, Any]:
    """What the resizes have in common; the region `roi`, all starts and then all ends, is read by cropping only."""
    roi = None
    if attrs.coordinate_transformation_mode == _CROP:
        roi = [float(edge) for edge in attrs.roi or []]
        if len(roi) != 2 * rank:
            raise ValueError(f"roi is {roi}, expected the start along each of {rank} axes and then the end")
    return {
        "roi": roi,
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
    """A resize to the rounded product of extents and scales, which are constants; grids meet at the first element."""
    scales = [attrs.scale_h, attrs.scale_w] if len(args) == 1 else _scales(b, args[1:])
    mode = "align_corners" if attrs.align_corners else "asymmetric"
    return _scaled(b, op.image.resize2d, args[0], dict(zip("HW", scales, strict=True)), attrs, mode)


def _upsampling3d(b: Builder, args: Sequence[Any], attrs: SimpleNamespace) -> Any:
    scales = [attrs.scale_d, attrs.scale_h, attrs.scale_w] if len(args) == 1 else _scales(b, args[1:])
    mode = attrs.coordinate_transformation_mode
    return _scaled(b, op.image.resize3d, args[0], dict(zip("DHW", scales, strict=True)), attrs, mode)


def _scales(b: Builder, args: Sequence[Any]) -> list[float]:
    scales = [b.known(arg) for arg in args]
    if any(scale is None for scale in scales):
        raise ValueError("the scales are computed when the program runs; only static shapes can be converted")
    return [float(scale.reshape(())) for scale in scales if scale is not None]


def _scaled(
    b: Builder, resize: Any, data: Any, scales: dict[str, float], attrs: SimpleNamespace, coordinates: str
) -> Any:
    if attrs.method not in _METHODS:
        raise ValueError(f"method is {attrs.method!r}, expected {', '.join(_METHODS)}")
    if any(scale <= 0 for scale in scales.values()):
        raise ValueError(f"the scales are {list(scales.values())}, which must be positive")
    plain = plain_layout(attrs.layout)
    data = change_layout(b, data, attrs.layout, plain)
    extents = dict(zip(plain, b.shape(data), strict=True))
    result = resize(
        data,
        [round(extents[axis] * scale) for axis, scale in scales.items()],
        layout=plain,
        method=_METHODS[attrs.method],
        coordinate_transformation_mode=coordinates,
        rounding_method="",
        cubic_alpha=-0.5,
    )
    return result if plain == attrs.layout else change_layout(b, b.emit(result), plain, attrs.layout)


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


IMAGE: list[Operator] = [
    row("image.resize1d", 1, "Resize1DAttrs", _resize1d),
    row("image.resize2d", 1, "Resize2DAttrs", _resize2d),
    row("dyn.image.resize2d", (2, 3), "Resize2DAttrs", _resize2d),
    row("image.resize3d", 1, "Resize3DAttrs", _resize3d),
    row("image.grid_sample", 2, "GridSampleAttrs", _grid_sample),
    row("image.affine_grid", 1, "AffineGridAttrs", _affine_grid),
    row("nn.upsampling", 1, "UpSamplingAttrs", _upsampling),
    row("dyn.nn.upsampling", 3, "UpSamplingAttrs", _upsampling),
    row("nn.upsampling3d", 1, "UpSampling3DAttrs", _upsampling3d),
    row("dyn.nn.upsampling3d", 4, "UpSampling3DAttrs", _upsampling3d),
]
