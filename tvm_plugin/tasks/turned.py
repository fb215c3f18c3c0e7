"""Tensors that are computed from concatenated parts, or sampled, and then turned: keys of rotary attention, images."""

from __future__ import annotations

from typing import Any

from tvm import ir, relax, tirx
from tvm.ir.expr import TensorLoad

from ..dtypes import is_floating
from ..relax_ir.functions import map_functions, rewrite_bindings, top_level_bindings
from ..search.space.expressions import nodes_of
from .concat import CONCAT_AXIS
from .fusion import INJECTIVE, behind_views, fusion_pattern

__all__ = ["keep_turns_apart"]


def keep_turns_apart(mod: ir.IRModule) -> ir.IRModule:
    """Put a view, behind which nothing is fused, before what turns rows into columns: transpose(concat(a, b) * c).

    Fused, a kernel would look for each element at where it lies, and read or write along columns, one by one; the
    tiles of transposes (search/space/memory_bound/transpose.py) are loaded whole. So are the rows of resized images
    (search/space/memory_bound/resample.py), transpose(resize2d(a)). What only moves elements, as a shuffle of channels,
    stays one kernel. The kernels of `mod` must have the attribute `op_pattern`.
    """
    return map_functions(mod, lambda function: rewrite_bindings(function, _Turns(mod, function).apart))


class _Turns:
    def __init__(self, mod: ir.IRModule, function: relax.Function) -> None:
        self._mod = mod
        self._builder = relax.BlockBuilder(mod)
        # What FuseOps can compute together with a concatenation or a resized image, and of that, what is made of other
        # tensors as well, or sampled.
        parts: set[relax.Var] = set()
        self._mixed: set[relax.Var] = set()
        for binding in top_level_bindings(function):
            if not isinstance(binding.var, relax.DataflowVar) or fusion_pattern(mod, binding.value) > INJECTIVE:
                continue
            arguments, kernel = binding.value.args[1].fields, mod[binding.value.args[0]]
            if CONCAT_AXIS in kernel.attrs:
                parts.add(binding.var)
            elif _samples(kernel):
                parts.add(binding.var)
                self._mixed.add(binding.var)
            elif not parts.isdisjoint(arguments):
                parts.add(binding.var)
                if len(arguments) > 1 or not self._mixed.isdisjoint(arguments):
                    self._mixed.add(binding.var)

    def apart(self, binding: Any) -> list[Any]:
        """The view that a binding needs, and the binding, which reads it."""
        call = binding.value
        if fusion_pattern(self._mod, call) > INJECTIVE or self._mixed.isdisjoint(call.args[1].fields):
            return [binding]
        return behind_views(self._builder, binding, [0] if _turns(self._mod[call.args[0]]) else [])


def _samples(kernel: tirx.PrimFunc) -> bool:
    """Whether it computes with elements whose places are rounded floats, as those between pixels are."""
    stores, loads = nodes_of(kernel.body, tirx.BufferStore), nodes_of(kernel.body, TensorLoad)
    if len(stores) != 1 or isinstance(stores[0].value, TensorLoad):
        return False
    casts = [cast for load in loads for index in load.indices for cast in nodes_of(index, tirx.Cast)]
    return any(is_floating(str(cast.value.ty.dtype)) for cast in casts)


def _turns(kernel: tirx.PrimFunc) -> bool:
    """Whether it only moves elements to other places, and another axis becomes the last."""
    stores = nodes_of(kernel.body, tirx.BufferStore)
    if len(stores) != 1 or not isinstance(stores[0].value, TensorLoad):
        return False
    written, read = list(stores[0].indices), list(stores[0].value.indices)
    order = [next((place for place, other in enumerate(written) if other.same_as(index)), -1) for index in read]
    return sorted(order) == list(range(len(written))) and bool(order) and order[-1] != len(written) - 1
