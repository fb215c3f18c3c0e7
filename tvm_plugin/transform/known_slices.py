"""KnownSlices: slices of symbolic length, of which the bounds of the symbols tell that they lie inside."""

from __future__ import annotations

from typing import Any

from tvm import ir, relax, sym, te, tirx, transform
from tvm.relax.expr_functor import PyExprMutator, mutator

from ..relax_ir.functions import has_call, operator
from ..relax_ir.tensors import BOUNDS, symbols_of
from ..repairs.plain_sizes import with_plain_sizes

__all__ = ["KnownSlices"]


@transform.module_pass(opt_level=0, name="KnownSlices")
class KnownSlices:
    """strided_slice(x, begin, end) -> a kernel whose result is end - begin long, where both are inside of x.

    TVM gives slices lengths such as min(n, 512), also where n is 512 at most; what follows then has no known shape, and
    is not built. Exported language models slice their tables of places.
    """

    def transform_module(self, mod: ir.IRModule, _context: transform.PassContext) -> ir.IRModule:
        """Rewrite `relax.strided_slice` in every Relax function whose attributes tell bounds."""
        mod = with_plain_sizes(mod)  # of what kernels will be made of here
        for variable, function in mod.functions_items():
            if isinstance(function, relax.Function) and _has_slices(function):
                slicer = _Slicer(mod, function)
                changed = slicer.visit_expr(function)
                mod = slicer.builder_.get()
                mod.update_func(mod.get_global_var(variable.name_hint), changed)
        return mod


def _has_slices(function: relax.Function) -> bool:
    if not function.attrs or BOUNDS[0] not in function.attrs:
        return False
    return has_call(function, {"relax.strided_slice"})


@mutator
class _Slicer(PyExprMutator):
    def __init__(self, mod: ir.IRModule, function: relax.Function) -> None:
        super().__init__(mod)
        self._analyzer = sym.Analyzer()
        lower, upper = (function.attrs.get(name, {}) for name in BOUNDS)
        for variable in symbols_of(function):
            low = int(lower.get(variable.name, 0))
            high = int(upper.get(variable.name, 2**31))
            self._analyzer.bind(variable, ir.Range(low, high + 1))

    def visit_call_(self, call: relax.Call) -> Any:
        call = self.visit_expr_post_order(call)
        inside = self._inside(call) if operator(call) == "relax.strided_slice" else {}
        if not inside:
            return call
        shape = [
            inside[axis][1] if axis in inside else extent for axis, extent in enumerate(call.args[0].ty.shape.values)
        ]

        def slice_of(x: te.Tensor) -> te.Tensor:
            def element(*at: Any) -> Any:
                return x[tuple(place + inside[axis][0] if axis in inside else place for axis, place in enumerate(at))]

            return te.compute(shape, element, name="T_slice")

        return self.builder_.call_te(slice_of, call.args[0], primfunc_name_hint="slice")

    def _inside(self, call: relax.Call) -> dict[int, tuple[Any, Any]]:
        """Where a slice begins along its axes, and how long it is; empty where it may go beyond, or is known."""
        x, *given = call.args
        if call.attrs.assume_inbound or x.ty.shape is None or not all(isinstance(one, relax.Tuple) for one in given):
            return {}
        axes, begins, ends = (list(one.fields) for one in given[:3])
        steps = list(given[3].fields) if len(given) > 3 else [tirx.IntImm("int64", 1)] * len(axes)
        found = {}
        for axis, begin, end, step in zip(axes, begins, ends, steps, strict=True):
            if not isinstance(step, tirx.IntImm) or int(step) != 1:
                return {}
            extent = x.ty.shape.values[int(axis)]
            begin, end = (self._analyzer.simplify(value) for value in (begin, tirx.min(end, extent)))
            length = self._analyzer.simplify(end - begin)
            if not (self._analyzer.can_prove(begin >= 0) and self._analyzer.can_prove(length >= 0)):
                return {}
            found[int(axis) % x.ty.ndim] = begin, length
        return {} if all(isinstance(length, tirx.IntImm) for _, length in found.values()) else found
