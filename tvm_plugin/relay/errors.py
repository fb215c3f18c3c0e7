"""Errors in Relay programs, with the place in the text."""

from __future__ import annotations

from ..errors import InputError, UnsupportedModelError

__all__ = ["RelayError", "UnsupportedRelayError"]


class RelayError(InputError):
    """A Relay program cannot be read or does not type-check.

    Attributes
    ----------
    line, column
        Where, counted from 1; None for programs that were read from JSON.
    """

    def __init__(self, message: str, line: int | None = None, column: int | None = None) -> None:
        super().__init__(message if line is None else f"line {line}, column {column}: {message}")
        self.line = line
        self.column = column


class UnsupportedRelayError(RelayError, UnsupportedModelError):
    """The program is Relay, but has something that Relax has no counterpart for."""
