"""Operators of TFLite that pick, turn round or overwrite elements: what TVM's importer refuses, or gets wrong."""

from __future__ import annotations

from typing import Any

import numpy as np
import tflite
from tvm import relax
from tvm.relax import op as relax_op

from ...errors import UnsupportedModelError
from ...relax_ir.tensors import extents
from .values import Values

__all__ = ["MOVES", "Moves", "options_of"]

MOVES = frozenset(
    (
        *("BATCH_TO_SPACE_ND", "BROADCAST_TO", "DEPTH_TO_SPACE", "DYNAMIC_UPDATE_SLICE", "EXPAND_DIMS", "GATHER"),
        *("GATHER_ND", "MIRROR_PAD", "PACK", "PAD", "PADV2", "RESIZE_NEAREST_NEIGHBOR", "REVERSE_V2", "SLICE"),
        *("SPACE_TO_BATCH_ND", "SPACE_TO_DEPTH", "SPLIT", "SPLIT_V", "SQUEEZE", "STRIDED_SLICE", "TILE", "TRANSPOSE"),
        "UNPACK",
    )
)
"""Operators that only move elements: of quantised tensors, the integers."""

_NO_OPTIONS = bytes((4, 0, 4, 0, 4, 0, 0, 0))
"""A table without fields, at 4: before it the sizes of its list of fields, and of itself, both with nothing in them."""


class Moves(Values):
    """TVM's converters, and others in the place of those that move elements."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.convert_map["DYNAMIC_UPDATE_SLICE"] = self.convert_dynamic_update_slice

    def convert_cumsum(self, op: Any) -> relax.Expr:
        """TVM's sums from the start alone."""
        x, axis = self.get_input_tensors(op)
        options = options_of(op, tflite.CumsumOptions())
        along = int(self.get_tensor_value(axis).item())

        def turned(value: relax.Expr) -> relax.Expr:
            return self.bb.normalize(relax_op.flip(value, along)) if options.Reverse() else value

        sums = relax_op.cumsum(turned(self.get_tensor_expr(x)), along, exclusive=options.Exclusive())
        return turned(self.bb.normalize(sums))

    def convert_dynamic_update_slice(self, op: Any) -> relax.Expr:
        """Elements whose place is inside of the slice are its own; it begins where all of it is inside of the whole."""
        x, update, start = map(self.get_tensor_expr, self.get_input_tensors(op))
        if 0 in extents(update.ty):
            return x
        inside, dtype, emit = None, str(start.ty.dtype), self.bb.normalize
        for axis, (whole, part) in enumerate(zip(extents(x.ty), extents(update.ty), strict=True)):
            if part == whole:
                continue
            begin = emit(relax_op.clip(emit(relax_op.take(start, relax.const(axis), 0)), 0, whole - part))
            place = emit(relax_op.subtract(relax.const(np.arange(whole, dtype=dtype)), begin))
            clipped = emit(relax_op.clip(place, 0, part - 1))
            update = emit(relax_op.take(update, clipped, axis))
            here = emit(relax_op.reshape(emit(relax_op.equal(place, clipped)), [-1, *[1] * (x.ty.ndim - axis - 1)]))
            inside = here if inside is None else emit(relax_op.logical_and(inside, here))
        return update if inside is None else relax_op.where(inside, update, x)

    def convert_gather(self, op: Any) -> relax.Expr:
        """TVM's takes batches for other axes, and looks at a constant index once for each element of the result."""
        options = options_of(op, tflite.GatherOptions())
        x, indices = map(self.get_tensor_expr, self.get_input_tensors(op))
        rank, added = x.ty.ndim, indices.ty.ndim
        if not options.BatchDims():
            return relax_op.take(x, indices, options.Axis() % rank)
        batches, axis = options.BatchDims(), options.Axis() % rank
        batches += added if batches < 0 else 0
        before = list(range(batches, axis))
        moved = relax_op.permute_dims(x, [*range(batches), axis, *before, *range(axis + 1, rank)])
        index = relax_op.expand_dims(self.bb.normalize(relax_op.astype(indices, "int64")), -1)
        taken = self.bb.normalize(relax_op.gather_nd(*map(self.bb.normalize, (moved, index)), batch_dims=batches))
        last = added + len(before)
        order = [*range(batches), *range(added, last), *range(batches, added), *range(last, taken.ty.ndim)]
        return relax_op.permute_dims(taken, order)

    def convert_gather_nd(self, op: Any) -> relax.Expr:
        """TVM's permutes the indices."""
        x, indices = map(self.get_tensor_expr, self.get_input_tensors(op))
        return relax_op.gather_nd(x, self.bb.normalize(relax_op.astype(indices, "int64")))

    def convert_mirror_pad(self, op: Any) -> relax.Expr:
        """TVM's does not repeat the outermost element."""
        x, pads = self.get_input_tensors(op)
        if options_of(op, tflite.MirrorPadOptions()).Mode() != tflite.MirrorPadMode.SYMMETRIC:
            return super().convert_mirror_pad(op)
        result = self.get_tensor_expr(x)
        for axis, (extent, pad) in enumerate(zip(extents(result.ty), self.get_tensor_value(pads), strict=True)):
            if pad.any():
                places = relax.const(np.pad(np.arange(extent), pad, mode="symmetric"))
                result = self.bb.normalize(relax_op.take(result, places, axis))
        return result

    def convert_reverse_v2(self, op: Any) -> relax.Expr:
        """TVM's reverses one axis."""
        x, axes = self.get_input_tensors(op)
        result = self.get_tensor_expr(x)
        for axis in self.get_tensor_value(axes).reshape(-1):
            result = self.bb.normalize(relax_op.flip(result, int(axis)))
        return result

    def convert_strided_slice(self, op: Any) -> relax.Expr:
        """TVM's does not know that ends may be relative to where the slice begins.

        What is equal may be one tensor: values are told apart by the order in which TVM's asks for them.
        """
        x, *numbers = self.get_input_tensors(op)
        options = options_of(op, tflite.StridedSliceOptions())
        if not options.Offset():
            return super().convert_strided_slice(op)
        if options.EllipsisMask() or options.NewAxisMask():
            raise UnsupportedModelError("STRIDED_SLICE with offsets and new axes, or an ellipsis, cannot be imported")
        starts, lengths, steps = map(self.get_tensor_value, numbers)
        sizes = np.array(extents(self.get_tensor_expr(x).ty))[: len(starts)]
        begins = np.where(starts < 0, starts + sizes, starts)
        is_masked = options.BeginMask() >> np.arange(len(starts)) & 1
        ends = np.where(is_masked, np.where(steps > 0, 0, sizes - 1), begins) + lengths
        self._asked_next = [starts, ends, steps]
        return super().convert_strided_slice(op)


def options_of(op: Any, options: Any) -> Any:
    """An operator's options, of the type of `options`; what they are by default where the file has none."""
    given = op.BuiltinOptions()
    options.Init(*((_NO_OPTIONS, 4) if given is None else (given.Bytes, given.Pos)))
    return options
