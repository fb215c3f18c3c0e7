"""Compare an imported model with the model that it came from: TVM's importers have silent errors."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..compile.untuned import untuned_executable
from ..errors import MismatchError
from ..machine import detect_target
from ..runtime import ModelRunner
from .imported import ImportedModel

__all__ = ["CHANGE", "compare", "is_settled", "sensitivity", "undecided", "verify_import"]

CHANGES = 8
"""How often inputs are changed to find ties; each time, one in two shows."""

CHANGE = 4e-6
"""Of an input, relative: more than what sums in another order change."""

MOST_UNDECIDED = 0.05
"""Share of an output's places."""


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
        Runs `imported.mod` on numpy arrays. By default it is compiled for this machine's CPU with plain schedules.
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
    run = run or ModelRunner(untuned_executable(imported.mod, detect_target(), plain=True))
    absolute, relative = compare(run(*inputs), expected)
    if not relative <= tolerance:
        raise MismatchError(
            f"the import of {imported.name} computes something else than {imported.source}: outputs differ by "
            f"{relative:.2e} relative ({absolute:.2e} absolute), more than {tolerance:.0e}; the model is refused"
        )
    return relative


def compare(
    outputs: Sequence[NDArray[Any]], expected: Sequence[NDArray[Any]], undecided: Sequence[NDArray[Any]] = ()
) -> tuple[float, float]:
    """Largest absolute difference, and largest difference relative to the largest magnitude of its output.

    Both are infinite where counts, shapes or dtypes differ, or where one side is finite and the other is not. Places
    that are `undecided` (see the function) are left out. An output of subnormal numbers alone counts as one of zeros,
    of which the difference is relative to 1: some code flushes such numbers to zero.
    """
    if [(a.shape, a.dtype) for a in outputs] != [(b.shape, b.dtype) for b in expected]:
        return math.inf, math.inf
    absolute = relative = 0.0
    for index, (got, want) in enumerate(zip(outputs, expected, strict=True)):
        decided: Any = ~undecided[index] if undecided else ...
        a, b = got[decided].astype(np.float64), want[decided].astype(np.float64)
        finite = np.isfinite(b)
        if not np.array_equal(a[~finite], b[~finite], equal_nan=True) or not np.isfinite(a[finite]).all():
            return math.inf, math.inf
        difference = float(np.max(np.abs(a[finite] - b[finite]), initial=0.0))
        scale = float(np.max(np.abs(b[finite]), initial=0.0))
        absolute = max(absolute, difference)
        least = float(np.finfo(want.dtype).tiny) if want.dtype in (np.float32, np.float64) else 0.0
        relative = max(relative, difference / scale if scale > least else difference)
    return absolute, relative


def undecided(
    evaluate: Callable[..., list[NDArray[Any]]],
    inputs: Sequence[NDArray[Any]],
    expected: Sequence[NDArray[Any]],
    tolerance: float,
    seed: int = 0,
) -> list[NDArray[Any]]:
    """For each output, where `evaluate` itself gives something else for inputs that differ by roundings.

    The places of the largest values, and what is looked up there, are such outputs where two values are nearly equal:
    one order is as right as the other. An output most of whose places are decided that way is not judged so: nowhere;
    and none is where some have another shape then, of a model that chooses more or fewer.

    Parameters
    ----------
    evaluate : callable
        What the model should compute.
    inputs, expected : sequence of ndarray
        What `evaluate` made of the inputs.
    tolerance : float
        Smaller changes are none, relative to the largest magnitude of the output.
    seed : int
        Of the changes to the inputs.
    """
    places = _moved(evaluate, inputs, expected, tolerance, seed)
    if places is None:
        return [np.zeros(want.shape, bool) for want in expected]
    return [place if _are_few(place) else np.zeros(place.shape, bool) for place in places]


def is_settled(
    evaluate: Callable[..., list[NDArray[Any]]],
    inputs: Sequence[NDArray[Any]],
    expected: Sequence[NDArray[Any]],
    tolerance: float,
    seed: int = 0,
) -> bool:
    """Whether `evaluate` gives the same, but for few places, for inputs that differ by roundings: as many of all.

    Arguments are as those of `undecided`.
    """
    places = _moved(evaluate, inputs, expected, tolerance, seed)
    return places is not None and all(map(_are_few, places))


def _are_few(places: NDArray[Any]) -> bool:
    return not places.size or bool(places.mean() <= MOST_UNDECIDED)


def _moved(
    evaluate: Callable[..., list[NDArray[Any]]],
    inputs: Sequence[NDArray[Any]],
    expected: Sequence[NDArray[Any]],
    tolerance: float,
    seed: int,
) -> list[NDArray[Any]] | None:
    """For each output, where it changes; None where there are outputs of another shape."""
    generator = np.random.default_rng(seed)
    places = [np.zeros(want.shape, bool) for want in expected]
    for _ in range(CHANGES):
        outputs = evaluate(*[_changed(array, generator) for array in inputs])
        if any(got.shape != want.shape for got, want in zip(outputs, expected, strict=True)):
            return None
        for place, got, want in zip(places, outputs, expected, strict=True):
            limit = tolerance * np.max(np.abs(want[np.isfinite(want)]), initial=0.0)
            with np.errstate(invalid="ignore"):
                same = np.abs(got.astype(np.float64) - want.astype(np.float64)) <= limit
            place |= ~(same | (got == want))
    return places


def sensitivity(
    evaluate: Callable[..., list[NDArray[Any]]],
    inputs: Sequence[NDArray[Any]],
    expected: Sequence[NDArray[Any]],
    undecided: Sequence[NDArray[Any]] = (),
    seed: int = 0,
) -> float:
    """How far the outputs move, relative to the largest, where the inputs are changed by roundings (`CHANGE`).

    Places that are `undecided` (see the function) are left out.
    """
    generator = np.random.default_rng(seed)
    _, relative = compare(evaluate(*[_changed(array, generator) for array in inputs]), expected, undecided)
    return relative


def _changed(array: NDArray[Any], generator: np.random.Generator) -> NDArray[Any]:
    if array.dtype.name not in ("float32", "float64"):
        return array
    return np.asarray(array * (1 + CHANGE * generator.uniform(-1, 1, array.shape)), array.dtype)
