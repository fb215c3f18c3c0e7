"""Sizes that PyTorch leaves open: from its symbols and what it computes of them to TVM's."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping
from typing import Any

import sympy
import torch
import torch.fx
from tvm import ir, relax, sym, tirx

from ..errors import UnsupportedModelError

__all__ = ["OpenSizes", "is_size"]


def is_size(value: Any) -> bool:
    """Whether a value is a number that is known only when the model runs."""
    return isinstance(value, ir.Expr) and isinstance(value.ty, ir.PrimType)


class OpenSizes:
    """What the sizes of a program are in the Relax function that it becomes.

    Parameters
    ----------
    symbols : mapping of str to tvm.ir.Var
        Of each of PyTorch's symbols.
    """

    def __init__(self, symbols: Mapping[str, Any]) -> None:
        self._symbols = dict(symbols)
        self._analyzer = sym.Analyzer()

    @staticmethod
    def of_inputs(values: Mapping[str, torch.Tensor], variables: Mapping[str, relax.Var]) -> OpenSizes:
        """From tensors that a program was exported with, and the parameters that they are, by name."""
        symbols: dict[str, Any] = {}
        for name, value in values.items():
            for dim, variable in zip(value.shape, variables[name].ty.shape or (), strict=True):
                if isinstance(dim, torch.SymInt) and isinstance(dim.node.expr, sympy.Symbol):
                    symbols.setdefault(str(dim.node.expr), variable)
        return OpenSizes(symbols)

    def __call__(self, size: Any) -> Any:
        """An int as it is; what a torch.SymInt stands for: an int, or an expression of the function's symbols.

        Raises UnsupportedModelError where that depends on data, or is computed in an unknown way.
        """
        return self._translated(size.node.expr) if isinstance(size, torch.SymInt) else size

    def simplified(self, size: Any) -> Any:
        """An equal size in fewer terms."""
        return self._analyzer.simplify(size) if is_size(size) else size

    def are_equal(self, one: Any, other: Any) -> bool:
        """Whether two sizes are certainly equal."""
        return bool(self._analyzer.can_prove_equal(one, other))

    def _translated(self, expression: sympy.Basic) -> Any:
        if isinstance(expression, sympy.Integer):
            return int(expression)
        if isinstance(expression, sympy.Symbol):
            if str(expression) not in self._symbols:
                raise UnsupportedModelError(f"a size ({expression}) depends on data; sizes of inputs can stay open")
            return self._symbols[str(expression)]
        compute = _COMPUTED.get(expression.func.__name__)
        if compute is None:
            raise UnsupportedModelError(f"a size is computed as {expression}, in a way that is not known here")
        return self.simplified(compute(*map(self._translated, expression.args)))


def _joined(function: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    return lambda *arguments: functools.reduce(function, arguments)


def _power(base: Any, exponent: Any) -> Any:
    if not isinstance(exponent, int) or exponent < 1:
        raise UnsupportedModelError(f"a size is a power with the exponent {exponent}")
    return functools.reduce(operator.mul, [base] * exponent)


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
