"""Open sizes of ONNX models: what nodes compute of shapes is known as expressions of the sizes of inputs.

TVM's importer keeps shapes apart from tensors and joins them where it can. Here, a shape is a tensor like any other; of
those that are made of sizes alone, it is also known which ones. Operators that need numbers look there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx.helper
import onnx.numpy_helper
from tvm import ir, relax, sym, tirx
from tvm.relax import op

from ...errors import UnsupportedModelError
from ...relax_ir.constants import array_of, constant_of
from ...relax_ir.tensors import repeated, shape_of
from ...repairs.open_slices import from_begin, of_positive_sizes, open_slice, within
from ..imported import KNOWN_SHAPES
from .nodes import padded, text_of
from .size_arithmetic import MOST, OF_SIZES, Sizes, fill_of, integers, objects

__all__ = ["SizeTensors"]


class SizeTensors:
    """Converts nodes on sizes, and those whose results' shapes are computed.

    Parameters
    ----------
    bb : relax.BlockBuilder
        Of the importer.

    Attributes
    ----------
    most : dict
        What sizes of inputs are taken to be at most.
    """

    def __init__(self, bb: relax.BlockBuilder) -> None:
        self._bb = bb
        self.most: dict[Any, int] = {}
        self._known: dict[Any, Sizes] = {}
        self._analyzer = sym.Analyzer()

    def convert(self, name: str, inputs: Sequence[Any], attrs: Mapping[str, Any]) -> relax.Expr | None:
        """What a node computes; None where it has nothing to do with open sizes."""
        if name == "Shape":
            return self._shape(inputs[0], attrs)
        if name in OF_SIZES and self._may_be_sizes(inputs):
            given = [None if value is None else self.sizes(value) for value in inputs]
            if all(sizes is not None for value, sizes in zip(inputs, given, strict=True) if value is not None):
                found = OF_SIZES[name](given, attrs)
                if found is not None:
                    sizes, dtype = _array(found), _dtype(name, inputs, attrs)
                    if _fits(sizes, dtype):
                        return self._tensor(sizes, dtype)
        if name in _BY_SIZES:
            return _BY_SIZES[name](self, [*inputs], attrs)
        return None

    def sizes(self, value: Any) -> Sizes | None:
        """What a tensor's elements are, where they are sizes or constant integers."""
        if isinstance(value, ir.GenericConst):
            array = array_of(value)
            return array.astype(object) if array.dtype.kind in "iub" and array.size <= MOST else None
        return self._known.get(value) if isinstance(value, relax.Var) else None

    def _may_be_sizes(self, inputs: Sequence[Any]) -> bool:
        """Some are sizes, or all are constants of 64 bits, as shapes are."""
        if any(isinstance(value, relax.Var) and value in self._known for value in inputs):
            return True
        return all(str(value.ty.dtype) in ("int64", "bool") for value in inputs if isinstance(value, ir.GenericConst))

    def emit(self, value: relax.Expr) -> relax.Expr:
        """Of the block builder."""
        return self._bb.emit(value)

    def stop(self, place: Any, extent: Any) -> Any:
        """Where a slice ends. A size of an input beside a table's that is known (x[:n]) is taken to be no larger."""
        if isinstance(place, ir.Var) and isinstance(extent, int):
            self.most[place] = min(extent, self.most.get(place, extent))
            return place
        if isinstance(place, int) and place >= 2**31 - 1:
            return extent
        return within(from_begin(place, extent), extent)

    def is_equal(self, one: Any, other: Any) -> bool:
        """Whether two sizes are certainly equal."""
        return bool(self._analyzer.can_prove_equal(one, other))

    def _shape(self, x: relax.Expr, attrs: Mapping[str, Any]) -> relax.Expr:
        if x.ty.shape is None:
            raise UnsupportedModelError("the shape of a tensor is asked for that depends on data")
        extents = objects(shape_of(x))
        return self._tensor(extents[int(attrs.get("start", 0)) : attrs.get("end")], "int64")

    def _tensor(self, sizes: Sizes, dtype: str) -> relax.Expr:
        """A tensor of them, which is known from then on."""
        elements = [self._analyzer.simplify(one) if isinstance(one, ir.Expr) else one for one in sizes.reshape(-1)]
        elements = [int(one) if isinstance(one, tirx.IntImm) else one for one in elements]
        if not any(isinstance(one, ir.Expr) for one in elements):
            return constant_of(np.array(elements, dtype).reshape(sizes.shape))
        result = self.emit(op.shape_to_tensor(relax.ShapeExpr(elements)))
        if sizes.ndim != 1:
            result = self.emit(op.reshape(result, sizes.shape))
        if dtype != "int64":
            result = self.emit(op.astype(result, dtype))
        self._known[result] = objects(elements).reshape(sizes.shape)
        return result


