"""Weights in huge pages: the same contents at the same addresses, backed by fewer pages."""

from __future__ import annotations

import mmap
import sys
from pathlib import Path

import numpy as np
import pytest
import tvm

from eqtune.huge_pages import HUGE_PAGE, move_to_huge_pages


def huge_bytes() -> int:
    """Of this process, in huge pages of its own."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("AnonHugePages"))


def has_huge_pages() -> bool:
    """Whether this machine gives huge pages to memory that asks for them before it is touched."""
    if not sys.platform.startswith("linux"):
        return False
    before = huge_bytes()
    with mmap.mmap(-1, 4 * HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        memory.madvise(mmap.MADV_HUGEPAGE)
        memory.write(bytes(4 * HUGE_PAGE))
        return huge_bytes() > before


@pytest.mark.skipif(not has_huge_pages(), reason="needs transparent huge pages")
def test_neighbours_share_huge_pages_and_keep_their_contents() -> None:
    memory = mmap.mmap(-1, 32 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # fresh, in small pages
    arrays = np.frombuffer(memory, "float32").reshape(32, 512, 512)  # 1 MiB each: half a page
    arrays[:] = np.random.default_rng(0).standard_normal(arrays.shape)
    expected = arrays.copy()
    tensors = [tvm.runtime.from_dlpack(array) for array in arrays]
    addresses = [tensor.data_ptr() for tensor in tensors]
    before = huge_bytes()
    move_to_huge_pages(tensors)
    assert huge_bytes() >= before + 8 * HUGE_PAGE
    assert [tensor.data_ptr() for tensor in tensors] == addresses
    np.testing.assert_array_equal(np.stack([tensor.numpy() for tensor in tensors]), expected)


def test_small_tensors_and_none_are_left_alone() -> None:
    small = tvm.runtime.tensor(np.arange(6, dtype="int8"))
    move_to_huge_pages([small, tvm.runtime.tensor(np.zeros((0, 3), "float32"))])
    move_to_huge_pages([])
    np.testing.assert_array_equal(small.numpy(), np.arange(6))
