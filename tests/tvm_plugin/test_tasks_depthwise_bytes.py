"""Depthwise convolutions of bytes, padded by their zero point: one kernel, and the very sums of integers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tvm
from tvm import relax

from eqtune.compile.executable import build_executable
from eqtune.compile.untuned import untuned_executable
from eqtune.runtime import ModelRunner
from eqtune.tasks import extract_tasks, lower_to_kernels

pytestmark = pytest.mark.unoptimised

op = relax.op
TARGET = tvm.target.Target("llvm")
RNG = np.random.default_rng(0)


def convolution(
    widths: list[int],
    dtype: str = "uint8",
    number: int = 9,
    layout: str = "HWOI",
    groups: int = 6,
    weights: str = "int8",
    read_twice: bool = False,
    **attributes: Any,
) -> tvm.IRModule:
    x = relax.Var("x", relax.TensorType((2, 9, 8, 6), dtype))
    limits = np.iinfo(weights)
    shape = {"H": 3, "W": 2, "O": 6, "I": 6 // groups}
    weight = RNG.integers(limits.min, limits.max, [shape[letter] for letter in layout], weights, endpoint=True)
    layouts = {"data_layout": "NHWC", "kernel_layout": layout, "out_layout": "NHWC"}
    builder = relax.BlockBuilder()
    with builder.function("main", [x]):
        with builder.dataflow():
            padded = builder.emit(op.nn.pad(x, widths, "constant", number))
            sums = op.nn.conv2d(padded, relax.const(weight), groups=groups, out_dtype="int32", **layouts, **attributes)
            results = [builder.emit_output(sums)]
            if read_twice:
                results.append(builder.emit_output(op.astype(padded, "int32")))
        builder.emit_func_output(results if read_twice else results[0])
    return builder.get()


def kernels(mod: tvm.IRModule) -> list[str]:
    return sorted(task.name for task in extract_tasks(mod))


def assert_same(mod: tvm.IRModule, lowered: tvm.IRModule) -> None:
    x = RNG.integers(0, 255, (2, 9, 8, 6), "uint8", endpoint=True).view(str(mod["main"].params[0].ty.dtype))
    expected = ModelRunner(untuned_executable(mod, TARGET))(x)
    for found, wanted in zip(ModelRunner(build_executable(lowered, TARGET))(x), expected, strict=True):
        assert wanted.std() > 10
        np.testing.assert_array_equal(found, wanted)


AROUND = [0, 0, 1, 2, 0, 1, 0, 0]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"dtype": "int8", "number": -100, "weights": "uint8"},
        {"strides": (2, 1), "dilation": (1, 2)},
        {"layout": "HWIO", "number": 255},
        {"layout": "OIHW", "strides": (1, 3)},
    ],
)
def test_one_kernel_with_the_sums_of_integers(options: dict[str, Any]) -> None:
    mod = convolution(AROUND, **options)
    lowered = lower_to_kernels(mod, TARGET)
    assert kernels(lowered) == ["conv2d"]
    assert_same(mod, lowered)


@pytest.mark.parametrize(
    "options",
    [
        {"widths": [0, 0, 1, 2, 0, 1, 0, 0], "groups": 2},  # the sums of a group may be longer
        {"widths": [0, 1, 1, 0, 0, 0, 0, 0]},  # another image
        {"widths": AROUND, "read_twice": True},
        {"widths": AROUND, "padding": (1, 1)},  # by 0, around what is padded
    ],
)
def test_what_stays_two_kernels(options: dict[str, Any]) -> None:
    mod = convolution(**options)
    lowered = lower_to_kernels(mod, TARGET)
    assert len(kernels(lowered)) > 1
    assert_same(mod, lowered)


def test_sums_that_floats_do_not_hold_stay_integers() -> None:
    """289 products of 255 and 255 are more than 2^24, and odd."""
    x = relax.Var("x", relax.TensorType((1, 17, 17, 2), "uint8"))
    weight = relax.const(np.full((17, 17, 2, 1), 255, "uint8"))
    layouts = {"data_layout": "NHWC", "kernel_layout": "HWOI", "out_layout": "NHWC"}
    builder = relax.BlockBuilder()
    with builder.function("main", [x]):
        with builder.dataflow():
            padded = builder.emit(op.nn.pad(x, [0, 0, 0, 1, 0, 0, 0, 0], "constant", 255))
            sums = builder.emit_output(op.nn.conv2d(padded, weight, groups=2, out_dtype="int32", **layouts))
        builder.emit_func_output(sums)
    lowered = lower_to_kernels(builder.get(), TARGET)
    (found,) = ModelRunner(build_executable(lowered, TARGET))(np.full((1, 17, 17, 2), 255, "uint8"))
    np.testing.assert_array_equal(found, np.full((1, 2, 1, 2), 17 * 17 * 255 * 255))
