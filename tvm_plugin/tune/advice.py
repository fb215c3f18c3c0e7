"""What a user has not permitted, where it would make much of the model faster."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

from tvm import ir, relax

from ..relax_ir.constants import is_static_tensor
from ..relax_ir.functions import leaves, operator, top_level_bindings
from ..relax_ir.tensors import extents
from ..search.space.hardware import Hardware

__all__ = ["fast_math_advice"]

WORTH_A_LINE = 0.3
"""Share of a model's arithmetic that fast math must concern."""


def fast_math_advice(mod: ir.IRModule, flops: float, hardware: Hardware) -> str:
    """How much of a Relax module's `flops` fast math could take over: a line for people; "" if little.

    Winograd's convolutions; where the machine has matrix tiles, products of bfloat16.
    """
    bound = {binding.var: binding.value for binding in top_level_bindings(mod["main"])}
    values = [value for value in bound.values() if not _has_narrow_weights(value, bound)]
    if "amx-bf16" in hardware.dot_products:
        concerned, what = sum(map(_product_flops, values)), "products and convolutions"
    else:
        concerned, what = sum(map(_winograd_flops, values)), "convolutions"
    if not concerned or concerned < WORTH_A_LINE * flops:
        return ""
    permit, share = "(--fast-math, fast_math=True)", min(concerned / max(flops, 1.0), 1.0)
    return f"not permitted; {share:.0%} of the arithmetic is in {what} that it makes faster {permit}"


def _has_narrow_weights(value: Any, bound: Mapping[Any, Any]) -> bool:
    """Whether it multiplies by what is stored in bytes, which `KeepNarrowWeights` leaves there."""
    if operator(value) != "relax.matmul":
        return False
    pending, seen, found = [value.args[1]], set(), False
    while pending:
        weight = pending.pop()
        if weight in bound and weight not in seen:
            seen.add(weight)
            pending.extend(leaves(bound[weight]))
        elif weight not in bound:
            if isinstance(weight, relax.Var):
                return False  # it depends on an input
            found |= is_static_tensor(weight.ty) and str(weight.ty.dtype) in ("int8", "uint8")
    return found


def _product_flops(value: Any) -> float:
    """Of one binding; 0 where it is no product of several rows of float32, or a convolution in groups."""
    name = operator(value) if isinstance(value, relax.Call) else ""
    if name not in ("relax.matmul", "relax.nn.conv2d") or not is_static_tensor(value.ty):
        return 0.0
    weight = value.args[1]
    if str(value.ty.dtype) != "float32" or not is_static_tensor(weight.ty):
        return 0.0
    shape = extents(weight.ty)
    if name == "relax.matmul":
        return 2.0 * prod(extents(value.ty)) * shape[-2] if value.ty.ndim > 1 and len(shape) > 1 else 0.0
    if int(value.attrs.groups) != 1:
        return 0.0
    return 2.0 * prod(extents(value.ty)) * prod(shape) / shape[str(value.attrs.kernel_layout).index("O")]


def _winograd_flops(value: Any) -> float:
    """Of one binding; 0 where it is no convolution that has a Winograd form worth trying."""
    if not isinstance(value, relax.Call) or operator(value) != "relax.nn.conv2d":
        return 0.0
    attrs, weight = value.attrs, value.args[1]
    if (str(attrs.data_layout), str(attrs.kernel_layout)) != ("NCHW", "OIHW") or not is_static_tensor(weight.ty):
        return 0.0
    from ..search.graph.rules.winograd import FEWEST_CHANNELS, KERNELS

    outputs, inputs, *kernel = extents(weight.ty)
    slides_by_one = {int(step) for step in (*attrs.strides, *attrs.dilation)} == {1}
    if not slides_by_one or int(attrs.groups) != 1 or tuple(kernel) not in KERNELS:
        return 0.0
    if min(outputs, inputs) < FEWEST_CHANNELS or not is_static_tensor(value.ty):
        return 0.0
    return 2.0 * prod(extents(value.ty)) * inputs * prod(kernel)
