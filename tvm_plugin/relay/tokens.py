"""Tokens of Relay's text format, one at a time: a long text costs no memory of its own."""

from __future__ import annotations

import re
from typing import NamedTuple

from .errors import RelayError
from .program import line_and_column

__all__ = ["Token", "Tokens", "shown"]

_TOKEN = re.compile(
    r"""
    (?:[ \t\r\n]+ | //[^\n]*)*
    (?:
        (?P<comment>/\*)
      | (?P<sign>->|=>|==|<=|>=|!=|[()\[\]{},;:=<>+\-*/?])
      | (?P<number>(?:\d+(?:\.\d*)?(?:[eE][+-]?\d+)?(?:[fi]\d*)?|(?:inf|nan)f\d*)(?!\w))
      | (?P<meta>meta\[[^\]\n]*\]\[[^\]\n]*\])
      | (?P<name>[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)
      | (?P<local>%[A-Za-z_][\w/]*(?:(?:\.|::)[\w/]+)*)
      | (?P<graph>%\d+)
      | (?P<string>"[^"]*")
      | (?P<item>\.\d+)
      | (?P<global>@[A-Za-z_][\w/.]*)
      | (?P<header>\#\[[^\]\n]*\])
      | (?P<end>\Z)
    )
    """,
    re.VERBOSE,
)
_BLANK = re.compile(r"(?:[ \t\r\n]+|//[^\n]*)*")
_COMMENT_EDGE = re.compile(r"/\*|\*/")
_KEYWORDS = frozenset({"def", "else", "extern", "fn", "free_var", "if", "let", "match", "ref", "type"})


class Token(NamedTuple):
    """`kind` is a group of the pattern, "keyword", "sign", or "end"; `position` an offset into the text."""

    kind: str
    text: str
    position: int


class Tokens:
    """The token at hand is `current`; `peek()` looks one further."""

    def __init__(self, text: str) -> None:
        self.text = text
        self._offset = 0
        self._ahead: Token | None = None
        self.current = self._scan()

    def advance(self) -> Token:
        """The token at hand, and step to the next."""
        token = self.current
        if self._ahead is None:
            self.current = self._scan()
        else:
            self.current, self._ahead = self._ahead, None
        return token

    def peek(self) -> Token:
        """The token after the one at hand."""
        if self._ahead is None:
            self._ahead = self._scan()
        return self._ahead

    def error(self, position: int, message: str) -> RelayError:
        """An error at a position, to raise."""
        return RelayError(message, *line_and_column(self.text, position))

    def _scan(self) -> Token:
        while True:
            match = _TOKEN.match(self.text, self._offset)
            if match is None:
                raise self._unknown()
            kind = match.lastgroup or ""
            start = match.start(kind)
            if kind == "comment":
                self._offset = self._end_of_comment(start)
                continue
            self._offset = match.end()
            value = match[kind]
            if kind == "name" and value in _KEYWORDS:
                kind = "keyword"
            return Token(kind, value, start)

    def _end_of_comment(self, start: int) -> int:
        depth = 0
        for edge in _COMMENT_EDGE.finditer(self.text, start):
            depth += 1 if edge.group() == "/*" else -1
            if depth == 0:
                return edge.end()
        raise self.error(start, "this comment is not closed: expected */")

    def _unknown(self) -> RelayError:
        blank = _BLANK.match(self.text, self._offset)
        start = blank.end() if blank else self._offset
        if self.text[start] == '"':
            return self.error(start, "this string is not closed: expected another quotation mark")
        return self.error(start, f"found {self.text[start]!r}, which starts nothing in Relay")


def shown(token: Token) -> str:
    """A token in an error message."""
    if token.kind == "end":
        return "the end of the text"
    return repr(token.text if len(token.text) <= 40 else token.text[:37] + "...")
