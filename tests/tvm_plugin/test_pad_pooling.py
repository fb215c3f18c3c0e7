"""PadPooling: pooling of open images with ceil_mode, right for every size and without sizes that are one of two."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tvm
from tvm import relax, tirx
from tvm.relax import op

import eqtune  # noqa: F401  registers the pipeline
from eqtune.machine import detect_target
from eqtune.runtime import ModelRunner
from eqtune.tasks import lower_to_kernels
from eqtune.transform.pad_pooling import PadPooling
from eqtune.transform.simplify import simplify

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.unoptimised

H, W = (tirx.Var(name, "int64") for name in "hw")
RNG = np.random.default_rng(0)


def pooling(pool: Any = op.nn.max_pool2d, window: int = 3, height: Any = H, **options: Any) -> tvm.IRModule:
    """A pooling, and a convolution with a relu behind it."""
    x = relax.Var("x", relax.TensorType((1, 16, height, W), "float32"))
    builder = relax.BlockBuilder()
    with builder.function("main", [x]):
        with builder.dataflow():
            value = builder.emit(pool(x, (window, window), **({"strides": (2, 2), "ceil_mode": True} | options)))
            value = builder.emit(op.nn.conv2d(value, relax.const(np.eye(16, dtype="float32")[:, :, None, None])))
            value = builder.emit_output(op.nn.relu(value))
        builder.emit_func_output(value)
    return builder.get()


@pytest.mark.parametrize(
    ("module", "function"),
    [
        (pooling(), lambda x: torch.nn.functional.max_pool2d(x, 3, 2, ceil_mode=True)),
        (pooling(padding=(1, 1)), lambda x: torch.nn.functional.max_pool2d(x, 3, 2, 1, ceil_mode=True)),
        (pooling(window=2), lambda x: torch.nn.functional.max_pool2d(x, 2, 2, ceil_mode=True)),
        (
            pooling(op.nn.avg_pool2d, padding=(1, 1), count_include_pad=False),
            lambda x: torch.nn.functional.avg_pool2d(x, 3, 2, 1, ceil_mode=True, count_include_pad=False),
        ),
    ],
)
def test_results_stay_and_what_follows_is_joined(module: tvm.IRModule, function: Any) -> None:
    target = detect_target()
    names = {variable.name_hint for variable in lower_to_kernels(simplify(module, target), target).functions}
    assert "conv2d_relu" in names, "TVM joins no kernels whose sizes are one of two"
    run = ModelRunner(tvm.compile(module, target=target, relax_pipeline=relax.get_pipeline("eqtune")))
    for height, width in ((3, 4), (8, 9), (13, 32)):
        x = RNG.standard_normal((1, 16, height, width)).astype(np.float32)
        np.testing.assert_allclose(run(x)[0], torch.relu(function(torch.tensor(x))).numpy(), atol=1e-6)


@pytest.mark.parametrize(
    "module",
    [
        pooling(window=1),  # the last window might see padding alone,
        pooling(window=2, padding=(1, 1)),  # as might this one
        pooling(padding=(0, 0, 2, 2)),
        pooling(op.nn.avg_pool2d, count_include_pad=True, padding=(1, 1)),
        pooling(ceil_mode=False),
    ],
)
def test_others_stay(module: tvm.IRModule) -> None:
    assert PadPooling()(module).same_as(module)


def test_known_sizes_stay() -> None:
    x = relax.Var("x", relax.TensorType((1, 16, 8, 8), "float32"))
    builder = relax.BlockBuilder()
    with builder.function("main", [x]):
        builder.emit_func_output(builder.emit(op.nn.max_pool2d(x, (3, 3), strides=(2, 2), ceil_mode=True)))
    mod = builder.get()
    assert PadPooling()(mod).same_as(mod)
