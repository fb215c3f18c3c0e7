"""Depthwise convolutions of bytes that are padded by a number: quantised ones, whose zero is seldom 0."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from tvm import ir, relax, te, tirx, topi

from ..dtypes import is_byte
from ..relax_ir.constants import array_of, constant_of, is_static_tensor
from ..relax_ir.functions import block_results, operator, top_level_bindings, use_counts
from ..relax_ir.te_kernels import with_te_kernels
from ..relax_ir.tensors import extents

__all__ = ["pad_in_depthwise_convolutions"]

_EXACT = 2**24
"""Whole numbers up to this are exact in float32."""

_LARGEST = 255 * 255
"""Product of two bytes, both of which may be unsigned."""


def pad_in_depthwise_convolutions(mod: ir.IRModule) -> ir.IRModule:
    """conv2d(pad(x, number), W) -> one kernel, where x are bytes with channels last, and nothing else is read padded.

    TVM's kernels pad with 0 while they read; with another number, the padded image is written and read again: 60 us for
    112 x 112 pixels with 96 channels (two threads of Zen 5), where the convolution takes 30. Its sums are whole numbers
    below 2^24, which multiply-adds of float32 compute exactly, in two thirds of the time of 32-bit integers, now that
    no masked load gives zeros; W is kept in float32.
    """
    return with_te_kernels(mod, "conv2d", _convolutions)


def _convolutions(function: relax.Function) -> Mapping[relax.Var, _Depthwise]:
    bindings, uses, results = list(top_level_bindings(function)), use_counts(function), block_results(function)
    pads = {
        binding.var: binding.value
        for binding in bindings
        if binding.var not in results and uses.get(binding.var) == 1 and _pads_image(binding.value)
    }
    return {
        binding.var: _Depthwise(binding.value, pads[binding.value.args[0]])
        for binding in bindings
        if _is_depthwise(binding.value) and binding.value.args[0] in pads
    }


def _is_depthwise(call: Any) -> bool:
    if operator(call) != "relax.nn.conv2d" or not is_static_tensor(call.ty) or str(call.ty.dtype) != "int32":
        return False
    layouts = str(call.attrs.data_layout), str(call.attrs.out_layout), sorted(str(call.attrs.kernel_layout))
    if layouts != ("NHWC", "NHWC", sorted("HWIO")):
        return False
    image, weight = call.args
    if not isinstance(weight, ir.GenericConst) or not is_static_tensor(image.ty) or 0 in extents(call.ty):
        return False
    shape, kernel = extents(image.ty), dict(zip(str(call.attrs.kernel_layout), extents(weight.ty), strict=True))
    return (
        is_byte(str(image.ty.dtype))
        and is_byte(str(weight.ty.dtype))
        and int(call.attrs.groups) == shape[3] == kernel["O"]
        and kernel["I"] == 1
        and kernel["H"] * kernel["W"] * _LARGEST < _EXACT
        and not any(map(int, call.attrs.padding))
    )


def _pads_image(pad: Any) -> bool:
    if operator(pad) != "relax.nn.pad" or not is_static_tensor(pad.args[0].ty) or pad.ty.ndim != 4:
        return False
    widths = [int(width) for width in pad.attrs.pad_width]
    return str(pad.attrs.pad_mode) == "constant" and not any(widths[:2] + widths[6:])


@dataclass(frozen=True)
class _Depthwise:
    """One kernel for a convolution, `call`, of what `pad` is."""

    call: relax.Call
    pad: relax.Call

    @property
    def arguments(self) -> list[Any]:
        floats = constant_of(array_of(self.call.args[1]).astype(np.float32))
        return [self.pad.args[0], floats]

    def compute(self, image: te.Tensor, weight: te.Tensor) -> te.Tensor:
        """As TVM writes it, stage by stage, so that sketches know it."""
        attrs = self.call.attrs
        (down, right), (below, beside) = map(int, attrs.strides), map(int, attrs.dilation)
        letters = str(attrs.kernel_layout)
        kernel = dict(zip(letters, extents(self.call.args[1].ty), strict=True))
        taps = {letter: te.reduce_axis((0, kernel[letter]), f"r{letter.lower()}") for letter in "HWI"}
        widths = [int(width) for width in self.pad.attrs.pad_width]
        number = tirx.const(int(self.pad.attrs.pad_value), image.dtype)
        padded = topi.nn.pad(image, widths[::2], widths[1::2], pad_value=number, name="pad_temp")

        def product(n: Any, y: Any, x: Any, f: Any) -> Any:
            pixel = padded[n, y * down + taps["H"] * below, x * right + taps["W"] * beside, f + taps["I"]]
            factor = weight[tuple((taps | {"O": f})[letter] for letter in letters)]
            return te.sum(pixel.astype("float32") * factor, axis=[taps["H"], taps["W"], taps["I"]])

        sums = te.compute(extents(self.call.ty), product, name="group_conv2d_nhwc")
        return te.compute(sums.shape, lambda *at: sums(*at).astype("int32"), name="whole")
