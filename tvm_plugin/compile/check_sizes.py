"""CheckSizes: a model refuses sizes of its inputs that it was not made for, wherever it runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tvm import ir, relax, tirx, transform

from ..relax_ir.constants import has_shape
from ..relax_ir.tensors import BOUNDS, STEPS, shape_of

__all__ = ["CheckSizes"]


@transform.module_pass(opt_level=0, name="CheckSizes")
class CheckSizes:
    """Compare each size of an input of "main" with the nearest that its attributes allow.

    Others are not only slow: tables that end at the largest size are read past their ends, and of an odd size that is
    exported as twice another the last row is left out. To be run just before VMShapeLower, which checks what is
    matched; earlier, the matched shapes would hide from other passes that sizes are equal.
    """

    def transform_module(self, mod: ir.IRModule, _context: transform.PassContext) -> ir.IRModule:
        """Add to the beginning of "main" what is to be checked, if anything is."""
        main = mod["main"] if "main" in mod else None  # noqa: SIM401 - a module has no `get`
        if not isinstance(main, relax.Function) or not main.attrs:
            return mod
        checks = [check for parameter in main.params for check in _checks(parameter, main.attrs)]
        if not checks:
            return mod
        body = relax.SeqExpr([relax.BindingBlock(checks), *main.body.blocks], main.body.body)
        result = mod.clone()
        result.update_func(
            mod.get_global_var("main"),
            relax.Function(main.params, body, main.ret_ty, main.is_pure, main.attrs, main.span),
        )
        return result


def _checks(parameter: relax.Var, attributes: Mapping[str, Any]) -> list[relax.MatchCast]:
    if not has_shape(parameter.ty):
        return []
    shape = shape_of(parameter)
    allowed = [_nearest(extent, attributes) if isinstance(extent, tirx.Var) else extent for extent in shape]
    if all(one is other for one, other in zip(shape, allowed, strict=True)):
        return []
    ty = relax.TensorType(allowed, parameter.ty.dtype)
    return [relax.MatchCast(relax.Var(f"{parameter.name}_checked", ty), parameter, ty)]


def _nearest(size: tirx.Var, attributes: Mapping[str, Any]) -> Any:
    """An allowed size that is equal to a size where that is allowed; the size itself, where all are."""
    low, high = (attributes.get(bound, {}).get(size.name) for bound in BOUNDS)
    nearest: Any = size
    if size.name in attributes.get(STEPS, {}):
        step, first = map(int, attributes[STEPS][size.name])
        nearest = (size - first) // step * step + first
    if low is not None and int(low) > 1:
        nearest = tirx.max(nearest, int(low))
    return nearest if high is None else tirx.min(nearest, int(high))
