"""SubPixelConvolution: a transposed convolution is a convolution whose channels are then laid out as pixels."""

from __future__ import annotations

from typing import Any

import numpy as np
from tvm import ir, relax, transform
from tvm.relax import op
from tvm.relax.expr_functor import PyExprMutator, mutator

from ..arrays import Array
from ..relax_ir.constants import array_of, constant_of, is_static_tensor
from ..relax_ir.functions import map_functions, operator
from ..relax_ir.tensors import extents

__all__ = ["SubPixelConvolution"]

_CONVOLUTIONS = {
    "relax.nn.conv1d_transpose": (op.nn.conv1d, "NCW", "IOW"),
    "relax.nn.conv2d_transpose": (op.nn.conv2d, "NCHW", "IOHW"),
    "relax.nn.conv3d_transpose": (op.nn.conv3d, "NCDHW", "IODHW"),
}


@transform.module_pass(opt_level=0, name="SubPixelConvolution")
class SubPixelConvolution:
    """Rewrite transposed convolutions with constant weights as convolutions.

    TVM puts zeros between the pixels of the data and multiplies by them: with strides of 2 x 2, three of four products.
    Instead, all s x s output pixels that belong to one input pixel are computed as channels, each by the taps of the
    kernel that reach it, and a transpose makes pixels of them (Shi et al., "Is the deconvolution layer the same as a
    convolutional layer?", 2016). Where the kernel is a multiple of the stride, pixels are counted from the corner of
    the output without padding, so that all pixels of one place need the same part of the data, and padding is cut off
    afterwards: 4 x 4 taps with strides of 2 x 2 are 2 x 2 for each pixel, where windows around each input pixel would
    be 3 x 3. Otherwise, the taps that some of the pixels lack are zeros: of 3 x 3 taps, 4 instead of the 2.25 that each
    pixel needs on average. By such zeros, as by those within dilated kernels, an infinity or NaN in the data also makes
    NaN (0 * inf) of pixels that it would not reach; finite data gives the same. To avoid that would take s x s
    convolutions.
    """

    def transform_module(self, mod: ir.IRModule, _context: transform.PassContext) -> ir.IRModule:
        """Rewrite those of every Relax function whose layout is NCHW (or NCW, NCDHW), grouped ones included."""
        return map_functions(mod, _rewritten)


def _rewritten(function: relax.Function) -> relax.Function:
    rewriter = _Rewriter()
    result = rewriter.visit_expr(function)
    return relax.analysis.remove_all_unused(result) if rewriter.changed else function


@mutator
class _Rewriter(PyExprMutator):
    def __init__(self) -> None:
        super().__init__()
        self.changed = False

    def visit_call_(self, call: relax.Call) -> Any:
        call = self.visit_expr_post_order(call)
        if operator(call) not in _CONVOLUTIONS:
            return call
        convolve, layout, kernel_layout = _CONVOLUTIONS[operator(call)]
        data, weight = call.args
        attrs = call.attrs
        if (
            not isinstance(weight, ir.GenericConst)
            or not is_static_tensor(data.ty)
            or not is_static_tensor(call.ty)
            or str(call.ty.dtype) != str(data.ty.dtype)
            or (str(attrs.data_layout), str(attrs.out_layout), str(attrs.kernel_layout))
            != (layout, layout, kernel_layout)
        ):
            return call
        size = extents(call.ty)[2:]
        strides, groups = [int(stride) for stride in attrs.strides], int(attrs.groups)
        padding = [int(pad) for pad in attrs.padding][: len(size)]
        taps = _dilated(array_of(weight), [int(distance) for distance in attrs.dilation])
        if any(pad >= taps.shape[2 + axis] for axis, pad in enumerate(padding)):
            return call
        self.changed = True
        cut = [_cut(*axis) for axis in zip(taps.shape[2:], strides, padding, size, strict=True)]
        places = [_places(*axis) for axis in zip(strides, size, cut, strict=True)]
        kernel, before = _as_channels(taps, strides, [pad - c for pad, c in zip(padding, cut, strict=True)], groups)
        inputs = extents(data.ty)[2:]
        # The last place reads this many pixels from its own on.
        after = [
            max(0, place - 1 + kernel.shape[2 + axis] - before[axis] - inputs[axis])
            for axis, place in enumerate(places)
        ]
        channels = convolve(
            data, constant_of(kernel), strides=1, padding=[*before, *after], groups=groups, data_layout=layout
        )
        return self._as_pixels(self.builder_.normalize(channels), strides, groups, size, cut)

    def _as_pixels(self, channels: Any, strides: list[int], groups: int, size: list[int], cut: list[int]) -> Any:
        """[N, groups x strides x C, places] -> [N, groups x C, size], without the first `cut` pixels of each axis.

        Moved with channels last, where C are runs.
        """
        emit = self.builder_.emit
        rank = len(strides)
        batch, count, *places = extents(channels.ty)
        width = count // int(np.prod(strides)) // groups
        last = emit(op.permute_dims(emit(channels), [0, *range(2, rank + 2), 1]))
        parts = emit(op.reshape(last, [batch, *places, groups, *strides, width]))
        pixels = [axis for n in range(rank) for axis in (1 + n, 2 + rank + n)]
        moved = emit(op.permute_dims(parts, [0, *pixels, 1 + rank, 2 + 2 * rank]))
        full = [place * stride for place, stride in zip(places, strides, strict=True)]
        image = emit(op.reshape(moved, [batch, *full, groups * width]))
        if full != size:
            axes = list(range(1, rank + 1))
            image = emit(op.strided_slice(image, axes, cut, [c + extent for c, extent in zip(cut, size, strict=True)]))
        return op.permute_dims(image, [0, rank + 1, *range(1, rank + 1)])


