"""Relay's text format, version 0.0.5, to a `Program`.

Recursive descent over the grammar of TVM's language reference ("Relay Core IR", "Relay expressions") and of its text
printer, as TVM 0.8 to 0.19 wrote it. Chains of bindings are read in a loop; only what is nested in the text recurses,
and no deeper than `MAX_DEPTH`.
"""

from __future__ import annotations

from typing import Any, NoReturn

import numpy as np

from . import program as ir
from .errors import RelayError
from .metadata import Metadata, split_metadata
from .program import Program
from .tokens import Token
from .values import ValueReader

__all__ = ["MAX_TEXT_CHARACTERS", "parse"]

MAX_TEXT_CHARACTERS = 8 << 20
"""Without the metadata section: some 80,000 operators. BERT-base has 0.1 million characters."""

_VERSION = '#[version = "0.0.5"]'
_OPERATORS = {
    "*": ("multiply", 12),
    "/": ("divide", 12),
    "+": ("add", 10),
    "-": ("subtract", 10),
    "<": ("less", 8),
    "<=": ("less_equal", 8),
    ">": ("greater", 8),
    ">=": ("greater_equal", 8),
    "==": ("equal", 7),
    "!=": ("not_equal", 7),
}
_UNSUPPORTED = {
    "match": "pattern matching",
    "ref": "a reference cell",
}


def parse(text: str) -> Program:
    """Read a module, or a single function (`fn (...) {...}`), which becomes "main".

    Raises
    ------
    RelayError
        The text is not Relay 0.0.5, with line, column, what was found and what was expected.
    UnsupportedRelayError
        It uses algebraic data types, pattern matching or references.
    """
    code, metadata = split_metadata(text)
    if len(code) > MAX_TEXT_CHARACTERS:
        raise RelayError(
            f"the program has {len(code):,} characters before its metadata section; {MAX_TEXT_CHARACTERS:,} are "
            "allowed. Weights belong into the metadata section or into parameters"
        )
    return _Parser(code, metadata).program()


class _Scopes:
    """Variables by name, innermost scope last."""

    def __init__(self) -> None:
        self._scopes: list[dict[str, ir.Var]] = [{}]

    def push(self) -> None:
        self._scopes.append({})

    def pop(self) -> None:
        self._scopes.pop()

    def bind(self, var: ir.Var) -> None:
        self._scopes[-1][var.name] = var

    def find(self, name: str) -> ir.Var | None:
        for scope in reversed(self._scopes):
            if name in scope:
                return scope[name]
        return None


