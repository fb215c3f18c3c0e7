"""FoldWeights: compute once, with numpy, whatever depends on constants alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from tvm import ir, relax, transform

from ..arrays import Array
from ..relax_ir.constants import array_of, constant_of, is_static_tensor, type_bytes
from ..relax_ir.evaluate import EVALUATORS, Value, evaluate
from ..relax_ir.functions import leaves, map_functions, operator, substitute, top_level_bindings, use_counts
from ..relax_ir.tensors import extents

__all__ = ["FoldWeights", "WeightValues", "transposed_weights"]

_GROWTH = 32
"""A folded constant may be this many times larger than the constants it comes from: enlarging a 1x1 kernel to 3x3
needs 9, a grouped convolution made dense up to 32. A scalar broadcast to an activation's shape needs far more."""

_FREE_BYTES = 64 * 1024
"""Results up to this size are folded whatever they come from."""

_SCRATCH_BYTES = 64 * 1024 * 1024
"""An intermediate value may take this much whatever it comes from."""

_TRANSPOSED_BYTES = 1024 * 1024
"""From this size on, weights that products read transposed stay as they are stored. Memory that was never touched costs
more than the copy into it: VGG-19's layers of 494 MB took 1.1 s."""


class WeightValues:
    """Which variables of a function depend on constants alone, and their values, computed when asked for.

    Parameters
    ----------
    function : relax.Function
        Only bindings at its top level are looked at; what If branches compute is left alone.
    """

    def __init__(self, function: relax.Function) -> None:
        self._bound: dict[relax.Var, Any] = {}
        self._source_bytes: dict[relax.Var, int] = {}
        self._values: dict[relax.Var, Value | None] = {}
        for binding in top_level_bindings(function):
            if isinstance(binding, relax.VarBinding) and self._depends_on_constants(binding.value):
                source_bytes = sum(self._bytes_behind(leaf) for leaf in leaves(binding.value))
                if type_bytes(binding.var.ty) <= max(_SCRATCH_BYTES, _GROWTH * source_bytes):
                    self._bound[binding.var] = binding.value
                    self._source_bytes[binding.var] = source_bytes

    def __contains__(self, expr: Any) -> bool:
        """Whether `expr` depends on constants alone. `value` may still be None."""
        return isinstance(expr, ir.GenericConst) or (isinstance(expr, relax.Var) and expr in self._bound)

    def affordable(self, var: relax.Var) -> bool:
        """Whether storing the value of `var` costs memory in proportion to the constants it comes from."""
        return type_bytes(var.ty) <= max(_FREE_BYTES, _GROWTH * self._source_bytes[var])

    def value(self, expr: Any) -> Value | None:
        """The value of a constant or variable, or None when numpy cannot compute it."""
        if isinstance(expr, ir.GenericConst):
            return array_of(expr)
        if expr not in self._bound:
            return None
        if expr not in self._values:
            self._values[expr] = self._compute(self._bound[expr])
        return self._values[expr]

    def array(self, expr: Any) -> Array | None:
        """As `value`, for a tensor; None for a tuple."""
        value = self.value(expr)
        return None if isinstance(value, tuple) else value

    def _depends_on_constants(self, value: Any) -> bool:
        if isinstance(value, relax.Call):
            known = operator(value) in EVALUATORS
            return known and _is_static(value.ty) and all(leaf in self for leaf in leaves(value))
        if isinstance(value, ir.GenericConst):
            return is_static_tensor(value.ty)
        if isinstance(value, relax.Var | relax.Tuple | relax.TupleGetItem):
            return _is_static(value.ty) and all(leaf in self for leaf in leaves(value))
        return False

    def _bytes_behind(self, leaf: Any) -> int:
        return type_bytes(leaf.ty) if isinstance(leaf, ir.GenericConst) else self._source_bytes[leaf]

    def _compute(self, value: Any) -> Value | None:
        inputs = [self.value(leaf) for leaf in leaves(value)]
        if any(known is None for known in inputs):
            return None
        if isinstance(value, relax.TupleGetItem):
            return inputs[0][value.index]  # type: ignore[index]
        if isinstance(value, ir.GenericConst | relax.Var):
            return inputs[0]
        if any(isinstance(known, tuple) for known in inputs):
            return None
        arrays: list[Any] = inputs
        return tuple(arrays) if isinstance(value, relax.Tuple) else evaluate(value, arrays)


@transform.module_pass(opt_level=0, name="FoldWeights")
class FoldWeights:
    """Replace every value that depends on constants alone by a constant.

    f(W, ...) -> constant, for the operators in `evaluate.EVALUATORS`. An operator that numpy cannot compute stays,
    and so does one whose result is much larger than its inputs (a scalar broadcast to an activation's shape).
    where(W, x, y) -> x, if W holds everywhere; x * W and x / W -> x, if W is one, x + W and x - W, if it is zero.
    Parameters, signature and names of what remains are kept; bindings that nothing uses any more are removed.

    Parameters
    ----------
    transposes : bool
        Whether matmul(x, permute_dims(W)) of a large matrix W gets a transposed copy of it. False leaves it to
        `LowerToKernels`, which makes one kernel of the two.
    """

    def __init__(self, transposes: bool = False) -> None:
        self._transposes = transposes

    def transform_module(self, mod: ir.IRModule, _context: transform.PassContext) -> ir.IRModule:
        """Fold the weights of every Relax function."""
        return map_functions(mod, lambda function: _fold(function, self._transposes))


