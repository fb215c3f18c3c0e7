"""Values that an index selects: of vectors, too, only what is chosen is loaded."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import tvm
from tvm import s_tir, te, tirx

from eqtune.machine import detect_target
from eqtune.search.space.lowering import prepare_for_lowering

sys.path.insert(0, str(Path(__file__).parent))
from guard_pages import stays_inside


def test_vectors_load_only_what_an_index_chooses() -> None:
    x, z = te.placeholder((2, 16), name="x"), te.placeholder((24,), name="z")
    y = te.compute((24, 16), lambda v, c: tirx.Select(v // 2 == 0, 2.0 * x[v % 2, c], z[v] + 1.0), name="y")
    schedule = s_tir.Schedule(te.create_prim_func([x, z, y]))
    schedule.vectorize(schedule.get_loops(schedule.get_sblock("y"))[-1])
    function = prepare_for_lowering(schedule.mod["main"])
    kernel = tvm.compile(tvm.IRModule({"main": function}), detect_target(1)).jit()["main"]
    assert stays_inside(kernel, [(2, 16), (24,), (24, 16)])  # TVM makes v of v % 2
    first, others = (np.arange(n, dtype="float32") for n in (32, 24))
    result = tvm.runtime.tensor(np.full((24, 16), np.nan, "float32"))
    kernel(tvm.runtime.tensor(first.reshape(2, 16)), tvm.runtime.tensor(others), result)
    expected = np.concatenate([2 * first.reshape(2, 16), np.repeat(others[2:, None] + 1, 16, 1)])
    np.testing.assert_array_equal(result.numpy(), expected)
