"""Operators of ONNX on images that TVM's importer does not know, or gets wrong."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from tvm import ir, relax
from tvm.relax import op

from ...errors import UnsupportedModelError
from ...relax_ir.constants import constant_of
from ...relax_ir.tensors import extents, shape_of
from ..antialiased import cubic, linear, resized
from ..chosen import chosen_rows
from ..empty_boxes import zeros_of_empty_boxes
from ..imported import KNOWN_SHAPES
from ..overlap import fold
from ..pooled_places import places_of_maxima
from .nodes import Convert, numbers_of, padded, text_of

__all__ = ["CHOICES", "IMAGES"]


def _affine_grid(bb: Any, inputs: Sequence[Any], attrs: dict[str, Any], _: Convert) -> Any:
    """Where a side is one pixel, and corners are aligned, ONNX Runtime and ONNX's reference do not agree."""
    size = [int(n) for n in numbers_of("AffineGrid", "size", inputs[1])]
    if attrs.get("align_corners", 0) and 1 in size[2:]:
        raise UnsupportedModelError(f"AffineGrid to {size[2:]} with align_corners=1 cannot be imported: a side is 1")
    return None


def _col2im(bb: Any, inputs: Sequence[Any], attrs: dict[str, Any], _: Convert) -> Any:
    x, size, taps = (
        inputs[0],
        numbers_of("Col2Im", "image_shape", inputs[1]),
        numbers_of("Col2Im", "block_shape", inputs[2]),
    )
    count = len(size)
    strides, dilations = _steps_and_dilations(attrs, count)
    pads = [int(n) for n in attrs.get("pads", [0] * (2 * count))]
    if pads[:count] != pads[count:]:
        raise UnsupportedModelError("Col2Im with different pads before and after cannot be imported")
    images = fold(bb.emit, x, list(zip(size, taps, dilations, pads[:count], strides, strict=True)))
    return op.reshape(images, [extents(x.ty)[0], -1, *size])


def _resize(bb: Any, inputs: Sequence[Any], attrs: dict[str, Any], convert: Convert) -> Any:
    return (_upsample if convert.opset < 11 else _resize_since_11)(bb, inputs, attrs, convert)


def _resize_since_11(bb: Any, inputs: Sequence[Any], attrs: dict[str, Any], convert: Convert) -> Any:
    """By the factors that are given, where TVM takes the quotients of the sizes; of the axes that are given."""
    x, roi, factors, sizes = padded(inputs, 4)
    antialias = bool(attrs.get("antialias", 0))
    is_known = len(inputs) > 2 and all(isinstance(value, ir.GenericConst | None) for value in (factors, sizes))
    if not is_known and not antialias:
        return convert("Resize", inputs, attrs)
    shape = extents(x.ty)
    after, steps = _sizes_and_steps(shape, factors, sizes, attrs)
    mode, place = (text_of(attrs.get(key, default)) for key, default in _RESIZE_DEFAULTS.items())
    axes = 3 if mode == "linear" and len(shape) == 5 else 2
    of_images = mode in ("linear", "cubic") and after[:-axes] == shape[:-axes]
    if antialias and not (of_images and place == "half_pixel"):
        raise UnsupportedModelError(
            f"Resize with antialias, {mode} and {place}, cannot be imported; linear or cubic of the last two axes can, "
            "by half_pixel"
        )
    quotients = [i / o for i, o in zip(shape, after, strict=True)]
    of_tvm_s_axes = len(shape) in (3, 4, 5) and after[:2] == shape[:2]
    is_tvm_s = of_tvm_s_axes and np.allclose(steps, quotients, rtol=1e-6) and place != "half_pixel_symmetric"
    if place == "align_corners":
        steps = [(i - 1) / (o - 1) if o > 1 else 1.0 for i, o in zip(shape, after, strict=True)]
        is_tvm_s = of_tvm_s_axes and min(after[2:], default=2) > 1
    if antialias or (of_images and place in _FIRST and not is_tvm_s):
        weigh = linear if mode == "linear" else cubic(float(attrs.get("cubic_coeff_a", -0.75)))
        reach, repeat_edges = 1 if mode == "linear" else 2, not attrs.get("exclude_outside", 0)
        first = [_FIRST[place](*of) for of in zip(steps[-axes:], after[-axes:], shape[-axes:], strict=True)]
        return resized(bb.emit, x, after[-axes:], steps[-axes:], weigh, reach, repeat_edges, antialias, first)
    if mode == "nearest" and place in _PLACES and not is_tvm_s:
        return _nearest(bb, x, after, steps, _PLACES[place], text_of(attrs.get("nearest_mode", "round_prefer_floor")))
    if after[:2] != shape[:2]:
        raise UnsupportedModelError(f"Resize of {shape} to {after} cannot be imported: it changes the first two axes")
    if "axes" in attrs and roi is not None:
        roi = _region_of_all_axes(roi, [int(axis) % len(shape) for axis in attrs["axes"]], len(shape))
    plain = {key: value for key, value in attrs.items() if key not in ("axes", "keep_aspect_ratio_policy")}
    return convert("Resize", [x, roi, None, relax.const(np.array(after, "int64"))], plain)


