"""Shapes: reshape, transpose, concatenation, slices, and tensors made from a shape."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
from tvm.relax import op

from ..builder import Builder
from .layouts import change_layout
from .operator import Convert, Operator, row

__all__ = ["SHAPE"]


def new_shape(shape: Sequence[int], wanted: Sequence[int], allow_zero: bool = False) -> list[int]:
    """What Relay's `newshape` means for a tensor of extents `shape`.

    0 copies an extent, -1 is inferred, -2 copies all that remain, -3 merges two, -4 splits one into the next two.
    Inferred is what the extents that are not copied, merged or split have in place of those that are given.
    """
    source, result, inferred, position = list(shape), [], -1, 0
    taken: set[int] = set()
    at, given = 0, 1
    while at < len(wanted):
        extent = wanted[at]
        if extent > 0 or (extent == 0 and allow_zero):
            result.append(extent)
            given *= extent
            position += 1
        elif extent == -1:
            if inferred >= 0:
                raise ValueError(f"newshape {list(wanted)} has more than one -1")
            inferred = len(result)
            result.append(1)
            position += 1
        elif extent == -2:
            result.extend(source[position:])
            taken.update(range(position, len(source)))
            position = len(source)
        elif extent in (0, -3):
            count = 1 if extent == 0 else 2
            if position + count > len(source):
                raise ValueError(f"newshape {list(wanted)} reads past the end of the shape {source}")
            result.append(math.prod(source[position : position + count]))
            taken.update(range(position, position + count))
            position += count
        elif extent == -4 and at + 2 < len(wanted) and position < len(source):
            left, right = wanted[at + 1], wanted[at + 2]
            left = source[position] // right if left == -1 and right > 0 else left
            result += [left, source[position] // left if right == -1 and left > 0 else right]
            taken.add(position)
            position += 1
            at += 2
        else:
            raise ValueError(f"newshape {list(wanted)} cannot be applied to the shape {source}")
        at += 1
    if inferred >= 0:
        left = math.prod(extent for place, extent in enumerate(source) if place not in taken)
        result[inferred] = left // given if given > 0 else 0
    if math.prod(result) != math.prod(source):
        raise ValueError(f"newshape {list(wanted)} cannot be applied to the shape {source}")
    return result


def _reshape(b: Builder, args: Sequence[Any], attrs: SimpleNamespace) -> Any:
    wanted = attrs.newshape if len(args) == 1 else b.integers(args[1], "the new shape")
    if wanted is None:
        raise ValueError("it needs the attribute newshape")
    shape = b.shape(args[0])
    if attrs.reverse:
        return op.reshape(args[0], new_shape(shape[::-1], wanted[::-1])[::-1])
    return op.reshape(args[0], new_shape(shape, wanted, attrs.allowzero))


def _reshape_tensor(b: Builder, args: Sequence[Any], attrs: SimpleNamespace) -> Any:
    return op.reshape(args[0], b.integers(args[1], "the new shape"))


def _reverse_reshape(b: Builder, args: Sequence[Any], attrs: SimpleNamespace) -> Any:
    attrs.reverse = True
    return _reshape(b, args, attrs)


def _reshape_like(b: Builder, args: Sequence[Any], attrs: SimpleNamespace) -> Any:
    left, right = b.shape(args[0]), b.shape(args[1])
    left_end = len(left) if attrs.lhs_end is None else attrs.lhs_end
    right_end = len(right) if attrs.rhs_end is None else attrs.rhs_end
    middle = right[slice(attrs.rhs_begin, right_end)]
    return op.reshape(args[0], [*left[: attrs.lhs_begin], *middle, *left[left_end:]])


def _transpose(b: Builder, args: Sequence[Any], attrs: SimpleNamespace) -> Any:
    if not attrs.axes:
        return op.permute_dims(args[0])
    return op.permute_dims(args[0], [b.axis(int(axis), args[0]) for axis in attrs.axes])


def _squeeze(b: Builder, args: Sequence[Any], attrs: SimpleNamespace) -> Any:
    axes = attrs.axis if len(args) == 1 else b.integers(args[1], "the axis")
    if axes is None:
        return op.squeeze(args[0])
    shape = b.shape(args[0])
    chosen = sorted(b.axis(int(axis), args[0]) for axis in axes)
    for axis in chosen:
        if shape[axis] != 1:
            raise ValueError(f"axis {axis} of {tuple(shape)} has not the extent 1")
    return op.squeeze(args[0], chosen)


def _expand_dims(b: Builder, args: Sequence[Any], attrs: SimpleNamespace) -> Any:
    axis = attrs.axis if len(args) == 1 else b.integers(args[1], "the axis")[0]
    first = b.axis(axis, args[0], extra=1)
    return op.expand_dims(args[0], list(range(first, first + attrs.num_newaxis)))


def _concatenate(b: Builder, args: Sequence[Any], attrs: SimpleNamespace) -> Any:
    parts = [b.emit(part) for part in b.fields(args[0])]
    return op.concat(parts, axis=b.axis(attrs.axis, parts[0])) if len(parts) > 1 else parts[0]


def _stack(b: Builder, args: Sequence[Any], attrs: SimpleNamespace) -> Any:
    parts = [b.emit(part) for part in b.fields(args[0])]
    return op.stack(parts, axis=b.axis(attrs.axis, parts[0], extra=1))


def _split(b: Builder, args: Sequence[Any], attrs: SimpleNamespace) -> Any:
    axis, sections = b.axis(attrs.axis, args[0]), attrs.indices_or_sections
    extent = b.shape(args[0])[axis]
    if isinstance(sections, int):
        if sections < 1 or extent % sections:
            raise ValueError(f"axis {axis} of extent {extent} into {sections} equal parts")
        if sections == 1:  # Relax gives the tensor, not a tuple of it
            return [args[0]]
        return op.split(args[0], sections, axis=axis)
    if not isinstance(sections, list) or not all(isinstance(index, int) for index in sections):
        raise ValueError(f"indices_or_sections is {sections!r}, expected a number or a list of numbers")
    if sections != sorted(sections) or any(not 0 <= index <= extent for index in sections):
        raise ValueError(f"the indices {sections} along axis {axis} of extent {extent}")
    if not sections:
        return [args[0]]
    return op.split(args[0], sections, axis=axis)


def _clamp(position: int, extent: int, stride: int) -> int:
    """One end of a slice as an index from the front, within what the stride's direction allows."""
    if position < 0:
        position += extent
    return min(max(position, 0), extent) if stride > 0 else min(max(position, -1), extent - 1)


