"""Weights in huge pages: reading memory in 4 KB pages costs a fifth of the bandwidth of reading it in 2 MB pages.

The prefetchers of the processor stop at the end of a page, and on a virtual machine a miss of the translation buffer
walks two page tables. Models whose weights do not fit into the caches (recurrent networks, the classifiers of
convolutional ones) wait for just this.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tvm import ir, relax
from tvm.relax.expr_functor import PyExprMutator, mutator

from ..arrays import ALIGNMENT, HUGE_PAGE, huge_memory
from ..relax_ir.constants import array_of, constant_of
from ..relax_ir.functions import constants, map_functions

__all__ = ["in_huge_pages"]

IN_PLACE = 4 * HUGE_PAGE
"""Bytes of a constant from which on it fills huge pages by itself, wherever it is: it need not be copied."""

MADV_COLLAPSE = 25
"""Of madvise(2), since Linux 6.1: make huge pages now. Python's mmap module does not name it yet."""

_Key = tuple[int, tuple[int, ...], str]


def in_huge_pages(mod: ir.IRModule) -> ir.IRModule:
    """The same module with its constants in huge pages, those of each function one after another in order of their use.

    Only where the system gives huge pages: elsewhere, and for few bytes, it is `mod` itself.
    """
    arrays = {_key(constant): array_of(constant) for constant in constants(mod) if _numpy_reads(constant)}
    small: dict[_Key, NDArray[Any]] = {}
    for key, array in arrays.items():
        if array.nbytes >= IN_PLACE:
            _collapse(array.ctypes.data, array.nbytes)
        else:
            small[key] = array
    offsets = np.cumsum([0, *(-(-array.nbytes // ALIGNMENT) * ALIGNMENT for array in small.values())])
    memory = huge_memory(int(offsets[-1])) if offsets[-1] >= HUGE_PAGE else None
    if memory is None:
        return mod
    moved = {}
    for (key, array), offset in zip(small.items(), offsets[:-1], strict=True):
        place = memory[offset : offset + array.nbytes].view(array.dtype).reshape(array.shape)
        place[...] = array
        moved[key] = constant_of(place)
    return map_functions(mod, lambda function: _Moved(moved).visit_expr(function))


def _key(constant: ir.GenericConst) -> _Key:
    """Not the address alone: a folded reshape or slice begins where the tensor does that it looks into."""
    tensor = constant.value
    return tensor.data_ptr(), tuple(map(int, tensor.shape)), str(tensor.dtype)


def _numpy_reads(constant: ir.GenericConst) -> bool:
    dtype = str(constant.value.dtype)
    return dtype in ("bool", "bfloat16") or dtype.rstrip("0123456789") in ("float", "int", "uint")


def _collapse(address: int, nbytes: int) -> None:
    """Ask the kernel to put the whole huge pages of a piece of memory together where they are. Only a hint."""
    if not sys.platform.startswith("linux"):
        return
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    start = -(-address // HUGE_PAGE) * HUGE_PAGE
    for advice in (mmap.MADV_HUGEPAGE, MADV_COLLAPSE):
        madvise(start, (address + nbytes) // HUGE_PAGE * HUGE_PAGE - start, advice)


@mutator
class _Moved(PyExprMutator):
    def __init__(self, moved: dict[_Key, ir.GenericConst]) -> None:
        super().__init__()
        self._moved = moved

    def visit_generic_const_(self, constant: ir.GenericConst) -> relax.Expr:
        return self._moved.get(_key(constant), constant)
