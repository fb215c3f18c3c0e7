"""Comparisons and sums of bool tensors, and powers of integers, which TVM types but fails to build for a CPU."""

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


OPERATORS = (
    *("equal", "not_equal", "greater", "greater_equal", "less", "less_equal", "maximum", "minimum", "add"),
    *("multiply", "bitwise_and", "bitwise_or", "bitwise_xor"),
)


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, np.ndarray]:
    """Of one model with a kernel for each operator: tuning it takes hardly longer than one with a single kernel."""
    mod = module(lambda a, b: relax.Tuple([getattr(relax.op, name)(a, b) for name in OPERATORS]))
    work_dir = tmp_path_factory.mktemp("bools")
    result = eqtune.tune_model(mod, trials=len(OPERATORS), threads=1, work_dir=work_dir, progress=False)
    return dict(zip(OPERATORS, result.run(A, B), strict=True))


@pytest.mark.parametrize("name", OPERATORS)
def test_operators_on_bools_mean_what_numpy_says(name: str, outputs: dict[str, np.ndarray]) -> None:
    assert outputs[name].dtype == bool
    np.testing.assert_array_equal(outputs[name], getattr(np, name)(A, B))


@pytest.mark.parametrize(("operator", "expected"), [("negative", [0, 255, 1]), ("sign", [0, 1, 1])])
def test_signs_of_bytes_without_any(tmp_path: Path, operator: str, expected: list[int]) -> None:
    x = relax.Var("x", relax.TensorType((3,), "uint8"))
    builder = relax.BlockBuilder()
    with builder.function("main", [x]):
        with builder.dataflow():
            result = builder.emit_output(getattr(relax.op, operator)(x))
        builder.emit_func_output(result)
    tuned = eqtune.tune_model(builder.get(), trials=1, threads=1, work_dir=tmp_path, progress=False)
    np.testing.assert_array_equal(tuned.run(np.array([0, 1, 255], "uint8")), [np.array(expected, "uint8")])


@pytest.mark.parametrize("operator", ["divide", "floor_divide", "mod", "floor_mod"])
def test_integers_divided_by_zero_do_not_end_the_process(tmp_path: Path, operator: str) -> None:
    inputs = [relax.Var(name, relax.TensorType((4,), "int32")) for name in "ab"]
    builder = relax.BlockBuilder()
    with builder.function("main", inputs):
        with builder.dataflow():
            result = builder.emit_output(getattr(relax.op, operator)(*inputs))
        builder.emit_func_output(result)
    a, b = np.array([7, -7, 9, 8], "int32"), np.array([2, 2, 0, 3], "int32")
    (found,) = eqtune.tune_model(builder.get(), trials=1, threads=1, work_dir=tmp_path, progress=False).run(a, b)
    floors, exact = {"divide": np.trunc(a / [2, 2, 1, 3]), "floor_divide": a // [2, 2, 1, 3]}, np.array([1, 1, 0, 2])
    expected = floors.get(operator, exact - 2 * (operator == "mod") * (a < 0))
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_powers_of_integers_are_whole(tmp_path: Path, dtype: str) -> None:
    base, exponent = np.array([[-3, 2, 7, 0]], dtype), np.array([[3], [10], [0]], dtype)
    inputs = [relax.Var(name, relax.TensorType(x.shape, dtype)) for name, x in (("a", base), ("b", exponent))]
    builder = relax.BlockBuilder()
    with builder.function("main", inputs):
        with builder.dataflow():
            result = builder.emit_output(relax.op.power(*inputs))
        builder.emit_func_output(result)
    (found,) = eqtune.tune_model(builder.get(), trials=1, threads=1, work_dir=tmp_path, progress=False).run(
        base, exponent
    )
    np.testing.assert_array_equal(found, base**exponent)
    assert found.dtype == dtype