def _strided_slice(b: Builder, args: Sequence[Any], attrs: SimpleNamespace) -> Any:
    shape = b.shape(args[0])
    if len(args) > 1:
        begin, end = b.integers(args[1], "begin"), b.integers(args[2], "end")
        strides = b.integers(args[3], "strides") if len(args) > 3 else []
    else:
        begin, end, strides = list(attrs.begin or []), list(attrs.end or []), list(attrs.strides or [])
    axes = [b.axis(axis, args[0]) for axis in attrs.axes] if attrs.axes else list(range(len(begin)))
    if len(begin) != len(end) or len(axes) != len(begin) or len(begin) > len(shape):
        raise ValueError(f"begin {begin} and end {end} of a tensor of shape {tuple(shape)}")
    if attrs.slice_mode == "size":
        end = [shape[axis] if size < 0 else start + size for axis, start, size in zip(axes, begin, end, strict=True)]
        strides = []
    strides = strides + [1] * (len(begin) - len(strides))
    if 0 in strides:
        raise ValueError("a stride of 0")
    begin = [_clamp(at, shape[axis], step) for axis, at, step in zip(axes, begin, strides, strict=False)]
    # The end of a backward slice lies one before its last element: below -extent is "from the start on".
    end = [_clamp(at, shape[axis], step) for axis, at, step in zip(axes, end, strides, strict=False)]
    if any(step < 0 for step in strides):
        return _gather_slices(b, args[0], list(zip(axes, begin, end, strides, strict=False)))
    strides = strides[: len(begin)]
    return op.strided_slice(args[0], axes=axes, begin=begin, end=end, strides=None if set(strides) <= {1} else strides)


