"""Compare an imported model with the model that it came from: TVM's importers have silent errors."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import MismatchError
from ..machine import detect_target
from ..runtime import ModelRunner
from ..transform.apply_tuned import untuned_executable
from .imported import ImportedModel

__all__ = ["compare", "verify_import"]


def verify_import(
    imported: ImportedModel,
    run: Callable[..., list[NDArray[Any]]] | None = None,
    *,
    seed: int = 0,
    tolerance: float = 1e-4,
) -> float:
    """Run the module and its reference on random inputs; return the largest relative difference.

    Parameters
    ----------
    imported
        A model with a reference. Without one there is nothing to compare with, and the difference is zero.
    run
        Runs `imported.mod` on numpy arrays. By default it is compiled for the CPU as it is, which is slow to run for
        large models (ResNet-50 takes 3 s, VGG-19 20 s): hand in a tuned executable where there is one.
    seed
        Of the inputs.
    tolerance
        Largest difference accepted, relative to the largest magnitude in each output.

    Raises
    ------
    MismatchError
        The outputs differ by more.
    """
    if imported.reference is None:
        return 0.0
    inputs = imported.random_inputs(seed)
    expected = imported.reference(*inputs)
    run = run or ModelRunner(untuned_executable(imported.mod, detect_target()))
    absolute, relative = compare(run(*inputs), expected)
    if not relative <= tolerance:
        raise MismatchError(
            f"the import of {imported.name} computes something else than {imported.source}: outputs differ by "
            f"{relative:.2e} relative ({absolute:.2e} absolute), more than {tolerance:.0e}; the model is refused"
        )
    return relative


def compare(outputs: Sequence[NDArray[Any]], expected: Sequence[NDArray[Any]]) -> tuple[float, float]:
    """Largest absolute difference, and largest difference relative to the largest magnitude of its output.

    Both are infinite where counts, shapes or dtypes differ, or where one side is finite and the other is not.
    """
    if [(a.shape, a.dtype) for a in outputs] != [(b.shape, b.dtype) for b in expected]:
        return math.inf, math.inf
    absolute = relative = 0.0
    for got, want in zip(outputs, expected, strict=True):
        a, b = got.astype(np.float64), want.astype(np.float64)
        finite = np.isfinite(b)
        if not np.array_equal(a[~finite], b[~finite], equal_nan=True) or not np.isfinite(a[finite]).all():
            return math.inf, math.inf
        difference = float(np.max(np.abs(a[finite] - b[finite]), initial=0.0))
        scale = float(np.max(np.abs(b[finite]), initial=0.0))
        absolute = max(absolute, difference)
        relative = max(relative, difference / scale if scale else difference)
    return absolute, relative
