"""Weights in huge pages: reading memory in 4 KB pages costs a fifth of the bandwidth of reading it in 2 MB pages.

The prefetchers of the processor stop at the end of a page, and on a virtual machine a miss of the translation buffer
walks two page tables. Models whose weights do not fit into the caches (recurrent networks, the classifiers of
convolutional ones) wait for just this.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Iterable, Iterator

import tvm

__all__ = ["move_to_huge_pages"]

HUGE_PAGE = 2 << 20
"""Bytes."""

MADV_COLLAPSE = 25
"""Of madvise(2), since Linux 6.1: make huge pages now. Python's mmap module does not name it yet."""

NEAR = 64 << 10
"""Bytes between two tensors that are taken to be in one piece of memory: what allocators put in between."""


def move_to_huge_pages(tensors: Iterable[tvm.runtime.Tensor]) -> None:
    """Ask the kernel to back tensors in main memory by huge pages where they are: contents and addresses stay the same.

    Only a hint: without huge pages (another system, an older kernel, no free memory) nothing happens.
    """
    if not sys.platform.startswith("linux"):
        return
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    for start, end in _pieces(tensors):
        for advice in (mmap.MADV_HUGEPAGE, MADV_COLLAPSE):
            madvise(start, end - start, advice)


def _pieces(tensors: Iterable[tvm.runtime.Tensor]) -> Iterator[tuple[int, int]]:
    """First address and end of the pieces of memory that hold the tensors, in whole huge pages."""
    spans = sorted((t.data_ptr(), t.data_ptr() + t.numel() * t.dtype.itemsize) for t in tensors)
    merged: list[tuple[int, int]] = []
    for start, end in spans:
        if merged and start <= merged[-1][1] + NEAR:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    for start, end in merged:
        first, last = -(-start // HUGE_PAGE) * HUGE_PAGE, end // HUGE_PAGE * HUGE_PAGE
        if first < last:
            yield first, last
