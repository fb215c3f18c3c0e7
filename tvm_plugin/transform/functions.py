"""Small tools that the passes share: walking and rebuilding Relax functions."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import tvm_ffi
from tvm import ir, relax, tirx
from tvm.relax.expr_functor import PyExprMutator, mutator

from .constants import array_of

__all__ = [
    "KERNEL_CALLS",
    "READY",
    "LookupMutator",
    "as_dtype",
    "as_shape",
    "block_results",
    "bound_values",
    "constant_bytes",
    "constants",
    "extents",
    "has_call",
    "is_empty",
    "is_scheduled",
    "is_seen_as",
    "leaves",
    "map_functions",
    "operator",
    "repeated",
    "rewrite_bindings",
    "rewrite_calls",
    "seen_as",
    "shape_of",
    "sizes_read",
    "substitute",
    "substituted",
    "symbols_of",
    "top_level_bindings",
    "use_counts",
    "values_of_one_block",
]

_VIEW = "vm.builtin.reshape"

_SHAPE = "vm.builtin.tensor_to_shape"

KERNEL_CALLS = frozenset({"relax.call_tir", "relax.call_tir_inplace"})
"""Operators that call a kernel: its name is their first argument, its inputs the tuple that is the second."""

READY = "eqtune.ready"
"""Attribute of kernels that are scheduled and need nothing else before TVM lowers them."""


def is_scheduled(function: Any) -> bool:
    """Whether a function is a kernel that has a schedule, of eqtune's or, as its attribute tells, of TVM's."""
    attributes = (function.attrs or {}) if isinstance(function, tirx.PrimFunc) else {}
    return READY in attributes or "tirx.is_scheduled" in attributes


def map_functions(
    mod: ir.IRModule,
    rewrite: Callable[[relax.Function], relax.Function],
    builder: relax.BlockBuilder | None = None,
) -> ir.IRModule:
    """A module in which each Relax function is `rewrite(function)`; `mod` itself when nothing changed.

    Where `rewrite` adds kernels to the module, `builder` is the one that it adds them with.
    """
    changed = {}
    for variable, function in mod.functions_items():
        if isinstance(function, relax.Function):
            rewritten = rewrite(function)
            if not rewritten.same_as(function):
                changed[variable] = rewritten
    if not changed:
        return mod
    result = (mod if builder is None else builder.get()).clone()
    for variable, function in changed.items():
        result.update_func(variable, function)
    return result


def operator(value: Any) -> str:
    """The name of the operator that `value` calls; "" when it is no call of an operator."""
    return getattr(value.op, "name", "") if isinstance(value, relax.Call) else ""


def as_dtype(emit: Callable[[Any], Any], tensor: Any, dtype: str) -> Any:
    """A tensor in another dtype, by a block builder's `emit`, or as it is."""
    return tensor if str(tensor.ty.dtype) == dtype else emit(relax.op.astype(tensor, dtype))


def extents(ty: Any) -> list[int]:
    """The shape of a static tensor type."""
    return [int(extent) for extent in ty.shape.values]


def shape_of(value: relax.Expr) -> list[Any]:
    """The extents of a tensor: ints, but for those that are known only when the model runs."""
    return [int(extent) if isinstance(extent, int | tirx.IntImm) else extent for extent in value.ty.shape]


def repeated(emit: Callable[[Any], Any], x: relax.Expr, counts: Sequence[Any], shape: Sequence[Any]) -> relax.Expr:
    """All of a tensor, so many times along each axis, which is of this `shape`; counts and sizes may be open."""
    extents = [1] * (len(counts) - len(shape_of(x))) + shape_of(x)
    apart = emit(relax.op.reshape(x, [part for extent in extents for part in (1, extent)]))
    pairs = zip(counts, extents, strict=True)
    wide = emit(relax.op.broadcast_to(apart, [part for pair in pairs for part in pair]))
    return relax.op.reshape(wide, list(shape))


def symbols_of(function: relax.Function) -> list[Any]:
    """The symbols in the shapes of what a function takes, in order."""
    found: list[Any] = []
    for parameter in function.params:
        for extent in getattr(getattr(parameter.ty, "shape", None), "values", ()):
            tvm_ffi.structural_walk(extent, (ir.Var, found.append))
    return list(dict.fromkeys(found))


