"""Taps that meet only padding are left out; what is computed stays the same."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tvm
from tvm import relax

from eqtune.compile.executable import build_executable
from eqtune.machine import detect_target
from eqtune.runtime import ModelRunner
from eqtune.tasks import lower_to_kernels
from eqtune.transform import TrimKernels
from eqtune.transform.simplify import simplify

TARGET = detect_target(1)
op = relax.op
CONVOLUTIONS = {3: op.nn.conv1d, 4: op.nn.conv2d, 5: op.nn.conv3d}


def module(data: tuple[int, ...], weight: tuple[int, ...], constant: bool = True, **attributes: Any) -> Any:
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType(data, "float32"))
    w = np.random.default_rng(0).standard_normal(weight).astype("float32")
    given = relax.const(w) if constant else relax.Var("w", relax.TensorType(weight, "float32"))
    with builder.function("main", [x] if constant else [x, given]):
        with builder.dataflow():
            convolve = op.nn.conv2d if "NCHW4c" in attributes.values() else CONVOLUTIONS[len(data)]
            result = builder.emit_output(convolve(x, given, **attributes))
        builder.emit_func_output(result)
    return builder.get()


def convolution(mod: Any) -> Any:
    (binding,) = mod["main"].body.blocks[0].bindings
    return binding.value


def kernel_of(mod: Any) -> tuple[int, ...]:
    return tuple(int(n) for n in convolution(mod).args[1].ty.shape)


@pytest.mark.parametrize(
    ("data", "weight", "attributes", "kernel"),
    [
        ((1, 8, 5, 6), (4, 8, 3, 3), {"padding": (6, 6), "dilation": (6, 6)}, (1, 1)),
        ((2, 8, 5, 6), (4, 8, 3, 3), {"padding": (5, 5), "dilation": (5, 5)}, (1, 3)),
        ((1, 8, 5, 6), (4, 8, 5, 3), {"padding": (6, 2), "dilation": (3, 2)}, (3, 3)),
        ((1, 8, 5, 6), (4, 8, 3, 3), {"padding": (8, 1, 0, 1), "dilation": (4, 1)}, (2, 3)),
        ((1, 8, 9, 9), (4, 4, 3, 3), {"padding": (9, 9), "dilation": (9, 9), "strides": (2, 2), "groups": 2}, (1, 1)),
        ((1, 8, 7), (4, 8, 3), {"padding": (7,), "dilation": (7,)}, (1,)),
        ((1, 2, 3, 4, 5), (4, 2, 3, 3, 3), {"padding": (3, 4, 1), "dilation": (3, 4, 1)}, (1, 1, 3)),
        ((1, 3, 3, 8), (3, 3, 8, 4), {"padding": (4, 4), "dilation": (4, 4)}, (1, 1)),
        ((1, 8, 1, 1), (4, 8, 3, 3), {"padding": (1, 1)}, (1, 1)),
    ],
    ids=["all but one", "down alone", "two of five", "one side", "grouped", "signal", "volume", "last", "one pixel"],
)
def test_taps_in_padding_are_left_out(
    data: tuple[int, ...], weight: tuple[int, ...], attributes: dict[str, Any], kernel: tuple[int, ...]
) -> None:
    last = {"data_layout": "NHWC", "kernel_layout": "HWIO"} if data[-1] == 8 else {}
    mod = module(data, weight, **attributes, **last)
    trimmed = TrimKernels()(mod)
    assert (kernel_of(trimmed)[:2] if last else kernel_of(trimmed)[2:]) == kernel
    assert convolution(trimmed).ty.shape.values == convolution(mod).ty.shape.values
    x = np.random.default_rng(1).standard_normal(data).astype("float32")
    want, got = (ModelRunner(build_executable(lower_to_kernels(each, TARGET), TARGET))(x)[0] for each in (mod, trimmed))
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("data", "padding", "dilation"),
    [
        ((1, 8, 5, 6), (1, 1), (1, 1)),
        ((1, 8, 5, 6), (4, 5), (4, 5)),
        ((1, 8, 20, 20), (0, 0), (9, 9)),
        ((1, 8, 8, 8), (-1, 0, 0, 0), (1, 1)),
    ],
    ids=["plain", "corners read", "unpadded", "cut"],
)
def test_other_kernels_stay(data: tuple[int, ...], padding: tuple[int, ...], dilation: tuple[int, ...]) -> None:
    mod = module(data, (4, 8, 3, 3), padding=padding, dilation=dilation)
    tvm.ir.assert_structural_equal(TrimKernels()(mod), mod)


def test_weights_that_are_no_constants_stay() -> None:
    mod = module((1, 8, 5, 6), (4, 8, 3, 3), constant=False, padding=(6, 6), dilation=(6, 6))
    tvm.ir.assert_structural_equal(TrimKernels()(mod), mod)


def test_packed_channels_stay() -> None:
    layouts = {"data_layout": "NCHW4c", "kernel_layout": "OIHW4i4o"}
    mod = module((1, 2, 5, 6, 4), (2, 2, 3, 3, 4, 4), padding=(6, 6), dilation=(6, 6), **layouts)
    tvm.ir.assert_structural_equal(TrimKernels()(mod), mod)


def test_every_model_is_trimmed() -> None:
    mod = module((1, 16, 14, 14), (4, 16, 3, 3), padding=(24, 24), dilation=(24, 24))
    assert kernel_of(simplify(mod, TARGET)) == (4, 16, 1, 1)
