"""TVM's dtypes in numpy."""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["HALVES", "epsilon", "is_byte", "is_floating", "is_integer", "numpy_dtype"]

HALVES = ("float16", "bfloat16")
"""Floating-point types of 16 bits."""


def numpy_dtype(name: str) -> np.dtype[Any]:
    """The numpy dtype of a TVM dtype. Raises AttributeError for one that numpy does not have."""
    try:
        return np.dtype(name)
    except TypeError:
        import ml_dtypes  # bfloat16, float8_e4m3fn, int4, ...

        return np.dtype(getattr(ml_dtypes, name))


def is_floating(name: str) -> bool:
    """Whether a dtype is of floating-point numbers: numpy takes bfloat16 for no number at all."""
    return name.startswith(("float", "bfloat"))


def is_integer(name: str) -> bool:
    """Whether a dtype is of whole numbers, with or without a sign; bool is not."""
    return name.startswith(("int", "uint"))


def is_byte(name: str) -> bool:
    """Whether a dtype is of whole numbers of 8 bits."""
    return name in ("int8", "uint8")


def epsilon(name: str) -> float:
    """The distance from 1 to the next number of a floating-point dtype; 0 for other types."""
    if not is_floating(name):
        return 0.0
    import ml_dtypes

    return float(ml_dtypes.finfo(numpy_dtype(name)).eps)
