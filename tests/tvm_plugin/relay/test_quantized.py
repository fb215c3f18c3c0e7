"""The qnn dialect, compiled by TVM and compared with float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import tvm
import tvm_ffi
from numpy.typing import NDArray
from scipy import special

from eqtune import relay
from eqtune.relay.operators import OPERATORS

Array = NDArray[Any]
RNG = np.random.default_rng(0)


@dataclass(frozen=True)
class Case:
    """A function body in Relay, its inputs %a, %b, ..., and what it should compute."""

    body: str
    inputs: tuple[Array, ...]
    expected: Callable[..., Any]


def integers(*shape: int, low: int, high: int, dtype: str = "int32") -> Array:
    return RNG.integers(low, high, shape).astype(dtype)


def quantized_cases() -> dict[str, Case]:
    """References in float64, with the scales and zero points as literals of the text."""

    def q(real: Array, scale: float, zero: int, dtype: str = "int8", tie: Callable[[Array], Array] = np.round) -> Array:
        limits = np.iinfo(dtype)
        return np.clip(tie(real / scale) + zero, limits.min, limits.max).astype(dtype)

    def up(x: Array) -> Array:
        return np.floor(x + 0.5)

    a, b = integers(2, 8, low=-100, high=100, dtype="int8"), integers(2, 8, low=-100, high=100, dtype="int8")
    image, kernel = (
        integers(1, 3, 6, 6, low=-50, high=50, dtype="int8"),
        integers(4, 3, 3, 3, low=-50, high=50, dtype="int8"),
    )
    ab = "0.5f, 3, 0.25f, -2, 0.75f, 1"

    def real(x: Array, scale: float, zero: int) -> Array:
        return scale * (x.astype("float64") - zero)

    def rescaled(x: Array, scale: float, zero: int) -> Array:
        return up(real(x, scale, zero) / 0.75)

    def through(name: str, function: Callable[[Array], Array], attrs: str = "") -> Case:
        body = f"qnn.{name}(%a, 0.03125f, 2, 0.0078125f, -5{attrs})"
        return Case(
            body,
            (integers(2, 8, low=3, high=100, dtype="int8"),),
            lambda x: q(function(real(x, 0.03125, 2)), 0.0078125, -5),
        )

    functions: dict[str, Callable[[Array], Array]] = {
        "abs": np.abs,
        "erf": special.erf,
        "exp": np.exp,
        "log": np.log,
        "rsqrt": lambda x: x**-0.5,
        "sigmoid": special.expit,
        "sqrt": np.sqrt,
        "tanh": np.tanh,
        "hardswish": lambda x: x * np.clip(x + 3, 0, 6) / 6,
    }
    return {
        "qnn.quantize": Case(
            'qnn.quantize(%a, 0.25f, 3, out_dtype="uint8")',
            (RNG.uniform(-40, 40, (2, 3, 4)).astype("float32"),),
            lambda x: q(x, 0.25, 3, "uint8"),
        ),
        "qnn.dequantize": Case("qnn.dequantize(%a, 0.25f, 3)", (a,), lambda x: real(x, 0.25, 3)),
        "qnn.requantize": Case(
            'qnn.requantize(%a, %b, 0, 0.75f, 1, axis=1, rounding="TONEAREST", out_dtype="int8")',
            (integers(2, 3, low=-500, high=500), np.array([0.5, 0.25, 0.125], "float32")),
            lambda x, s: q(x * s.astype("float64"), 0.75, 1, tie=lambda v: np.sign(v) * np.floor(np.abs(v) + 0.5)),
        ),
        "qnn.requantize_upward": Case(
            'qnn.requantize(%a, 0.5f, 3, 0.75f, 1, out_dtype="uint8")',
            (a,),
            lambda x: q(real(x, 0.5, 3), 0.75, 1, "uint8", up),
        ),
        "qnn.conv2d": Case(
            "qnn.conv2d(%a, %b, 3, 1, 0.5f, 0.25f, padding=[1, 1, 1, 1], channels=4, kernel_size=[3, 3], "
            'out_dtype="int32")',
            (image, kernel),
            lambda x, w: F.conv2d(torch.from_numpy(real(x, 1, 3)), torch.from_numpy(real(w, 1, 1)), padding=1).numpy(),
        ),
        "qnn.dense": Case(
            'qnn.dense(%a, %b, 3, 1, 0.5f, 0.25f, units=2, out_dtype="int32")',
            (a, b),
            lambda x, w: real(x, 1, 3) @ real(w, 1, 1).T,
        ),
        "qnn.batch_matmul": Case(
            'qnn.batch_matmul(%a, %b, 3, 1, 0.5f, 0.25f, out_dtype="int32")',
            (a.reshape(1, 2, 8), b.reshape(1, 2, 8)),
            lambda x, y: real(x, 1, 3) @ real(y, 1, 1).swapaxes(1, 2),
        ),
        "qnn.add": Case(
            f"qnn.add(%a, %b, {ab})",
            (a, b),
            lambda x, y: np.clip(rescaled(x, 0.5, 3) + rescaled(y, 0.25, -2) + 1, -128, 127),
        ),
        "qnn.subtract": Case(
            f"qnn.subtract(%a, %b, {ab})",
            (a, b),
            lambda x, y: np.clip(rescaled(x, 0.5, 3) - rescaled(y, 0.25, -2) + 1, -128, 127),
        ),
        "qnn.mul": Case(
            f"qnn.mul(%a, %b, {ab})", (a, b), lambda x, y: q(real(x, 0.5, 3) * real(y, 0.25, -2), 0.75, 1, tie=up)
        ),
        "qnn.concatenate": Case(
            "qnn.concatenate((%a, %b), (0.5f, 0.25f), (3, -2), 0.75f, 1, axis=1)",
            (a, b),
            lambda x, y: q(np.concatenate([real(x, 0.5, 3), real(y, 0.25, -2)], 1), 0.75, 1, tie=up),
        ),
        "qnn.leaky_relu": through("leaky_relu", lambda x: np.where(x > 0, x, 0.1 * x), ", alpha=0.1f"),
        "qnn.softmax": through("softmax", lambda x: special.softmax(x, -1)),
        **{f"qnn.{name}": through(name, function) for name, function in functions.items()},
    }


CASES = quantized_cases()


@pytest.fixture(scope="module")
def functions(compile_cases: Callable[..., dict[str, Callable[..., Array]]]) -> dict[str, Callable[..., Array]]:
    return compile_cases(CASES)


@pytest.mark.parametrize("name", CASES)
def test_operator_computes_what_its_reference_computes(name: str, functions: dict[str, Callable[..., Array]]) -> None:
    case = CASES[name]
    actual, expected = functions[name](*case.inputs), np.asarray(case.expected(*case.inputs))
    assert actual.shape == expected.shape
    # One unit of an 8-bit result is a rounding of the float32 computation before it.
    tolerance = 1.0 if actual.dtype.itemsize == 1 else 1e-5
    np.testing.assert_allclose(actual.astype("float64"), expected, atol=tolerance)


def test_every_quantized_operator_has_a_case() -> None:
    assert {name for name in OPERATORS if name.startswith("qnn.")} - set(CASES) == set()


def test_printed_operators_are_read_back_as_the_same(convert_cases: Callable[..., tvm.IRModule]) -> None:
    mod = convert_cases(CASES)
    again = relay.from_text(relay.astext(mod))
    different = [
        name
        for index, name in enumerate(CASES)
        if not tvm_ffi.structural_equal(mod[f"case{index}"], again[f"case{index}"])
    ]
    assert different == []
