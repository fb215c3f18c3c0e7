"""Allocators by name."""

from __future__ import annotations

from collections.abc import Callable

from eqtune.errors import InputError

from .base import Allocator
from .gradient import Gradient
from .round_robin import RoundRobin

__all__ = ["create", "names"]

_ALLOCATORS: dict[str, Callable[[], Allocator]] = {allocator.name: allocator for allocator in (Gradient, RoundRobin)}


def names() -> list[str]:
    """Names that `create` takes."""
    return sorted(_ALLOCATORS)


def create(allocator: str | Allocator) -> Allocator:
    """An allocator by name, with its default constants; an instance is returned as it is.

    Raises
    ------
    InputError
        When the name is unknown (the message lists those there are), or the instance is no allocator.
    """
    if isinstance(allocator, str):
        if allocator not in _ALLOCATORS:
            raise InputError(f"unknown allocator {allocator!r}; there are {', '.join(names())}")
        return _ALLOCATORS[allocator]()
    if isinstance(allocator, type) or not callable(getattr(allocator, "begin", None)):
        raise InputError(
            f"an allocator is a name ({', '.join(names())}) or an object with begin(seed), not {allocator!r}"
        )
    return allocator
