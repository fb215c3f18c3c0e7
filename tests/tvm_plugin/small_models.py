"""Models of one input, for tests that tune them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import tvm
from tvm import relax


def module(shape: tuple[int, ...], body: Callable[[relax.BlockBuilder, relax.Var], relax.Expr]) -> tvm.IRModule:
    """A model of one input."""
    x = relax.Var("x", relax.TensorType(shape, "float32"))
    builder = relax.BlockBuilder()
    with builder.function("main", [x]):
        with builder.dataflow():
            y = builder.emit_output(body(builder, x))
        builder.emit_func_output(y)
    return builder.get()


def weight(*shape: int) -> relax.Expr:
    return relax.const(np.random.default_rng(0).standard_normal(shape).astype("float32"))
