"""What is inside an expression: literals, attribute values and types, over the tokens of a text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

import numpy as np

from . import program as ir
from .metadata import Metadata
from .program import MAX_DEPTH
from .tokens import Token, Tokens, shown

__all__ = ["ValueReader"]

_DTYPES = {
    **{name: name for name in ("bool", "bfloat16", "float16", "float32", "float64")},
    **{f"{kind}{bits}": f"{kind}{bits}" for kind in ("int", "uint") for bits in (1, 4, 8, 16, 32, 64)},
    **{kind: f"{kind}32" for kind in ("int", "uint", "float")},
}
"""What TVM reads from a name; 32 bits where it gives none."""

_SHAPE_VARIABLES = ("tir.Any", "tir.SizeVar", "tir.Var")
"""Classes of extents that are not known, as meta[tir.SizeVar][0] refers to them; `?` otherwise."""

_T = TypeVar("_T")


class ValueReader:
    """Reads tokens one by one; every error says where, what was found and what was expected."""

    def __init__(self, text: str, metadata: Metadata) -> None:
        self._tokens = Tokens(text)
        self._metadata = metadata
        self._depth = 0

    # Literals and attributes

    def _scalar(self) -> Any:
        """A number with its dtype: 1 is int32 (int64 where it must be), 1f float32, 2i64, 3f16, True."""
        start = self._tokens.current
        return self._signed(start, self._sign())

    def _sign(self) -> bool:
        """Whether what follows is negative, after any number of minus signs."""
        negative = False
        while self._accept("-"):
            negative = not negative
        return negative

    def _signed(self, start: Token, negative: bool) -> Any:
        token = self._tokens.current
        if token.text in ("True", "False") and not negative:
            return np.bool_(self._tokens.advance().text == "True")
        if token.kind != "number":
            self._fail("a number")
        self._tokens.advance()
        value = _number(token.text, negative)
        if value is None:
            raise self._tokens.error(start.position, f"{token.text} is no number that its type can hold")
        return value

    def _natural(self, token: Token, digits: str) -> int:
        if len(digits) > 9:
            raise self._tokens.error(token.position, f"{digits[:20]}... is too large")
        return int(digits)

    def _at_attribute(self) -> bool:
        return self._tokens.current.kind == "name" and self._tokens.peek().text == "="

    def _attribute(self, attrs: dict[str, Any]) -> None:
        name = self._tokens.advance()
        self._tokens.advance()
        if name.text in attrs:
            raise self._tokens.error(name.position, f"the attribute {name.text} is given twice")
        attrs[name.text] = self._attribute_value()

    def _attribute_value(self) -> Any:
        token = self._tokens.current
        if token.kind == "string":
            return self._tokens.advance().text[1:-1]
        if token.text in ("None", "nullptr"):
            self._tokens.advance()
            return None
        if token.kind == "meta":
            return self._metadata.attribute(self._tokens.advance(), self._tokens)
        if token.text in ("[", "(", "{"):
            return self._attribute_list()
        return self._plain_number()

    def _plain_number(self) -> bool | int | float:
        """A number of an attribute, which is a double or a whole number whatever its suffix says."""
        start = self._tokens.current
        negative = self._sign()
        token = self._tokens.current
        digits, mark, _ = token.text.partition("f")
        if token.kind == "number" and digits[0].isdigit() and (mark or not digits.isdigit()) and "i" not in digits:
            self._tokens.advance()
            return -float(digits) if negative else float(digits)
        return self._signed(start, negative).item()

    def _attribute_list(self) -> list[Any]:
        start = self._tokens.advance()
        self._enter(start)
        close = {"[": "]", "(": ")", "{": "}"}[start.text]
        values: list[Any] = []
        while self._tokens.current.text != close:
            if self._at_attribute():  # {"key"=value} of a dictionary; nothing that computes has one
                self._tokens.advance()
                self._tokens.advance()
            values.append(self._attribute_value())
            if not self._accept(","):
                break
        self._expect(close)
        self._leave()
        return values

    # Types

    def _type(self) -> ir.Type | None:
        """None for `_`, which is left to inference."""
        token = self._tokens.current
        self._enter(token)
        result = self._type_inside(token)
        self._leave()
        return result

    def _type_inside(self, token: Token) -> ir.Type | None:
        if token.text == "(":
            return ir.TupleType(self._types())
        if token.text == "fn":
            self._tokens.advance()
            params = self._types()
            self._expect("->")
            return ir.FunctionType(params, self._type())
        if token.kind != "name":
            return self._fail("a type, as in Tensor[(1, 3), float32]")
        self._tokens.advance()
        if token.text == "_":
            return None
        if token.text != "Tensor":
            return ir.TensorType((), self._dtype(token))
        self._expect("[")
        shape = self._shape()
        self._expect(",")
        dtype = self._dtype(self._expect_kind("name", "a dtype, as in float32"))
        self._expect("]")
        return ir.TensorType(shape, dtype)

    def _types(self) -> tuple[ir.Type | None, ...]:
        return tuple(self._list("(", self._type, ")"))

    def _dtype(self, token: Token) -> str:
        if token.text not in _DTYPES:
            raise self._tokens.error(
                token.position, f"found {shown(token)}, expected a dtype, as in float32, int64 or bool"
            )
        return _DTYPES[token.text]

    def _shape(self) -> tuple[int | None, ...]:
        return tuple(self._list("(", self._extent, ")"))

    def _extent(self) -> int | None:
        token = self._tokens.current
        if self._accept("?"):
            return None
        value = self._metadata.attribute(self._tokens.advance(), self._tokens) if token.kind == "meta" else None
        if value in _SHAPE_VARIABLES:
            return None
        if token.kind == "number":
            value = self._scalar().item()
        if not isinstance(value, int) or not 0 <= value < 1 << 40:
            raise self._tokens.error(token.position, f"found {shown(token)}, expected an extent: a number or ?")
        return value

    def _list(self, opening: str, element: Callable[[], _T], closing: str) -> list[_T]:
        self._expect(opening)
        values: list[_T] = []
        while self._tokens.current.text != closing:
            values.append(element())
            if not self._accept(","):
                break
        self._expect(closing)
        return values

    # Tokens

    def _accept(self, text: str) -> bool:
        if self._tokens.current.text != text or self._tokens.current.kind == "string":
            return False
        self._tokens.advance()
        return True

    def _expect(self, text: str) -> None:
        if not self._accept(text):
            self._fail(text)

    def _expect_kind(self, kind: str, what: str) -> Token:
        if self._tokens.current.kind != kind:
            self._fail(what)
        return self._tokens.advance()

    def _fail(self, expected: str) -> NoReturn:
        token = self._tokens.current
        raise self._tokens.error(token.position, f"found {shown(token)}, expected {expected}")

    def _enter(self, token: Token) -> None:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise self._tokens.error(
                token.position,
                f"nested more than {MAX_DEPTH} levels deep; give inner values names (%0 = ...; let %x = ...;)",
            )

    def _leave(self) -> None:
        self._depth -= 1


_FLOATS: dict[str, Any] = {"": np.float32, "16": np.float16, "32": np.float32, "64": np.float64}
_INTEGERS: dict[str, Any] = {"8": np.int8, "16": np.int16, "32": np.int32, "64": np.int64}
_LIMITS = {width: 1 << (int(width) - 1) for width in _INTEGERS}


def _number(text: str, negative: bool) -> Any:
    """A scalar of the literal's dtype; None when the suffix is unknown or the value does not fit."""
    digits, mark, width = text, "", ""
    if not text.isdigit():
        for suffix in ("f", "i"):
            body, found, rest = text[1:].rpartition(suffix)  # [1:]: the i of inff is no suffix
            if found and (not rest or rest.isdigit()):
                digits, mark, width = text[0] + body, suffix, rest
                break
    if mark == "f" or not (mark or digits.isdigit()):
        dtype = _FLOATS.get(width)
        if dtype is None:
            return None
        value = float(digits)
        with np.errstate(over="ignore"):
            number = dtype(-value if negative else value)
        return None if np.isinf(number) and digits != "inf" else number
    if not digits.isdigit() or len(digits) > 19:
        return None
    integer = -int(digits) if negative else int(digits)
    if not width:
        width = "32" if mark or -_LIMITS["32"] <= integer < _LIMITS["32"] else "64"
    if width not in _INTEGERS or not -_LIMITS[width] <= integer < _LIMITS[width]:
        return None
    return _INTEGERS[width](integer)