def seen_as(value: relax.Expr, shape: Sequence[Any]) -> relax.Expr:
    """A tensor as one of a shape that it has, though TVM does not see it: n // 2 * 2 is n. A view.

    No match_cast, which CanonicalizeBindings follows for ever there, and no reshape, which TVM would compute.
    """
    ty = relax.TensorType(shape, str(value.ty.dtype))
    return relax.op.call_pure_packed(_VIEW, value, relax.ShapeExpr(shape), ty_args=ty)


def is_seen_as(value: Any) -> bool:
    """Whether a value is such a view; its second argument is what is seen."""
    return _calls(value, _VIEW)


def as_shape(sizes: relax.Expr) -> relax.Expr:
    """A tensor of integers as a shape.

    No tensor_to_shape: what TVM makes of that names the sizes once more, and not all uses of them agree on a name then.
    """
    (count,) = shape_of(sizes)
    return relax.op.call_pure_packed(_SHAPE, sizes, ty_args=relax.ShapeType(ndim=count))


def _calls(value: Any, name: str) -> bool:
    return operator(value) == "relax.call_pure_packed" and str(value.args[0].global_symbol) == name


def is_empty(value: relax.Expr) -> bool:
    """Whether a tensor has certainly no elements."""
    return any(isinstance(extent, int) and extent == 0 for extent in shape_of(value))


def rewrite_bindings(function: relax.Function, rewrite: Callable[[Any], list[Any]]) -> relax.Function:
    """Put the bindings `rewrite(binding)` in the place of each one. New values must be normal."""
    blocks = []
    changed = False
    for block in function.body.blocks:
        found = [rewrite(binding) for binding in block.bindings]
        for new, old in zip(found, block.bindings, strict=True):
            changed = changed or len(new) != 1 or not new[0].same_as(old)
        kind = relax.DataflowBlock if isinstance(block, relax.DataflowBlock) else relax.BindingBlock
        blocks.append(kind([binding for new in found for binding in new]))
    if not changed:
        return function
    body = relax.SeqExpr(blocks, function.body.body)
    return relax.Function(function.params, body, function.ret_ty, function.is_pure, function.attrs)


def rewrite_calls(function: relax.Function, rewrite: Callable[[relax.VarBinding], relax.VarBinding]) -> relax.Function:
    """Replace bindings whose value is a call, one by one. The new value must be normal and of the same type."""

    def one(binding: Any) -> list[Any]:
        is_call = isinstance(binding, relax.VarBinding) and isinstance(binding.value, relax.Call)
        return [rewrite(binding) if is_call else binding]

    return rewrite_bindings(function, one)


def top_level_bindings(function: relax.Function) -> Iterator[Any]:
    """The bindings of a function in order, without those inside the branches of an If."""
    if isinstance(function.body, relax.SeqExpr):
        for block in function.body.blocks:
            yield from block.bindings


def bound_values(function: relax.Function) -> dict[relax.Var, Any]:
    """What the variables of a function are bound to at its top level, in order."""
    return {binding.var: binding.value for binding in top_level_bindings(function)}


def values_of_one_block(function: relax.Function) -> dict[relax.Var, Any]:
    """The same of a function of one block; nothing for several: what one of them computes, another one may not see."""
    return bound_values(function) if len(function.body.blocks) == 1 else {}


def has_call(function: relax.Function, operators: Collection[str]) -> bool:
    """Whether a function calls one of these operators at its top level."""
    return any(operator(binding.value) in operators for binding in top_level_bindings(function))


def block_results(function: relax.Function) -> set[relax.Var]:
    """The results of the dataflow blocks of a function, or a branch, that has several blocks.

    What they are made of, other blocks may not read: a pass that looks there would write it where it is not known.
    """
    found: set[relax.Var] = set()
    bodies: list[Any] = [function.body]
    while bodies:
        body = bodies.pop()
        blocks = list(body.blocks) if isinstance(body, relax.SeqExpr) else []
        for block in blocks:
            if isinstance(block, relax.DataflowBlock):
                results = {binding.var for binding in block.bindings if not isinstance(binding.var, relax.DataflowVar)}
                found |= results if len(blocks) > 1 else set()
                continue
            for binding in block.bindings:
                if isinstance(binding.value, relax.If):
                    bodies += [binding.value.true_branch, binding.value.false_branch]
    return found