def _region_of_all_axes(roi: Any, axes: Sequence[int], rank: int) -> Any:
    """Where the region of an image that is resized begins and ends along every axis, of where it does along some."""
    region = np.array([[0.0] * rank, [1.0] * rank], "float32")
    region[:, axes] = np.reshape(numbers_of("Resize", "roi", roi), (2, len(axes)))
    return constant_of(region.reshape(-1))


def _upsample(bb: Any, inputs: Sequence[Any], attrs: dict[str, Any], convert: Convert) -> Any:
    """By factors, from the first pixel on, as all was resized before version 11."""
    x, factors = padded(inputs, 2)
    if factors is None:  # version 7
        factors = constant_of(np.array(attrs["scales"], "float32"))
    mode = text_of(attrs.get("mode", "nearest"))
    later = {"mode": mode, "coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
    return _resize_since_11(bb, [x, None, factors], {key: value.encode() for key, value in later.items()}, convert)


def _nearest(bb: Any, x: Any, after: Sequence[int], steps: Sequence[float], place: Any, rounding: str) -> Any:
    """Along each axis the elements that are nearest, in float32 as ONNX Runtime finds them."""
    for axis, (length, size, step) in enumerate(zip(extents(x.ty), after, steps, strict=True)):
        if size == length and step == 1.0:
            continue
        factor = np.float32(1 / step)
        at = place(np.arange(size, dtype="float32"), factor, np.float32(length), np.float32(size))
        index = np.clip(_ROUNDINGS[rounding](at), 0, length - 1).astype("int64")
        x = bb.emit(op.take(x, constant_of(index), axis=axis))
    return x


def _sizes_and_steps(
    shape: Sequence[int], factors: Any, sizes: Any, attrs: dict[str, Any]
) -> tuple[list[int], list[float]]:
    """Of all axes: how long they become, and how many pixels of the input lie between two of the result."""
    axes = [int(axis) % len(shape) for axis in attrs.get("axes", range(len(shape)))]
    after, steps = list(shape), [1.0] * len(shape)
    given = numbers_of("Resize", "scales", factors) if factors is not None else []
    wanted = [] if given else numbers_of("Resize", "sizes", sizes)
    choose = _POLICIES[text_of(attrs.get("keep_aspect_ratio_policy", "stretch"))]
    if wanted and choose is None:
        for axis, size in zip(axes, wanted, strict=True):
            after[axis], steps[axis] = int(size), shape[axis] / size
        return after, steps
    if choose is not None and wanted:
        quotients = [np.float32(size) / np.float32(shape[axis]) for axis, size in zip(axes, wanted, strict=True)]
        given = [choose(quotients)] * len(axes)
    for axis, factor in zip(axes, given, strict=True):
        length = np.float32(shape[axis]) * np.float32(factor)  # as ONNX Runtime does: 10 * 0.7 is not below 7
        after[axis], steps[axis] = int(length + 0.5 if wanted else length), 1 / float(factor)
    return after, steps


def _max_pool(bb: Any, inputs: Sequence[Any], attrs: dict[str, Any], convert: Convert) -> Any:
    """To as many pixels as steps begin in the image: where it is padded below, TVM leaves the last one out. Where the
    second result is used, with the places of the maxima."""
    given = _with_pads(shape_of(inputs[0])[2:], attrs)
    if attrs["tvm_custom"]["num_outputs"] == 1:
        return None if given is attrs else convert("MaxPool", inputs, given)
    shape = shape_of(inputs[0])
    if len(shape) != 4 or not all(isinstance(extent, int) for extent in shape):
        raise UnsupportedModelError("MaxPool whose indices are used can be imported of images of two known sides only")
    values = bb.emit(convert("MaxPool", inputs, dict(given)))
    window = [int(n) for n in given["kernel_shape"]]
    steps, dilations = _steps_and_dilations(given, 2)
    pads = [int(n) for n in given.get("pads", (0, 0, 0, 0))]
    places = places_of_maxima(bb.emit, inputs[0], extents(values.ty)[2:], window, steps, pads[:2], dilations)
    if attrs.get("storage_order", 0):  # they count along columns
        row, column = (
            bb.emit(function(places, relax.const(shape[3], "int64"))) for function in (op.floor_divide, op.floor_mod)
        )
        places = bb.emit(op.add(bb.emit(op.multiply(column, relax.const(shape[2], "int64"))), row))
    planes = np.arange(shape[0] * shape[1]).reshape([*shape[:2], 1, 1]) * (shape[2] * shape[3])
    return relax.Tuple([values, bb.emit(op.add(places, relax.const(planes, "int64")))])


def _lp_pool(bb: Any, inputs: Sequence[Any], attrs: dict[str, Any], convert: Convert) -> Any:
    """Of windows that reach beyond the image: TVM takes their means times as many elements as windows have."""
    if not attrs.get("ceil_mode", 0):
        return None
    (x,) = inputs
    shape = shape_of(x)[2:]
    if not all(isinstance(extent, int) for extent in shape):
        raise UnsupportedModelError(f"LpPool of open sizes with ceil_mode=1 cannot be imported; {KNOWN_SHAPES}")
    count = len(shape)
    given = _with_pads(shape, attrs)
    window, pads = ([int(n) for n in given.get(name, [0] * 2 * count)] for name in ("kernel_shape", "pads"))
    steps, dilations = _steps_and_dilations(attrs, count)
    for axis, (extent, taps, step, dilation) in enumerate(zip(shape, window, steps, dilations, strict=True)):
        beyond = -(extent + pads[axis] + pads[count + axis] - (taps - 1) * dilation - 1) % step
        last = extent + pads[axis] + pads[count + axis] + beyond - (taps - 1) * dilation - 1
        pads[count + axis] += beyond if last < extent + pads[axis] else beyond - step
    plain = {key: value for key, value in attrs.items() if key not in ("auto_pad", "ceil_mode")}
    return convert("LpPool", inputs, plain | {"pads": pads})


def _max_unpool(bb: Any, inputs: Sequence[Any], attrs: dict[str, Any], convert: Convert) -> Any:
    """To a shape, which TVM's converter takes as an array, not as the constant that it is. Where none is given, to what
    was pooled: TVM subtracts the padding of other axes."""
    x, places, shape = padded(inputs, 3)
    if shape is None:
        before, window = extents(x.ty), [int(n) for n in attrs["kernel_shape"]]
        count = len(window)
        steps, _ = _steps_and_dilations(attrs, count)
        pads = [int(n) for n in attrs.get("pads", [0] * (2 * count))]
        sides = zip(before[2:], window, steps, pads[:count], pads[count:], strict=True)
        size = [*before[:2], *((extent - 1) * step + taps - pad - end for extent, taps, step, pad, end in sides)]
    else:
        size = numbers_of("MaxUnpool", "output_shape", shape)
    return convert("MaxUnpool", [x, places, np.array(size)], attrs)


def _non_max_suppression(bb: Any, inputs: Sequence[Any], attrs: dict[str, Any], convert: Convert) -> Any:
    """By ONNX's defaults, where TVM has others, also for what is computed; boxes that overlap just so much stay."""
    boxes, scores, *given = padded(inputs, 5)
    unknown = [str(extent) for extent in shape_of(boxes) + shape_of(scores) if not isinstance(extent, int)]
    if unknown:
        what = f"known numbers of images, classes and boxes, not {', '.join(dict.fromkeys(unknown))}"
        raise UnsupportedModelError(f"NonMaxSuppression needs {what}; {KNOWN_SHAPES}")
    names = ("max_output_boxes_per_class", "iou_threshold", "score_threshold")
    most, overlap, score = (
        default if value is None else numbers_of("NonMaxSuppression", name, value)[0]
        for name, value, default in zip(names, given, (0, 0.0, -np.inf), strict=True)
    )
    if most <= 0:
        raise UnsupportedModelError("NonMaxSuppression with max_output_boxes_per_class=0, or none, chooses no boxes")
    above = max(np.nextafter(np.float32(overlap), np.float32(np.inf)), np.finfo("float32").tiny)
    if score < 0:
        scores, score = _positive(bb, scores, score), 0.0
    if attrs.get("center_point_box"):
        boxes = _corners(bb, boxes)
    known = (np.int64(min(most, extents(boxes.ty)[1])), above, np.float32(score))
    numbers = (constant_of(np.array(number)) for number in known)
    chosen = bb.emit(op.vision.all_class_non_max_suppression(boxes, scores, *numbers, output_format="onnx"))
    return chosen_rows(bb, *(bb.emit(relax.TupleGetItem(chosen, place)) for place in range(2)))


def _corners(bb: Any, boxes: Any) -> Any:
    """Of boxes that are given by their middles and sizes."""
    middles, sizes = (
        bb.emit(op.strided_slice(boxes, [2], [begin], [begin + 2], assume_inbound=True)) for begin in (0, 2)
    )
    halves = bb.emit(op.divide(sizes, relax.const(2, str(boxes.ty.dtype))))
    corners = [bb.emit(function(middles, halves)) for function in (op.subtract, op.add)]
    return bb.emit(op.concat(corners, axis=2))


def _positive(bb: Any, scores: Any, least: float) -> Any:
    """Numbers in the order of `scores` along the last axis, above zero for those above `least`, as TVM needs them."""
    count = extents(scores.ty)[-1]
    order = bb.emit(op.argsort(scores, -1, descending=True, dtype="int32"))
    places = bb.emit(op.argsort(order, -1, dtype="int32"))
    ranks = bb.emit(op.astype(bb.emit(op.subtract(relax.const(count, "int32"), places)), "float32"))
    above = bb.emit(op.greater(scores, relax.const(least, str(scores.ty.dtype))))
    return bb.emit(op.where(above, ranks, relax.const(0, "float32")))


def _roi_align(bb: Any, inputs: Sequence[Any], attrs: dict[str, Any], convert: Convert) -> Any:
    """Half a pixel is one of the image that is sampled; TVM moves boxes by one of theirs, before they are scaled."""
    x, boxes, batches = inputs
    if text_of(attrs.get("mode", "avg")) == "max":
        # ONNX, as ONNX Runtime, takes the largest pixel of the four around a sample, times its weight; TVM adds them.
        raise UnsupportedModelError("RoiAlign with mode=max cannot be imported; with mode=avg it can")
    count = shape_of(x)[0]
    if isinstance(count, int):  # TVM reads whatever lies beside the images
        batches = bb.emit(op.clip(batches, 0, count - 1))
    default = "half_pixel" if convert.opset >= 16 else "output_half_pixel"
    if text_of(attrs.get("coordinate_transformation_mode", default)) != "half_pixel":
        return convert("RoiAlign", [x, boxes, batches], attrs)
    scale, moved = float(attrs.get("spatial_scale", 1.0)), boxes
    if scale != 1.0:
        moved = bb.emit(op.add(boxes, relax.const(0.5 - 0.5 / scale, str(boxes.ty.dtype))))
    pooled = bb.emit(convert("RoiAlign", [x, moved, batches], attrs))
    return pooled if attrs.get("sampling_ratio", 0) else zeros_of_empty_boxes(bb.emit, pooled, boxes)


def _with_pads(shape: Sequence[Any], attrs: dict[str, Any]) -> dict[str, Any]:
    """The attributes of a pooling with numbers for `auto_pad`; as they are where they have them, or sides are open.

    As in ONNX Runtime, they are those of a window without dilations: by the standard, there would be more.
    """
    where = text_of(attrs.get("auto_pad", "NOTSET"))
    if where not in ("SAME_UPPER", "SAME_LOWER") or not all(isinstance(extent, int) for extent in shape):
        return attrs
    window = [int(n) for n in attrs["kernel_shape"]]
    steps, _ = _steps_and_dilations(attrs, len(shape))
    pads = [
        max((-(-extent // step) - 1) * step + taps - extent, 0)
        for extent, taps, step in zip(shape, window, steps, strict=True)
    ]
    plain = {key: value for key, value in attrs.items() if key != "auto_pad"}
    return plain | {"pads": _before_and_after(pads, where == "SAME_LOWER")}


def _transposed_convolution(bb: Any, inputs: Sequence[Any], attrs: dict[str, Any], convert: Convert) -> Any:
    """To the sizes that are given, which TVM ignores."""
    wanted = [int(n) for n in attrs.get("output_shape", ())]
    if not wanted:
        return None
    shape = shape_of(inputs[0])[2:]
    if not all(isinstance(extent, int) for extent in shape):
        raise UnsupportedModelError("ConvTranspose of open sizes to given ones cannot be imported")
    taps = extents(inputs[1].ty)[2:]
    steps, dilations = _steps_and_dilations(attrs, len(shape))
    beyond = [int(n) for n in attrs.get("output_padding", [0] * len(shape))]
    pads = [
        step * (extent - 1) + more + (count - 1) * dilation + 1 - size
        for extent, count, step, dilation, more, size in zip(
            shape, taps, steps, dilations, beyond, wanted[-len(shape) :], strict=True
        )
    ]
    beyond = [more + max(0, -pad) for more, pad in zip(beyond, pads, strict=True)]
    if any(more >= step for more, step in zip(beyond, steps, strict=True)):
        raise UnsupportedModelError(f"ConvTranspose to {wanted}, a step or more beyond what it computes")
    plain = {key: value for key, value in attrs.items() if key not in ("auto_pad", "output_shape")}
    first_is_larger = text_of(attrs.get("auto_pad", "NOTSET")) != "SAME_UPPER"
    around = _before_and_after([max(0, pad) for pad in pads], first_is_larger)
    return convert("ConvTranspose", padded(inputs, 3), plain | {"pads": around, "output_padding": beyond})


def _steps_and_dilations(attrs: dict[str, Any], axes: int) -> tuple[list[int], list[int]]:
    """Of a window over so many axes; ones where they are left out."""
    strides, dilations = ([int(n) for n in attrs.get(name, [1] * axes)] for name in ("strides", "dilations"))
    return strides, dilations


def _before_and_after(pads: Sequence[int], first_is_larger: bool) -> list[int]:
    """Halves of what is added, or left out, along each axis: all first ones, then all last ones."""
    halves = [pad // 2 for pad in pads]
    rests = [pad - half for pad, half in zip(pads, halves, strict=True)]
    return [*rests, *halves] if first_is_larger else [*halves, *rests]


_POLICIES: dict[str, Callable[..., Any] | None] = {"stretch": None, "not_larger": min, "not_smaller": max}
"""Which of the quotients of sizes is the factor of all axes."""

_PLACES: dict[str, Callable[..., Any]] = {
    "asymmetric": lambda at, factor, length, size: at / factor,
    "half_pixel": lambda at, factor, length, size: _half_pixel(at, factor),
    "pytorch_half_pixel": lambda at, factor, length, size: _half_pixel(at, factor) if size > 1 else 0 * at,
    "half_pixel_symmetric": lambda at, factor, length, size: (
        length / 2 * (1 - size / (factor * length)) + _half_pixel(at, factor)
    ),
    "align_corners": lambda at, factor, length, size: at * (length - 1) / (size - 1) if size > 1 else 0 * at,
}
"""Where pixels of the result lie in the image, by the factor and both lengths."""

_FIRST: dict[str, Callable[[float, int, int], float]] = {
    "align_corners": lambda step, size, length: 0.5,
    "asymmetric": lambda step, size, length: 0.5,
    "half_pixel": lambda step, size, length: step / 2,
    "half_pixel_symmetric": lambda step, size, length: (length - size * step) / 2 + step / 2,
    "pytorch_half_pixel": lambda step, size, length: step / 2 if size > 1 else 0.5,
}
"""Where the first of `size` pixels of the result has its middle in the image, of as many as `length`; the next ones are
`step` further each."""

_ROUNDINGS: dict[str, Callable[..., Any]] = {
    "round_prefer_floor": lambda at: np.ceil(at - np.float32(0.5)),
    "round_prefer_ceil": lambda at: np.floor(at + np.float32(0.5)),
    "floor": np.floor,
    "ceil": np.ceil,
}

_RESIZE_DEFAULTS = {"mode": "nearest", "coordinate_transformation_mode": "half_pixel"}


def _half_pixel(at: Any, factor: Any) -> Any:
    return (at + np.float32(0.5)) / factor - np.float32(0.5)


IMAGES: dict[str, Callable[..., Any]] = {
    "AffineGrid": _affine_grid,
    "Col2Im": _col2im,
    "ConvTranspose": _transposed_convolution,
    "LpPool": _lp_pool,
    "MaxPool": _max_pool,
    "MaxUnpool": _max_unpool,
    "NonMaxSuppression": _non_max_suppression,
    "Resize": _resize,
    "RoiAlign": _roi_align,
    "Upsample": _upsample,
}
"""Name of an operator -> a function of block builder, inputs, attributes and `Convert` that returns the result."""

CHOICES = frozenset({"NonMaxSuppression"})
"""Operators whose results are as long as their data decides."""
