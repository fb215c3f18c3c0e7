"""TVM's dtypes in numpy."""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["numpy_dtype"]


def numpy_dtype(name: str) -> np.dtype[Any]:
    """The numpy dtype of a TVM dtype. Raises AttributeError for one that numpy does not have."""
    try:
        return np.dtype(name)
    except TypeError:
        import ml_dtypes  # bfloat16, float8_e4m3fn, int4, ...

        return np.dtype(getattr(ml_dtypes, name))