def _array(value: Any) -> Sizes:
    """numpy gives single elements bare."""
    return value if isinstance(value, np.ndarray) else objects([value]).reshape(())


def _fits(sizes: Sizes, dtype: str) -> bool:
    """Whether a dtype has all numbers among sizes: what wraps around is none."""
    if dtype == "bool":
        return True
    limits = np.iinfo(dtype)
    return all(isinstance(one, ir.Expr) or limits.min <= one <= limits.max for one in sizes.reshape(-1))


def _dtype(name: str, inputs: Sequence[Any], attrs: Mapping[str, Any]) -> str:
    if name == "Cast":
        return str(onnx.helper.tensor_dtype_to_np_dtype(attrs["to"]))
    if name == "ConstantOfShape":
        return str(fill_of(attrs).dtype)
    if name in ("Equal", "Less", "Greater"):
        return "bool"
    return str(inputs[1 if name == "Where" else 0].ty.dtype)


def _reshape(sizes: SizeTensors, inputs: Sequence[Any], attrs: Mapping[str, Any]) -> relax.Expr | None:
    x, given = inputs[0], sizes.sizes(inputs[1]) if len(inputs) > 1 else objects(list(attrs["shape"]))
    if given is None or x.ty.shape is None:
        return None
    extents, shape = shape_of(x), list(given)
    for place, extent in enumerate(shape):
        if not isinstance(extent, ir.Expr) and extent == 0 and not attrs.get("allowzero"):
            shape[place] = extents[place]
    return op.reshape(x, shape)


def _expand(sizes: SizeTensors, inputs: Sequence[Any], attrs: Mapping[str, Any]) -> relax.Expr | None:
    x, given = inputs[0], sizes.sizes(inputs[1])
    if given is None or x.ty.shape is None:
        return None
    extents, shape = shape_of(x), list(given)
    rank = max(len(extents), len(shape))
    extents, shape = ([*[1] * (rank - len(part)), *part] for part in (extents, shape))
    result = [_broadcast(own, wanted) for own, wanted in zip(extents, shape, strict=True)]
    return op.broadcast_to(x, result)


def _broadcast(own: Any, wanted: Any) -> Any:
    is_one = not isinstance(own, ir.Expr) and own == 1
    return wanted if is_one else own


def _constant_of_shape(sizes: SizeTensors, inputs: Sequence[Any], attrs: Mapping[str, Any]) -> relax.Expr | None:
    given, value = sizes.sizes(inputs[0]), fill_of(attrs)
    if given is None:
        return None
    return op.full(relax.ShapeExpr(list(given)), constant_of(np.array(value)), str(value.dtype))


def _range(sizes: SizeTensors, inputs: Sequence[Any], attrs: Mapping[str, Any]) -> relax.Expr | None:
    given = [sizes.sizes(value) for value in inputs]
    if any(part is None for part in given):
        return None
    start, end, step = (part.item() for part in given if part is not None)
    if isinstance(step, ir.Expr) or step == 0:
        return None
    zero = tirx.IntImm("int64", 0)
    count = (zero + end - start + step - 1) // step if step > 0 else (zero + start - end - step - 1) // -step
    analyzer = of_positive_sizes(count)
    count = analyzer.simplify(count if analyzer.can_prove(count >= 0) else tirx.max(count, zero))
    return op.arange(start, start + count * step, step, str(inputs[0].ty.dtype))


def _tile(sizes: SizeTensors, inputs: Sequence[Any], attrs: Mapping[str, Any]) -> relax.Expr | None:
    x, counts = inputs[0], sizes.sizes(inputs[1])
    if counts is None or x.ty.shape is None:
        return None
    shape = [count * extent for count, extent in zip(counts, shape_of(x), strict=True)]
    return repeated(sizes.emit, x, list(counts), shape)


