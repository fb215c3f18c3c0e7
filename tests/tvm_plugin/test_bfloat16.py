"""bfloat16 models: numpy has no such dtype, so their weights take a way of their own."""

from __future__ import annotations

import ml_dtypes
import numpy as np
from tvm import relax

from eqtune.frontends.imported import SUPPORTED_DTYPES
from eqtune.transform.evaluate import array_of, constant_of


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
