"""Allocators by name."""

from __future__ import annotations

from collections.abc import Callable

from ..registry import resolve
from .base import Allocator
from .gradient import Gradient
from .round_robin import RoundRobin

__all__ = ["create", "names"]

_ALLOCATORS: dict[str, Callable[[], Allocator]] = {allocator.name: allocator for allocator in (Gradient, RoundRobin)}


def names() -> list[str]:
    """Names that `create` takes."""
    return sorted(_ALLOCATORS)


def create(allocator: str | Allocator) -> Allocator:
    """An allocator by name or as an instance; raises InputError for anything else (`resolve`)."""
    return resolve(allocator, _ALLOCATORS, "an allocator", "begin(seed)")
