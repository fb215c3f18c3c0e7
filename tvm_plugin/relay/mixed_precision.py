"""Relay left the results of a converted program in float16; Relax casts them back to float32."""

from __future__ import annotations

from typing import Any

from tvm import ir, relax, transform

__all__ = ["ToFloat16"]


@transform.module_pass(opt_level=0, name="ToFloat16")
class ToFloat16:
    """Relax's pass, and then no casts of the results that the program did not have itself."""

    def transform_module(self, mod: ir.IRModule, _context: transform.PassContext) -> ir.IRModule:
        """Convert every Relax function."""
        converted = relax.transform.ToNonDataflow()(relax.transform.ToMixedPrecision(out_dtype="float16")(mod))
        for var, function in converted.functions_items():
            if isinstance(function, relax.Function):
                converted.update_func(var, _without_casts(function, mod[var.name_hint]))
        finish = [
            relax.transform.Normalize(),
            relax.transform.ConvertToDataflow(1),
            relax.transform.DeadCodeElimination(),
        ]
        return transform.Sequential(finish)(converted)


def _without_casts(function: relax.Function, original: relax.Function) -> relax.Function:
    values, original_values = _values(function), _values(original)

    def result(expr: Any, before: Any) -> Any:
        value, before = _follow(expr, values), _follow(before, original_values)
        if isinstance(value, relax.Tuple) and isinstance(before, relax.Tuple):
            return relax.Tuple([result(*pair) for pair in zip(value.fields, before.fields, strict=True)])
        if _is_cast(value) and not _is_cast(before) and str(value.args[0].ty.dtype) == "float16":
            return value.args[0]
        return expr

    returned = result(function.body.body, original.body.body)
    body = relax.SeqExpr(function.body.blocks, returned)
    return relax.Function(function.params, body, returned.ty, function.is_pure, function.attrs)


def _values(function: relax.Function) -> dict[relax.Var, Any]:
    return {b.var: b.value for block in function.body.blocks for b in block.bindings if isinstance(b, relax.VarBinding)}


def _follow(expr: Any, values: dict[relax.Var, Any]) -> Any:
    """What a variable is bound to, other variables left out."""
    while isinstance(expr, relax.Var) and expr in values:
        expr = values[expr]
    return expr


def _is_cast(value: Any) -> bool:
    return isinstance(value, relax.Call) and value.op == ir.Op.get("relax.astype")
