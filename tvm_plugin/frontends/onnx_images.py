"""Operators of ONNX on images that TVM's importer does not know, or gets wrong."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tvm.relax import op

from ..errors import UnsupportedModelError
from ..transform.functions import extents
from .antialiased import cubic, linear, resized
from .onnx_nodes import numbers_of, text_of
from .overlap import fold

__all__ = ["IMAGES"]


def _col2im(bb: Any, inputs: Sequence[Any], attrs: dict[str, Any]) -> Any:
    x, size, taps = (
        inputs[0],
        numbers_of("Col2Im", "image_shape", inputs[1]),
        numbers_of("Col2Im", "block_shape", inputs[2]),
    )
    if len(size) != 2:
        raise UnsupportedModelError(f"Col2Im of {len(size)} axes cannot be imported; two can")
    dilations, strides = ([int(n) for n in attrs.get(name, (1, 1))] for name in ("dilations", "strides"))
    pads = [int(n) for n in attrs.get("pads", (0, 0, 0, 0))]
    if pads[:2] != pads[2:]:
        raise UnsupportedModelError("Col2Im with different pads before and after cannot be imported")
    images = fold(bb.emit, x, list(zip(size, taps, dilations, pads[:2], strides, strict=True)))
    return op.reshape(images, [extents(x.ty)[0], -1, *size])


def _antialiased(bb: Any, inputs: Sequence[Any], attrs: dict[str, Any]) -> Any:
    x, _, factors, sizes = [*inputs, None, None, None][:4]
    mode, place = (text_of(attrs.get(key, default)) for key, default in _RESIZE_DEFAULTS.items())
    shape = extents(x.ty)
    factors = numbers_of("Resize", "scales", factors) if factors is not None else []
    after = [int(n) for n in numbers_of("Resize", "sizes", sizes)] if sizes is not None else []
    after = after or [int(extent * factor) for extent, factor in zip(shape, factors, strict=True)]
    if place != "half_pixel" or mode not in ("linear", "cubic") or after[:-2] != shape[:-2] or attrs.get("axes"):
        raise UnsupportedModelError(
            f"Resize with antialias, {mode} and {place}, cannot be imported; linear or cubic of the last two axes can, "
            "by half_pixel"
        )
    steps = [1 / f for f in factors[-2:]] if factors else [i / o for i, o in zip(shape[-2:], after[-2:], strict=True)]
    weigh = linear if mode == "linear" else cubic(float(attrs.get("cubic_coeff_a", -0.75)))
    repeat_edges = not attrs.get("exclude_outside", 0)
    return resized(bb.emit, x, after[-2:], steps, weigh, 1 if mode == "linear" else 2, repeat_edges)


_RESIZE_DEFAULTS = {"mode": "nearest", "coordinate_transformation_mode": "half_pixel"}


IMAGES: dict[str, Callable[..., Any]] = {"Col2Im": _col2im, "Resize": _antialiased}
"""Name of an operator -> a function of block builder, inputs and attributes that returns the result. Of `Resize`, with
antialias only."""