class _Parser(ValueReader):
    def __init__(self, text: str, metadata: Metadata) -> None:
        super().__init__(text, metadata)
        self._scopes = _Scopes()
        self._graph: dict[str, ir.Expr] = {}
        self._free: list[ir.Var] | None = None
        self._constructors: set[str] = set()

    # Module

    def program(self) -> Program:
        """The whole text."""
        self._version()
        if not self._at_definition():
            return Program({"main": self._open_expression()}, self._tokens.text)
        functions: dict[str, ir.Function] = {}
        while self._tokens.current.kind != "end":
            token = self._tokens.current
            if token.text == "fn" and not functions:
                functions["main"] = self._function(self._tokens.advance())
            elif token.text == "def":
                self._tokens.advance()
                name = self._expect_kind("global", "the function's name, as in def @main")
                if name.text[1:] in functions:
                    raise self._tokens.error(name.position, f"{name.text} is defined twice")
                functions[name.text[1:]] = self._function(name)
            elif token.text in ("type", "extern"):
                self._skip_type()
            else:
                self._fail("def @NAME(...)")
        if not functions:
            self._fail("def @main(...)")
        return Program(functions, self._tokens.text)

    def _version(self) -> None:
        """The first line. `print(mod)` leaves it out, `mod.astext()` does not."""
        token = self._tokens.current
        if token.kind == "header" and "".join(token.text.split()) == "".join(_VERSION.split()):
            self._tokens.advance()
        elif token.kind not in ("keyword", "graph"):
            self._fail(f"{_VERSION} as the first line; text of another version must be converted with the TVM it is of")

    def _at_definition(self) -> bool:
        token = self._tokens.current
        return token.text in ("def", "fn", "type", "extern") or token.kind not in ("keyword", "graph")

    def _skip_type(self) -> None:
        """type List[A] { Cons(A, List[A]), Nil, }, which PyTorch's importer left in modules that do not use it."""
        self._accept("extern")
        self._expect("type")
        self._expect_kind("name", "the type's name")
        depth = 0
        while self._tokens.current.kind != "end":
            token = self._tokens.advance()
            if token.text in ("{", "[", "("):
                depth += 1
            elif token.text in ("}", "]", ")"):
                depth -= 1
            elif depth == 1 and token.kind == "name":
                self._constructors.add(token.text)
            following = self._tokens.current
            if depth == 0 and (token.text == "}" or following.text in ("def", "type", "extern")):
                return
        if depth:
            self._fail("} at the end of the type")

    def _open_expression(self) -> ir.Function:
        """An expression with free variables, as `expr.astext()` prints it: a function of them."""
        start = self._tokens.current
        self._free = []
        body = self._statements()
        if self._tokens.current.kind != "end":
            self._fail("the end of the text")
        return ir.Function(self._free, body, None, {}, start.position)

    def _function(self, start: Token) -> ir.Function:
        """[T](%x: T, name=value) -> U { body }."""
        self._enter(start)
        self._scopes.push()
        if self._tokens.current.text == "[":
            raise self._unsupported_error(self._tokens.current, "a function with type parameters")
        self._expect("(")
        params: list[ir.Var] = []
        attrs: dict[str, Any] = {}
        while self._tokens.current.text != ")":
            if self._tokens.current.kind == "local":
                params.append(self._parameter())
            elif self._at_attribute():
                self._attribute(attrs)
            else:
                self._fail("a parameter (%x: Tensor[(1, 3), float32]), an attribute (Primitive=1) or )")
            if not self._accept(","):
                break
        self._expect(")")
        result = self._type() if self._accept("->") else None
        body = self._block()
        self._scopes.pop()
        self._leave()
        return ir.Function(params, body, result, attrs, start.position)

    def _parameter(self) -> ir.Var:
        token = self._tokens.advance()
        if self._accept("{"):  # {virtual_device_=meta[VirtualDevice][0]}
            while self._at_attribute():
                self._attribute({})
                self._accept(",")
            self._expect("}")
        return self._bind(token, self._type() if self._accept(":") else None)

    def _bind(self, token: Token, annotation: ir.Type | None) -> ir.Var:
        var = ir.Var(token.text[1:], annotation, token.position)
        self._scopes.bind(var)
        return var

    # Expressions

    def _block(self) -> ir.Expr:
        """{ statements }."""
        self._expect("{")
        self._scopes.push()
        body = self._statements()
        self._scopes.pop()
        self._expect("}")
        return body

    def _statements(self) -> ir.Expr:
        """Bindings, each with a semicolon, then the value."""
        self._enter(self._tokens.current)
        lets: list[tuple[ir.Var, ir.Expr]] = []
        while True:
            token = self._tokens.current
            if token.text == "let":
                lets.append(self._let())
            elif token.kind == "graph" and self._tokens.peek().text == "=":
                self._tokens.advance()
                self._tokens.advance()
                self._graph[token.text] = self._binary()
                self._expect(";")
            elif token.text == "free_var":
                self._free_variable()
            else:
                value = self._block() if token.text == "{" else self._binary()
                if not self._accept(";"):  # else: pure, and its value is not used
                    break
        for var, bound in reversed(lets):
            value = ir.Let(var, bound, value, var.position)
        self._leave()
        return value

    def _let(self) -> tuple[ir.Var, ir.Expr]:
        self._tokens.advance()
        token = self._expect_kind("local", "a variable, as in let %x = ...")
        annotation = self._type() if self._accept(":") else None
        self._expect("=")
        value = self._binary()
        self._expect(";")
        return self._bind(token, annotation), value

    def _free_variable(self) -> None:
        """free_var %x: T; which is a parameter where the whole text is an expression."""
        token = self._tokens.advance()
        name = self._expect_kind("local", "a variable, as in free_var %x")
        if self._free is None:
            raise self._tokens.error(
                token.position, f"{name.text} is a free variable; make it a parameter of the function that uses it"
            )
        self._free.append(self._bind(name, self._type() if self._accept(":") else None))
        self._expect(";")

    def _binary(self) -> ir.Expr:
        """Infix operators by precedence; all associate to the left."""
        operands = [self._call()]
        pending: list[tuple[str, int, int]] = []
        while self._tokens.current.kind == "sign" and self._tokens.current.text in _OPERATORS:
            token = self._tokens.advance()
            name, precedence = _OPERATORS[token.text]
            while pending and pending[-1][1] >= precedence:
                _apply(operands, pending.pop())
            pending.append((name, precedence, token.position))
            operands.append(self._call())
        while pending:
            _apply(operands, pending.pop())
        return operands[0]

    def _call(self) -> ir.Expr:
        """An atom, with any number of projections and argument lists after it."""
        token = self._tokens.current
        value: ir.Expr
        if token.kind == "name" and token.text in self._constructors:
            raise self._unsupported_error(token, f"{token.text}, a value of an algebraic data type,")
        if token.kind == "name" and token.text not in ("True", "False"):
            self._tokens.advance()
            if self._tokens.current.text != "(":
                self._fail(f"( after the operator {token.text}")
            value = self._arguments(token.text, token)
        else:
            value = self._atom()
        while True:
            if self._tokens.current.kind == "item":
                item = self._tokens.advance()
                value = ir.TupleItem(value, self._natural(item, item.text[1:]), item.position)
            elif self._tokens.current.text == "(":
                value = self._arguments(value, token)
            else:
                return value

    def _arguments(self, callee: str | ir.Expr, start: Token) -> ir.Call:
        self._enter(self._tokens.advance())
        args: list[ir.Expr] = []
        attrs: dict[str, Any] = {}
        while self._tokens.current.text != ")":
            token = self._tokens.current
            if self._at_attribute():
                self._attribute(attrs)
            elif token.kind == "meta" and ".attrs." in token.text:
                attrs.update(self._metadata.attrs(self._tokens.advance(), self._tokens))
            else:
                args.append(self._binary())
            if not self._accept(","):
                break
        self._expect(")")
        self._leave()
        return ir.Call(callee, args, attrs, start.position)

    def _atom(self) -> ir.Expr:
        token = self._tokens.current
        if token.kind == "local":
            return self._variable(self._tokens.advance())
        if token.kind == "graph":
            self._tokens.advance()
            if token.text not in self._graph:
                raise self._tokens.error(token.position, f"{token.text} is used before it is defined")
            return self._graph[token.text]
        if token.kind == "global":
            self._tokens.advance()
            return ir.GlobalRef(token.text[1:], token.position)
        if token.kind == "meta":
            return ir.Constant(self._metadata.constant(self._tokens.advance(), self._tokens), token.position)
        if token.kind == "number" or token.text in ("-", "True", "False"):
            return ir.Constant(np.asarray(self._scalar()), token.position)
        if token.text == "(":
            return self._parentheses()
        if token.text == "fn":
            return self._function(self._tokens.advance())
        if token.text == "if":
            return self._if()
        if token.kind == "keyword" and token.text in _UNSUPPORTED:
            self._unsupported(token)
        return self._fail("an expression")

    def _variable(self, token: Token) -> ir.Expr:
        """%x, or a projection %x.0, which is lexed as one name because PyTorch's names have dots."""
        name, items = token.text[1:], []
        var = self._scopes.find(name)
        while var is None and "." in name:
            name, _, item = name.rpartition(".")
            if not item.isdigit():
                break
            items.append(item)
            var = self._scopes.find(name)
        if var is None:
            raise self._tokens.error(token.position, f"the variable {token.text} is not defined here")
        value: ir.Expr = var
        for item in reversed(items):
            value = ir.TupleItem(value, self._natural(token, item), token.position)
        return value

    def _parentheses(self) -> ir.Expr:
        """(), (a), (a,), (a, b), or a let in parentheses."""
        start = self._tokens.advance()
        fields: list[ir.Expr] = []
        while self._tokens.current.text != ")":
            fields.append(self._statements())
            if not self._accept(","):
                self._expect(")")
                return fields[0] if len(fields) == 1 else ir.Tuple(fields, start.position)
        self._expect(")")
        return ir.Tuple(fields, start.position)

    def _if(self) -> ir.Expr:
        start = self._tokens.advance()
        self._expect("(")
        condition = self._statements()
        self._expect(")")
        then = self._block()
        self._expect("else")
        return ir.If(condition, then, self._block(), start.position)

    def _unsupported(self, token: Token) -> NoReturn:
        raise self._unsupported_error(token, _UNSUPPORTED[token.text])

    def _unsupported_error(self, token: Token, what: str) -> RelayError:
        return Program({}, self._tokens.text).unsupported(
            token.position,
            f"{what} has no counterpart in Relax; only programs over tensors and tuples can be converted",
        )


def _apply(operands: list[ir.Expr], operator: tuple[str, int, int]) -> None:
    name, _, position = operator
    right, left = operands.pop(), operands.pop()
    operands.append(ir.Call(name, [left, right], {}, position))
