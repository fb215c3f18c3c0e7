"""Sizes that PyTorch leaves open: from its symbols and what it computes of them to TVM's."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Mapping
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
import torch.fx
from tvm import ir, relax, sym, tirx

from ...errors import UnsupportedModelError

__all__ = ["OpenSizes", "is_size", "number_of_sizes", "tensor_of_size"]


def is_size(value: Any) -> bool:
    """Whether a value is a number that is known only when the model runs."""
    return isinstance(value, ir.Expr) and isinstance(value.ty, ir.PrimType)


EXACT = 1 << 16
"""Largest denominator of a factor whose products with sizes are computed exactly with floats (1.5, not 0.7)."""


class OpenSizes:
    """What the sizes of a program are in the Relax function that it becomes.

    Parameters
    ----------
    symbols : mapping of str to tvm.ir.Expr
        Of each of PyTorch's symbols, and of what is computed of one.

    Attributes
    ----------
    parameters : dict
        Inputs with open sizes, by name.
    names : dict
        Of PyTorch's symbols, as their sizes are called here.
    steps : dict
        By name, [step, first] of a size that PyTorch computes: `first` and any number of steps more.
    """

    def __init__(self, symbols: Mapping[str, Any]) -> None:
        self.parameters: dict[str, relax.Var] = {}
        self.names: dict[str, str] = {}
        self.steps: dict[str, list[int]] = {}
        self._computed: dict[str, str] = {}
        self._symbols = dict(symbols)
        self._analyzer = sym.Analyzer()

    @staticmethod
    def of_inputs(values: Mapping[str, torch.Tensor], given: Mapping[str, relax.Var]) -> OpenSizes:
        """From tensors that a program was exported with, and the parameters that they are, by name.

        A symbol that no extent is alone, as in 2 * s, is computed of one: no program of Relax could tell what it is.
        `parameters` are what `given` becomes by that, and by the names that a `torch.export.Dim` has.
        """
        sizes = OpenSizes({})
        dims = [dim for value in values.values() for dim in value.shape if isinstance(dim, torch.SymInt)]
        open_dims = [dim for dim in dims if dim.node.expr.free_symbols]
        for dim in open_dims:
            expression = dim.node.expr
            if isinstance(expression, sympy.Symbol) and str(expression) not in sizes._symbols:
                name = _name_of(dim)
                taken = name in sizes.names.values() or not name.isidentifier()
                sizes.names[str(expression)] = str(expression) if taken else name
                sizes._symbols[str(expression)] = tirx.Var(sizes.names[str(expression)], "int64")
        for expression in (dim.node.expr for dim in open_dims):
            symbol = next(iter(expression.free_symbols))
            if str(symbol) not in sizes._symbols and expression.is_polynomial(symbol) and sympy.degree(expression) == 1:
                whole = sizes._symbols.setdefault(str(expression), tirx.Var(f"of_{symbol}", "int64"))
                factor, added = map(int, sympy.Poly(expression, symbol).all_coeffs())
                sizes._symbols[str(symbol)] = (whole - added) // factor
                sizes._computed[str(expression)] = str(whole.name)
                sizes.steps[str(whole.name)] = [factor, added]
        for name, value in values.items():
            if any(isinstance(dim, torch.SymInt) for dim in value.shape):
                ty = relax.TensorType([sizes(dim) for dim in value.shape], given[name].ty.dtype)
                sizes.parameters[name] = relax.Var(str(given[name].name), ty)
        return sizes

    def bounds(
        self, of_symbols: Mapping[str, tuple[int, int | None]], ranges: Mapping[sympy.Basic, Any]
    ) -> dict[str, tuple[int, int | None]]:
        """What sizes are at least and at most, from what PyTorch's symbols are, and what its program says."""
        found = {self.names[symbol]: limits for symbol, limits in of_symbols.items() if symbol in self.names}
        for expression, limits in ranges.items():
            if str(expression) in self._computed:
                known = [int(limit) if limit.is_Integer else None for limit in (limits.lower, limits.upper)]
                found[self._computed[str(expression)]] = known[0] or 1, known[1]
        return found

    def __call__(self, size: Any) -> Any:
        """An int as it is; what a torch.SymInt stands for: an int, or an expression of the function's symbols.

        Raises UnsupportedModelError where that depends on data, or is computed in an unknown way.
        """
        return self.of_expression(size.node.expr) if isinstance(size, torch.SymInt) else size

    def simplified(self, size: Any) -> Any:
        """An equal size in fewer terms."""
        return self._analyzer.simplify(size) if is_size(size) else size

    def are_equal(self, one: Any, other: Any) -> bool:
        """Whether two sizes are certainly equal."""
        return bool(self._analyzer.can_prove_equal(one, other))

    def of_expression(self, expression: sympy.Basic) -> Any:
        """What one of PyTorch's expressions stands for; raises UnsupportedModelError as a call does."""
        if isinstance(expression, sympy.Integer):
            return int(expression)
        if str(expression) in self._symbols:
            return self._symbols[str(expression)]
        if isinstance(expression, sympy.Symbol):
            raise UnsupportedModelError(f"a size ({expression}) depends on data; sizes of inputs can stay open")
        name = expression.func.__name__
        if name in _ROUNDED:
            fraction = self._fraction(expression.args[0])
            if fraction is not None:
                return self.simplified(_ROUNDED[name](*fraction))
        compute = _COMPUTED.get(name)
        if compute is None:
            raise UnsupportedModelError(f"a size is computed as {expression}, in a way that is not known here")
        return self.simplified(compute(*map(self.of_expression, expression.args)))

    def _fraction(self, expression: sympy.Basic) -> tuple[Any, int] | None:
        """The numerator and denominator of a size times a number that floats have exactly, as of a scale factor."""
        if expression.func.__name__ == "ToFloat":
            return self.of_expression(expression.args[0]), 1
        if expression.is_Number and expression > 0:
            numerator, denominator = float(expression).as_integer_ratio()
            return (numerator, denominator) if denominator <= EXACT else None
        if expression.func.__name__ != "Mul":
            return None
        parts = [self._fraction(part) for part in expression.args]
        if any(part is None for part in parts):
            return None
        numerators, denominators = zip(*filter(None, parts), strict=True)
        return functools.reduce(operator.mul, numerators), math.prod(denominators)


