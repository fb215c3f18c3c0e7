"""Open sizes of ONNX models: what nodes compute of shapes is known as expressions of the sizes of inputs.

TVM's importer keeps shapes apart from tensors and joins them where it can. Here, a shape is a tensor like any other; of
those that are made of sizes alone, it is also known which ones. Operators that need numbers look there.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx.helper
import onnx.numpy_helper
from numpy.typing import NDArray
from tvm import ir, relax, sym, tirx
from tvm.relax import op

from ...errors import UnsupportedModelError
from ...relax_ir.constants import array_of, constant_of
from ...relax_ir.tensors import repeated, shape_of
from ...repairs.open_slices import from_begin, of_positive_sizes, open_slice, within
from ..imported import KNOWN_SHAPES
from .nodes import padded, text_of

__all__ = ["SizeTensors"]

Sizes = NDArray[Any]
"""Numbers and expressions (dtype object) of a tensor's shape."""

MOST = 64
"""Elements of a tensor of sizes: of constants, those of more are none."""


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
        if name in _OF_SIZES and self._may_be_sizes(inputs):
            given = [None if value is None else self.sizes(value) for value in inputs]
            if all(sizes is not None for value, sizes in zip(inputs, given, strict=True) if value is not None):
                found = _OF_SIZES[name](given, attrs)
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
        extents = _objects(shape_of(x))
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
        self._known[result] = _objects(elements).reshape(sizes.shape)
        return result


def _objects(elements: Sequence[Any]) -> Sizes:
    """An array of one axis; numpy would look into expressions."""
    array = np.empty(len(elements), object)
    for place, element in enumerate(elements):
        array[place] = element
    return array


def _array(value: Any) -> Sizes:
    """numpy gives single elements bare."""
    return value if isinstance(value, np.ndarray) else _objects([value]).reshape(())


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
        return str(_fill(attrs).dtype)
    if name in ("Equal", "Less", "Greater"):
        return "bool"
    return str(inputs[1 if name == "Where" else 0].ty.dtype)


# Of sizes, sizes.


def _integers(sizes: Sizes | None) -> list[int] | None:
    """Sizes that are numbers; None where there are others, or none."""
    if sizes is None or any(isinstance(one, ir.Expr) for one in sizes.reshape(-1)):
        return None
    return [int(one) for one in sizes.reshape(-1)]


def _axes(given: Sequence[Sizes | None], attrs: Mapping[str, Any], place: int = 1) -> list[int] | None:
    if "axes" in attrs:
        return list(attrs["axes"])
    return _integers(given[place]) if len(given) > place else None


def _gather(given: Sequence[Any], attrs: Mapping[str, Any]) -> Any:
    data, indices = given
    places = _integers(indices)
    if places is None:
        return None
    return np.take(data, np.reshape(places, indices.shape).astype(int), axis=int(attrs.get("axis", 0)))


def _slice(given: Sequence[Any], attrs: Mapping[str, Any]) -> Any:
    data, *bounds = given
    starts, ends, _, steps = (_integers(part) for part in padded(bounds, 4))
    if "starts" in attrs:
        starts, ends = list(attrs["starts"]), list(attrs["ends"])
    if starts is None or ends is None or data.ndim != 1:
        return None
    return data[starts[0] : ends[0] : (steps or [1])[0]]


def _unsqueeze(given: Sequence[Any], attrs: Mapping[str, Any]) -> Any:
    axes = _axes(given, attrs)
    return None if axes is None else np.expand_dims(given[0], tuple(axes))


def _squeeze(given: Sequence[Any], attrs: Mapping[str, Any]) -> Any:
    axes = _axes(given, attrs)
    return np.squeeze(given[0], None if axes is None else tuple(axes))


def _quotient(one: Any, other: Any) -> Any:
    """ONNX rounds towards zero."""
    if _are_numbers(one, other):
        return None if other == 0 else abs(one) // abs(other) * (1 if (one < 0) == (other < 0) else -1)
    return one // other if _are_positive(one, other) else None


def _remainder(given: Sequence[Any], attrs: Mapping[str, Any]) -> Any:
    """With the sign of the divisor, or with `fmod` of the dividend: the same where neither is negative."""

    def of_elements(one: Any, other: Any) -> Any:
        if _are_numbers(one, other):
            return None if other == 0 else int(math.fmod(one, other)) if attrs.get("fmod") else one % other
        return one % other if _are_positive(one, other) else None

    return _each(of_elements)(given, attrs)


def _are_numbers(*values: Any) -> bool:
    return not any(isinstance(value, ir.Expr) for value in values)


def _are_positive(one: Any, other: Any) -> bool:
    """Whether a dividend is certainly not negative, and a divisor above zero."""
    analyzer = of_positive_sizes(one, other)
    zero = tirx.IntImm("int64", 0)
    return bool(analyzer.can_prove(zero + one >= 0) and analyzer.can_prove(zero + other > 0))


