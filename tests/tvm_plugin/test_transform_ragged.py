"""Pooling with windows of different sizes: loops whose ends are no constants."""

import numpy as np
import pytest
from tvm import relax

from eqtune.compile.executable import build_scheduled
from eqtune.compile.untuned import untuned_executable
from eqtune.machine import detect_target
from eqtune.runtime import ModelRunner
from eqtune.transform import ApplyTuned, LowerToKernels

op = relax.op


def pooling(shape, size, layout):
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType(shape, "float32"))
    with builder.function("main", [x]):
        with builder.dataflow():
            pooled = builder.emit(op.nn.adaptive_avg_pool2d(x, size, layout=layout))
            y = builder.emit_output(op.exp(pooled))
        builder.emit_func_output(y)
    return builder.get()


@pytest.mark.parametrize(
    ("shape", "size", "layout"),
    [
        ((1, 16, 7, 7), (3, 3), "NCHW"),
        ((1, 512, 7, 7), (1, 3), "NCHW"),
        ((2, 8, 10, 10), (4, 4), "NHWC"),
        ((4, 16, 10, 5), (4, 6), "NHWC"),
    ],
)
def test_windows_of_different_sizes(shape, size, layout):
    model, target = pooling(shape, size, layout), detect_target()
    x = np.random.default_rng(0).standard_normal(shape, dtype="float32")
    (want,) = ModelRunner(untuned_executable(model, target))(x)
    (piped,) = ModelRunner(relax.build(model, target, relax_pipeline="eqtune"))(x)
    np.testing.assert_allclose(piped, want, rtol=1e-5)
    with target:
        kernels = ApplyTuned(estimate=True)(LowerToKernels()(model))
    (estimated,) = ModelRunner(build_scheduled(kernels, target))(x)
    np.testing.assert_allclose(estimated, want, rtol=1e-5)
