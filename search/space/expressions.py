"""Questions and replacements that the rewriters of scheduled functions share. Variables are compared by identity."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tvm_ffi
from numpy.typing import NDArray
from tvm import ir, tirx
from tvm.ir.expr import TensorLoad

__all__ = [
    "COMPARISONS",
    "binding_of",
    "conditionals",
    "conjuncts",
    "constant_extent",
    "evaluate",
    "guarded_loads",
    "is_conditional",
    "is_reduced",
    "is_zero",
    "nodes_of",
    "substitute",
    "uses",
]

COMPARISONS = (tirx.LT, tirx.LE, tirx.GT, tirx.GE, tirx.EQ, tirx.NE)

Array = NDArray[Any]

_OPERATORS: Mapping[type, Callable[[Array, Array], Array]] = {
    tirx.Add: np.add,
    tirx.Sub: np.subtract,
    tirx.Mul: np.multiply,
    tirx.FloorDiv: np.floor_divide,
    tirx.FloorMod: np.mod,
    tirx.Min: np.minimum,
    tirx.Max: np.maximum,
    tirx.LT: np.less,
    tirx.LE: np.less_equal,
    tirx.GT: np.greater,
    tirx.GE: np.greater_equal,
    tirx.EQ: np.equal,
    tirx.NE: np.not_equal,
    tirx.And: np.logical_and,
    tirx.Or: np.logical_or,
}

_FUNCTIONS: Mapping[str, Callable[..., Array]] = {
    "floor": np.floor,
    "ceil": np.ceil,
    "trunc": np.trunc,
    "round": np.rint,
    "nearbyint": np.rint,
    "if_then_else": np.where,
}


def substitute(expression: Any, values: Sequence[tuple[Any, Any]]) -> Any:
    """An expression or a statement with other values for some variables."""

    def value_of(var: Any) -> Any:
        return next((value for known, value in values if known.same_as(var)), var)

    if isinstance(expression, ir.Var):
        return value_of(expression)
    if isinstance(expression, tirx.IntImm):
        return expression
    return tvm_ffi.structural_map(expression, (ir.Var, value_of))


def nodes_of(expression: Any, kind: Any) -> list[Any]:
    """The nodes of a type, or of one of several, in an expression or a statement."""
    found: list[Any] = []
    tvm_ffi.structural_walk(expression, (kind, found.append))
    return found


def uses(expression: Any, *variables: Any) -> bool:
    """Whether any of the variables occurs."""
    return any(use.same_as(variable) for use in nodes_of(expression, ir.Var) for variable in variables)


def binding_of(realize: Any) -> list[tuple[Any, Any]]:
    """The variables of a block, each with what it stands for in the loops around."""
    return [(axis.var, value) for axis, value in zip(realize.block.iter_vars, realize.iter_values, strict=True)]


def conjuncts(predicate: Any) -> list[Any]:
    """The conditions that a predicate joins; none of one that always holds."""
    if isinstance(predicate, tirx.And):
        return [*conjuncts(predicate.a), *conjuncts(predicate.b)]
    return [] if isinstance(predicate, tirx.IntImm) and bool(predicate.value) else [predicate]


def constant_extent(axis: tirx.IterVar) -> int:
    """The extent of a block's axis; 1 for one that varies, such as a window of ragged adaptive pooling."""
    return int(axis.dom.extent) if isinstance(axis.dom.extent, tirx.IntImm) else 1


def is_reduced(axis: tirx.IterVar) -> bool:
    """Whether a block reduces over its axis."""
    return int(axis.iter_type) == tirx.IterVar.CommReduce


def evaluate(expression: Any, values: Mapping[Any, Any]) -> Any:
    """An expression over numpy arrays, in the types of its parts; `values` has what its variables stand for.

    Raises
    ------
    TypeError
        For a load, and for any operator that indices and conditions do not usually have.
    KeyError
        For a variable without a value.
    """
    if isinstance(expression, tirx.IntImm | tirx.FloatImm):
        return np.asarray(expression.value, dtype=str(expression.ty.dtype))
    if isinstance(expression, ir.Var):
        return np.asarray(values[expression])
    if isinstance(expression, tirx.Cast):
        return evaluate(expression.value, values).astype(str(expression.ty.dtype))
    if isinstance(expression, tirx.Not):
        return np.logical_not(evaluate(expression.a, values))
    if type(expression) in _OPERATORS:
        return _OPERATORS[type(expression)](evaluate(expression.a, values), evaluate(expression.b, values))
    if isinstance(expression, tirx.Div):
        quotient = evaluate(expression.a, values) / evaluate(expression.b, values)
        dtype = str(expression.ty.dtype)
        return (quotient if dtype.startswith("float") else np.trunc(quotient)).astype(dtype)
    if isinstance(expression, tirx.Select):
        parts = expression.condition, expression.true_value, expression.false_value
        return np.where(*(evaluate(part, values) for part in parts))
    if isinstance(expression, ir.Call):
        name = str(getattr(expression.op, "name", "")).rpartition(".")[2]
        if name in _FUNCTIONS:
            return _FUNCTIONS[name](*(evaluate(part, values) for part in expression.args))
    raise TypeError(f"{type(expression).__name__} in an index")


def is_conditional(value: Any) -> bool:
    """Whether it is a call of if_then_else, which evaluates only what its condition chooses."""
    return isinstance(value, ir.Call) and str(getattr(value.op, "name", "")).endswith("if_then_else")


def conditionals(value: Any) -> list[Any]:
    """The calls of if_then_else in an expression or a statement."""
    return [call for call in nodes_of(value, ir.Call) if is_conditional(call)]


def guarded_loads(value: Any) -> list[Any]:
    """What conditions in an expression decide to load, or not."""
    branches = [branch for call in conditionals(value) for branch in call.args[1:]]
    return [load for branch in branches for load in nodes_of(branch, TensorLoad)]


def is_zero(value: Any) -> bool:
    """Whether an expression is the constant 0."""
    return isinstance(value, tirx.FloatImm | tirx.IntImm) and float(value.value) == 0.0
