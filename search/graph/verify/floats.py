"""Floating-point arithmetic, in which a rule's rounding is seen."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from scipy import special

from .evaluate import Array

__all__ = ["Floats"]


_UNARY: Mapping[str, Callable[[Array], Array]] = {
    "abs": np.abs,
    "ceil": np.ceil,
    "cos": np.cos,
    "erf": special.erf,
    "exp": np.exp,
    "floor": np.floor,
    "gelu": lambda x: x * special.ndtr(x),
    "gelu_tanh": lambda x: (
        x * special.expit(2 * np.sqrt(2 / np.pi).astype(x.dtype) * (x + x**3 * x.dtype.type(0.044715)))
    ),
    "log": np.log,
    "negative": np.negative,
    "relu": lambda x: np.maximum(x, 0),
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "sigmoid": special.expit,
    "silu": lambda x: x * special.expit(x),
    "sin": np.sin,
    "sqrt": np.sqrt,
    "square": np.square,
    "tanh": np.tanh,
}

_REDUCE: Mapping[str, Callable[..., Array]] = {"sum": np.sum, "mean": np.mean, "max": np.max, "min": np.min}


class Floats:
    """numpy's arithmetic in one dtype; see `Algebra`."""

    lowest = -np.inf

    def __init__(self, dtype: Any = np.float32) -> None:
        self.dtype = np.dtype(dtype)

    def constant(self, value: float | int | bool) -> Array:
        """See `Algebra`."""
        return np.asarray(value, self.dtype)

    def unary(self, kind: str, x: Array) -> Array:
        """See `Algebra`."""
        return np.asarray(_UNARY[kind](x), self.dtype)

    def binary(self, kind: str, x: Array, y: Array) -> Array:
        """See `Algebra`."""
        return np.asarray(getattr(np, kind)(x, y), self.dtype)

    def matmul(self, x: Array, y: Array) -> Array:
        """See `Algebra`."""
        return x @ y

    def reduce(self, kind: str, x: Array) -> Array:
        """See `Algebra`."""
        return np.asarray(_REDUCE[kind](x, axis=-1), self.dtype)

    def softmax(self, x: Array) -> Array:
        """See `Algebra`."""
        return np.asarray(special.softmax(x, axis=-1), self.dtype)
