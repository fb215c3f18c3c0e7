"""What the tables of printing share: what a row may ask of the printer, and attributes as plain numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np
import tvm

__all__ = ["Write", "Writer", "integers", "literal", "numbers", "optional", "out_dtype", "prim", "same"]


class Writer(Protocol):
    """What a row may ask of the printer."""

    def value(self, expr: Any) -> str:
        """An argument: a variable, a literal, or a reference to the metadata."""

    def definition(self, expr: Any) -> Any:
        """What a variable is bound to; None for anything else."""

    def call(self, name: str, args: Sequence[Any], **attrs: Any) -> str:
        """A call of a Relay operator; arguments are expressions, or text that is written already."""


Write: TypeAlias = Callable[[Writer, Any], str]


def numbers(value: Any) -> list[int]:
    """An array of an attribute."""
    return [int(element) for element in value]


def optional(value: Any) -> int | None:
    """A whole number of an attribute, or None."""
    return None if value is None else int(value)


def same(name: str) -> Write:
    """The same arguments, and no attributes."""
    return lambda w, call: w.call(name, call.args)


def out_dtype(call: Any) -> str | None:
    """The result's dtype where it is not that of the first operand."""
    result = str(call.ty.dtype)
    return None if result == str(call.args[0].ty.dtype) else result


def prim(expr: Any) -> Any:
    """The number in a PrimValue."""
    value = getattr(expr, "value", expr)
    return getattr(value, "value", value)


def integers(expr: Any) -> list[int]:
    """The numbers in a tuple of PrimValues, or in a shape."""
    values = getattr(expr, "fields", None) or getattr(expr, "values", [])
    return [int(prim(value)) for value in values]


def literal(value: float, like: Any) -> Any:
    """A scalar constant of the dtype of `like`."""
    dtype = str(like.ty.dtype)
    return tvm.ir.GenericConst(tvm.runtime.tensor(np.asarray(value, dtype)), tvm.relax.TensorType((), dtype))
