"""Weights in huge pages: the same contents, in fewer pages."""

from __future__ import annotations

import mmap
import sys
from pathlib import Path

import numpy as np
import pytest
import tvm
import tvm_ffi
from tvm import relax

from eqtune.arrays import HUGE_PAGE
from eqtune.compile.huge_pages import in_huge_pages
from eqtune.relax_ir.constants import array_of, constant_of

WEIGHTS = 32


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


def sum_of_weights(rows: int) -> tvm.IRModule:
    """x, with one weight after another added: each twice, and an integer and a scalar among them."""
    rng = np.random.default_rng(0)
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((rows, 512), "float32"))
    with builder.function("main", [x]):
        with builder.dataflow():
            y = builder.emit(relax.op.multiply(x, relax.const(2.0, "float32")))
            for _ in range(WEIGHTS):
                weight = relax.const(rng.standard_normal((rows, 512)).astype("float32"))
                y = builder.emit(relax.op.add(builder.emit(relax.op.add(y, weight)), weight))
            order = relax.const(rng.permutation(rows).astype("int64"))
            y = builder.emit_output(relax.op.take(y, order, axis=0))
        builder.emit_func_output(y)
    return builder.get()


@pytest.mark.skipif(not has_huge_pages(), reason="needs transparent huge pages")
def test_small_weights_share_huge_pages() -> None:
    mod = sum_of_weights(512)  # 1 MiB each: half a page
    before = huge_bytes()
    moved = in_huge_pages(mod)
    assert huge_bytes() >= before + WEIGHTS // 2 * HUGE_PAGE
    relax.analysis.well_formed(moved)
    assert tvm_ffi.structural_equal(moved, mod)  # contents of constants included
    x = np.ones((512, 512), "float32")
    results = [
        relax.VirtualMachine(tvm.compile(each, tvm.target.Target("llvm")), tvm.cpu())["main"](tvm.runtime.tensor(x))
        for each in (mod, moved)
    ]
    np.testing.assert_array_equal(results[0].numpy(), results[1].numpy())


@pytest.mark.skipif(not has_huge_pages(), reason="needs transparent huge pages")
def test_views_of_one_weight_keep_their_shapes() -> None:
    data = constant_of(np.random.default_rng(0).standard_normal((1024, 1024)).astype("float32"))
    part = constant_of(array_of(data)[:512])
    flat = constant_of(array_of(data).reshape(-1))
    assert part.value.data_ptr() == flat.value.data_ptr() == data.value.data_ptr()
    builder = relax.BlockBuilder()
    with builder.function("main", []):
        with builder.dataflow():
            y = builder.emit_output(relax.Tuple([data, part, flat]))
        builder.emit_func_output(y)
    mod = builder.get()
    moved = in_huge_pages(mod)
    assert not moved.same_as(mod)
    assert tvm_ffi.structural_equal(moved, mod)


def test_few_weights_stay_where_they_are() -> None:
    mod = sum_of_weights(8)
    assert in_huge_pages(mod).same_as(mod)
