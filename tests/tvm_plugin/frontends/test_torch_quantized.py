"""PyTorch models that were quantised for export multiply bytes, and give PyTorch's results."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tvm

from eqtune.compile.executable import build_executable
from eqtune.frontends import load_model
from eqtune.relax_ir.functions import operator, top_level_bindings
from eqtune.runtime import ModelRunner
from eqtune.tasks import lower_to_kernels
from eqtune.transform import FakeQuantizationToInteger, FoldWeights, NarrowProducts

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.unoptimised
pytest.importorskip("torch.ao.quantization.fx._decomposed")  # registers the operators
ops = torch.ops.quantized_decomposed
TARGET = tvm.target.Target("llvm")
BYTE, SIGNED = (0, 255, torch.uint8), (-127, 127, torch.int8)


class Network(torch.nn.Module):
    """A convolution with weights a channel, stored as integers; a dense layer whose weights are rounded when it runs.

    Parameters of the activation between are tensors, and its range is a bit short, as some back ends ask for.
    """

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.register_buffer("taps", torch.randint(-127, 128, (8, 3, 3, 3), generator=generator, dtype=torch.int8))
        self.register_buffer("scales", 0.001 + 0.001 * torch.rand(8, generator=generator))
        self.register_buffer("zeros", torch.zeros(8, dtype=torch.int64))
        self.bias = torch.nn.Parameter(torch.randn(8, generator=generator))
        self.dense = torch.nn.Parameter(0.2 * torch.randn(10, 128, generator=generator))
        self.register_buffer("scale", torch.tensor(0.02))
        self.register_buffer("zero", torch.tensor(60))

    def forward(self, x: Any) -> Any:
        x = ops.dequantize_per_tensor(ops.quantize_per_tensor(x, 0.03, 128, *BYTE), 0.03, 128, *BYTE)
        taps = ops.dequantize_per_channel(self.taps, self.scales, self.zeros, 0, *SIGNED)
        x = torch.relu(torch.nn.functional.conv2d(x, taps, self.bias, stride=2, padding=1))
        short = (0, 127, torch.uint8)
        stored = ops.quantize_per_tensor.tensor(x, self.scale, self.zero, *short)
        x = ops.dequantize_per_tensor.tensor(stored, self.scale, self.zero, *short)
        weight = ops.dequantize_per_tensor(ops.quantize_per_tensor(self.dense, 0.005, 0, *SIGNED), 0.005, 0, *SIGNED)
        x = torch.nn.functional.linear(torch.flatten(x, 1), weight)
        return ops.dequantize_per_tensor(ops.quantize_per_tensor(x, 0.02, 100, *BYTE), 0.02, 100, *BYTE)


def test_products_are_of_bytes_and_results_pytorchs() -> None:
    network = Network().eval()
    example = torch.randn(1, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    imported = load_model(network, example_inputs=(example,))
    passes = [FoldWeights(), FakeQuantizationToInteger(), FoldWeights(), NarrowProducts()]
    narrow = tvm.transform.Sequential(passes)(imported.mod)
    products = [
        b for b in top_level_bindings(narrow["main"]) if operator(b.value) in ("relax.nn.conv2d", "relax.matmul")
    ]
    assert [[str(arg.ty.dtype) for arg in b.value.args] for b in products] == [["uint8", "int8"]] * 2
    (actual,) = ModelRunner(build_executable(lower_to_kernels(narrow, TARGET), TARGET))(example.numpy())
    with torch.no_grad():
        expected = network(example).numpy()
    assert len(np.unique(expected)) > 5
    assert np.abs(actual - expected).max() <= 0.02 * 1.01  # a step of the last scale


def half(x: Any) -> Any:
    return ops.dequantize_per_tensor(
        ops.quantize_per_tensor(x, 0.03, 64, *BYTE), 0.03, 64, *BYTE, out_dtype=torch.float16
    )


def of_half(x: Any) -> Any:
    stored = ops.quantize_per_tensor(x.half(), 0.02, 3, *SIGNED)
    return ops.dequantize_per_tensor(stored, 0.02, 3, *SIGNED)


def without_zeros(x: Any) -> Any:
    scales = torch.full((5,), 0.02)
    stored = ops.quantize_per_channel(x, scales, torch.zeros(5, dtype=torch.int64), 1, *SIGNED)
    return ops.dequantize_per_channel(stored, scales, None, 1, *SIGNED)


def wide(x: Any) -> Any:
    scales, zeros, limits = torch.linspace(0.001, 0.002, 3), torch.arange(3), (-1000, 900, torch.int32)
    stored = ops.quantize_per_channel(x, scales, zeros, 0, *limits)
    return ops.dequantize_per_channel(stored, scales, zeros, 0, *limits)


@pytest.mark.parametrize("body", [half, of_half, without_zeros, wide])
def test_each_argument_has_its_effect(body: Any) -> None:
    class Body(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            return body(x)

    x = torch.randn(3, 5, generator=torch.Generator().manual_seed(0))
    imported = load_model(Body().eval(), example_inputs=(x,))
    mod = tvm.transform.Sequential([FoldWeights(), FakeQuantizationToInteger()])(imported.mod)
    (actual,) = ModelRunner(build_executable(lower_to_kernels(mod, TARGET), TARGET))(x.numpy())
    expected = body(x).numpy()
    assert actual.dtype == expected.dtype
    np.testing.assert_allclose(actual, expected, atol=1e-3)


class Dynamic(torch.nn.Module):
    """A dense layer whose inputs are quantised by what they are, as exporters of dynamic quantisation write it."""

    def __init__(self, symmetric: bool) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.register_buffer("weight", torch.randint(-127, 128, (24, 64), generator=generator, dtype=torch.int8))
        self.register_buffer("scales", 0.001 + 0.001 * torch.rand(24, generator=generator))
        self.register_buffer("zeros", torch.zeros(24, dtype=torch.int64))
        self.choose = ops.choose_qparams_symmetric if symmetric else ops.choose_qparams
        self.stored = (-128, 127, torch.int8) if symmetric else BYTE

    def forward(self, x: Any) -> Any:
        low, high, dtype = self.stored
        scale, zero = self.choose(x, low, high, 1e-6, dtype)
        bytes_ = ops.quantize_per_tensor.tensor(x, scale, zero, *self.stored)
        real = ops.dequantize_per_tensor.tensor(bytes_, scale, zero, *self.stored)
        weight = ops.dequantize_per_channel(self.weight, self.scales, self.zeros, 0, *SIGNED)
        return torch.nn.functional.linear(real, weight), scale, zero


def narrowed(mod: tvm.IRModule) -> tvm.IRModule:
    passes = [FoldWeights(), FakeQuantizationToInteger(), FoldWeights(), NarrowProducts()]
    return tvm.transform.Sequential(passes)(mod)


def products_of(mod: tvm.IRModule) -> list[list[str]]:
    """The dtypes of the operands of each matrix product."""
    bindings = top_level_bindings(mod["main"])
    return [[str(arg.ty.dtype) for arg in b.value.args] for b in bindings if operator(b.value) == "relax.matmul"]


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("scale", [1.0, 0.0])
def test_scales_of_what_comes_multiply_bytes_too(symmetric: bool, scale: float) -> None:
    network, generator = Dynamic(symmetric).eval(), torch.Generator().manual_seed(1)
    x = scale * (torch.randn(2, 3, 64, generator=generator) + 0.3)
    imported = load_model(network, example_inputs=(x,))
    assert products_of(narrowed(imported.mod)) == [["int8" if symmetric else "uint8", "int8"]]
    found = ModelRunner(build_executable(lower_to_kernels(narrowed(imported.mod), TARGET), TARGET))(x.numpy())
    for got, want in zip(found, network(x), strict=True):
        assert got.dtype == want.numpy().dtype
        np.testing.assert_allclose(got, want.numpy(), rtol=1e-4, atol=1e-4)


def test_products_of_bytes_that_pytorch_sums_in_32_bits() -> None:
    class Model(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            return torch._int_mm(x, weight)

    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randint(-128, 128, shape, generator=generator).to(torch.int8) for shape in ((32, 64), (64, 16)))
    imported = load_model(Model(), example_inputs=(x,))
    assert products_of(narrowed(imported.mod)) == [["int8", "int8"]]
    (got,) = ModelRunner(build_executable(lower_to_kernels(imported.mod, TARGET), TARGET))(x.numpy())
    np.testing.assert_array_equal(got, Model()(x).numpy())
