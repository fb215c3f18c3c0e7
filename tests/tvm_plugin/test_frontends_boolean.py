"""Comparisons and sums of bool tensors, which TVM types but fails to build for a CPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import tvm
from tvm import relax

import eqtune

A = np.array([[False, False, True, True]])
B = np.array([[False, True, False, True]])


def module(op: Callable[[relax.Expr, relax.Expr], relax.Expr]) -> tvm.IRModule:
    a, b = (relax.Var(name, relax.TensorType(A.shape, "bool")) for name in "ab")
    builder = relax.BlockBuilder()
    with builder.function("main", [a, b]):
        with builder.dataflow():
            result = builder.emit_output(op(a, b))
        builder.emit_func_output(result)
    return builder.get()


@pytest.mark.parametrize(
    "name",
    ["equal", "not_equal", "greater", "greater_equal", "less", "less_equal", "maximum", "minimum", "add", "multiply"],
)
def test_operators_on_bools_mean_what_numpy_says(tmp_path: Path, name: str) -> None:
    mod = module(getattr(relax.op, name))
    result = eqtune.tune_model(mod, trials=1, threads=1, work_dir=tmp_path, progress=False)
    (found,) = result.run(A, B)
    assert found.dtype == bool
    np.testing.assert_array_equal(found, getattr(np, name)(A, B))