def transposed_weights(function: relax.Function) -> set[relax.Var]:
    """The variables that hold permute_dims(W) of a large matrix W, and are right operands of products and nothing else.

    The left operands have an axis besides the one that is summed over.
    """
    found = {
        binding.var
        for binding in top_level_bindings(function)
        if operator(binding.value) == "relax.permute_dims" and _is_large_transpose(binding.value)
    }
    uses = use_counts(function) if found else {}
    for binding in top_level_bindings(function) if found else ():
        if operator(binding.value) == "relax.matmul":
            data, weight = binding.value.args
            if weight in found and _is_static(binding.value.ty) and data.ty.ndim > 1:
                uses[weight] -= 1
    return {var for var in found if uses.get(var) == 0}


def _is_large_transpose(call: relax.Call) -> bool:
    if not is_static_tensor(call.ty) or type_bytes(call.ty) < _TRANSPOSED_BYTES:
        return False
    order = call.attrs.axes
    transposed = call.ty.ndim == 2 and (order is None or int(order[0]) % 2 == 1)
    return transposed and all(int(extent) > 1 for extent in call.ty.shape.values)


def _fold(function: relax.Function, transposes: bool) -> relax.Function:
    kept: set[relax.Var] = set() if transposes else transposed_weights(function)
    values = WeightValues(function)
    replacements = _chosen(function, values) | dict(_needed_constants(function, values, kept))
    return substitute(function, replacements) if replacements else function


_NEUTRAL = {"relax.multiply": 1, "relax.divide": 1, "relax.add": 0, "relax.subtract": 0}
"""What as a right operand changes nothing; as a left one, too, where operands may be exchanged."""

_COMMUTATIVE = frozenset({"relax.multiply", "relax.add"})


def _chosen(function: relax.Function, values: WeightValues) -> dict[relax.Var, Any]:
    """The variables that hold what is one of their operands whatever the inputs are, with that operand.

    where(W, x, y) with a W that holds everywhere, x * 1, x / 1, x + 0, x - 0. Graph searches would multiply by such a
    one as often as they like.
    """
    found: dict[relax.Var, Any] = {}
    for binding in top_level_bindings(function):
        # A result of the function's block keeps its binding: x may be known inside the block alone.
        if not isinstance(binding.var, relax.DataflowVar) or not isinstance(binding.value, relax.Call):
            continue
        for x, others, holds in _choices(binding.value):
            array = values.array(others) if others in values and _same_type(x.ty, binding.var.ty) else None
            if array is not None and holds(array):
                found[binding.var] = found.get(x, x)
                break
    return found


def _same_type(one: Any, other: Any) -> bool:
    return _is_static(one) and _is_static(other) and extents(one) == extents(other) and one.dtype == other.dtype


def _choices(call: relax.Call) -> Iterator[tuple[Any, Any, Callable[[Array], bool]]]:
    """An operand that the call may be, one that decides it, and when that does."""
    name = operator(call)
    if name == "relax.where":
        yield call.args[1], call.args[0], lambda condition: bool(condition.all())
    elif name in _NEUTRAL:
        neutral = _NEUTRAL[name]
        pairs = [call.args, call.args[::-1]] if name in _COMMUTATIVE else [call.args]
        for x, weight in pairs:
            if is_static_tensor(weight.ty) and type_bytes(weight.ty) <= _FREE_BYTES:
                yield x, weight, lambda array: bool((array == neutral).all())


def _needed_constants(
    function: relax.Function, values: WeightValues, kept: set[relax.Var]
) -> Iterator[tuple[relax.Var, Any]]:
    """The variables that something else reads, except `kept`, with the constants to put in their place.

    From the last binding to the first: what is read only by folded bindings is neither stored nor kept.
    """
    read: set[Any] = set(leaves(function.body.body)) if isinstance(function.body, relax.SeqExpr) else set()
    for binding in reversed(list(top_level_bindings(function))):
        if binding.var in values:
            if binding.var not in read:
                continue
            folds = binding.var not in kept and values.affordable(binding.var)
            value = values.value(binding.var) if folds else None
            if value is not None:
                yield binding.var, _constant(value)
                continue
        read.update(relax.analysis.free_vars(binding.value))


def _constant(value: Value) -> Any:
    return relax.Tuple([constant_of(part) for part in value]) if isinstance(value, tuple) else constant_of(value)


def _is_static(ty: Any) -> bool:
    if isinstance(ty, relax.TupleType):
        return all(is_static_tensor(field) for field in ty.fields)
    return is_static_tensor(ty)
