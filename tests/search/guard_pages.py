"""Memory whose neighbours may not be touched: a kernel that reads beside its inputs dies, in a process of its own."""

from __future__ import annotations

import ctypes
import mmap
import os
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import tvm

_GUARD_BYTES = 16 * mmap.PAGESIZE
_PROT_NONE = 0
_ALIGNMENT = 64  # bytes; compiled kernels assume it of their arguments


def stays_inside(kernel: Callable[..., Any], shapes: list[tuple[int, ...]]) -> bool:
    """Whether a compiled, serial kernel touches nothing in front of and behind its float32 arguments.

    Behind an argument whose bytes are no multiple of 64, that is told only from the next multiple on.
    """
    placed = [[tvm.runtime.from_dlpack(_guarded(shape, at_end)) for shape in shapes] for at_end in (True, False)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forking beside threads: the child starts none
        child = os.fork()
    if child == 0:
        code = 1
        try:  # whatever is raised here, this process must not go on with the tests
            for arguments in placed:
                kernel(*arguments)
            code = 0
        finally:
            os._exit(code)
    return os.waitpid(child, 0)[1] == 0


def _guarded(shape: tuple[int, ...], at_end: bool) -> np.ndarray:
    """An array of ones that ends, or begins, where memory may be touched."""
    count = int(np.prod(shape))
    size = count * np.dtype(np.float32).itemsize
    aligned = -(-size // _ALIGNMENT) * _ALIGNMENT
    room = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = mmap.mmap(-1, room + 2 * _GUARD_BYTES)
    start = np.frombuffer(memory, np.uint8).ctypes.data
    for guard in (start, start + _GUARD_BYTES + room):
        code = ctypes.CDLL(None).mprotect(ctypes.c_void_p(guard), ctypes.c_size_t(_GUARD_BYTES), _PROT_NONE)
        assert code == 0
    first = _GUARD_BYTES + (room - aligned if at_end else 0)
    array = np.frombuffer(memory, np.float32, count, first).reshape(shape)
    array[...] = 1
    return array
