"""Seeded weights and inputs: the same numbers in every process, on every back end.

Each array has its own stream, seeded by the model's seed and the array's name, so that adding a layer to a model
leaves all other weights alone. Arrays are drawn as float32 in one pass: VGG-19's 575 MB take well under a second.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

__all__ = ["fan_in_scaled", "integers", "normal", "uniform"]

FloatArray = npt.NDArray[np.float32]


def _generator(seed: int, name: str) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, *name.encode()])))


def _aligned(shape: tuple[int, ...]) -> FloatArray:
    """Uninitialised float32 array on a 64-byte boundary, without which TVM cannot share it (numpy gives 16)."""
    alignment = 64
    size = 4 * math.prod(shape)
    buffer = np.empty(size + alignment, np.uint8)
    start = -buffer.ctypes.data % alignment
    return buffer[start : start + size].view(np.float32).reshape(shape)


def uniform(seed: int, name: str, shape: Sequence[int], low: float, high: float) -> FloatArray:
    """Array of `shape`, uniform in [low, high)."""
    array = _aligned(tuple(shape))
    _generator(seed, name).random(dtype=np.float32, out=array)
    array *= np.float32(high - low)
    array += np.float32(low)
    return array


def normal(seed: int, name: str, shape: Sequence[int]) -> FloatArray:
    """Array of `shape` with zero mean and unit variance."""
    array = _aligned(tuple(shape))
    return _generator(seed, name).standard_normal(dtype=np.float32, out=array)


def integers(seed: int, name: str, shape: Sequence[int], high: int) -> npt.NDArray[np.int64]:
    """Array of `shape` with whole numbers in [0, high)."""
    return _generator(seed, name).integers(0, high, size=tuple(shape), dtype=np.int64)


def fan_in_scaled(seed: int, name: str, shape: Sequence[int], fan_in: int, gain: float = math.sqrt(2.0)) -> FloatArray:
    """Weight whose layer keeps the mean square of its input times `gain` squared.

    The default gain makes up for a ReLU before the layer (He et al., "Delving Deep into Rectifiers", ICCV 2015,
    equation 10); 1.0 suits an input that was not rectified.
    """
    bound = gain * math.sqrt(3.0 / fan_in)
    return uniform(seed, name, shape, -bound, bound)
