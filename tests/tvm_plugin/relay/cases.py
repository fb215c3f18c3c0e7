"""What the tests of operators share: a case, and random inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import tvm
import tvm_ffi
from numpy.typing import NDArray

from eqtune import relay

Array = NDArray[Any]


@dataclass(frozen=True)
class Case:
    """A function body in Relay, its inputs %a, %b, ..., and what it should compute."""

    body: str
    inputs: tuple[Array, ...]
    expected: Callable[..., Any]


class Random:
    """The inputs of one file's cases: the same whichever other files are collected."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(0)

    def f32(self, *shape: int, low: float = -2.0, high: float = 2.0) -> Array:
        return self.rng.uniform(low, high, shape).astype("float32")

    def i32(self, *shape: int, low: int = -9, high: int = 9, dtype: str = "int32") -> Array:
        return self.rng.integers(low, high, shape).astype(dtype)

    def flags(self, *shape: int) -> Array:
        return self.rng.integers(0, 2, shape).astype(bool)


def by_torch(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *arrays: function(*(torch.from_numpy(array) for array in arrays))


def assert_computes(case: Case, function: Callable[..., Array], rtol: float = 2e-5, atol: float = 2e-5) -> None:
    actual, expected = function(*case.inputs), np.asarray(case.expected(*case.inputs))
    assert actual.shape == expected.shape
    np.testing.assert_allclose(actual.astype("float64"), expected, rtol=rtol, atol=atol)


def not_read_back(mod: tvm.IRModule, names: Iterable[str]) -> list[str]:
    """The cases of a module that are another program when they are printed and read again."""
    again = relay.from_text(relay.astext(mod))
    functions = [(name, f"case{index}") for index, name in enumerate(names)]
    return [name for name, function in functions if not tvm_ffi.structural_equal(mod[function], again[function])]
