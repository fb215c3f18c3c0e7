"""WriteInPlace: results in the memory of an operand that nobody reads again, as a residual's."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import tvm_ffi
from tvm import ir, relax, tirx, transform

from ..relax_ir.functions import map_functions, operator, rewrite_bindings, top_level_bindings
from ..relax_ir.tensors import shape_of
from ..schedules.overwritable import OVERWRITABLE
from ..search.space.access import dtype_bytes

__all__ = ["WriteInPlace"]

LEAST_BYTES = 1 << 20
"""Of a result that is worth it: less stays in the second-level cache anyhow."""

_ALLOCATION = "relax.builtin.alloc_tensor"


@transform.module_pass(opt_level=0, name="WriteInPlace")
class WriteInPlace:
    """Let kernels write their results in the memory of an operand that they read for the last time.

    The lines of the cache that hold a residual then become those of the sum, instead of being read, and those of other
    memory fetched to be written. Use it where results are allocated, after `CallTIRRewrite`, before their memory is
    planned. Kernels say by an attribute (`with_overwritable`) which operands may be overwritten.
    """

    def transform_module(self, mod: ir.IRModule, _context: transform.PassContext) -> ir.IRModule:
        """Rewrite every Relax function of plain bindings."""
        places = {
            variable: [int(place) for place in (function.attrs or {}).get(OVERWRITABLE, ())]
            for variable, function in mod.functions_items()
            if isinstance(function, tirx.PrimFunc)
        }
        return map_functions(mod, lambda function: _rewritten(function, places)) if any(places.values()) else mod


def _rewritten(function: relax.Function, places: Mapping[Any, Sequence[int]]) -> relax.Function:
    """`places`: of each kernel, which operands may be overwritten."""
    if not isinstance(function.body, relax.SeqExpr):
        return function
    memory = _Memory(function, places.keys())
    instead: dict[Any, Any] = {}
    for number, binding in enumerate(top_level_bindings(function)):
        if not memory.begins_at(binding.value, number):
            continue
        for place in places.get(_callee(binding.value), ()):
            *operands, result = binding.value.args
            operand = operands[place]
            if memory.ends_at(operand, number, operands) and memory.is_alike(operand, result) and _is_large(operand):
                instead[result] = operand
                memory.unite(operand, result)
                break
    return rewrite_bindings(function, lambda binding: _with_others(binding, instead)) if instead else function


def _is_large(tensor: relax.Var) -> bool:
    """Whether it is, or may be."""
    extents = shape_of(tensor)
    known = all(isinstance(extent, int) for extent in extents)
    return not known or math.prod(extents) * dtype_bytes(str(tensor.ty.dtype)) >= LEAST_BYTES


def _callee(value: Any) -> Any:
    """The variable of the function that a value calls; None where it is no such call."""
    return value.op if isinstance(value, relax.Call) and isinstance(value.op, ir.GlobalVar) else None


def _with_others(binding: Any, instead: Mapping[Any, Any]) -> list[Any]:
    """A binding that names other variables; none for one of these."""
    value = binding.value
    if binding.var in instead:
        return []
    if isinstance(value, relax.Var) and value in instead:
        return [relax.VarBinding(binding.var, instead[value])]
    if isinstance(value, relax.Call) and any(isinstance(one, relax.Var) and one in instead for one in value.args):
        arguments = [instead.get(one, one) if isinstance(one, relax.Var) else one for one in value.args]
        call = relax.Call(value.op, arguments, value.attrs, value.ty_args)
        return [relax.VarBinding(binding.var, relax.BlockBuilder().normalize(call))]
    return [binding]


class _Memory:
    """Which variables of a function are the same memory, and which bindings use it first and last."""

    def __init__(self, function: relax.Function, kernels: Collection[Any]) -> None:
        self._allocated: dict[Any, Any] = {}
        """By variable, the one that it is another name of."""
        self._types: dict[Any, Any] = {}
        self._first: dict[Any, float] = {}
        self._last: dict[Any, float] = {}
        for number, binding in enumerate(top_level_bindings(function)):
            value = binding.value
            if operator(value) == _ALLOCATION:
                self._allocated[binding.var], self._types[binding.var] = binding.var, value.args
            elif isinstance(value, relax.Var):
                if value in self._allocated:
                    self._allocated[binding.var] = self._allocated[value]
            else:
                # What is seen in other ways, as views and parts of tuples are, is never overwritten.
                self._use(value, number, number if _callee(value) in kernels else math.inf)
        self._use(function.body.body, math.inf, math.inf)

    def _use(self, value: Any, first: float, last: float) -> None:
        for variable in relax.analysis.free_vars(value):
            own = self._allocated.get(variable)
            if own is not None:
                self._first.setdefault(own, first)
                self._last[own] = max(last, self._last.get(own, last))

    def begins_at(self, call: Any, number: int) -> bool:
        """Whether a call is the first use of the memory of one argument, the last one: that is its only result, and
        nobody has written a part of it. What is written in place already, and several results, are left alone."""
        if _callee(call) is None:
            return False
        variables = [one for one in call.args if isinstance(one, relax.Var)]
        fresh = [one for one in variables if self._first.get(self._allocated.get(one)) == number]
        return len(fresh) == 1 and fresh[0].same_as(call.args[-1]) and fresh[0] in self._types

    def ends_at(self, operand: Any, number: int, operands: Sequence[Any]) -> bool:
        """Whether what an operand holds is read by this binding last, and as this operand only."""
        own = self._allocated.get(operand)
        once = [self._allocated.get(other) for other in operands if isinstance(other, relax.Var)].count(own) == 1
        return own is not None and once and self._last[own] == number

    def is_alike(self, one: Any, other: Any) -> bool:
        """Whether both have the same shape and type, on the same device."""
        first, second = (self._types.get(self._allocated.get(variable)) for variable in (one, other))
        return first is not None and second is not None and all(map(tvm_ffi.structural_equal, first, second))

    def unite(self, operand: Any, result: Any) -> None:
        """From now on, the result is in the operand's memory."""
        own, other = self._allocated[operand], self._allocated[result]
        self._last[own] = self._last.get(other, self._last[own])
        self._allocated |= {variable: own for variable, known in self._allocated.items() if known is other}
