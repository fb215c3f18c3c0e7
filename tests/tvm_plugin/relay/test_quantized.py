"""The qnn dialect, compiled by TVM and compared with float64."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import tvm
from scipy import special
from tvm import relax

from eqtune import relay
from eqtune.relay.operators import OPERATORS

from .cases import Array, Case, Random, assert_computes, not_read_back

RANDOM = Random()
f32, i32 = RANDOM.f32, RANDOM.i32

FLOAT_FUNCTIONS: dict[str, Callable[[Array], Array]] = {
    "abs": np.abs,
    "erf": special.erf,
    "exp": np.exp,
    "log": np.log,
    "rsqrt": lambda x: x**-0.5,
    "sigmoid": special.expit,
    "sqrt": np.sqrt,
    "tanh": np.tanh,
    "hardswish": lambda x: x * np.clip(x + 3, 0, 6) / 6,
    "leaky_relu": lambda x: np.where(x > 0, x, 0.1 * x),
    "softmax": lambda x: special.softmax(x, -1),
}


def quantized_cases() -> dict[str, Case]:
    """References in float64, with the scales and zero points as literals of the text."""

    def away(x: Array) -> Array:
        return np.sign(x) * np.floor(np.abs(x) + 0.5)

    def q(real: Array, scale: float, zero: int, dtype: str = "int8", tie: Callable[[Array], Array] = away) -> Array:
        limits = np.iinfo(dtype)
        return np.clip(tie(real / scale) + zero, limits.min, limits.max).astype(dtype)

    def up(x: Array) -> Array:
        return np.floor(x + 0.5)

    a, b = i32(2, 8, low=-100, high=100, dtype="int8"), i32(2, 8, low=-100, high=100, dtype="int8")
    image, kernel = (
        i32(1, 3, 6, 6, low=-50, high=50, dtype="int8"),
        i32(4, 3, 3, 3, low=-50, high=50, dtype="int8"),
    )
    ab = "0.5f, 3, 0.25f, -2, 0.75f, 1"
    channels = image[:, :, :3, :3].copy()

    def real(x: Array, scale: float, zero: int) -> Array:
        return scale * (x.astype("float64") - zero)

    def rescaled(x: Array, scale: float, zero: int) -> Array:
        return up(real(x, scale, zero) / 0.75)

    def through(name: str, function: Callable[[Array], Array], attrs: str = "") -> Case:
        body = f"qnn.{name}(%a, 0.03125f, 2, 0.0078125f, -5{attrs})"
        return Case(
            body,
            (i32(2, 8, low=3 if name in ("log", "rsqrt", "sqrt") else -100, high=100, dtype="int8"),),
            lambda x: q(function(real(x, 0.03125, 2)), 0.0078125, -5),
        )

    return {
        "qnn.quantize": Case(
            'qnn.quantize(%a, 0.25f, 3, out_dtype="uint8")',
            (f32(2, 3, 4, low=-40, high=40),),
            lambda x: q(x, 0.25, 3, "uint8"),
        ),
        "qnn.quantize_ties": Case(
            'qnn.quantize(%a, 2f, 0, out_dtype="int8")',
            (np.array([-5, -3, -1, 1, 3, 5, np.inf], "float32"),),
            lambda x: np.array([-3, -2, -1, 1, 2, 3, 127]),
        ),
        "qnn.dequantize": Case("qnn.dequantize(%a, 0.25f, 3)", (a,), lambda x: real(x, 0.25, 3)),
        "qnn.requantize": Case(
            'qnn.requantize(%a, %b, 0, 0.75f, 1, axis=1, rounding="TONEAREST", out_dtype="int8")',
            (i32(2, 3, low=-500, high=500), np.array([0.5, 0.25, 0.125], "float32")),
            lambda x, s: q(x * s.astype("float64"), 0.75, 1),
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
        "qnn.conv2d_transpose": Case(
            'qnn.conv2d_transpose(%a, %b, 3, 1, 0.5f, 0.25f, strides=[2, 2], kernel_layout="IOHW", out_dtype="int32")',
            (image, i32(3, 4, 3, 3, low=-50, high=50, dtype="int8")),
            lambda x, w: F.conv_transpose2d(
                torch.from_numpy(real(x, 1, 3)), torch.from_numpy(real(w, 1, 1)), stride=2
            ).numpy(),
        ),
        "qnn.contrib_dense_pack": Case(
            'qnn.contrib_dense_pack(%a, %b, 3, 1, 0.5f, 0.25f, units=4, weight_layout="NC2n", out_dtype="int32")',
            (a, i32(2, 8, 2, low=-50, high=50, dtype="int8")),
            lambda x, w: real(x, 1, 3) @ real(w.transpose(1, 0, 2).reshape(8, 4), 1, 1),
        ),
        "qnn.avg_pool2d": Case(
            "qnn.avg_pool2d(%a, 0.5f, 3, 0.5f, 3, pool_size=[2, 2], strides=[2, 2])",
            (i32(1, 3, 6, 6, low=0, high=100, dtype="int8"),),
            lambda x: x.astype("int32").reshape(1, 3, 3, 2, 3, 2).sum((3, 5)) // 4,
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
        **{
            f"qnn.{name}": through(name, function, ", alpha=0.1f" if name == "leaky_relu" else "")
            for name, function in FLOAT_FUNCTIONS.items()
        },
        "qnn.mul_of_channels": Case(  # as many as columns
            "qnn.mul(%a, %b, %c, 3, %c, -2, 0.5f, 1, lhs_axis=1, rhs_axis=1)",
            (channels, channels[:, ::-1].copy(), np.array([0.5, 0.25, 0.125], "float32")),
            lambda x, y, s: q(real(x, 1, 3) * real(y, 1, -2) * (s * s)[:, None, None], 0.5, 1, tie=up),
        ),
        "qnn.requantize_in_float32": Case(
            'qnn.requantize(%a, 0.5f, 0, 1f, 3, rounding="TONEAREST", compute_dtype="float32", out_dtype="int8")',
            (np.array([-9, -7, -3, -1, 0, 1, 3], "int32"),),
            lambda x: away(0.5 * x + 3),
        ),
    }


CASES = quantized_cases()


@pytest.fixture(scope="module")
def functions(compile_cases: Callable[..., dict[str, Callable[..., Array]]]) -> dict[str, Callable[..., Array]]:
    return compile_cases(CASES)


@pytest.mark.parametrize("name", CASES)
def test_operator_computes_what_its_reference_computes(name: str, functions: dict[str, Callable[..., Array]]) -> None:
    # One unit of an 8-bit result is a rounding of the float32 computation before it.
    through_float = name.removeprefix("qnn.") in FLOAT_FUNCTIONS
    assert_computes(CASES[name], functions[name], rtol=1e-6, atol=1.0 if through_float else 1e-5)


def test_every_quantized_operator_has_a_case() -> None:
    assert {name for name in OPERATORS if name.startswith("qnn.")} - set(CASES) == set()


def test_scales_of_channels_along_two_axes_are_refused() -> None:
    text = """def @main(%x: Tensor[(3, 3), int8], %s: Tensor[(3), float32]) {
      qnn.mul(%x, %x, %s, 0, %s, 0, 1f, 0, lhs_axis=0, rhs_axis=1)
    }"""
    with pytest.raises(relay.RelayError, match="scales of channels along the axes 0 and 1; give one"):
        relay.from_text(text)


def test_printed_operators_are_read_back_as_the_same(convert_cases: Callable[..., tvm.IRModule]) -> None:
    assert not_read_back(convert_cases(CASES), CASES) == []


def rescale(accumulated: Array, ratio: float, zero: int) -> Array:
    """As integer arithmetic has it: round half up after the product, then add the zero point and saturate."""
    return np.clip(np.floor(accumulated * ratio + 0.5) + zero, -128, 127).astype("int8")


def test_a_quantized_network_gives_the_integers_of_its_reference() -> None:
    """Convolution, bias and rescaling, with one scale for each channel; a residual; pooling; a product."""
    weight, bias = i32(4, 4, 3, 3, low=-127, high=128, dtype="int8"), i32(4, low=-2000, high=2000)
    classes = i32(5, 4, low=-127, high=128, dtype="int8")
    scales = np.array([0.001, 0.002, 0.003, 0.004])
    data = i32(1, 4, 6, 6, low=-128, high=128, dtype="int8")
    text = """#[version = "0.0.5"]
    def @main(%x: Tensor[(1, 4, 6, 6), int8], %w: Tensor[(4, 4, 3, 3), int8], %b: Tensor[(4), int32],
              %s: Tensor[(4), float32], %c: Tensor[(5, 4), int8]) -> Tensor[(1, 5), int8] {
      %0 = nn.pad(%x, 3f, pad_width=[[0, 0], [0, 0], [1, 1], [1, 1]]);
      %1 = qnn.conv2d(%0, %w, 3, 0, 0.5f, %s, channels=4, kernel_size=[3, 3], out_dtype="int32");
      %2 = nn.bias_add(%1, %b);
      %3 = qnn.requantize(%2, %s, 0, 1f, -5, axis=1, out_dtype="int8");
      %4 = clip(%3, a_min=-5f, a_max=127f);
      %5 = qnn.add(%4, %x, 0.5f, -5, 0.25f, 3, 0.5f, -7);
      %6 = nn.avg_pool2d(cast(%5, dtype="int32"), pool_size=[6, 6]);
      %7 = cast(clip(reshape(%6, newshape=[1, 4]), a_min=-128f, a_max=127f), dtype="int8");
      %8 = qnn.dense(%7, %c, -7, 0, 0.5f, 0.01f, units=5, out_dtype="int32");
      qnn.requantize(%8, 0.005f, 0, 0.0625f, 4, out_dtype="int8")
    }"""
    params = {"w": weight, "b": bias, "s": scales.astype("float32"), "c": classes}
    machine = relax.VirtualMachine(tvm.compile(relay.from_text(text, params), "llvm"), tvm.cpu())
    actual = machine["main"](tvm.runtime.tensor(data)).numpy()

    wide = torch.from_numpy(np.pad(data.astype("int64") - 3, [(0, 0), (0, 0), (1, 1), (1, 1)]))
    sums = F.conv2d(wide, torch.from_numpy(weight.astype("int64"))).numpy() + bias[:, None, None]
    ratios = scales.astype("float32").astype("float64")[:, None, None]
    layer = np.maximum(rescale(sums, ratios, -5), -5).astype("int64")
    left = np.floor((layer + 5) * 1.0 + 0.5) - 7
    right = np.floor((data.astype("int64") - 3) * 0.5 + 0.5) - 7
    added = np.clip(left + right + 7, -128, 127).astype("int64")
    pooled = np.trunc(added.sum((2, 3)) / 36).astype("int64")
    logits = (pooled + 7) @ classes.astype("int64").T
    expected = rescale(logits, float(np.float32(0.005)) / 0.0625, 4)
    assert len(np.unique(layer)) > 20
    np.testing.assert_array_equal(actual, expected)
