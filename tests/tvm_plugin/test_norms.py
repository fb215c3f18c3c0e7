"""Group and instance norms of values that are far from zero, as convolutions make them."""

from __future__ import annotations

import numpy as np
import pytest
from tvm import relax
from tvm.relax import op

from eqtune.machine import detect_target
from eqtune.runtime import ModelRunner
from eqtune.transform import ApplyTuned, LowerToKernels
from eqtune.transform.apply_tuned import build_scheduled, untuned_executable
from eqtune.transform.constants import array_of

EPSILON = 1e-5


def constant(count, seed):
    return relax.const(np.random.default_rng(seed).uniform(0.5, 1.5, count).astype("float32"))


def norm(shape, make):
    builder, x = relax.BlockBuilder(), relax.Var("x", relax.TensorType(shape, "float32"))
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
