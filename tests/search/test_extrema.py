"""Maxima and minima of rows of infinities, and their positions, also of the lowest integers: what numpy finds."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tvm
from tvm import relax

from eqtune.compile.executable import build_scheduled
from eqtune.compile.untuned import untuned_executable
from eqtune.machine import detect_target
from eqtune.runtime import ModelRunner
from eqtune.search.space.extrema import begin_with_infinity
from eqtune.tasks import lower_to_kernels
from eqtune.transform import ApplyTuned, LowerToKernels

op = relax.op
ROWS = np.random.default_rng(0).standard_normal((5, 40), dtype="float32")
ROWS[0], ROWS[1], ROWS[2, ::2] = -np.inf, np.inf, -np.inf
ROWS[3, [7, 21]], ROWS[4, [9, 30]] = 9, -9  # the first of two
IMAGE = np.full((1, 2, 8, 8), -np.inf, "float32")
IMAGE[0, 1, 3, 3] = 1.0

OPERATORS: dict[str, tuple[Any, Any, Any]] = {
    "max": (ROWS, lambda x: op.max(x, -1), ROWS.max(-1)),
    "min": (ROWS, lambda x: op.min(x, -1), ROWS.min(-1)),
    "argmax": (ROWS, lambda x: op.argmax(x, -1), ROWS.argmax(-1)),
    "argmin": (ROWS, lambda x: op.argmin(x, -1), ROWS.argmin(-1)),
    "float16": (ROWS.astype("float16"), lambda x: op.max(x, -1), ROWS.astype("float16").max(-1)),
    "argmax of bytes": (np.zeros((5, 40), "uint8"), lambda x: op.argmax(x, -1), np.zeros(5)),
    "argmin of integers": (np.full((5, 40), 2**31 - 1, "int32"), lambda x: op.argmin(x, -1), np.zeros(5)),
    "pool": (
        IMAGE,
        lambda x: op.nn.max_pool2d(x, (2, 2), (2, 2)),
        IMAGE.reshape(1, 2, 4, 2, 4, 2).max((3, 5)),
    ),
    "padded pool": (
        IMAGE,
        lambda x: op.nn.max_pool2d(x, (3, 3), (1, 1), (1, 1, 1, 1)),
        np.lib.stride_tricks.sliding_window_view(
            np.pad(IMAGE, ((0, 0), (0, 0), (1, 1), (1, 1)), constant_values=-np.inf), (3, 3), (2, 3)
        ).max((-1, -2)),
    ),
}


def model(given: Any, operator: Any) -> Any:
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType(given.shape, str(given.dtype)))
    with builder.function("main", [x]):
        with builder.dataflow():
            y = builder.emit_output(operator(x))
        builder.emit_func_output(y)
    return builder.get()


@pytest.mark.parametrize("name", OPERATORS)
def test_infinities_are_found(name: str) -> None:
    given, operator, want = OPERATORS[name]
    mod, target = model(given, operator), detect_target()
    with target:
        kernels = ApplyTuned(estimate=True)(LowerToKernels()(mod))
    for built in (
        untuned_executable(mod, target),
        untuned_executable(mod, target, plain=True),
        build_scheduled(kernels, target),
        relax.build(mod, target, relax_pipeline="eqtune"),
    ):
        np.testing.assert_array_equal(ModelRunner(built)(given)[0], want)


def test_a_mask_of_the_lowest_number_stays_finite() -> None:
    """A row that is masked as a whole has equal probabilities, as in PyTorch, and no NaN."""
    lowest = np.finfo("float32").min

    def masked(x: Any) -> Any:
        return op.nn.softmax(op.where(op.greater(x, relax.const(100.0)), x, relax.const(lowest)), -1)

    rows = np.zeros((4, 16), "float32")
    mod, target = model(rows, masked), detect_target()
    built = relax.build(mod, target, relax_pipeline="eqtune")
    np.testing.assert_allclose(ModelRunner(built)(rows)[0], np.full_like(rows, 1 / 16), rtol=1e-6)


@pytest.mark.parametrize(("dtype", "reduce"), [("float32", "max"), ("float32", "min"), ("float16", "max")])
def test_padding_by_the_lowest_number_stays_finite(dtype: str, reduce: str) -> None:
    """Rows of nothing else have it for their largest element, and so do those of minus infinity that end with it."""
    limit = float(np.finfo(dtype).min if reduce == "max" else np.finfo(dtype).max)
    rows = np.random.default_rng(0).standard_normal((3, 16)).astype(dtype)
    rows[1] = np.inf * limit

    def padded(x: Any) -> Any:
        return getattr(op, reduce)(op.nn.pad(x, [0, 1, 0, 2], pad_value=limit), -1)

    want = getattr(np.pad(rows, [(0, 1), (0, 2)], constant_values=limit), reduce)(-1)
    mod, target = model(rows, padded), detect_target()
    with target:
        kernels = ApplyTuned(estimate=True)(LowerToKernels()(mod))
    for built in (untuned_executable(mod, target), build_scheduled(kernels, target)):
        np.testing.assert_array_equal(ModelRunner(built)(rows)[0], want)


def test_sums_and_maxima_of_integers_stay() -> None:
    target = detect_target()
    for operator, dtype in ((op.sum, "float32"), (op.max, "int32")):
        mod = lower_to_kernels(model(np.zeros((5, 40), dtype), lambda x, reduce=operator: reduce(x, -1)), target)
        (kernel,) = [function for function in mod.functions.values() if isinstance(function, tvm.tirx.PrimFunc)]
        assert begin_with_infinity(kernel).same_as(kernel)
