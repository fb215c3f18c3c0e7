"""Small results that are spread over large ones, as the gates of squeeze-and-excitation blocks are."""

from __future__ import annotations

import math
from typing import Any

from tvm import ir, relax

from ..transform.constants import is_static_tensor
from ..transform.functions import extents, map_functions, operator, rewrite_bindings, top_level_bindings

__all__ = ["keep_spreads_apart"]

_BROADCAST = 1  # of TVM's OpPatternKind: what is computed place by place, and what can be fused behind...
_PRODUCT = 4  # ... a convolution or matrix product


def keep_spreads_apart(mod: ir.IRModule) -> ir.IRModule:
    """Put a view, behind which nothing is fused, where a product's result is broadcast: sigmoid(conv(x)) * image.

    TVM takes a multiplication for element-wise where one of its operands is, so FuseOps would make one kernel of the
    product and of the multiplication of a whole image: its tiles spread over the image, and take minutes to compile.
    The kernels of `mod` must have the attribute `op_pattern`.
    """
    return map_functions(mod, lambda function: rewrite_bindings(function, _Views(mod, function).before))


class _Views:
    def __init__(self, mod: ir.IRModule, function: relax.Function) -> None:
        self._mod = mod
        self._builder = relax.BlockBuilder(mod)
        # Results of products, perhaps after element-wise work: what FuseOps makes one kernel.
        self._products: set[relax.Var] = set()
        for binding in top_level_bindings(function):
            if isinstance(binding.var, relax.DataflowVar) and self._is_product(binding.value):
                self._products.add(binding.var)

    def before(self, binding: Any) -> list[Any]:
        """The views that a binding needs, and the binding, which reads them."""
        call = binding.value
        if self._pattern(call) > _BROADCAST or not is_static_tensor(call.ty):
            return [binding]
        arguments = list(call.args[1].fields)
        views = []
        for position, argument in enumerate(arguments):
            if argument in self._products and self._size(argument) < self._size(call):
                view = relax.DataflowVar(f"{argument.name}_whole", argument.ty)
                value = self._builder.normalize(relax.op.reshape(argument, argument.ty.shape))
                views.append(relax.VarBinding(view, value))
                arguments[position] = view
        if not views:
            return [binding]
        spread = relax.Call(call.op, [call.args[0], relax.Tuple(arguments)], call.attrs, call.ty_args)
        return [*views, relax.VarBinding(binding.var, self._builder.normalize(spread))]

    def _is_product(self, value: Any) -> bool:
        pattern = self._pattern(value)
        if pattern > _BROADCAST:
            return pattern == _PRODUCT
        same = [argument for argument in value.args[1].fields if self._size(argument) == self._size(value)]
        return any(argument in self._products for argument in same)

    def _pattern(self, value: Any) -> float:
        """TVM's OpPatternKind of a call of a kernel; infinity for anything else."""
        if operator(value) != "relax.call_tir" or not isinstance(value.args[1], relax.Tuple):
            return math.inf
        attributes = self._mod[value.args[0]].attrs
        return int(attributes["op_pattern"]) if attributes and "op_pattern" in attributes else math.inf

    @staticmethod
    def _size(value: Any) -> float:
        return math.prod(extents(value.ty)) if is_static_tensor(value.ty) else math.inf
