"""Collects the Relax bindings of one function, and infers their types on the way."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import tvm
from numpy.typing import NDArray
from tvm import relax

from ..relax_ir.constants import array_of, constant_of, is_static_tensor
from ..relax_ir.evaluate import evaluate
from ..relax_ir.functions import leaves
from ..relax_ir.tensors import extents
from .errors import RelayError

__all__ = ["Builder"]

MAX_BINDINGS = 200_000
"""Functions are inlined where they are called; a text of a few lines can ask for more than fits into memory."""

_FOLDED_ELEMENTS = 1024
"""Shapes, axes and indices that are computed at import are folded up to this size, floating point never."""


class Builder:
    """Emits operators one after the other.

    Values are `relax.Expr` (variables and constants) or Python lists of values, which are tuples.

    Parameters
    ----------
    dataflow
        Whether the function has no `If`; only then can it be one dataflow block.
    """

    def __init__(self, dataflow: bool) -> None:
        self._block_builder = relax.BlockBuilder()
        self._variable = relax.DataflowVar if dataflow else relax.Var
        self._dataflow = dataflow
        self._bindings: list[relax.VarBinding] = []
        self._count = 0

    # Emitting

    def emit(self, expr: Any) -> Any:
        """Bind an expression to a new variable; what is a variable, a constant or a list already stays."""
        if isinstance(expr, list):
            return [self.emit(part) for part in expr]
        if isinstance(expr, relax.Var | tvm.ir.GenericConst):
            return expr
        expr = self._block_builder.normalize(expr)
        folded = self._fold(expr)
        return self._bind(expr) if folded is None else folded

    def _bind(self, expr: Any) -> relax.Var:
        self._count += 1
        if self._count > MAX_BINDINGS:
            raise RelayError(f"the program has more than {MAX_BINDINGS:,} operators after its functions are inlined")
        var = self._variable(f"lv{self._count - 1}", expr.ty)
        self._bindings.append(relax.VarBinding(var, expr))
        return var

    def _fold(self, expr: Any) -> Any:
        """The constant that a small computation on whole numbers comes to, or None."""
        if not isinstance(expr, relax.Call) or not is_static_tensor(expr.ty) or "int" not in str(expr.ty.dtype):
            return None
        inputs = leaves(expr)
        if np.prod(extents(expr.ty)) > _FOLDED_ELEMENTS or any(isinstance(leaf, relax.Var) for leaf in inputs):
            return None
        result = evaluate(expr, [array_of(leaf) for leaf in inputs])
        return self.constant(result) if isinstance(result, np.ndarray) else None

    def materialize(self, value: Any) -> Any:
        """A value as one Relax expression: a list becomes a tuple."""
        if isinstance(value, list):
            return self._block_builder.normalize(relax.Tuple([self.materialize(part) for part in value]))
        return value

    def branch_on(self, condition: Any, then: Any, otherwise: Any) -> Any:
        """Bind `if (condition) then else otherwise`, two bodies that `body` made."""
        return self._bind(self._block_builder.normalize(relax.If(condition, then, otherwise)))

    @contextmanager
    def branch(self) -> Iterator[None]:
        """Collect the bindings of a branch; `body` ends it."""
        outer, self._bindings = self._bindings, []
        yield
        self._bindings = outer

    def body(self, value: Any) -> relax.SeqExpr:
        """The bindings so far that the result needs, and the result."""
        value = self.materialize(value)
        result = relax.Var("gv", value.ty)
        kind = relax.DataflowBlock if self._dataflow else relax.BindingBlock
        block = kind([*self._needed(value), relax.VarBinding(result, value)])
        return self._block_builder.normalize(relax.SeqExpr([block], result))

    def _needed(self, value: Any) -> list[relax.VarBinding]:
        """Without masks of dropout, and what else an operator gives that the program does not read."""
        used = set(relax.analysis.free_vars(value))
        kept = []
        for binding in reversed(self._bindings):
            if binding.var in used:
                kept.append(binding)
                used.update(relax.analysis.free_vars(binding.value))
        return kept[::-1]

    # Asking

    @staticmethod
    def constant(array: NDArray[Any] | float, dtype: str | None = None) -> Any:
        """A Relax constant."""
        return constant_of(np.asarray(array, dtype))

    def like(self, value: float, reference: Any) -> Any:
        """A scalar constant of the dtype of `reference`."""
        return self.constant(value, self.dtype(reference))

    @staticmethod
    def known(value: Any) -> NDArray[Any] | None:
        """The array of a constant, None for anything else."""
        return array_of(value) if isinstance(value, tvm.ir.GenericConst) else None

    def integers(self, value: Any, what: str) -> list[int]:
        """The elements of a constant, for arguments that decide a shape."""
        array = self.known(value)
        if array is None:
            raise ValueError(f"{what} is computed when the program runs; only static shapes can be converted")
        return [int(element) for element in array.reshape(-1)]

    @staticmethod
    def shape(value: Any) -> list[int]:
        """The extents of a tensor."""
        ty = _tensor_type(value)
        if not is_static_tensor(ty):
            raise ValueError(f"a tensor of static shape is expected, found {ty}")
        return extents(ty)

    @staticmethod
    def dtype(value: Any) -> str:
        """The dtype of a tensor."""
        return str(_tensor_type(value).dtype)

    def rank(self, value: Any) -> int:
        """The number of axes of a tensor."""
        return len(self.shape(value))

    def axis(self, axis: int, value: Any, extra: int = 0) -> int:
        """An axis of `value`, counted from the front; `extra` for axes that are about to be inserted."""
        rank = self.rank(value) + extra
        if not -rank <= axis < rank:
            raise ValueError(f"axis {axis} of a tensor with {rank} axes")
        return axis % rank

    def axes(self, axes: Sequence[int] | None, value: Any, exclude: bool = False) -> list[int]:
        """Axes to reduce, in order: all when none is given; the others with `exclude`."""
        rank = self.rank(value)
        chosen = sorted({self.axis(int(axis), value) for axis in axes}) if axes else list(range(rank))
        return [axis for axis in range(rank) if axis not in chosen] if exclude and axes else chosen

    @staticmethod
    def fields(value: Any) -> list[Any]:
        """The parts of a tuple."""
        if isinstance(value, list):
            return value
        if isinstance(value.ty, relax.TupleType):
            return [relax.TupleGetItem(value, index) for index in range(len(value.ty.fields))]
        raise ValueError(f"a tuple is expected, found {value.ty}")


def _tensor_type(value: Any) -> Any:
    """The type of a value. Raises ValueError where it is a tuple."""
    if isinstance(value, list) or isinstance(value.ty, relax.TupleType):
        raise ValueError("a tensor is expected, found a tuple")
    return value.ty
