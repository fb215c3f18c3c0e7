"""PadPooling: ceil_mode as padding, where sizes are open."""

from __future__ import annotations

from typing import Any

from tvm import ir, relax, transform
from tvm.relax.expr_functor import PyExprMutator, mutator

from ..relax_ir.constants import is_static_tensor
from ..relax_ir.functions import map_functions, operator, top_level_bindings

__all__ = ["PadPooling"]

_POOLS = {"relax.nn.max_pool2d": relax.op.nn.max_pool2d, "relax.nn.avg_pool2d": relax.op.nn.avg_pool2d}


@transform.module_pass(opt_level=0, name="PadPooling")
class PadPooling:
    """Write pooling of open images with ceil_mode as pooling with as much more padding behind, less one, as it slides.

    In ceil_mode, TVM writes the size of the result as one of two numbers, which joins no kernels, and makes minutes of
    simplifying the indices of all kernels behind (SqueezeNet). Padding counts for no maximum, nor for a mean without
    count_include_pad. Only where windows reach as far as they slide and are padded behind, together: of others, TVM
    drops the last one if it sees that padding alone.
    """

    def transform_module(self, mod: ir.IRModule, _context: transform.PassContext) -> ir.IRModule:
        """Rewrite every Relax function."""
        return map_functions(mod, _padded)


def _padded(function: relax.Function) -> relax.Function:
    if not any(_is_open(binding.value) for binding in top_level_bindings(function)):
        return function
    return _Padding().visit_expr(function)


def _is_open(value: Any) -> bool:
    if operator(value) not in _POOLS or not value.attrs.ceil_mode or is_static_tensor(value.ty):
        return False
    attrs = value.attrs
    windows = zip(attrs.pool_size, attrs.dilation, attrs.strides, list(attrs.padding)[2:], strict=True)
    if any(
        int(dilation) * (int(size) - 1) + 1 < int(stride) + int(behind) for size, dilation, stride, behind in windows
    ):
        return False
    return operator(value) == "relax.nn.max_pool2d" or not attrs.count_include_pad


@mutator
class _Padding(PyExprMutator):
    def visit_call_(self, call: relax.Call) -> Any:
        is_open = _is_open(call)
        call = self.visit_expr_post_order(call)
        if not is_open:
            return call
        attrs = call.attrs
        top, left, bottom, right = (int(count) for count in attrs.padding)
        down, across = (int(count) - 1 for count in attrs.strides)
        return _POOLS[operator(call)](
            call.args[0],
            [int(count) for count in attrs.pool_size],
            strides=[int(count) for count in attrs.strides],
            padding=(top, left, bottom + down, right + across),
            dilation=[int(count) for count in attrs.dilation],
            ceil_mode=False,
            layout=str(attrs.layout),
            out_layout=str(attrs.out_layout),
        )
