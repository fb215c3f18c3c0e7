"""Images resized to sizes that are known only when a model runs."""

from __future__ import annotations

from typing import Any

from tvm import relax, te, tirx, topi

__all__ = ["legalize_resize"]

_ROUNDINGS = {
    "floor": te.floor,
    "ceil": te.ceil,
    "round_prefer_floor": lambda place: te.ceil(place - _real(0.5)),
    "round_prefer_ceil": lambda place: te.floor(place + _real(0.5)),
}
_METHODS = ("linear", "nearest_neighbor")


def legalize_resize(builder: relax.BlockBuilder, call: relax.Call) -> Any:
    """For `LegalizeOps`: as TVM does it, but where sizes are open, as ONNX Runtime does, to the nearest pixel.

    TVM's routine adds 1e-5 before it rounds, and cannot compute where corners lie whose distance is open.
    """
    attrs, sizes, dtype = call.attrs, list(call.args[1].values), str(call.ty.dtype)
    layout = str(attrs.layout)
    shape = list(call.args[0].ty.shape)
    axes = [layout.index(letter) for letter in "HW"] if len(layout) == len(shape) else []
    involved = [*sizes, *(shape[axis] for axis in axes)]
    method, rounding = str(attrs.method), str(attrs.rounding_method)
    known = method in _METHODS and (method == "linear" or rounding in _ROUNDINGS)
    if not known or not axes or all(isinstance(size, tirx.IntImm) for size in involved):
        return _by_tvm(builder, call)
    mode = str(attrs.coordinate_transformation_mode)

    def resize2d(x: Any) -> Any:
        after = list(x.shape)
        for axis, size in zip(axes, sizes, strict=True):
            after[axis] = size

        def element(*at: Any) -> Any:
            places = [_place(at[axis], x.shape[axis], after[axis], mode) for axis in axes]
            if method == "linear":
                return _between(x, list(at), list(zip(axes, places, strict=True))).astype(dtype)
            nearest = list(at)
            for axis, place in zip(axes, places, strict=True):
                nearest[axis] = _inside(_ROUNDINGS[rounding](place), x.shape[axis])
            return x(*nearest).astype(dtype)

        return te.compute(after, element, name="resize")

    return builder.call_te(resize2d, call.args[0], primfunc_name_hint="resize2d")


def _by_tvm(builder: relax.BlockBuilder, call: relax.Call) -> Any:
    """In the dtype of the result: TVM's own legalization leaves that out, and fills another buffer with the image's."""
    attrs = call.attrs
    if str(call.ty.dtype) == str(call.args[0].ty.dtype):
        return call.op.get_attr("FLegalize")(builder, call)
    options = {
        name: getattr(attrs, name)
        for name in ("roi", "layout", "method", "coordinate_transformation_mode", "rounding_method")
    }
    return builder.call_te(
        topi.image.resize2d,
        call.args[0],
        size=call.args[1],
        bicubic_alpha=attrs.cubic_alpha,
        bicubic_exclude=attrs.cubic_exclude,
        extrapolation_value=attrs.extrapolation_value,
        out_dtype=str(call.ty.dtype),
        **options,
    )


def _between(x: Any, at: list[Any], places: list[tuple[int, Any]]) -> Any:
    """What lies between the elements around a place, along one axis after another, as float32."""
    if not places:
        return x(*at).astype("float32")
    (axis, place), *others = places
    low = te.floor(place)

    def beside(pixel: Any) -> Any:
        return _between(x, [*at[:axis], _inside(pixel, x.shape[axis]), *at[axis + 1 :]], others)

    first, second = beside(low), beside(low + _real(1))
    return first + (second - first) * (place - low)


def _place(index: Any, before: Any, after: Any, mode: str) -> Any:
    """Where a pixel of the result is among those of the image, as float32, rounded step by step as in ONNX Runtime."""
    index, before, after = (tirx.Cast("float32", value) for value in (index, before, after))
    before, after = (tirx.max(value, _real(1)) for value in (before, after))  # TVM fails to bound plain quotients
    if mode == "asymmetric":
        return index / (after / before)
    if mode == "align_corners":
        return index * (before - _real(1)) / tirx.max(after - _real(1), _real(1))
    centre = (index + _real(0.5)) / (after / before) - _real(0.5)
    if mode == "half_pixel":
        return centre
    if mode == "pytorch_half_pixel":
        return tirx.Select(after > _real(1), centre, _real(0))
    raise ValueError(f"images of open sizes cannot be resized with coordinates by {mode}")


def _inside(place: Any, extent: Any) -> Any:
    return tirx.max(tirx.min(tirx.Cast("int64", place), extent - 1), tirx.IntImm("int64", 0))


def _real(value: float) -> Any:
    return tirx.FloatImm("float32", value)