def _slice_of(sizes: SizeTensors, inputs: Sequence[Any], attrs: Mapping[str, Any]) -> relax.Expr | None:
    x, starts, ends, axes, steps = padded(inputs, 5)
    if x.ty.shape is None or not isinstance(starts, relax.Expr):
        return None
    begins, stops = sizes.sizes(starts), sizes.sizes(ends)
    rank = len(begins) if begins is not None else 0
    along = list(range(rank)) if axes is None else integers(sizes.sizes(axes))
    strides = [1] * rank if steps is None else integers(sizes.sizes(steps))
    if begins is None or stops is None or along is None or strides is None or 0 in strides:
        return None
    for axis, begin, stop, step in zip(along, begins, stops, strides, strict=True):
        extent = shape_of(x)[axis]
        if step < 0:
            x, step = sizes.emit(op.flip(x, axis % x.ty.ndim)), -step
            # As in ONNX Runtime, the largest integers mean all that there is: here, as far as the first element.
            stop = -(2**31) if isinstance(stop, int) and stop in (2**31 - 1, 2**63 - 1) else stop
            places = (extent - 1 - from_begin(_near(place), extent) for place in (begin, stop))
            begin, stop = (within(place, extent) for place in places)
        else:
            begin, stop = within(from_begin(begin, extent), extent), sizes.stop(stop, extent)
        length = _not_negative(stop - begin if step == 1 else (stop - begin + step - 1) // step)
        if not (sizes.is_equal(length, extent) and step == 1):
            x = open_slice(sizes.emit, x, axis % x.ty.ndim, begin, length, step)
    return x


def _near(place: Any) -> Any:
    """Far beyond the ends of an axis, which files say with the largest numbers that there are, is beyond them."""
    return place if isinstance(place, ir.Expr) else max(-(2**31), min(int(place), 2**31))


def _not_negative(length: Any) -> Any:
    if not isinstance(length, ir.Expr):
        return max(0, length)
    analyzer = of_positive_sizes(length)
    return analyzer.simplify(length if analyzer.can_prove(length >= 0) else tirx.max(length, tirx.IntImm("int64", 0)))


def _flatten(sizes: SizeTensors, inputs: Sequence[Any], attrs: Mapping[str, Any]) -> relax.Expr | None:
    x, axis = inputs[0], int(attrs.get("axis", 1))
    if x.ty.shape is None:
        return None
    extents = shape_of(x)
    axis = axis + len(extents) if axis < 0 else axis
    return op.reshape(x, [math.prod(extents[:axis]), math.prod(extents[axis:])])


def _top(sizes: SizeTensors, inputs: Sequence[Any], attrs: Mapping[str, Any]) -> relax.Expr | None:
    """The largest, or smallest, elements along an axis, where it is computed how many: all in order, cut off."""
    x, given = inputs[0], sizes.sizes(inputs[1]) if len(inputs) > 1 else None
    if given is None or x.ty.shape is None or not isinstance(given.item(), ir.Expr):
        return None
    axis = int(attrs.get("axis", -1)) % x.ty.ndim
    order = sizes.emit(op.argsort(x, axis, descending=bool(attrs.get("largest", 1)), dtype="int64"))
    places = open_slice(sizes.emit, order, axis, 0, given.item())
    return relax.Tuple([sizes.emit(op.gather_elements(x, places, axis)), places])


def _resize(sizes: SizeTensors, inputs: Sequence[Any], attrs: Mapping[str, Any]) -> relax.Expr | None:
    """Images, along height and width: to sizes that are known only when the model runs; from such by whole factors."""
    x, _, factors, wanted = padded(inputs, 4)
    shape = [] if x.ty.shape is None else shape_of(x)
    after = None if wanted is None else sizes.sizes(wanted)
    if factors is not None and wanted is None and isinstance(factors, ir.GenericConst):
        whole = [int(factor) for factor in array_of(factors)]
        after = objects([n * extent for n, extent in zip(whole, shape, strict=True)]) if shape else None
        after = after if np.array_equal(whole, array_of(factors)) else None
    if after is None or len(shape) != 4 or not any(isinstance(one, ir.Expr) for one in (*after, *shape)):
        return None
    mode, policy = text_of(attrs.get("mode", "nearest")), text_of(attrs.get("keep_aspect_ratio_policy", "stretch"))
    place = text_of(attrs.get("coordinate_transformation_mode", "half_pixel"))
    unusual = policy != "stretch" or attrs.get("antialias") or attrs.get("exclude_outside") or "axes" in attrs
    same = all(sizes.is_equal(one, other) for one, other in zip(after[:2], shape[:2], strict=True))
    if unusual or mode not in _METHODS or place not in _PLACES or not same:
        raise UnsupportedModelError(
            f"a Resize of open sizes can be imported where it is nearest or linear, of height and width, not as here "
            f"({mode}, {place}); {KNOWN_SHAPES}"
        )
    return op.image.resize2d(
        x,
        relax.ShapeExpr(list(after[2:])),
        layout="NCHW",
        method=_METHODS[mode],
        coordinate_transformation_mode=place,
        rounding_method=text_of(attrs.get("nearest_mode", "round_prefer_floor")),
    )


_METHODS = {"nearest": "nearest_neighbor", "linear": "linear"}

_PLACES = frozenset({"align_corners", "asymmetric", "half_pixel", "pytorch_half_pixel"})
"""Where pixels of the result may lie, of all of an image: not of a part of it that an input tells."""

_BY_SIZES: Mapping[str, Callable[[SizeTensors, Sequence[Any], Mapping[str, Any]], relax.Expr | None]] = {
    "ConstantOfShape": _constant_of_shape,
    "Expand": _expand,
    "Flatten": _flatten,
    "Range": _range,
    "Reshape": _reshape,
    "Resize": _resize,
    "Slice": _slice_of,
    "Tile": _tile,
    "TopK": _top,
}
