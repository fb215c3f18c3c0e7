"""Arithmetic of sizes: what ONNX's operators make of shapes' numbers and expressions.

Each function takes the operands, arrays of sizes or None, and the node's attributes. It returns the result, None where
that is undecided, or no size.
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
from tvm import ir, tirx

from ...repairs.open_slices import of_positive_sizes
from .nodes import padded

__all__ = ["MOST", "OF_SIZES", "Sizes", "fill_of", "integers", "objects"]

Sizes = NDArray[Any]
"""Numbers and expressions (dtype object) of a tensor's shape."""

MOST = 64
"""Elements of a tensor of sizes: of constants, those of more are none."""


def objects(elements: Sequence[Any]) -> Sizes:
    """An array of one axis; numpy would look into expressions."""
    array = np.empty(len(elements), object)
    for place, element in enumerate(elements):
        array[place] = element
    return array


def integers(sizes: Sizes | None) -> list[int] | None:
    """Sizes that are numbers; None where there are others, or none."""
    if sizes is None or any(isinstance(one, ir.Expr) for one in sizes.reshape(-1)):
        return None
    return [int(one) for one in sizes.reshape(-1)]


def _axes(given: Sequence[Sizes | None], attrs: Mapping[str, Any], place: int = 1) -> list[int] | None:
    if "axes" in attrs:
        return list(attrs["axes"])
    return integers(given[place]) if len(given) > place else None


def _gather(given: Sequence[Any], attrs: Mapping[str, Any]) -> Any:
    data, indices = given
    places = integers(indices)
    if places is None:
        return None
    return np.take(data, np.reshape(places, indices.shape).astype(int), axis=int(attrs.get("axis", 0)))


def _slice(given: Sequence[Any], attrs: Mapping[str, Any]) -> Any:
    data, *bounds = given
    starts, ends, _, steps = (integers(part) for part in padded(bounds, 4))
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
        return None if any(one is None for one in found) else objects(found).reshape(pairs[0].shape)

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
    return objects([total]) if keep else total


def _extreme(choose: Callable[[Any, Any], Any]) -> Callable[[Sequence[Any], Mapping[str, Any]], Any]:
    """Of all elements of a vector."""

    def of_array(given: Sequence[Any], attrs: Mapping[str, Any]) -> Any:
        if given[0].ndim > 1:
            return None
        found = functools.reduce(choose, given[0].reshape(-1))
        return objects([found]) if attrs.get("keepdims", 1) else found

    return of_array


def _reshaped(given: Sequence[Any], attrs: Mapping[str, Any]) -> Any:
    shape = integers(given[1]) if len(given) > 1 else list(attrs["shape"])
    return None if shape is None else given[0].reshape(shape)


def _filled(given: Sequence[Any], attrs: Mapping[str, Any]) -> Any:
    """ConstantOfShape, of few elements whose number is known."""
    extents, value = integers(given[0]), fill_of(attrs)
    if extents is None or math.prod(extents) > MOST or value.dtype.kind != "i":
        return None
    return np.full(extents, int(value), object)


def fill_of(attrs: Mapping[str, Any]) -> NDArray[Any]:
    """The element that ConstantOfShape repeats."""
    tensor = attrs.get("value")
    return np.zeros((), "float32") if tensor is None else onnx.numpy_helper.to_array(tensor).reshape(())


OF_SIZES: Mapping[str, Callable[[Sequence[Any], Mapping[str, Any]], Any]] = {
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
