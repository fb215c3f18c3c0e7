"""Einstein sums are products of matrices where they are that, and right where they are not."""

from __future__ import annotations

import numpy as np
import pytest
from tvm import ir, relax
from tvm.relax import op

from eqtune.compile.untuned import untuned_executable
from eqtune.frontends import load_model
from eqtune.machine import detect_target
from eqtune.runtime import ModelRunner

pytestmark = pytest.mark.unoptimised

SIZES = dict(zip("abcdijknhw", (2, 3, 4, 5, 6, 7, 8, 1, 3, 2), strict=True))


def module(subscripts: str, *shapes: tuple[int, ...], dtype: str = "float32") -> ir.IRModule:
    builder = relax.BlockBuilder()
    inputs = [relax.Var(f"x{index}", relax.TensorType(shape, dtype)) for index, shape in enumerate(shapes)]
    with builder.function("main", inputs):
        with builder.dataflow():
            result = builder.emit_output(builder.emit(op.einsum(inputs, subscripts)))
        builder.emit_func_output(result)
    return builder.get()


def shapes_of(subscripts: str) -> list[tuple[int, ...]]:
    terms = subscripts.partition("->")[0].replace(" ", "").replace("...", "ab").split(",")
    return [tuple(SIZES[letter] for letter in term) for term in terms]


def operators(mod: ir.IRModule) -> list[str]:
    bindings = [binding for block in mod["main"].body.blocks for binding in block.bindings]
    return [binding.value.op.name for binding in bindings if isinstance(binding.value, relax.Call)]


def result_of(mod: ir.IRModule, arrays: list[np.ndarray]) -> np.ndarray:
    (result,) = ModelRunner(untuned_executable(mod, detect_target(), plain=True))(*arrays)
    return result


@pytest.mark.parametrize(
    ("subscripts", "expected"),
    [
        ("ij,jk->ik", "matmul"),
        ("ij,kj", "matmul"),
        ("bi,bi->b", "multiply"),
        ("aibd,ajbd->abij", "matmul"),
        ("abij,ajbd->aibd", "matmul"),
        ("...ij,...jk->...ik", "matmul"),
        ("...i,ij->...j", "matmul"),
        ("ai,bj->jbia", "multiply"),
        ("ij,ji->", "multiply"),
        ("ijk,jb->bi", "matmul"),
        ("a b c, c d -> a d b", "matmul"),
        ("ij,ij->ij", "multiply"),
        ("ii,ij->j", "einsum"),
        ("ij,jk,kd->id", "einsum"),
        ("ij->ji", "einsum"),
    ],
)
def test_sums_of_products(subscripts: str, expected: str) -> None:
    shapes = shapes_of(subscripts)
    generator = np.random.default_rng(0)
    arrays = [generator.standard_normal(shape).astype("float32") for shape in shapes]
    mod = load_model(module(subscripts, *shapes)).mod
    assert {"relax.matmul", "relax.multiply", "relax.einsum"} & set(operators(mod)) == {f"relax.{expected}"}
    np.testing.assert_allclose(result_of(mod, arrays), np.einsum(subscripts, *arrays), rtol=1e-4, atol=1e-5)


def test_operands_that_fit_are_not_moved() -> None:
    for subscripts in ("nchw,cd->ndhw", "ij,kj->ki", "nij,jk->nik"):
        names = operators(load_model(module(subscripts, *shapes_of(subscripts))).mod)
        assert names.count("relax.permute_dims") == (subscripts != "nij,jk->nik")


def test_tensors_without_elements() -> None:
    for subscripts, shapes in (("ij,ij->i", [(3, 0), (3, 0)]), ("ij,jk->ik", [(3, 0), (0, 2)])):
        arrays = [np.ones(shape, "float32") for shape in shapes]
        mod = load_model(module(subscripts, *shapes)).mod
        np.testing.assert_array_equal(result_of(mod, arrays), np.einsum(subscripts, *arrays))


def test_extents_of_one_are_repeated() -> None:
    arrays = [np.float32([[1.0], [2.0]]), np.arange(12, dtype="float32").reshape(2, 6)]
    mod = load_model(module("ij,ij->i", (2, 1), (2, 6))).mod
    np.testing.assert_allclose(result_of(mod, arrays), (arrays[0] * arrays[1]).sum(1), rtol=1e-6)
