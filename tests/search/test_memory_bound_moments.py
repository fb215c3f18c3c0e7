"""Mean and variance in one pass: the same norm, also where E[x^2] - E[x]^2 fails, and only for a row's own mean."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tvm
from tvm import te, tirx

from eqtune.search.space.hardware import Hardware
from eqtune.search.space.lowering import prepare_for_lowering
from eqtune.search.space.memory_bound import memory_bound_sketches

ROWS, COLUMNS = 8, 1024


def scheduled(own_mean: bool = True, **values: int) -> Any:
    """x normalised in 16 lanes with the mean of its rows, or with that of z's."""
    rows, columns = (tirx.const(extent, "int64") for extent in (ROWS, COLUMNS))  # as Relax has them
    x, z = (te.placeholder((rows, columns), "float32", name) for name in "xz")
    k, j = (te.reduce_axis((tirx.const(0, "int64"), columns), name) for name in "kj")
    of = x if own_mean else z
    total = te.compute((rows,), lambda i: te.sum(of[i, k], axis=k), "total")

    def distance(i: Any, j: Any) -> Any:
        return x[i, j] - total[i] / np.float32(COLUMNS)

    squares = te.compute((rows,), lambda i: te.sum(distance(i, j) * distance(i, j), axis=j), "squares")
    y = te.compute((rows, columns), lambda i, j: distance(i, j) * te.rsqrt(squares[i] / np.float32(COLUMNS)), "y")
    mod = tvm.IRModule({"main": te.create_prim_func([x, z, y])})
    sketch = next(s for s in memory_bound_sketches(mod, Hardware(threads=1)) if s.name.startswith("rows"))
    first = {knob.name: knob.values[0] for knob in sketch.knobs}
    return prepare_for_lowering(sketch.apply(first | {"lanes": 16} | values).mod["main"])


def run(func: Any, x: Any) -> Any:
    module = tvm.IRModule({"main": func.with_attr("global_symbol", "main")})
    out = tvm.runtime.tensor(np.zeros_like(x))
    tvm.compile(module, target=tvm.target.Target({"kind": "llvm"})).jit()["main"](*map(tvm.runtime.tensor, (x, x)), out)
    return out.numpy()


@pytest.mark.parametrize("knobs", [{}, {"accumulators": 2, "together": 2}, {"accumulators": 4, "together": 4}])
def test_rows_far_from_zero_and_with_outliers_are_as_exact_as_in_two_passes(knobs: dict[str, int]) -> None:
    func = scheduled(**knobs)
    assert func.script().count("center") > 0
    x = np.random.default_rng(0).standard_normal((ROWS, COLUMNS)).astype(np.float32)
    x[1] += 1e4
    x[2, 0] = 1e4  # an outlier that is the first of its lane
    x[3, :16] = 1e3
    x[4] *= 1e-6
    x[5, 100] = np.nan
    x[6] = np.linspace(-1e6, 1e6, COLUMNS)
    out = run(func, x)
    exact = x.astype(np.float64) - x.mean(axis=1, keepdims=True, dtype=np.float64)
    exact /= np.sqrt((exact**2).mean(axis=1, keepdims=True))
    for row in range(ROWS):
        # The mean of row 1 is known to half a unit in the last place of 1e4.
        np.testing.assert_allclose(out[row], exact[row], rtol=2e-6, atol=6e-4 if row == 1 else 2e-6)


@pytest.mark.parametrize("size", [1e19, 1e25, 1e30])
def test_squares_beyond_float32_are_infinite_as_in_two_passes(size: float) -> None:
    x = np.random.default_rng(0).uniform(0.5, 2.0, (ROWS, COLUMNS)).astype(np.float32) * np.float32(size)
    np.testing.assert_array_equal(run(scheduled(), x), np.zeros_like(x))


def test_distances_from_another_mean_take_two_passes() -> None:
    assert "center" not in scheduled(own_mean=False).script()
