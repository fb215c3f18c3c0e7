"""Relax functions, walked and rebuilt."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from tvm import ir, relax
from tvm.relax.expr_functor import PyExprMutator, mutator

from .constants import array_of

__all__ = [
    "LookupMutator",
    "block_results",
    "bound_values",
    "constant_bytes",
    "constants",
    "has_call",
    "leaves",
    "map_functions",
    "operator",
    "rewrite_bindings",
    "rewrite_calls",
    "substitute",
    "substituted",
    "top_level_bindings",
    "use_counts",
    "values_of_one_block",
]


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