def _name_of(dim: torch.SymInt) -> str:
    """What its `torch.export.Dim` is called, where PyTorch still knows; else the symbol."""
    environment = dim.node.shape_env
    for source in getattr(environment, "var_to_sources", {}).get(dim.node.expr, ()):
        place = source.name() if callable(source.name) else source.name
        name = getattr(environment, "source_name_to_debug_name", {}).get(place)
        if name:
            return str(name)
    return str(dim.node.expr)


def tensor_of_size(emit: Callable[[Any], Any], size: Any) -> relax.Expr:
    """A size as a tensor without axes, of int64."""
    return emit(relax.op.reshape(emit(relax.op.shape_to_tensor(relax.ShapeExpr([size]))), []))


def number_of_sizes(value: torch.SymFloat, sizes: OpenSizes, importer: Any) -> relax.Expr:
    """A fraction that is computed of open sizes, as a tensor without axes.

    Raises UnsupportedModelError where it is computed in an unknown way.
    """
    emit = importer.block_builder.emit

    def translated(expression: sympy.Basic) -> relax.Expr:
        name = expression.func.__name__
        if expression.is_Number:
            return relax.const(float(expression), "float64")
        if name in ("Add", "Mul") and not expression.is_integer:
            combine = relax.op.add if name == "Add" else relax.op.multiply
            return functools.reduce(lambda one, other: emit(combine(one, other)), map(translated, expression.args))
        if name in _FRACTIONS and not expression.is_integer:
            return emit(_FRACTIONS[name](*map(translated, expression.args)))
        return emit(relax.op.astype(tensor_of_size(emit, sizes.of_expression(expression)), "float64"))

    return translated(value.node.expr)


_FRACTIONS: Mapping[str, Callable[..., Any]] = {
    "ToFloat": lambda one: relax.op.astype(one, "float64"),
    "FloatTrueDiv": relax.op.divide,
    "IntTrueDiv": relax.op.divide,
    "FloatPow": relax.op.power,
    "Pow": relax.op.power,
    "OpaqueUnaryFn_sqrt": relax.op.sqrt,
    "OpaqueUnaryFn_exp": relax.op.exp,
    "OpaqueUnaryFn_log": relax.op.log,
}
"""What makes fractions of numbers, by name."""


def _joined(function: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    return lambda *arguments: functools.reduce(function, arguments)


def _power(base: Any, exponent: Any) -> Any:
    if not isinstance(exponent, int) or exponent < 1:
        raise UnsupportedModelError(f"a size is a power with the exponent {exponent}")
    return functools.reduce(operator.mul, [base] * exponent)


_ROUNDED: Mapping[str, Callable[[Any, int], Any]] = {
    "TruncToInt": operator.floordiv,
    "FloorToInt": operator.floordiv,
    "CeilToInt": lambda numerator, denominator: (numerator + denominator - 1) // denominator,
}
"""Whole numbers of positive fractions, by name."""

_COMPUTED: Mapping[str, Callable[..., Any]] = {
    "Add": _joined(operator.add),
    "Mul": _joined(operator.mul),
    "Pow": _power,
    "PowByNatural": _power,
    "FloorDiv": operator.floordiv,
    "CleanDiv": operator.floordiv,
    "Mod": operator.mod,
    "PythonMod": operator.mod,
    "ModularIndexing": lambda base, divisor, modulus: (base // divisor) % modulus,
    "Max": _joined(tirx.max),
    "Min": _joined(tirx.min),
}
"""Functions of sympy, and of PyTorch's own for sizes, by name."""