def _gather_slices(b: Builder, data: Any, slices: list[tuple[int, int, int, int]]) -> Any:
    """Slices with negative strides, as gathers: an end of -1 stands for "before the first element"."""
    for axis, begin, end, step in slices:
        indices = np.arange(begin, end, step)
        if not np.array_equal(indices, np.arange(b.shape(data)[axis])):
            data = b.emit(op.take(data, b.constant(indices, "int64"), axis=axis))
    return data


def _slice_like(b: Builder, args: Sequence[Any], attrs: SimpleNamespace) -> Any:
    wanted = b.shape(args[1])
    axes = b.axes(attrs.axes, args[0]) if attrs.axes else list(range(min(b.rank(args[0]), len(wanted))))
    return op.strided_slice(args[0], axes=axes, begin=[0] * len(axes), end=[wanted[axis] for axis in axes])


def _target_shape(b: Builder, args: Sequence[Any], attrs: SimpleNamespace, position: int) -> list[int]:
    if len(args) > position:
        return b.integers(args[position], "the shape")
    if attrs.shape is None:
        raise ValueError("it needs the attribute shape")
    return [int(extent) for extent in attrs.shape]


def _broadcast_to(b: Builder, args: Sequence[Any], attrs: SimpleNamespace) -> Any:
    return op.broadcast_to(args[0], _target_shape(b, args, attrs, 1))


def _broadcast_to_like(b: Builder, args: Sequence[Any], attrs: SimpleNamespace) -> Any:
    return op.broadcast_to(args[0], b.shape(args[1]))


def _collapse_sum(b: Builder, args: Sequence[Any], attrs: SimpleNamespace) -> Any:
    return _sum_to(b, args[0], b.shape(args[1]))


def _collapse_sum_to(b: Builder, args: Sequence[Any], attrs: SimpleNamespace) -> Any:
    return _sum_to(b, args[0], b.integers(args[1], "the shape"))


def _sum_to(b: Builder, data: Any, target: list[int]) -> Any:
    """Sum over the axes along which the target was broadcast."""
    shape = b.shape(data)
    lead = len(shape) - len(target)
    axes = [*range(lead), *(lead + i for i, extent in enumerate(target) if extent == 1 and shape[lead + i] != 1)]
    total = b.emit(op.sum(data, axis=axes, keepdims=True)) if axes else data
    return op.reshape(total, target)


def _full(b: Builder, args: Sequence[Any], attrs: SimpleNamespace) -> Any:
    return op.full(_target_shape(b, args, attrs, 1), args[0], dtype=attrs.dtype or b.dtype(args[0]))


def _filled(function: Callable[..., Any]) -> Convert:
    def convert(b: Builder, args: Sequence[Any], attrs: SimpleNamespace) -> Any:
        return function(_target_shape(b, args, attrs, 0), dtype=attrs.dtype or "float32")

    return convert


def _full_like(b: Builder, args: Sequence[Any], attrs: SimpleNamespace) -> Any:
    return op.full(b.shape(args[0]), args[1], dtype=b.dtype(args[0]))


def _arange(b: Builder, args: Sequence[Any], attrs: SimpleNamespace) -> Any:
    """Start, stop and step are arguments; since they are constants, so is the result."""
    bounds = [b.known(arg) for arg in args]
    if any(bound is None for bound in bounds):
        raise ValueError("start, stop and step must be constants")
    return b.constant(np.arange(*(bound.item() for bound in bounds if bound is not None)), attrs.dtype or "float32")


def _meshgrid(b: Builder, args: Sequence[Any], attrs: SimpleNamespace) -> Any:
    return op.meshgrid([b.emit(part) for part in b.fields(args[0])], indexing=attrs.indexing)


def _tile(b: Builder, args: Sequence[Any], attrs: SimpleNamespace) -> Any:
    repeats = attrs.reps if len(args) == 1 else b.integers(args[1], "reps")
    return op.tile(args[0], [int(count) for count in repeats or []])


def _repeat(b: Builder, args: Sequence[Any], attrs: SimpleNamespace) -> Any:
    return op.repeat(args[0], attrs.repeats, axis=attrs.axis)


