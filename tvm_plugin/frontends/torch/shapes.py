"""Converters for PyTorch operators that only arrange elements, where sizes are open: by the shapes that PyTorch knows.

Where all sizes are known, they are left to TVM's importer.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

from tvm import relax
from tvm.relax import op

from ...relax_ir.tensors import repeated, shape_of
from ...repairs.open_slices import from_begin, open_slice, within
from .nodes import Converter, arguments, cast, dtype_of, shape_in_torch
from .sizes import is_size, tensor_of_size

__all__ = ["SHAPE_CONVERTERS"]


def _where_open(name: str, convert: Converter) -> Converter:
    """One for open sizes, of the result or what is given; else the method `name` of TVM's importer."""

    def either(node: Any, importer: Any) -> relax.Expr:
        given = [importer.env[operand] for operand in node.all_input_nodes]
        extents = [dim for value in given for dim in ([value] if is_size(value) else shape_of(value))]
        is_open = any(map(is_size, (*extents, *shape_in_torch(node, importer))))
        return convert(node, importer) if is_open else getattr(importer, name)(node)

    return either


def _to_shape(function: Callable[[Any, Any], relax.Expr], place: int = 0) -> Converter:
    """Of a tensor, the argument at `place`, and the shape of the result; the tensor itself where it has that."""

    def convert(node: Any, importer: Any) -> relax.Expr:
        x, shape = cast(importer.env[node.args[place]], dtype_of(node), importer), shape_in_torch(node, importer)
        given = shape_of(x)
        if len(given) == len(shape) and all(map(importer.sizes.are_equal, given, shape)):
            return x
        return importer.block_builder.emit(function(x, relax.ShapeExpr(shape)))

    return convert


def _slice(node: Any, importer: Any) -> relax.Expr:
    """x[..., begin:end:step]."""
    x, axis, begin, _, step = arguments(node, importer, ("input", "dim", "start", "end", "step"), (0, None, None, 1))
    axis %= len(shape_of(x))
    extent, length = shape_of(x)[axis], shape_in_torch(node, importer)[axis]
    if importer.sizes.are_equal(length, extent):
        return x
    begin = within(from_begin(0 if begin is None else begin, extent), extent)
    return open_slice(importer.block_builder.emit, x, axis, begin, length, step)


def _sliced(node: Any, importer: Any) -> relax.Expr:
    """Where nothing is left, up to the beginning: TVM refuses to end before it."""
    x, axis = arguments(node, importer, ("input", "dim"), (0,))
    axis %= len(shape_of(x))
    length = shape_in_torch(node, importer)[axis]
    if isinstance(length, int) and length == 0:
        return importer.block_builder.emit(op.strided_slice(x, [axis], [0], [0]))
    return _SLICED(node, importer)


def _arange(node: Any, importer: Any) -> relax.Expr:
    given = arguments(node, importer, ("first", "second", "step"), (None, 1))
    start, end = given[:2] if given[1] is not None else (0, given[0])
    return importer.block_builder.emit(op.arange(start, end, given[2], dtype_of(node)))


def _repeat(node: Any, importer: Any) -> relax.Expr:
    """All of a tensor, so many times along each axis."""
    x, counts = arguments(node, importer, ("input", "repeats"), ())
    emit, counts = importer.block_builder.emit, [importer.env.get(count, count) for count in counts]
    return emit(repeated(emit, x, counts, shape_in_torch(node, importer)))


def _roll(node: Any, importer: Any) -> relax.Expr:
    """What leaves the end of an axis comes in at its beginning; without axes, that of all elements in a row."""
    x, shifts, dims = arguments(node, importer, ("input", "shifts", "dims"), ((),))
    emit, shape = importer.block_builder.emit, shape_in_torch(node, importer)
    shifts, dims = ([value] if isinstance(value, int) or is_size(value) else list(value) for value in (shifts, dims))
    shifts = [importer.env.get(shift, shift) for shift in shifts]
    if not dims:
        return emit(op.reshape(_rolled(emit, emit(op.flatten(x)), shifts[0], 0), shape))
    for shift, axis in zip(shifts, dims, strict=True):
        x = _rolled(emit, x, shift, axis % len(shape))
    return x


def _rolled(emit: Callable[[Any], Any], x: relax.Expr, shift: Any, axis: int) -> relax.Expr:
    extent = shape_of(x)[axis]
    if isinstance(extent, int) and isinstance(shift, int):
        begin = -shift % max(extent, 1)
        halves = (open_slice(emit, x, axis, at, length) for at, length in ((begin, extent - begin), (0, begin)))
        return emit(op.concat(list(halves), axis)) if begin else x
    from_shift = emit(op.arange(-shift, extent - shift, 1, "int64"))
    places = emit(op.floor_mod(from_shift, tensor_of_size(emit, extent)))
    return emit(op.take(x, places, axis, mode="fast"))


def _split(node: Any, importer: Any) -> Any:
    """A single part is the tensor itself: TVM's kernels of a split have several results, none of them empty."""
    x, axis, parts = importer.env[node.args[0]], node.args[2] if len(node.args) > 2 else 0, node.meta["val"]
    if len(parts) == 1:
        return (x,)
    lengths = [part.shape[axis] for part in parts]
    if 0 not in lengths:
        return importer._split(node)
    ends, axis = list(itertools.accumulate(lengths)), axis % len(shape_of(x))
    bounds = zip([0, *ends], ends, strict=False)
    return tuple(importer.block_builder.emit(op.strided_slice(x, [axis], [begin], [end])) for begin, end in bounds)


def _squeeze(node: Any, importer: Any) -> relax.Expr:
    """A number has no axis but the one that PyTorch lets it have: it stays."""
    x = importer.env[node.args[0]]
    return _SQUEEZED(node, importer) if shape_of(x) else x


_SLICED = _where_open("_slice", _slice)

_SQUEEZED = _where_open("_squeeze", _to_shape(op.reshape))

SHAPE_CONVERTERS: dict[str, Converter] = {
    **{
        name: _where_open("_reshape", _to_shape(op.reshape))
        for name in ("view.default", "reshape.default", "_unsafe_view.default")
    },
    "flatten.using_ints": _where_open("_flatten", _to_shape(op.reshape)),
    "unflatten.int": _where_open("_unflatten", _to_shape(op.reshape)),
    "expand.default": _where_open("_expand", _to_shape(op.broadcast_to)),
    "copy.default": _to_shape(op.broadcast_to, place=1),  # of the other tensor; TVM's importer changes the first, too
    "slice.Tensor": _sliced,
    **{f"squeeze.{name}": _squeeze for name in ("default", "dim", "dims")},
    "split.Tensor": _split,
    "split_with_sizes.default": _split,
    **{f"arange.{name}": _where_open("_arange", _arange) for name in ("default", "start", "start_step")},
    "repeat.default": _where_open("_repeat", _repeat),
    "roll.default": _where_open("_roll", _roll),
}
