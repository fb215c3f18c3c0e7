"""What FuseOps joins: patterns of kernels, and views, across which nothing is fused."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from tvm import ir, relax

from ..relax_ir.functions import operator

__all__ = ["BROADCAST", "ELEMENTWISE", "INJECTIVE", "OPAQUE", "PRODUCT", "behind_views", "fusion_pattern"]

ELEMENTWISE, BROADCAST, INJECTIVE, PRODUCT, OPAQUE = 0, 1, 2, 4, 8
"""Of TVM's OpPatternKind, the attribute `op_pattern` of kernels: what is computed element by element, or place by place
with broadcasting; what is made of single elements; a product or convolution, behind which these can be fused; and what
must not be fused."""


def fusion_pattern(mod: ir.IRModule, value: Any) -> float:
    """TVM's OpPatternKind of a call of a kernel; infinity for anything else."""
    if operator(value) != "relax.call_tir" or not isinstance(value.args[1], relax.Tuple):
        return math.inf
    attributes = mod[value.args[0]].attrs
    return int(attributes["op_pattern"]) if attributes and "op_pattern" in attributes else math.inf


def behind_views(builder: relax.BlockBuilder, binding: Any, places: Sequence[int]) -> list[Any]:
    """Views of the arguments at some places of a kernel's call, and the binding of the call that reads them.

    FuseOps joins kernels alone, and a view is none.
    """
    call, views = binding.value, []
    arguments = list(call.args[1].fields)
    for place in places:
        whole = arguments[place]
        arguments[place] = relax.DataflowVar(f"{whole.name}_whole", whole.ty)
        views.append(relax.VarBinding(arguments[place], builder.normalize(relax.op.reshape(whole, whole.ty.shape))))
    if not views:
        return [binding]
    reading = relax.Call(call.op, [call.args[0], relax.Tuple(arguments)], call.attrs, call.ty_args)
    return [*views, relax.VarBinding(binding.var, builder.normalize(reading))]
