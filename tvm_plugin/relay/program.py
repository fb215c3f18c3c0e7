"""A Relay program as data: types, expressions and functions.

Expressions form a graph, and each has a number that is larger than those of its parts: the order of the text. A graph
variable (`%0`) is no node: its uses share one object, as in Relay itself. Positions are offsets into the text, or -1
for programs that were read from JSON.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import count
from typing import Any, TypeAlias

from numpy.typing import NDArray

from .errors import RelayError, UnsupportedRelayError

__all__ = [
    "MAX_DEPTH",
    "Call",
    "Constant",
    "Expr",
    "Function",
    "FunctionType",
    "GlobalRef",
    "If",
    "Let",
    "Program",
    "TensorType",
    "Tuple",
    "TupleItem",
    "TupleType",
    "Type",
    "Var",
]

MAX_DEPTH = 64
"""Nested parentheses, blocks, calls or functions. Printed programs have three or four: they name inner values."""


@dataclass(frozen=True, slots=True)
class TensorType:
    """`Tensor[(1, ?, 3), float32]`; an extent is None where it is `?`. Scalars have the shape ()."""

    shape: tuple[int | None, ...]
    dtype: str

    def __str__(self) -> str:
        if not self.shape:
            return self.dtype
        extents = ", ".join("?" if extent is None else str(extent) for extent in self.shape)
        return f"Tensor[({extents}), {self.dtype}]"


@dataclass(frozen=True, slots=True)
class TupleType:
    """`(T, U)`."""

    fields: tuple[Type | None, ...]

    def __str__(self) -> str:
        inner = ", ".join("_" if part is None else str(part) for part in self.fields)
        return f"({inner},)" if len(self.fields) == 1 else f"({inner})"


@dataclass(frozen=True, slots=True)
class FunctionType:
    """`fn (T, U) -> V`."""

    params: tuple[Type | None, ...]
    result: Type | None


_SERIALS = count()


def _serial() -> Any:
    return field(default_factory=_SERIALS.__next__)


Type: TypeAlias = TensorType | TupleType | FunctionType


@dataclass(slots=True, eq=False, repr=False)
class Var:
    """A parameter or a variable bound by `let`: `%x`."""

    name: str
    type: Type | None
    position: int = -1
    serial: int = _serial()


@dataclass(slots=True, eq=False, repr=False)
class Constant:
    """A literal, or an array of the metadata section."""

    value: NDArray[Any]
    position: int = -1
    serial: int = _serial()


@dataclass(slots=True, eq=False, repr=False)
class GlobalRef:
    """`@name`."""

    name: str
    position: int = -1
    serial: int = _serial()


@dataclass(slots=True, eq=False, repr=False)
class Tuple:
    """`(a, b)`."""

    fields: list[Expr]
    position: int = -1
    serial: int = _serial()


@dataclass(slots=True, eq=False, repr=False)
class TupleItem:
    """`a.0`."""

    value: Expr
    index: int
    position: int = -1
    serial: int = _serial()


@dataclass(slots=True, eq=False, repr=False)
class Call:
    """`operator(args, name=value)`; the callee is an operator's name, or an expression that is a function."""

    callee: str | Expr
    args: list[Expr]
    attrs: dict[str, Any]
    position: int = -1
    serial: int = _serial()


@dataclass(slots=True, eq=False, repr=False)
class If:
    """`if (condition) { a } else { b }`."""

    condition: Expr
    then: Expr
    otherwise: Expr
    position: int = -1
    serial: int = _serial()


@dataclass(slots=True, eq=False, repr=False)
class Let:
    """`let %x = value; body`."""

    var: Var
    value: Expr
    body: Expr
    position: int = -1
    serial: int = _serial()


@dataclass(slots=True, eq=False, repr=False)
class Function:
    """`fn (%x: T, Primitive=1) -> U { body }`, also the right side of `def @name`."""

    params: list[Var]
    body: Expr
    result: Type | None
    attrs: dict[str, Any] = field(default_factory=dict)
    position: int = -1
    serial: int = _serial()


Expr: TypeAlias = Var | Constant | GlobalRef | Tuple | TupleItem | Call | If | Let | Function


@dataclass(frozen=True)
class Program:
    """Functions by name, and the text that they came from ("" for JSON)."""

    functions: Mapping[str, Function]
    text: str = ""

    def error(self, position: int, message: str) -> RelayError:
        """An error at a position, to raise."""
        return RelayError(message, *line_and_column(self.text, position))

    def unsupported(self, position: int, message: str) -> UnsupportedRelayError:
        """As `error`, for what is right in Relay and has no counterpart."""
        return UnsupportedRelayError(message, *line_and_column(self.text, position))

    def place(self, position: int) -> str:
        """The position in words; "" where it is unknown."""
        line, column = line_and_column(self.text, position)
        return "" if line is None else f"line {line}, column {column}"


def line_and_column(text: str, position: int) -> tuple[int, int] | tuple[None, None]:
    """Counted from 1."""
    if position < 0:
        return None, None
    return text.count("\n", 0, position) + 1, position - text.rfind("\n", 0, position)
