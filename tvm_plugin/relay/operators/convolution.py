"""Convolutions, transposed ones too, and their packed forms (NCHW16c)."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from tvm.relax import op

from ..builder import Builder
from .layouts import change_layout, plain_layout
from .operator import Convert, Operator, row

__all__ = ["CONVOLUTION", "convolve", "transposed_convolve"]

SPATIAL = {1: "W", 2: "HW", 3: "DHW"}
"""The axes of a convolution over as many dimensions."""


def convolve(spatial: str) -> Convert:
    """A convolution over the axes `spatial`; also of whole numbers, with `out_dtype`."""
    function = {"W": op.nn.conv1d, "HW": op.nn.conv2d, "DHW": op.nn.conv3d}[spatial]
    plain = f"OI{spatial}"

    def convert(b: Builder, args: Sequence[Any], attrs: SimpleNamespace) -> Any:
        out_layout = attrs.out_layout or attrs.data_layout
        data, data_layout = _without_blocks(b, args[0], attrs.data_layout, f"NC{spatial}")
        weight, layout = _without_blocks(b, args[1], attrs.kernel_layout, plain)
        multiplied = attrs.groups > 1 and attrs.groups == b.shape(data)[data_layout.index("C")]
        if layout not in (plain, f"{spatial}IO") or multiplied:
            weight, layout = change_layout(b, weight, layout, plain), plain
        if multiplied:
            weight = _one_input_each(b, weight)
        _check_kernel(b, weight, layout, attrs)
        result = function(
            data,
            weight,
            strides=attrs.strides,
            padding=attrs.padding,
            dilation=attrs.dilation,
            groups=attrs.groups,
            data_layout=data_layout,
            kernel_layout=layout,
            out_layout=plain_layout(out_layout),
            out_dtype=attrs.out_dtype or b.dtype(data),
        )
        plain_out = plain_layout(out_layout)
        return result if out_layout == plain_out else change_layout(b, b.emit(result), plain_out, out_layout)

    return convert


def _without_blocks(b: Builder, value: Any, layout: str, expected: str) -> tuple[Any, str]:
    """A tensor in the layout that is left when its blocks are merged, and that layout."""
    plain = plain_layout(layout)
    if sorted(plain) != sorted(expected):
        raise ValueError(f"the layout {layout}; only orders of {expected} can be converted")
    return change_layout(b, value, layout, plain), plain


def _one_input_each(b: Builder, weight: Any) -> Any:
    """Depthwise weights: Relay has (C, multiplier, ...), Relax (C * multiplier, 1, ...)."""
    channels, multiplier, *window = b.shape(weight)
    return weight if multiplier == 1 else b.emit(op.reshape(weight, [channels * multiplier, 1, *window]))


def _check_kernel(b: Builder, weight: Any, layout: str, attrs: SimpleNamespace) -> None:
    """Refuse attributes that contradict the weights; Relax does not know them."""
    shape = b.shape(weight)
    if len(shape) != len(layout):
        raise ValueError(f"weights of shape {tuple(shape)} in the layout {layout}")
    size = [shape[axis] for axis, letter in enumerate(layout) if letter not in "OI"]
    if attrs.kernel_size and list(attrs.kernel_size) != size:
        raise ValueError(f"kernel_size is {attrs.kernel_size}, the weights are {tuple(shape)} in {layout}")
    channels = shape[layout.index("O")]
    if attrs.channels is not None and attrs.channels != channels:
        raise ValueError(f"channels is {attrs.channels}, the weights are {tuple(shape)} in {layout}")


def transposed_convolve(spatial: str) -> Convert:
    """A transposed convolution; channels last are moved to the front for it and back, since Relax wants NCHW."""
    function = {"W": op.nn.conv1d_transpose, "HW": op.nn.conv2d_transpose, "DHW": op.nn.conv3d_transpose}[spatial]
    plain, data_plain = f"IO{spatial}", f"NC{spatial}"

    def convert(b: Builder, args: Sequence[Any], attrs: SimpleNamespace) -> Any:
        data = change_layout(b, args[0], attrs.data_layout, data_plain)
        # Older importers write OIHW and mean the same array, whose first axis is the input's.
        swapped = attrs.kernel_layout == f"OI{spatial}" and b.shape(args[1])[:1] == b.shape(data)[1:2]
        layout = plain if swapped else attrs.kernel_layout
        result = function(
            data,
            change_layout(b, args[1], layout, plain),
            strides=attrs.strides,
            padding=attrs.padding,
            output_padding=attrs.output_padding,
            dilation=attrs.dilation,
            groups=attrs.groups,
            data_layout=data_plain,
            kernel_layout=plain,
            out_dtype=attrs.out_dtype or b.dtype(args[0]),
        )
        out_layout = attrs.out_layout or attrs.data_layout
        return result if out_layout == data_plain else change_layout(b, b.emit(result), data_plain, out_layout)

    return convert


CONVOLUTION: list[Operator] = [
    *(row(f"nn.conv{n}d", 2, f"Conv{n}DAttrs", convolve(axes)) for n, axes in SPATIAL.items()),
    *(
        row(f"nn.conv{n}d_transpose", 2, f"Conv{n}DTransposeAttrs", transposed_convolve(axes))
        for n, axes in SPATIAL.items()
    ),
    row("nn.contrib_conv2d_NCHWc", 2, "Conv2DAttrs", convolve("HW")),
    row("nn.contrib_depthwise_conv2d_NCHWc", 2, "Conv2DAttrs", convolve("HW")),
]
