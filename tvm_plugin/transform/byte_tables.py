"""TabulateBytes: a function of bytes, quantised again, becomes a table of 256 bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from tvm import ir, relax, te, transform
from tvm.target import codegen

from ..arrays import Array
from ..dtypes import is_byte
from ..operators import register_operator
from ..relax_ir.constants import array_of, constant_of, is_static_tensor
from ..relax_ir.evaluate import evaluate
from ..relax_ir.functions import (
    block_results,
    map_functions,
    operator,
    rewrite_bindings,
    top_level_bindings,
    use_counts,
)
from ..relax_ir.tensors import extents
from ..search.space.byte_tables import BYTES, TABLE_INSTRUCTIONS, table_index

__all__ = ["OPERATOR", "TabulateBytes", "table_instructions"]

OPERATOR = "eqtune.byte_table"

_FUNCTIONS = frozenset(
    f"relax.{name}"
    for name in ("divide", "erf", "exp", "log", "nn.gelu", "nn.silu", "power", "rsqrt", "sigmoid", "sqrt", "tanh")
)
"""What takes longer than a table."""

_CHEAP = frozenset(
    f"relax.{name}"
    for name in ("add", "astype", "clip", "maximum", "minimum", "multiply", "negative", "nn.relu", "round", "subtract")
)

_MANY, _FEW = 40, 14
"""So many cheap operators take longer than a table, without and with instructions for vectors of any length."""


def table_instructions(target: Any) -> str:
    """The feature whose instructions pick bytes of tables on a CPU, in `TABLE_INSTRUCTIONS`; "" without any."""
    features = {str(feature) for feature in codegen.llvm_get_cpu_features(target)}
    return next((feature for feature in TABLE_INSTRUCTIONS if feature in features), "")


@transform.module_pass(opt_level=0, name="TabulateBytes")
class TabulateBytes:
    """quantize(f(dequantize(x))) -> byte_table(x, table), where f is element-wise and no number in it is computed.

    A quantised SiLU has three roundings, of x, sigmoid(x) and their product, and is still a function of one byte. The
    table holds what the operators themselves make of the 256 bytes. For CPUs: see search/space/byte_tables.py.

    Parameters
    ----------
    target : tvm.target.Target
    """

    def __init__(self, target: Any) -> None:
        self._many = _FEW if table_instructions(target) == "avx512vbmi" else _MANY

    def transform_module(self, mod: ir.IRModule, _context: transform.PassContext) -> ir.IRModule:
        """Rewrite every Relax function."""
        return map_functions(mod, lambda function: _tabulated(function, self._many))


@dataclass(frozen=True)
class _OfByte:
    """What a variable is for each value of the byte `source`, and by how many operators it is computed of that."""

    source: relax.Var
    results: Array
    operators: frozenset[relax.Var]
    takes_long: bool


def _tabulated(function: relax.Function, many: int) -> relax.Function:
    if not any(_is_byte(binding.var) for binding in top_level_bindings(function)):
        return function
    uses, results = use_counts(function), block_results(function)
    known: dict[relax.Var, _OfByte] = {}
    builder = relax.BlockBuilder()

    def rewrite(binding: Any) -> list[Any]:
        var, value = binding.var, getattr(binding, "value", None)
        found = _evaluated(var, value, known, builder) if operator(value) in _CHEAP | _FUNCTIONS else None
        if found is not None and _is_byte(var) and (found.takes_long or len(found.operators) >= many):
            table = constant_of(np.ascontiguousarray(found.results.reshape(-1)))
            call = builder.normalize(relax.Call(ir.Op.get(OPERATOR), [found.source, table]))
            binding = relax.VarBinding(var, call)
            if uses.get(var, 0) > 1:
                found = None  # others read it, so that it is there
        if found is not None and var not in results:  # whose bytes another block may not see
            known[var] = found
        return [binding]

    changed = rewrite_bindings(function, rewrite)
    return function if changed is function else relax.analysis.remove_all_unused(changed)


def _evaluated(
    var: relax.Var, call: relax.Call, known: Mapping[relax.Var, _OfByte], builder: relax.BlockBuilder
) -> _OfByte | None:
    """What an element-wise operator makes of each value of the one byte that it depends on; None where it is no such
    function, or where some results are not finite."""
    if not is_static_tensor(var.ty):
        return None
    inputs: dict[relax.Var, _OfByte] = {}
    for argument in call.args:
        if isinstance(argument, relax.Var):
            if not is_static_tensor(argument.ty) or extents(argument.ty) != extents(var.ty):
                return None
            if argument not in known and not _is_byte(argument):
                return None
            inputs[argument] = known.get(argument) or _itself(argument)
        elif isinstance(argument, ir.GenericConst) and array_of(argument).size != 1:
            return None
    if len({one.source for one in inputs.values()}) != 1:
        return None
    (source,) = {one.source for one in inputs.values()}
    operands = [
        relax.Var("x", relax.TensorType(inputs[arg].results.shape, arg.ty.dtype)) if arg in inputs else arg
        for arg in call.args
    ]
    arrays = [
        inputs[arg].results if arg in inputs else array_of(arg)
        for arg in call.args
        if arg in inputs or isinstance(arg, ir.GenericConst)
    ]
    results = evaluate(builder.normalize(relax.Call(call.op, operands, call.attrs, call.ty_args)), arrays)
    if not isinstance(results, np.ndarray) or not np.isfinite(results).all():
        return None
    operators = frozenset({var}).union(*(one.operators for one in inputs.values()))
    takes_long = operator(call) in _FUNCTIONS or any(one.takes_long for one in inputs.values())
    return _OfByte(source, results, operators, takes_long)


def _is_byte(value: Any) -> bool:
    return is_static_tensor(value.ty) and is_byte(str(value.ty.dtype)) and value.ty.ndim > 0


def _itself(byte: relax.Var) -> _OfByte:
    values = np.arange(BYTES, dtype=np.uint8).view(str(byte.ty.dtype))
    return _OfByte(byte, values.reshape([1] * (byte.ty.ndim - 1) + [BYTES]), frozenset(), False)


def _infer_type(call: relax.Call, _builder: relax.BlockBuilder) -> Any:
    data, table = call.args
    return relax.TensorType(data.ty.shape, table.ty.dtype)


def _legalize(builder: relax.BlockBuilder, call: relax.Call) -> Any:
    def kernel(data: te.Tensor, table: te.Tensor) -> te.Tensor:
        return te.compute(data.shape, lambda *at: table[table_index(data(*at))], name="byte_table")

    return builder.call_te(kernel, *call.args, primfunc_name_hint="byte_table")


register_operator(
    OPERATOR, "The elements of a table of 256 bytes at the places that bytes are.", _infer_type, _legalize
)
