"""How routines share their work among threads."""

from __future__ import annotations

from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

__all__ = ["array", "rest", "share", "variable", "workers", "worthwhile_threads"]

LEAST_SHARE = 8192
"""Elements that a thread must have to touch, or another one is not asked for."""


def worthwhile_threads(threads: int, elements: int) -> int:
    """How many of them are worth starting."""
    return max(1, min(threads, elements // LEAST_SHARE))


def share(extent: int, parts: int) -> int:
    """What each of the parts has, but the last ones."""
    return -(-extent // parts)


def rest(extent: int, start: Any, share: int) -> Any:
    """Of a share that begins at `start`, what lies within the extent."""
    return tirx.max(tirx.min(share, extent - start), 0)


def workers(iterations: int, threads: int) -> Any:
    """A loop whose iterations threads share."""
    loop = T.serial if min(iterations, threads) == 1 else T.parallel
    return loop(0, tirx.IntImm("int64", iterations))


def array(elements: int, dtype: str) -> Any:
    """Memory of so many elements, of a thread where it is made within `workers`."""
    return T.buffer_proxy(T.alloc_buffer((elements,), dtype))


def variable(dtype: str) -> Any:
    """Something to store in, at place 0."""
    return array(1, dtype)
