"""Small results that are spread over large ones, as the gates of squeeze-and-excitation blocks are."""

from __future__ import annotations

import math
from typing import Any

from tvm import ir, relax

from ..relax_ir.constants import is_static_tensor
from ..relax_ir.functions import map_functions, rewrite_bindings, top_level_bindings
from ..relax_ir.tensors import extents
from .fusion import BROADCAST, PRODUCT, behind_views, fusion_pattern

__all__ = ["keep_spreads_apart"]


def keep_spreads_apart(mod: ir.IRModule) -> ir.IRModule:
    """Put a view, behind which nothing is fused, where a product's result is broadcast: sigmoid(conv(x)) * image.

    TVM takes a multiplication for element-wise where one of its operands is, so FuseOps would make one kernel of the
    product and of the multiplication of a whole image: its tiles spread over the image, and take minutes to compile.
    The kernels of `mod` must have the attribute `op_pattern`.
    """
    return map_functions(mod, lambda function: rewrite_bindings(function, _Spreads(mod, function).apart))


class _Spreads:
    def __init__(self, mod: ir.IRModule, function: relax.Function) -> None:
        self._mod = mod
        self._builder = relax.BlockBuilder(mod)
        # Results of products, perhaps after element-wise work: what FuseOps makes one kernel.
        self._products: set[relax.Var] = set()
        for binding in top_level_bindings(function):
            if isinstance(binding.var, relax.DataflowVar) and self._is_product(binding.value):
                self._products.add(binding.var)

    def apart(self, binding: Any) -> list[Any]:
        """The views that a binding needs, and the binding, which reads them."""
        call = binding.value
        if fusion_pattern(self._mod, call) > BROADCAST or not is_static_tensor(call.ty):
            return [binding]
        spread = [
            place
            for place, argument in enumerate(call.args[1].fields)
            if argument in self._products and self._size(argument) < self._size(call)
        ]
        return behind_views(self._builder, binding, spread)

    def _is_product(self, value: Any) -> bool:
        pattern = fusion_pattern(self._mod, value)
        if pattern > BROADCAST:
            return pattern == PRODUCT
        same = [argument for argument in value.args[1].fields if self._size(argument) == self._size(value)]
        return any(argument in self._products for argument in same)

    @staticmethod
    def _size(value: Any) -> float:
        return math.prod(extents(value.ty)) if is_static_tensor(value.ty) else math.inf
