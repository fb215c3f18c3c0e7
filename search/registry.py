"""Parts by name: what strategies and allocators have in common."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

from eqtune.errors import InputError

__all__ = ["resolve"]

_Part = TypeVar("_Part")


def resolve(given: str | _Part, parts: Mapping[str, Callable[[], _Part]], kind: str, begin: str) -> _Part:
    """A part by name, with its default constants; an instance is returned as it is.

    Parameters
    ----------
    given : str or instance
        What the user wrote.
    parts : mapping of str to callable
        Names to constructors.
    kind, begin : str
        What the part is called, and its method, in messages: "a strategy", "begin(space, seed)".

    Raises
    ------
    InputError
        When the name is unknown (the message lists those there are), or the instance has no method `begin`.
    """
    names = ", ".join(sorted(parts))
    if isinstance(given, str):
        if given not in parts:
            raise InputError(f"unknown {kind.split(maxsplit=1)[1]} {given!r}; there are {names}")
        return parts[given]()
    if isinstance(given, type) or not callable(getattr(given, "begin", None)):
        raise InputError(f"{kind} is a name ({names}) or an object with {begin}, not {given!r}")
    return given