def leaves(value: Any) -> list[Any]:
    """The variables and constants that a binding's value reads directly, in order, tuples flattened."""
    if isinstance(value, ir.GenericConst | relax.Var):
        return [value]
    if isinstance(value, relax.Tuple):
        return [leaf for field in value.fields for leaf in leaves(field)]
    if isinstance(value, relax.TupleGetItem):
        return leaves(value.tuple_value)
    if isinstance(value, relax.Call):
        return [leaf for argument in value.args for leaf in leaves(argument)]
    return []


def constants(mod: ir.IRModule) -> list[ir.GenericConst]:
    """The constants of all Relax functions of a module, each once for each use."""
    found: list[ir.GenericConst] = []

    def visit(node: Any) -> None:
        if isinstance(node, ir.GenericConst):
            found.append(node)

    for function in mod.functions.values():
        if isinstance(function, relax.Function):
            relax.analysis.post_order_visit(function, visit)
    return found


def constant_bytes(mod: ir.IRModule) -> int:
    """What a run reads of a module's constants: their sizes, each once for each use."""
    return sum(array_of(constant).nbytes for constant in constants(mod))


def sizes_read(function: relax.Function) -> set[relax.Var]:
    """The variables of tuples an element of which becomes a shape (`as_shape`): how many boxes are chosen."""
    elements: dict[Any, Any] = {}
    found: set[relax.Var] = set()
    for binding in top_level_bindings(function):
        value = binding.value
        if isinstance(value, relax.TupleGetItem):
            elements[binding.var] = value.tuple_value
        elif _calls(value, _SHAPE) and value.args[1] in elements:
            found.add(elements[value.args[1]])
    return found


def use_counts(function: relax.Function) -> dict[relax.Var, int]:
    """How often each variable is read at the top level of a function; its result counts as a use.

    A use inside an If counts as two, so that no one takes the variable for used once.
    """
    counts: dict[relax.Var, int] = {}

    def count(var: relax.Var, uses: int) -> None:
        counts[var] = counts.get(var, 0) + uses

    for binding in top_level_bindings(function):
        if isinstance(binding.value, relax.If):
            for var in relax.analysis.free_vars(binding.value):
                count(var, 2)
        else:
            for leaf in leaves(binding.value):
                if isinstance(leaf, relax.Var):
                    count(leaf, 1)
    if isinstance(function.body, relax.SeqExpr):
        for leaf in leaves(function.body.body):
            if isinstance(leaf, relax.Var):
                count(leaf, 1)
    return counts


def substitute(function: relax.Function, replacements: Mapping[relax.Var, Any]) -> relax.Function:
    """Put expressions in the place of variables, and drop the bindings that nothing uses any more."""
    return relax.analysis.remove_all_unused(substituted(function, replacements))


def substituted(expr: Any, replacements: Mapping[relax.Var, Any]) -> Any:
    """An expression with others in the place of variables."""
    return _Substitute(replacements).visit_expr(expr)


@mutator
class _Substitute(PyExprMutator):
    def __init__(self, replacements: Mapping[relax.Var, Any]) -> None:
        super().__init__()
        self._replacements = replacements

    def visit_var_(self, var: relax.Var) -> Any:
        return self._replacements.get(var, var)

    def visit_dataflow_var_(self, var: relax.Var) -> Any:
        return self._replacements.get(var, var)


class LookupMutator(PyExprMutator):
    """A mutator that asks what operands were computed by: to derive from, and to decorate as `mutator`."""

    def __init__(self, function: relax.Function) -> None:
        super().__init__()
        self._results = block_results(function)

    def _value(self, expr: Any) -> Any:
        """What a variable is bound to, None where its block does not know; any other expression is itself."""
        if not isinstance(expr, relax.Var):
            return expr
        return None if expr in self._results else self.lookup_binding(expr)