def _reverse(b: Builder, args: Sequence[Any], attrs: SimpleNamespace) -> Any:
    return op.flip(args[0], axis=b.axis(attrs.axis or 0, args[0]))


def _layout_transform(b: Builder, args: Sequence[Any], attrs: SimpleNamespace) -> Any:
    return change_layout(b, args[0], attrs.src_layout, attrs.dst_layout)


def _shape_of(b: Builder, args: Sequence[Any], attrs: SimpleNamespace) -> Any:
    return b.constant(np.asarray(b.shape(args[0])), attrs.dtype or "int32")


def _size(b: Builder, args: Sequence[Any], attrs: SimpleNamespace) -> Any:
    return b.constant(math.prod(b.shape(args[0])), attrs.dtype or "int32")


def _blocks(b: Builder, args: Sequence[Any], attrs: SimpleNamespace, to_space: bool) -> Any:
    """depth_to_space and space_to_depth: depth is ordered by block, then channel (DCR), or the other way (CRD)."""
    size, layout = attrs.block_size, attrs.layout
    data = args[0]
    if layout not in ("NCHW", "NHWC"):
        raise ValueError(f"the layout {layout}; NCHW or NHWC is expected")
    if layout == "NHWC":
        data = b.emit(op.permute_dims(data, [0, 3, 1, 2]))
    n, c, h, w = b.shape(data)
    if to_space and attrs.mode not in ("DCR", "CRD"):
        raise ValueError(f"mode is {attrs.mode!r}, expected DCR or CRD")
    if to_space:
        deep, order = (
            ([n, size, size, c // size**2, h, w], [0, 3, 4, 1, 5, 2])
            if attrs.mode == "DCR"
            else ([n, c // size**2, size, size, h, w], [0, 1, 4, 2, 5, 3])
        )
        result = [n, c // size**2, h * size, w * size]
    else:
        deep, order = [n, c, h // size, size, w // size, size], [0, 3, 5, 1, 2, 4]
        result = [n, c * size**2, h // size, w // size]
    moved = b.emit(op.permute_dims(b.emit(op.reshape(data, deep)), order))
    data = op.reshape(moved, result)
    return op.permute_dims(b.emit(data), [0, 2, 3, 1]) if layout == "NHWC" else data


def _pairs(values: Sequence[Any], count: int, name: str) -> list[list[int]]:
    pairs = [[int(edge) for edge in pair] for pair in values if isinstance(pair, list) and len(pair) == 2]
    if len(pairs) != count:
        raise ValueError(f"{name} is {values}, expected [before, after] for each of {count} axes")
    return pairs


def _space_to_batch(b: Builder, args: Sequence[Any], attrs: SimpleNamespace) -> Any:
    """Pad, then move blocks of the first axes after the batch into the batch."""
    block = [int(extent) for extent in attrs.block_shape]
    count = len(block)
    pads = [[0, 0], *_pairs(attrs.paddings, count, "paddings")]
    pads += [[0, 0]] * (b.rank(args[0]) - len(pads))
    data = b.emit(op.nn.pad(args[0], [edge for pair in pads for edge in pair], pad_value=attrs.pad_value))
    shape = b.shape(data)
    split = [shape[0]]
    for extent, size in zip(shape[1:], block, strict=False):
        split += [extent // size, size]
    order = [2 * i + 2 for i in range(count)] + [0] + [2 * i + 1 for i in range(count)]
    order += range(2 * count + 1, len(shape) + count)
    moved = b.emit(op.permute_dims(b.emit(op.reshape(data, split + shape[count + 1 :])), order))
    spatial = [extent // size for extent, size in zip(shape[1:], block, strict=False)]
    return op.reshape(moved, [shape[0] * math.prod(block), *spatial, *shape[count + 1 :]])


def _batch_to_space(b: Builder, args: Sequence[Any], attrs: SimpleNamespace) -> Any:
    """The inverse: blocks of the batch into the first axes after it, then crop."""
    block = [int(extent) for extent in attrs.block_shape]
    count, shape = len(block), b.shape(args[0])
    crops = _pairs(attrs.crops, count, "crops")
    batch = shape[0] // math.prod(block)
    deep = b.emit(op.reshape(args[0], [*block, batch, *shape[1:]]))
    order = [count]
    for i in range(count):
        order += [count + 1 + i, i]
    order += range(2 * count + 1, len(shape) + count)
    spatial = [extent * size for extent, size in zip(shape[1:], block, strict=False)]
    data = b.emit(op.reshape(b.emit(op.permute_dims(deep, order)), [batch, *spatial, *shape[count + 1 :]]))
    axes = list(range(1, count + 1))
    ends = [extent - crop[1] for extent, crop in zip(spatial, crops, strict=True)]
    return op.strided_slice(data, axes=axes, begin=[crop[0] for crop in crops], end=ends)


SHAPE: list[Operator] = [
    row("reshape", (1, 2), "ReshapeAttrs", _reshape),
    row("dyn.reshape", 2, "ReshapeAttrs", _reshape),
    row("vm.reshape_tensor", 2, "ReshapeTensorAttrs", _reshape_tensor),
    row("contrib_reverse_reshape", 1, "ReshapeAttrs", _reverse_reshape),
    row("reshape_like", 2, "ReshapeLikeAttrs", _reshape_like),
    row("transpose", 1, "TransposeAttrs", _transpose),
    row("squeeze", 1, "SqueezeAttrs", _squeeze),
    row("dyn.squeeze", 2, "SqueezeAttrs", _squeeze),
    row("expand_dims", 1, "ExpandDimsAttrs", _expand_dims),
    row("dyn.expand_dims", 2, "DynExpandDimsAttrs", _expand_dims),
    row("concatenate", 1, "ConcatenateAttrs", _concatenate),
    row("stack", 1, "StackAttrs", _stack),
    row("split", 1, "SplitAttrs", _split),
    row("strided_slice", (1, 4), "StridedSliceAttrs", _strided_slice),
    row("dyn.strided_slice", (3, 4), "StridedSliceAttrs", _strided_slice),
    row("slice_like", 2, "SliceLikeAttrs", _slice_like),
    row("broadcast_to", (1, 2), "InitOpAttrs", _broadcast_to),
    row("dyn.broadcast_to", 2, "InitOpAttrs", _broadcast_to),
    row("broadcast_to_like", 2, "", _broadcast_to_like),
    row("collapse_sum_like", 2, "", _collapse_sum),
    row("collapse_sum_to", 2, "InitOpAttrs", _collapse_sum_to),
    row("full", (1, 2), "InitOpAttrs", _full),
    row("dyn.full", 2, "InitOpAttrs", _full),
    row("full_like", 2, "", _full_like),
    row("zeros", (0, 1), "InitOpAttrs", _filled(op.zeros)),
    row("ones", (0, 1), "InitOpAttrs", _filled(op.ones)),
    row("dyn.zeros", 1, "InitOpAttrs", _filled(op.zeros)),
    row("dyn.ones", 1, "InitOpAttrs", _filled(op.ones)),
    row("arange", 3, "ArangeAttrs", _arange),
    row("meshgrid", 1, "MeshgridAttrs", _meshgrid),
    row("tile", (1, 2), "TileAttrs", _tile),
    row("dyn.tile", 2, "TileAttrs", _tile),
    row("repeat", 1, "RepeatAttrs", _repeat),
    row("reverse", 1, "ReverseAttrs", _reverse),
    row("layout_transform", 1, "LayoutTransformAttrs", _layout_transform),
    row("shape_of", 1, "ShapeOfAttrs", _shape_of),
    row("vm.shape_of", 1, "ShapeOfAttrs", _shape_of),
    row("ndarray_size", 1, "NdarraySizeAttrs", _size),
    row("nn.depth_to_space", 1, "SubPixelAttrs", lambda b, args, attrs: _blocks(b, args, attrs, True)),
    row("nn.space_to_depth", 1, "SubPixelAttrs", lambda b, args, attrs: _blocks(b, args, attrs, False)),
    row("nn.space_to_batch_nd", 1, "SpaceToBatchNDAttrs", _space_to_batch),
    row("nn.batch_to_space_nd", 1, "BatchToSpaceNDAttrs", _batch_to_space),
]
