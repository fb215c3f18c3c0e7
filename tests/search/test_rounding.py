"""Rounding in vectors gives the same integers as rounding element by element, ties included."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tvm
from tvm import te, tirx

from eqtune.search.space.rounding import round_in_vectors

VALUES = np.concatenate(
    [
        np.arange(-300, 300, dtype=np.float32) + np.float32(0.5),
        np.nextafter(np.arange(-300, 300, dtype=np.float32) + np.float32(0.5), np.float32(1e9)),
        np.random.default_rng(0).uniform(-400, 400, 1000).astype(np.float32),
        np.array([1e9, -1e9, 3e38, -3e38, np.inf, -np.inf, 0.0, -0.0], np.float32),
    ]
)
LIMITS = {"uint8": (0, 255), "int8": (-128, 127), "int32": (-100000, 100000)}


def rounding(dtype: str, zero: float | None) -> Any:
    """The end of a quantised layer, as it is lowered: limited after it was rounded."""
    low, high = (tirx.const(float(limit), "float32") for limit in LIMITS[dtype])
    x = te.placeholder((len(VALUES),), "float32", name="x")

    def value(i: Any) -> Any:
        rounded = te.nearbyint(x[i])
        shifted = rounded if zero is None else rounded + tirx.const(zero, "float32")
        return te.max(te.min(shifted, high), low).astype(dtype)

    return te.create_prim_func([x, te.compute(x.shape, value)])


def run(function: Any, dtype: str) -> Any:
    library = tvm.compile(tvm.IRModule({"main": function}), tvm.target.Target("llvm")).jit()
    output = tvm.runtime.tensor(np.zeros(len(VALUES), dtype))
    library["main"](tvm.runtime.tensor(VALUES), output)
    return output.numpy()


@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("zero", [None, 3.0, 130.0, -7.0])
def test_integers_are_those_of_numpy(dtype: str, zero: float | None) -> None:
    before = rounding(dtype, zero)
    after = round_in_vectors(before)
    assert "nearbyint" not in after.script()
    assert "nearbyint" in before.script()
    low, high = LIMITS[dtype]
    expected = np.clip(np.rint(VALUES.astype(np.float64)) + (zero or 0.0), low, high).astype(dtype)
    np.testing.assert_array_equal(run(after, dtype), expected)


def test_other_roundings_become_llvms() -> None:
    x = te.placeholder((len(VALUES),), "float32", name="x")
    function = te.create_prim_func([x, te.compute(x.shape, lambda i: te.nearbyint(x[i]) + 1.0)])
    after = round_in_vectors(function)
    assert "llvm.nearbyint" in after.script()
    np.testing.assert_array_equal(run(after, "float32"), np.rint(VALUES) + np.float32(1))


def test_a_function_without_rounding_stays_as_it_is() -> None:
    x = te.placeholder((8,), "float32", name="x")
    function = te.create_prim_func([x, te.compute(x.shape, lambda i: x[i] + 1.0)])
    assert round_in_vectors(function).same_as(function)