def _each(function: Callable[..., Any]) -> Callable[[Sequence[Any], Mapping[str, Any]], Any]:
    """Of each pair of elements; None where one is not decided."""

    def of_arrays(given: Sequence[Any], attrs: Mapping[str, Any]) -> Any:
        pairs = np.broadcast_arrays(*given)
        found = [function(*elements) for elements in zip(*(part.reshape(-1) for part in pairs), strict=True)]
        return None if any(one is None for one in found) else _objects(found).reshape(pairs[0].shape)

    return of_arrays


def _is_equal(one: Any, other: Any) -> bool | None:
    if _are_numbers(one, other):
        return bool(one == other)
    analyzer = of_positive_sizes(one, other)
    if analyzer.can_prove_equal(one, other):
        return True
    zero = tirx.IntImm("int64", 0)
    return False if analyzer.can_prove(tirx.NE(zero + one, zero + other)) else None


def _compared(compare: Callable[[Any, Any], bool]) -> Callable[[Any, Any], bool | None]:
    def decided(one: Any, other: Any) -> bool | None:
        return None if isinstance(one, ir.Expr) or isinstance(other, ir.Expr) else bool(compare(one, other))

    return decided


def _larger(one: Any, other: Any) -> Any:
    return max(one, other) if not isinstance(one, ir.Expr) and not isinstance(other, ir.Expr) else tirx.max(one, other)


def _smaller(one: Any, other: Any) -> Any:
    return min(one, other) if not isinstance(one, ir.Expr) and not isinstance(other, ir.Expr) else tirx.min(one, other)


def _of_any_number(choose: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    return lambda *values: functools.reduce(choose, values)


def _where(condition: Any, one: Any, other: Any) -> Any:
    return None if isinstance(condition, ir.Expr) else (one if condition else other)


def _cast(given: Sequence[Any], attrs: Mapping[str, Any]) -> Any:
    kind = np.dtype(onnx.helper.tensor_dtype_to_np_dtype(attrs["to"])).kind
    return given[0] if kind == "i" else None


def _product(given: Sequence[Any], attrs: Mapping[str, Any]) -> Any:
    if given[0].ndim > 1:  # of some axes, perhaps
        return None
    keep = bool(attrs.get("keepdims", 1))
    total = math.prod(given[0].reshape(-1))
    return _objects([total]) if keep else total


def _extreme(choose: Callable[[Any, Any], Any]) -> Callable[[Sequence[Any], Mapping[str, Any]], Any]:
    """Of all elements of a vector."""

    def of_array(given: Sequence[Any], attrs: Mapping[str, Any]) -> Any:
        if given[0].ndim > 1:
            return None
        found = functools.reduce(choose, given[0].reshape(-1))
        return _objects([found]) if attrs.get("keepdims", 1) else found

    return of_array


def _reshaped(given: Sequence[Any], attrs: Mapping[str, Any]) -> Any:
    shape = _integers(given[1]) if len(given) > 1 else list(attrs["shape"])
    return None if shape is None else given[0].reshape(shape)


def _filled(given: Sequence[Any], attrs: Mapping[str, Any]) -> Any:
    """ConstantOfShape, of few elements whose number is known."""
    extents, value = _integers(given[0]), _fill(attrs)
    if extents is None or math.prod(extents) > MOST or value.dtype.kind != "i":
        return None
    return np.full(extents, int(value), object)


def _fill(attrs: Mapping[str, Any]) -> NDArray[Any]:
    tensor = attrs.get("value")
    return np.zeros((), "float32") if tensor is None else onnx.numpy_helper.to_array(tensor).reshape(())


_OF_SIZES: Mapping[str, Callable[[Sequence[Any], Mapping[str, Any]], Any]] = {
    "Add": _each(lambda one, other: one + other),
    "Sub": _each(lambda one, other: one - other),
    "Mul": _each(lambda one, other: one * other),
    "Div": _each(_quotient),
    "Mod": _remainder,
    "Max": _each(_of_any_number(_larger)),
    "Min": _each(_of_any_number(_smaller)),
    "Equal": _each(_is_equal),
    "Less": _each(_compared(lambda one, other: one < other)),
    "Greater": _each(_compared(lambda one, other: one > other)),
    "Where": _each(_where),
    "Cast": _cast,
    "Concat": lambda given, attrs: np.concatenate(given, int(attrs["axis"])),
    "ConstantOfShape": _filled,
    "Gather": _gather,
    "Identity": lambda given, attrs: given[0],
    "ReduceMax": _extreme(_larger),
    "ReduceMin": _extreme(_smaller),
    "ReduceProd": _product,
    "Reshape": _reshaped,
    "Slice": _slice,
    "Squeeze": _squeeze,
    "Unsqueeze": _unsqueeze,
}


# Of tensors whose shapes sizes tell.


def _reshape(sizes: SizeTensors, inputs: Sequence[Any], attrs: Mapping[str, Any]) -> relax.Expr | None:
    x, given = inputs[0], sizes.sizes(inputs[1]) if len(inputs) > 1 else _objects(list(attrs["shape"]))
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
    given, value = sizes.sizes(inputs[0]), _fill(attrs)
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
    along = list(range(rank)) if axes is None else _integers(sizes.sizes(axes))
    strides = [1] * rank if steps is None else _integers(sizes.sizes(steps))
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
        after = _objects([n * extent for n, extent in zip(whole, shape, strict=True)]) if shape else None
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
