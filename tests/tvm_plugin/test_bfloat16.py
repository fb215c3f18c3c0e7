"""bfloat16 models: numpy has no such dtype, so their weights take a way of their own."""

from __future__ import annotations

import ml_dtypes
import numpy as np
from tvm import relax

from eqtune.frontends.imported import SUPPORTED_DTYPES
from eqtune.transform import FoldWeights
from eqtune.transform.constants import array_of, constant_of


def test_weights_are_read_in_place_and_written_back() -> None:
    weight = np.arange(24).reshape(4, 6).astype(ml_dtypes.bfloat16)
    constant = relax.const(weight, "bfloat16")
    first, second = array_of(constant), array_of(constant)
    assert first.dtype == weight.dtype
    assert first.ctypes.data == second.ctypes.data
    again = constant_of(np.ascontiguousarray(first.T))
    assert str(again.value.dtype) == str(again.ty.dtype) == "bfloat16"
    np.testing.assert_array_equal(again.value.numpy(), weight.T)


def test_models_of_bfloat16_are_accepted() -> None:
    assert "bfloat16" in SUPPORTED_DTYPES


def test_weights_are_folded_in_float32_and_rounded_once() -> None:
    left, right = (np.random.default_rng(i).standard_normal((8, 8)).astype(ml_dtypes.bfloat16) for i in range(2))
    x = relax.Var("x", relax.TensorType((8, 8), "bfloat16"))
    builder = relax.BlockBuilder()
    with builder.function("main", [x]):
        with builder.dataflow():
            product = builder.emit(relax.op.matmul(relax.const(left, "bfloat16"), relax.const(right, "bfloat16")))
            folded = builder.emit(relax.op.tanh(builder.emit(relax.op.permute_dims(product))))
            result = builder.emit_output(relax.op.add(x, folded))
        builder.emit_func_output(result)
    (binding,) = FoldWeights()(builder.get())["main"].body.blocks[0].bindings
    product = (left.astype(np.float32) @ right.astype(np.float32)).astype(ml_dtypes.bfloat16)
    expected = np.tanh(product.T.astype(np.float32)).astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(array_of(binding.value.args[1]), expected)
