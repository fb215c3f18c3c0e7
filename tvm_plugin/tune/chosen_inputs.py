"""Inputs for which a model chooses something, clearly: of no boxes, nothing can be compared."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..dtypes import is_floating
from ..frontends import ImportedModel
from ..frontends.verify import is_settled
from ..runtime import Model

__all__ = ["NOTHING_CHOSEN", "inputs_that_choose"]

FACTORS = (1.0, 4.0, 16.0, 64.0, 255.0)
"""Of random numbers: a detector sees little in noise, more where it is loud; some models take bytes as floats."""

SEEDS = 2
"""So many times each."""

TOLERANCE = 1e-4
"""What changes by less, relative to the largest value of an output, does not count as changed."""

NOTHING_CHOSEN = (
    f"nothing is chosen for any of {len(FACTORS) * SEEDS} random inputs: what becomes of a choice is NOT COMPARED"
)
"""Said of such a model."""

Inputs = list[NDArray[Any]]


def inputs_that_choose(imported: ImportedModel, evaluate: Model, seed: int) -> tuple[Inputs, bool]:
    """Random inputs for a model whose outputs are as long as it chooses, and whether it chooses anything.

    The first for which no output is empty, and for which it chooses the same where inputs differ by roundings; where
    there are none, the first for which no output is empty; or else just random ones.

    Parameters
    ----------
    imported : ImportedModel
    evaluate : Model
        What it should compute.
    seed : int
        Of the first inputs, and of the changes.
    """
    unsettled: Inputs | None = None
    for inputs in _candidates(imported, seed):
        outputs = evaluate(*inputs)
        if not all(output.size for output in outputs):
            continue
        if is_settled(evaluate, inputs, outputs, TOLERANCE, seed):
            return inputs, True
        unsettled = unsettled or inputs
    return (unsettled, True) if unsettled else (list(imported.random_inputs(seed)), False)


def _candidates(imported: ImportedModel, seed: int) -> Iterator[Inputs]:
    for factor in FACTORS:
        for more in range(SEEDS):
            yield _louder(imported.random_inputs(seed + more), factor)


def _louder(inputs: Sequence[NDArray[Any]], factor: float) -> Inputs:
    return [np.asarray(array * factor, array.dtype) if is_floating(str(array.dtype)) else array for array in inputs]
