"""Views that nothing is fused across: FuseOps joins kernels alone, and a view is none."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from tvm import ir, relax

from ..transform.functions import operator

__all__ = ["BROADCAST", "INJECTIVE", "PRODUCT", "behind_views", "fusion_pattern"]

BROADCAST = 1
"""Of TVM's OpPatternKind: what is computed place by place..."""

INJECTIVE = 2
"""... what is made of single elements..."""

PRODUCT = 4
"""... and a convolution or matrix product, behind which these can be fused."""


def fusion_pattern(mod: ir.IRModule, value: Any) -> float:
    """TVM's OpPatternKind of a call of a kernel, its attribute `op_pattern`; infinity for anything else."""
    if operator(value) != "relax.call_tir" or not isinstance(value.args[1], relax.Tuple):
        return math.inf
    attributes = mod[value.args[0]].attrs
    return int(attributes["op_pattern"]) if attributes and "op_pattern" in attributes else math.inf


def behind_views(builder: relax.BlockBuilder, binding: Any, places: Sequence[int]) -> list[Any]:
    """Views of the arguments at some places of a kernel's call, and the binding of the call that reads them."""
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
