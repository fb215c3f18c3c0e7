"""TrimKernels: a convolution without the taps that meet nothing but padding."""

from __future__ import annotations

from typing import Any

from tvm import ir, relax, transform
from tvm.relax import op
from tvm.relax.expr_functor import PyExprMutator, mutator

from ..relax_ir.constants import array_of, constant_of, is_static_tensor
from ..relax_ir.functions import map_functions, operator
from ..relax_ir.tensors import extents

__all__ = ["TrimKernels"]

_CONVOLUTIONS = {
    "relax.nn.conv1d": (op.nn.conv1d, "W"),
    "relax.nn.conv2d": (op.nn.conv2d, "HW"),
    "relax.nn.conv3d": (op.nn.conv3d, "DHW"),
}


@transform.module_pass(opt_level=0, name="TrimKernels")
class TrimKernels:
    """Leave out taps at the edges of constant kernels that read no element of the data in any place.

    Dilated by 24, of 3 x 3 taps over 14 x 14 pixels the one in the middle is left (DeepLab's pyramid over an image of
    224 x 224): a ninth of the products, and of the weights. Padding shrinks with the kernel, and where that would leave
    less than none, the taps stay.
    """

    def transform_module(self, mod: ir.IRModule, _context: transform.PassContext) -> ir.IRModule:
        """Rewrite every Relax function; sizes that are open stay as they are."""
        return map_functions(mod, _trimmed)


def _trimmed(function: relax.Function) -> relax.Function:
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
        data, weight = call.args
        if not isinstance(weight, ir.GenericConst) or not is_static_tensor(data.ty) or not is_static_tensor(call.ty):
            return call
        convolve, axes = _CONVOLUTIONS[operator(call)]
        attrs = call.attrs
        layouts = [str(layout) for layout in (attrs.data_layout, attrs.kernel_layout, attrs.out_layout)]
        packed = any(len(layout) != len(axes) + 2 for layout in layouts)
        if packed or any(int(pad) < 0 for pad in attrs.padding):
            return call
        given, window, places = (
            _along(axes, layout, extents(tensor.ty))
            for layout, tensor in zip(layouts, (data, weight, call), strict=True)
        )
        strides, dilation, padding = (
            [int(n) for n in numbers] for numbers in (attrs.strides, attrs.dilation, attrs.padding)
        )
        before, after = padding[: len(axes)], padding[len(axes) :]
        kept = [_taps(*axis) for axis in zip(given, window, places, strides, dilation, before, after, strict=True)]
        if all(len(taps) == count for taps, count in zip(kept, window, strict=True)):
            return call
        self.changed = True
        of_axis = {letter: slice(taps.start, taps.stop) for letter, taps in zip(axes, kept, strict=True)}
        kernel = array_of(weight)[tuple(of_axis.get(letter, slice(None)) for letter in layouts[1])]
        lost = [(taps.start, count - taps.stop) for taps, count in zip(kept, window, strict=True)]
        return convolve(
            data,
            constant_of(kernel),
            strides=strides,
            padding=[
                *(pad - first * step for pad, (first, _), step in zip(before, lost, dilation, strict=True)),
                *(pad - last * step for pad, (_, last), step in zip(after, lost, dilation, strict=True)),
            ],
            dilation=[step if len(taps) > 1 else 1 for taps, step in zip(kept, dilation, strict=True)],
            groups=int(attrs.groups),
            data_layout=layouts[0],
            kernel_layout=layouts[1],
            out_layout=layouts[2],
            out_dtype=str(call.ty.dtype),
        )


def _along(axes: str, layout: str, shape: list[int]) -> list[int]:
    return [shape[layout.index(letter)] for letter in axes]


def _taps(size: int, count: int, places: int, stride: int, dilation: int, before: int, after: int) -> range:
    """The taps of one axis that are kept: from the first to the last that read any of `size` elements."""

    def reads(tap: int) -> bool:
        first = tap * dilation - before
        return any(0 <= first + place * stride < size for place in range(places))

    reading = [tap for tap in range(count) if reads(tap)]
    if not reading:
        return range(count)
    return range(min(reading[0], before // dilation), max(reading[-1] + 1, count - after // dilation))
