"""Group and instance norms of values that are far from zero, as convolutions make them."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import tvm
from tvm import relax, tirx
from tvm.relax import op

from eqtune.compile.executable import build_scheduled
from eqtune.compile.untuned import untuned_executable
from eqtune.dtypes import numpy_dtype
from eqtune.frontends import load_model
from eqtune.gpu_machine import gpu_target
from eqtune.machine import describe_machine, detect_target
from eqtune.relax_ir.constants import array_of, constant_of
from eqtune.runtime import ModelRunner
from eqtune.search.space import Decision, build_space
from eqtune.search.space.gpu.hardware import DEVICES
from eqtune.tasks import extract_tasks, lower_to_kernels
from eqtune.transform import ApplyTuned, LowerToKernels

sys.path.insert(0, str(Path(__file__).parents[1] / "search"))
import cuda_on_cpu

EPSILON = 1e-5


def constant(count, seed, dtype="float32"):
    return constant_of(np.random.default_rng(seed).uniform(0.5, 1.5, count).astype(numpy_dtype(dtype)))


def norm(shape, make, dtype="float32"):
    builder, x = relax.BlockBuilder(), relax.Var("x", relax.TensorType(shape, dtype))
    with builder.function("main", [x]):
        with builder.dataflow():
            result = builder.emit_output(builder.emit(make(x)))
        builder.emit_func_output(result)
    return builder.get()


def expected(x, groups, gamma, beta):
    """With channels first, in float64."""
    parts = x.reshape(len(x), groups, -1).astype("float64")
    parts = (parts - parts.mean(-1, keepdims=True)) / np.sqrt(parts.var(-1, keepdims=True) + EPSILON)
    column = (-1, *[1] * (x.ndim - 2))
    return parts.reshape(x.shape) * gamma.reshape(column) + beta.reshape(column)


@pytest.mark.parametrize("tuned", [False, True])
@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
@pytest.mark.parametrize("groups", [1, 4, 16])
def test_values_far_from_zero(groups, layout, tuned):
    channels, last = 16, layout == "NHWC"
    axis, axes = (3, [1, 2]) if last else (1, [2, 3])
    gamma, beta = constant(channels, 1), constant(channels, 2)

    def make(x):
        if groups == channels:
            return op.nn.instance_norm(x, gamma, beta, axis, axes, EPSILON)
        return op.nn.group_norm(x, gamma, beta, groups, axis, axes, EPSILON)

    x = (300 + np.random.default_rng(0).standard_normal((2, channels, 9, 8))).astype("float32")
    given = np.ascontiguousarray(x.transpose(0, 2, 3, 1)) if last else x
    mod, target = norm(given.shape, make), detect_target()
    if tuned:
        with target:
            executable = build_scheduled(ApplyTuned(estimate=True)(LowerToKernels()(mod)), target)
    else:
        executable = untuned_executable(mod, target, plain=True)
    (result,) = ModelRunner(executable)(given)
    result = result.transpose(0, 3, 1, 2) if last else result
    np.testing.assert_allclose(result, expected(x, groups, *(array_of(c) for c in (gamma, beta))), atol=5e-4)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(
    ("shape", "groups"),
    [((3, 13, 10, 24), 3), ((1, 700, 20), 20), ((2, 5, 6, 7, 48), 16), ((1, 64, 16), 2), ((1, 129, 129, 18), 9)],
    ids=["images", "instances-of-lines", "volumes", "one-block", "many-blocks"],
)
def test_channels_last_in_one_pass(shape, groups, threads):
    gamma, beta = constant(shape[-1], 1), constant(shape[-1], 2)
    axes = list(range(1, len(shape) - 1))
    target = detect_target(threads)
    with target:
        kernels = LowerToKernels()(
            norm(shape, lambda x: op.nn.relu(op.nn.group_norm(x, gamma, beta, groups, len(shape) - 1, axes, EPSILON)))
        )
        names = sorted(var.name_hint for var in kernels.get_global_vars())
        assert names == ["main", "norm_moments", "subtract_multiply_add_relu"]
        executable = build_scheduled(ApplyTuned(estimate=True)(kernels), target)
    generator = np.random.default_rng(0)
    x = (generator.standard_normal(shape) + 100 * generator.standard_normal(shape[-1])).astype("float32")
    (result,) = ModelRunner(executable)(x)
    first = np.moveaxis(x, -1, 1)
    wanted = np.maximum(expected(np.ascontiguousarray(first), groups, *(array_of(c) for c in (gamma, beta))), 0)
    np.testing.assert_allclose(np.moveaxis(result, -1, 1), wanted, atol=5e-4)


def test_no_images():
    target, shape = detect_target(), (0, 9, 9, 24)
    with target:
        kernels = LowerToKernels()(
            norm(shape, lambda x: op.nn.group_norm(x, constant(24, 1), constant(24, 2), 3, 3, [1, 2]))
        )
        executable = build_scheduled(ApplyTuned(estimate=True)(kernels), target)
    (result,) = ModelRunner(executable)(np.zeros(shape, "float32"))
    assert result.shape == shape


def test_an_outlier_among_pixels_loses_no_digits():
    x = np.random.default_rng(0).standard_normal((1, 16, 16, 32)).astype("float32")
    x[0, 0, 0] = 1e4  # the first of the first block, which the others are compared with
    gamma, beta, target = constant(32, 1), constant(32, 2), detect_target()
    with target:
        kernels = LowerToKernels()(norm(x.shape, lambda y: op.nn.group_norm(y, gamma, beta, 8, 3, [1, 2], EPSILON)))
        executable = build_scheduled(ApplyTuned(estimate=True)(kernels), target)
    (result,) = ModelRunner(executable)(x)
    first = np.ascontiguousarray(np.moveaxis(x, -1, 1))
    wanted = expected(first, 8, *(array_of(c) for c in (gamma, beta)))
    np.testing.assert_allclose(np.moveaxis(result, -1, 1), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("groups", [3, 9])
@pytest.mark.parametrize("open_sides", [False, True])
@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
def test_values_far_from_zero_in_an_open_batch(groups, layout, open_sides):
    gamma, beta = constant(9, 1), constant(9, 2)
    batch, high, wide = (tirx.Var(name, "int64") for name in ("batch", "high", "wide"))
    sides, last = (high, wide) if open_sides else (14, 12), layout == "NHWC"
    axis, axes = (3, [1, 2]) if last else (1, [2, 3])

    def make(x):
        if groups == 9:
            return op.nn.instance_norm(x, gamma, beta, axis, axes, EPSILON)
        return op.nn.group_norm(x, gamma, beta, groups, axis, axes, EPSILON)

    mod, target = norm((batch, *sides, 9) if last else (batch, 9, *sides), make), detect_target()
    with target:
        executable = build_scheduled(ApplyTuned(estimate=True)(LowerToKernels()(mod)), target)
    x = (30 + 0.1 * np.random.default_rng(0).standard_normal((3, 9, 14, 12))).astype("float32")
    (result,) = ModelRunner(executable)(np.ascontiguousarray(x.transpose(0, 2, 3, 1)) if last else x)
    result = result.transpose(0, 3, 1, 2) if last else result
    wanted = expected(x, groups, array_of(gamma), array_of(beta))
    assert np.abs(result - wanted).max() < 5e-4  # 0.2 where the square of the mean is subtracted


@pytest.mark.parametrize("channel", [1, 3])
@pytest.mark.parametrize("groups", [3, 6])
def test_doubles(groups, channel):
    gamma, beta = (constant(6, seed, "float64") for seed in (1, 2))
    axes = [axis for axis in (1, 2, 3) if axis != channel]

    def make(x):
        if groups == 6:
            return op.nn.instance_norm(x, gamma, beta, channel, axes, EPSILON)
        return op.nn.group_norm(x, gamma, beta, groups, channel, axes, EPSILON)

    x = 100 + np.random.default_rng(0).standard_normal((2, 6, 4, 6))
    imported = load_model(norm(x.shape, make, "float64"))
    (result,) = ModelRunner(tvm.compile(imported.mod, "llvm"))(x)
    wanted = expected(np.ascontiguousarray(np.moveaxis(x, channel, 1)), groups, array_of(gamma), array_of(beta))
    np.testing.assert_allclose(np.moveaxis(result, channel, 1), wanted, rtol=0, atol=1e-11)


NORMS = {
    "layer": lambda x, gamma, beta: op.nn.layer_norm(x, gamma, beta, [1], EPSILON),
    "rms": lambda x, gamma, _: op.nn.rms_norm(x, gamma, [1], EPSILON),
    "group": lambda x, gamma, beta: op.nn.group_norm(x, gamma, beta, 4, 1, [], EPSILON),
    "instance": lambda x, gamma, beta: op.nn.instance_norm(x, gamma, beta, 0, [1], EPSILON),
}


OF_16_BITS = ["layer", "rms", "instance"]
"""TVM has no group norm of bfloat16."""


@pytest.mark.parametrize("machine", ["cpu", "nvidia/nvidia-h100"])
@pytest.mark.parametrize(
    ("name", "dtype"), [*((name, "float64") for name in NORMS), *((name, "bfloat16") for name in OF_16_BITS)]
)
def test_norms_that_no_front_end_has_written_out(name, dtype, machine):
    target = detect_target() if machine == "cpu" else gpu_target(DEVICES[machine].hardware())
    mod = norm((8, 8), lambda x: NORMS[name](x, constant(8, 1, dtype), constant(8, 2, dtype)), dtype)
    for task in extract_tasks(lower_to_kernels(mod, target)):
        space = build_space(task.mod, describe_machine(target, measure=False))
        assert space.apply(space.decision(np.zeros(1 + space.cardinalities.shape[1], np.int16)))


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
@pytest.mark.parametrize(("name", "dtype", "atol"), [("group", "float32", 5e-4), ("instance", "float16", 5e-3)])
def test_values_far_from_zero_on_a_gpu(name, dtype, atol, tmp_path):
    """In one kernel, whose threads share a row."""
    hardware, gamma, beta = DEVICES["nvidia/nvidia-h100"].hardware(), constant(16, 1, dtype), constant(16, 2, dtype)

    def make(x):
        if name == "instance":
            return op.nn.instance_norm(x, gamma, beta, 1, [2, 3], EPSILON)
        return op.nn.group_norm(x, gamma, beta, 4, 1, [2, 3], EPSILON)

    x = (300 + np.random.default_rng(0).standard_normal((2, 16, 9, 8))).astype(dtype)
    (task,) = extract_tasks(lower_to_kernels(norm(x.shape, make, dtype), gpu_target(hardware)))
    schedule = build_space(task.mod, hardware).apply(Decision("gpu_rows", {"threads": 64, "rows": 2}))
    given = [x, *map(array_of, (gamma, beta)), np.empty_like(x)]
    wanted = expected(x, 16 if name == "instance" else 4, *(array_of(c).astype("float32") for c in (gamma, beta)))
    for result in cuda_on_cpu.run(schedule, gpu_target(hardware), given, tmp_path):
        np.testing.assert_allclose(result, wanted, atol=atol)
