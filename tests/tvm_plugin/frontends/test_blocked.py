"""Convolutions with channels in blocks (NCHW8c), which TVM types but cannot lower."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm
from tvm import relax

import eqtune
from eqtune.errors import InputError
from eqtune.frontends import load_model

pytestmark = pytest.mark.unoptimised

WEIGHTS = np.random.default_rng(0).standard_normal((16, 8, 3, 3)).astype("float32")


def convolution(shape: tuple[int, ...], weights: np.ndarray, layouts: tuple[str, str], **attrs: Any) -> tvm.IRModule:
    x = relax.Var("x", relax.TensorType(shape, "float32"))
    builder = relax.BlockBuilder()
    data_layout, kernel_layout = layouts
    with builder.function("main", [x]):
        with builder.dataflow():
            y = relax.op.nn.conv2d(
                x, relax.const(weights), data_layout=data_layout, kernel_layout=kernel_layout, **attrs
            )
            y = builder.emit_output(relax.op.nn.relu(builder.emit(y)))
        builder.emit_func_output(y)
    return builder.get()


def test_channels_in_blocks_are_tuned_and_right(tmp_path: Path) -> None:
    attrs = {"strides": (2, 1), "padding": (1, 0, 2, 1)}
    blocked = WEIGHTS.reshape(2, 8, 1, 8, 3, 3).transpose(0, 2, 4, 5, 3, 1)
    mod = convolution((1, 1, 10, 9, 8), blocked, ("NCHW8c", "OIHW8i8o"), **attrs)
    result = eqtune.tune_model(mod, trials=2, threads=1, work_dir=tmp_path, progress=False)
    plain = load_model(convolution((1, 8, 10, 9), WEIGHTS, ("NCHW", "OIHW"), **attrs)).mod
    image = np.random.default_rng(1).standard_normal((1, 8, 10, 9)).astype("float32")
    machine = relax.VirtualMachine(tvm.compile(plain, "llvm"), tvm.cpu())
    expected = machine["main"](tvm.runtime.tensor(image)).numpy()
    (found,) = result.run(image.reshape(1, 1, 8, 10, 9).transpose(0, 1, 3, 4, 2).copy())
    unblocked = found.transpose(0, 1, 4, 2, 3).reshape(expected.shape)
    np.testing.assert_allclose(unblocked, expected, rtol=1e-4, atol=1e-5)


def test_blocks_of_another_kind_are_refused_with_what_is_possible() -> None:
    weights = np.zeros((2, 1, 3, 3, 4, 8), "float32")
    with pytest.raises(InputError, match="NCHW4c, OIHW4i8o, NCHW8c and 1 groups"):
        load_model(convolution((1, 1, 10, 9, 4), weights, ("NCHW4c", "OIHW4i8o"), out_layout="NCHW8c"))
