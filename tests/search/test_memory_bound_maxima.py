"""Softmax's exp: shorter where its argument is a difference from the maximum of its row, and nowhere else."""

from __future__ import annotations

import numpy as np
import tvm
from tvm import te, tirx

from eqtune.search.space.lowering import prepare_for_lowering
from eqtune.search.space.memory_bound.math_forms import exp_below_zero
from eqtune.search.space.memory_bound.maxima import exp_of_differences_from_maxima

ROWS, COLUMNS = 4, 64


def shifted_exp(maximum_of_itself: bool = True, transposed: bool = False, columns: int = COLUMNS) -> tirx.PrimFunc:
    """exp(x[i, j] - m[i]), m the maximum of x's rows, or of as many `columns`; of another tensor's; of x's columns."""
    shape = (ROWS, COLUMNS) if not transposed else (COLUMNS, COLUMNS)
    x, z = (te.placeholder(shape, "float32", name) for name in "xz")
    source, k = x if maximum_of_itself else z, te.reduce_axis((0, columns), "k")
    m = te.compute(shape[:1], lambda i: te.max(source[k, i] if transposed else source[i, k], axis=k), "m")
    y = te.compute(shape, lambda i, j: tirx.exp(x[i, j] - m[i]), "y")
    return te.create_prim_func([x, z, y])


def run(func: tirx.PrimFunc, *arrays: np.ndarray) -> np.ndarray:
    module = tvm.IRModule({"main": func.with_attr("global_symbol", "main")})
    out = tvm.runtime.tensor(np.zeros_like(arrays[0]))
    tvm.compile(module, target=tvm.target.Target({"kind": "llvm"})).jit()["main"](*map(tvm.runtime.tensor, arrays), out)
    return out.numpy()


def test_only_differences_from_a_maximum_of_their_own_row_are_replaced() -> None:
    own, other, columns = shifted_exp(), shifted_exp(maximum_of_itself=False), shifted_exp(transposed=True)
    assert "T.exp(" not in exp_of_differences_from_maxima(own).script()
    assert exp_of_differences_from_maxima(other).same_as(other)
    assert exp_of_differences_from_maxima(columns).same_as(columns)
    half = shifted_exp(columns=COLUMNS // 2)
    assert exp_of_differences_from_maxima(half).same_as(half)


def test_masked_elements_become_zero_and_nan_stays() -> None:
    x = np.random.default_rng(0).standard_normal((ROWS, COLUMNS)).astype(np.float32)
    x[0, 3:] = -np.inf
    x[1, 5] = np.nan
    x[2] = 3e38 * np.linspace(-1, 1, COLUMNS)
    got = run(prepare_for_lowering(shifted_exp()), x, x)
    assert not got[0, 3:].any()
    assert np.isnan(got[1, 5])
    with np.errstate(over="ignore"):
        exact = np.exp(x.astype(np.float64) - x.max(axis=1, keepdims=True))
    np.testing.assert_allclose(got[[0, 2, 3]], exact[[0, 2, 3]], rtol=5e-7, atol=1e-37)


def test_error_grows_no_more_than_that_of_a_rounded_difference() -> None:
    values = -np.geomspace(1e-6, 87.3, 1 << 14).astype(np.float32)
    x = te.placeholder(values.shape, "float32", "x")
    func = te.create_prim_func([x, te.compute(values.shape, lambda i: exp_below_zero(x[i]), "y")])
    exact = np.exp(values.astype(np.float64))
    error = np.abs(run(func, values) / exact - 1)
    assert np.all(error <= 2.5 * 2.0**-24 + 7.5e-8 * np.abs(values))


def test_the_maximum_of_every_third_element_or_of_a_diagonal_is_not_that_of_its_row() -> None:
    x, k = te.placeholder((ROWS, COLUMNS), "float32", "x"), te.reduce_axis((0, COLUMNS // 3 + 1), "k")
    m = te.compute((ROWS,), lambda i: te.max(x[i, k * 3], axis=k), "m")  # from 0 to 63
    third = te.create_prim_func([x, te.compute(x.shape, lambda i, j: tirx.exp(x[i, j] - m[i]), "y")])
    assert exp_of_differences_from_maxima(third).same_as(third)
    x, k = te.placeholder((ROWS, 8, 8), "float32", "x"), te.reduce_axis((0, 8), "k")
    m = te.compute((ROWS,), lambda i: te.max(x[i, k, k], axis=k), "m")
    diagonal = te.create_prim_func([x, te.compute(x.shape, lambda i, j, n: tirx.exp(x[i, j, n] - m[i]), "y")])
    assert exp_of_differences_from_maxima(diagonal).same_as(diagonal)
