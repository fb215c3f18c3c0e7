"""Transposed convolutions as convolutions: against TVM's own, which multiplies by the zeros between pixels."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from tvm import relax

from eqtune.compile.executable import build_executable
from eqtune.machine import detect_target
from eqtune.runtime import ModelRunner
from eqtune.tasks import extract_tasks, lower_to_kernels
from eqtune.transform import ChannelsLast, FoldWeights, SubPixelConvolution

pytestmark = pytest.mark.unoptimised

TARGET = detect_target(1)
op = relax.op


def module(data, weight, constant=True, function=op.nn.conv2d_transpose, **attributes):
    """A transposed convolution and a convolution of its result, whose layouts must agree."""
    random = np.random.default_rng(0)
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType(data, "float32"))
    w = random.standard_normal(weight).astype("float32")
    given = relax.const(w) if constant else relax.Var("w", relax.TensorType(weight, "float32"))
    with builder.function("main", [x] if constant else [x, given]):
        with builder.dataflow():
            image = builder.emit(function(x, given, **attributes))
            if function is op.nn.conv2d_transpose:
                channels = int(image.ty.shape.values[1])
                mixed = relax.const(random.standard_normal((2, channels, 1, 1)).astype("float32"))
                image = builder.emit(op.nn.relu(op.nn.conv2d(image, mixed)))
            result = builder.emit_output(image)
        builder.emit_func_output(result)
    return builder.get(), [random.standard_normal(data).astype("float32"), *([] if constant else [w])]


def outputs(mod, inputs):
    return ModelRunner(build_executable(lower_to_kernels(mod, TARGET), TARGET))(*inputs)[0]


@pytest.mark.parametrize(
    ("data", "weight", "attributes"),
    [
        ((1, 4, 5, 6), (4, 3, 2, 2), {"strides": (2, 2)}),
        ((2, 4, 5, 6), (4, 3, 3, 3), {"strides": (2, 2), "padding": (1, 1), "output_padding": (1, 1)}),
        ((1, 4, 5, 6), (4, 3, 4, 5), {"strides": (2, 3), "padding": (1, 2)}),
        ((2, 4, 5, 6), (4, 3, 4, 6), {"strides": (2, 3), "padding": (1, 4), "output_padding": (1, 0)}),
        ((1, 4, 5, 6), (4, 3, 1, 2), {"strides": (3, 2)}),
        ((1, 4, 5, 6), (4, 3, 3, 3), {"padding": (2, 0)}),
        ((1, 4, 5, 6), (4, 3, 3, 2), {"strides": (2, 2), "dilation": (2, 3), "padding": (2, 1)}),
        ((1, 4, 5, 6), (4, 2, 3, 3), {"strides": (2, 2), "padding": (1, 1), "groups": 2}),
    ],
    ids=["pixels", "even", "unequal", "cut", "short", "without-stride", "dilated", "grouped"],
)
@pytest.mark.parametrize("last", [False, True], ids=["channels-first", "channels-last"])
def test_the_same_image(data, weight, attributes, last):
    mod, inputs = module(data, weight, **attributes)
    rewritten = tvm.transform.Sequential([SubPixelConvolution(), FoldWeights(), *([ChannelsLast()] if last else [])])(
        mod
    )
    assert "conv2d_transpose" not in rewritten.script()
    np.testing.assert_allclose(outputs(rewritten, inputs), outputs(mod, inputs), rtol=1e-4, atol=1e-5)


def test_one_dimension():
    mod, inputs = module((1, 4, 9), (4, 3, 4), function=op.nn.conv1d_transpose, strides=2, padding=1)
    rewritten = SubPixelConvolution()(mod)
    assert "conv1d_transpose" not in rewritten.script()
    np.testing.assert_allclose(outputs(rewritten, inputs), outputs(mod, inputs), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("taps", [2, 4])
def test_kernels_that_are_a_multiple_of_the_stride_spread_no_infinity(taps):
    mod, (image,) = module((1, 2, 5, 6), (2, 3, taps, taps), strides=(2, 2), padding=(taps // 4, taps // 4))
    image[0, 0, 2, 3] = np.inf
    want, got = outputs(mod, [image]), outputs(SubPixelConvolution()(mod), [image])
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)  # NaN would be zero: relu loses it


def test_a_kernel_as_large_as_its_stride_multiplies_by_no_zeros():
    mod, _ = module((1, 4, 5, 6), (4, 3, 2, 2), strides=(2, 2))
    first, *_ = sorted(
        extract_tasks(lower_to_kernels(FoldWeights()(SubPixelConvolution()(mod)), TARGET)), key=lambda task: -task.flops
    )
    assert first.flops == 2 * 4 * (3 * 2 * 2) * 5 * 6


def test_a_kernel_of_twice_its_stride_multiplies_by_no_zeros_either():
    """With windows around each input pixel, 3 x 3 of its taps would be read instead of 2 x 2."""
    mod, inputs = module((1, 4, 5, 6), (4, 3, 4, 4), strides=(2, 2), padding=(1, 1))
    rewritten = FoldWeights()(SubPixelConvolution()(mod))
    first, *_ = sorted(extract_tasks(lower_to_kernels(rewritten, TARGET)), key=lambda task: -task.flops)
    assert first.flops == 2 * (4 * 2 * 2) * (3 * 2 * 2) * (5 + 1) * (6 + 1)
    np.testing.assert_allclose(outputs(rewritten, inputs), outputs(mod, inputs), rtol=1e-4, atol=1e-5)


def test_weights_that_are_no_constants_stay_with_channels_first():
    """TVM has no transposed convolution with channels last, and says so only when it compiles."""
    mod, inputs = module((1, 4, 5, 6), (4, 3, 2, 2), constant=False, strides=(2, 2))
    kept = SubPixelConvolution()(mod)
    assert "conv2d_transpose" in kept.script()
    np.testing.assert_allclose(outputs(ChannelsLast()(kept), inputs), outputs(mod, inputs), rtol=1e-4, atol=1e-5)