def _dilated(weight: Array, dilation: list[int]) -> Array:
    """The kernel with the zeros between its taps written out."""
    for axis, distance in enumerate(dilation, start=2):
        if distance > 1:
            shape = list(weight.shape)
            shape[axis] = (shape[axis] - 1) * distance + 1
            spread = np.zeros(shape, weight.dtype)
            spread[(slice(None),) * axis + (slice(None, None, distance),)] = weight
            weight = spread
    return weight


def _phases(length: int, stride: int, pad: int) -> list[tuple[int, list[int]]]:
    """For each pixel r of a place: the input pixel d, from its own on, that its first tap reads; and its taps."""
    return [((r + pad) // stride, list(range((r + pad) % stride, length, stride))) for r in range(stride)]


def _window(phases: list[tuple[int, list[int]]]) -> tuple[int, int]:
    """The first and the last input pixel, from its own on, that any pixel of a place reads."""
    return min(d - len(own) + 1 for d, own in phases if own), max(d for d, own in phases if own)


def _places(stride: int, size: int, cut: int) -> int:
    return -(-(size + cut) // stride)


def _cut(length: int, stride: int, pad: int, size: int) -> int:
    """Pixels that are computed in front of the output, and cut off, where that makes fewer products."""

    def products(cut: int) -> int:
        first, last = _window(_phases(length, stride, pad - cut))
        return (last - first + 1) * _places(stride, size, cut)

    return min(0, pad % stride, key=products)


def _as_channels(taps: Array, strides: list[int], padding: list[int], groups: int) -> tuple[Array, list[int]]:
    """The kernel [groups x strides x C, I / groups, window] of the convolution, and the padding in front of its data.

    `taps` are [I, C, taps] of the transposed convolution. Output pixel s * q + r takes tap a + s * t from the input
    pixel q + d - t, where a = (r + p) % s and d = (r + p) // s, for an axis of stride s and padding p.
    """
    inputs, width = taps.shape[:2]
    # [groups, I / groups, C, taps] -> [groups, C, I / groups, taps]
    kernel = taps.reshape(groups, inputs // groups, width, *taps.shape[2:]).swapaxes(1, 2)
    before = []
    for axis, (stride, pad) in enumerate(zip(strides, padding, strict=True)):
        # Pixels r already found lie between the groups and C: [groups, ..., C, I / groups, window..., taps...].
        position = 3 + 2 * axis
        length = kernel.shape[position]
        phases = _phases(length, stride, pad)
        first, last = _window(phases)
        found = []
        for d, own in phases:
            window = np.zeros([*kernel.shape[:position], last - first + 1, *kernel.shape[position + 1 :]], kernel.dtype)
            for t, tap in enumerate(own):
                window[(slice(None),) * position + (d - t - first,)] = kernel.take(tap, position)
            found.append(window)
        kernel = np.stack(found, 1 + axis)
        before.append(-first)
    return kernel.reshape(-1, inputs // groups, *kernel.shape[3 + len(strides) :]), before
