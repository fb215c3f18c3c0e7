"""Models of 16 bits. numpy has no bfloat16, so their weights and inputs take a way of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from tvm import relax

import eqtune
from eqtune.compile.untuned import untuned_executable
from eqtune.dtypes import epsilon, numpy_dtype
from eqtune.frontends import load_model, verify_import
from eqtune.frontends.torch.nodes import array_of_torch
from eqtune.machine import detect_target
from eqtune.relax_ir.constants import array_of, constant_of
from eqtune.runtime import ModelRunner
from eqtune.tasks import lower_to_kernels
from eqtune.transform import FoldWeights

torch = pytest.importorskip("torch")
nn = torch.nn


def test_weights_are_read_in_place_and_written_back() -> None:
    weight = np.arange(24).reshape(4, 6).astype(ml_dtypes.bfloat16)
    constant = relax.const(weight, "bfloat16")
    first, second = array_of(constant), array_of(constant)
    assert first.dtype == weight.dtype
    assert first.ctypes.data == second.ctypes.data
    again = constant_of(np.ascontiguousarray(first.T))
    assert str(again.value.dtype) == str(again.ty.dtype) == "bfloat16"
    np.testing.assert_array_equal(again.value.numpy(), weight.T)


def test_weights_are_folded_in_float32_and_rounded_once() -> None:
    left, right = (np.random.default_rng(i).standard_normal((8, 8)).astype(ml_dtypes.bfloat16) for i in range(2))
    x = relax.Var("x", relax.TensorType((8, 8), "bfloat16"))
    builder = relax.BlockBuilder()
    with builder.function("main", [x]):
        with builder.dataflow():
            product = builder.emit(relax.op.matmul(relax.const(left, "bfloat16"), relax.const(right, "bfloat16")))
            folded = builder.emit(relax.op.tanh(builder.emit(relax.op.permute_dims(product))))
            result = builder.emit_output(relax.op.add(x, folded))
        builder.emit_func_output(result)
    (binding,) = FoldWeights()(builder.get())["main"].body.blocks[0].bindings
    product = (left.astype(np.float32) @ right.astype(np.float32)).astype(ml_dtypes.bfloat16)
    expected = np.tanh(product.T.astype(np.float32)).astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(array_of(binding.value.args[1]), expected)


def drawn(layer: Any) -> Any:
    """A layer whose numbers are not all zeros or ones, as they begin."""
    for tensor in (*layer.parameters(), *layer.buffers()):
        if tensor.is_floating_point():
            nn.init.uniform_(tensor, 0.5, 1.5)
    return layer


def half_modules() -> dict[str, tuple[Any, Any]]:
    x, image = torch.randn(2, 8, 32), torch.randn(1, 3, 16, 16)
    transposed = (nn.ConvTranspose2d(3, 4, 4, 2, 1), nn.Flatten(2), nn.ConvTranspose1d(4, 2, 3))
    convolutions = (nn.Conv2d(3, 8, 3, padding=1), drawn(nn.BatchNorm2d(8)), nn.ReLU(), nn.MaxPool2d(2))
    return {
        "perceptron": (nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)), x),
        "transformer": (nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), x),
        "convolutions": (nn.Sequential(*convolutions, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4)), image),
        "transposed": (nn.Sequential(*transposed), image),
        "resized": (nn.Sequential(nn.Upsample(scale_factor=2), nn.Upsample(scale_factor=1.5, mode="bilinear")), image),
        "prelu": (drawn(nn.PReLU(8)), x),
        "groups": (drawn(nn.GroupNorm(2, 8)), x),
        "recurrent": (nn.LSTM(32, 16, batch_first=True), x),
        "embedding": (nn.Sequential(nn.Embedding(9, 32), nn.Linear(32, 8)), torch.randint(0, 9, (2, 5))),
        "masked": (Masked(), x),
    }


class Masked(nn.Module):
    """Attention to what came before, out in float32, as language models give their logits."""

    def forward(self, x: Any) -> Any:
        x = x[:, None]
        return torch.nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True).float()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", half_modules())
def test_modules_of_16_bits_compute_what_pytorch_does(name: str, dtype: Any) -> None:
    torch.manual_seed(0)
    module, x = half_modules()[name]
    x = x.to(dtype) if x.is_floating_point() else x
    imported = load_model(module.to(dtype).eval(), example_inputs=(x,))
    assert verify_import(imported, tolerance=1.0) < 4 * torch.finfo(dtype).eps


def test_what_tvm_lacks_of_bfloat16_is_computed_in_float32() -> None:
    class Model(nn.Module):
        def forward(self, x: Any) -> Any:
            found = torch.fmod(x, 0.5) + torch.where(x.isnan(), 0, x) ** 2
            return found, found.argmax(-1), torch.relu(x).argmin(-1)

    x = torch.linspace(-2, 2, 64).reshape(4, 16).bfloat16()
    assert verify_import(load_model(Model(), example_inputs=(x,)), tolerance=1.0) < 2.0**-6


def test_order_is_that_of_float32() -> None:
    """TVM's runtime takes bfloat16 for something wider, and writes past the end of its buffers."""

    class Model(nn.Module):
        def forward(self, x: Any) -> Any:
            most, median = x.topk(200, -1, largest=False), x.median(-1)
            return x.sort(-1), x.argsort(-1, descending=True), x.topk(3, 0), most, median.values

    x = torch.randperm(256, generator=torch.Generator().manual_seed(0)).sub(100).bfloat16().expand(4, -1)
    x = x + torch.tensor([[0], [256], [512], [-512]])
    assert verify_import(load_model(Model(), example_inputs=(x.contiguous(),))) == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_operators_of_several_steps_are_rounded_once(dtype: Any) -> None:
    """Squares of 300 are infinite in float16, and 1 - erf(1.7) loses digits."""

    class Model(nn.Module):
        def forward(self, x: Any, y: Any) -> Any:
            spread, mean = torch.var_mean(y, -1)
            return x.norm(dim=-1), x.std(-1), spread, mean, torch.logaddexp(y, y + 1), torch.erfc(y / 2)

    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(4, 64, generator=generator).mul(scale).to(dtype) for scale in (300, 1))
    imported = load_model(Model(), example_inputs=(x, y))
    found = ModelRunner(untuned_executable(imported.mod, detect_target(1)))(array_of_torch(x), array_of_torch(y))
    for got, want in zip(found, Model()(x.double(), y.double()), strict=True):
        np.testing.assert_allclose(got.astype(np.float64), want.numpy(), rtol=2 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_scores_of_attention_stay_in_float32(dtype: Any) -> None:
    """Those of 100 and wide are infinite in float16; a row that all of a mask blocks is not uniform."""
    attend = nn.functional.scaled_dot_product_attention

    class Model(nn.Module):
        def forward(self, query: Any, key: Any, value: Any, mask: Any) -> Any:
            large = attend(100 * query, 100 * key, value)
            return large, attend(query, key, value, is_causal=True), attend(query, key, value, mask)

    generator = torch.Generator().manual_seed(0)
    heads = [torch.randn(2, 2, 12, 64, generator=generator).to(dtype) for _ in range(3)]
    mask = torch.full((12, 12), -60000.0).tril(-1).to(dtype)
    mask[5] = -60000.0
    inputs = (*heads, mask)
    imported = load_model(Model(), example_inputs=inputs)
    found = ModelRunner(untuned_executable(imported.mod, detect_target(1)))(*map(array_of_torch, inputs))
    for got, want in zip(found, Model()(*(x.double() for x in inputs)), strict=True):
        np.testing.assert_allclose(got.astype(np.float64), want.numpy(), atol=3 * torch.finfo(dtype).eps, rtol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_products_are_scaled_before_they_are_rounded(dtype: Any) -> None:
    """In float16, 64 times 100 times 100 is infinite."""

    class Model(nn.Module):
        def forward(self, x: Any, y: Any, nothing: Any) -> Any:
            several = torch.baddbmm(x[None], x[None], y[None], alpha=0.01)
            return torch.addmm(x, x, y, beta=0.5, alpha=0.01), torch.addmm(nothing, x, y, beta=0, alpha=0.01), several

    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(64, 64, generator=generator).mul(100).to(dtype) for _ in range(2))
    inputs = (x, y, torch.full((64,), torch.inf, dtype=dtype))
    found = ModelRunner(untuned_executable(load_model(Model(), example_inputs=inputs).mod, detect_target(1)))(
        *map(array_of_torch, inputs)
    )
    for got, want in zip(found, Model()(*(z.double() for z in inputs)), strict=True):
        np.testing.assert_allclose(got.astype(np.float64), want.numpy(), rtol=torch.finfo(dtype).eps, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_what_is_scattered_is_summed_in_float32(dtype: Any) -> None:
    """A hundred numbers a place, of which bfloat16 would lose a tenth."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bag = nn.EmbeddingBag(9, 4, mode="mean")

        def forward(self, x: Any, places: Any) -> Any:
            nothing = torch.zeros(3, 4, dtype=x.dtype)
            mean = nothing.scatter_reduce(0, places[:, None].expand(-1, 4), x, "mean", include_self=False)
            summed = nothing.scatter_add(0, places[:, None].expand(-1, 4), x)
            return mean, summed, nothing.index_add(0, places, x), self.bag(places.reshape(3, -1))

    generator = torch.Generator().manual_seed(0)
    x, places = torch.rand(300, 4, generator=generator).to(dtype), torch.randint(0, 3, (300,), generator=generator)
    model = Model().to(dtype)
    imported = load_model(model, example_inputs=(x, places))
    found = ModelRunner(untuned_executable(imported.mod, detect_target(1)))(array_of_torch(x), places.numpy())
    for got, want in zip(found, model.double()(x.double(), places), strict=True):
        np.testing.assert_allclose(got.astype(np.float64), want.detach().numpy(), rtol=2 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_what_inputs_add_to_states_is_not_rounded(dtype: Any) -> None:
    """States are rounded once: below 1, by a quarter of the distance from 1 to the next number at most."""
    torch.manual_seed(0)
    layer, x = nn.RNN(32, 16).to(dtype), (3 * torch.randn(5, 2, 32)).to(dtype)
    imported = load_model(layer, example_inputs=(x,))
    found, _ = ModelRunner(untuned_executable(imported.mod, detect_target(1)))(array_of_torch(x))
    want = layer.double()(x.double())[0].detach().numpy()
    np.testing.assert_allclose(found.astype(np.float64), want, atol=0.3 * torch.finfo(dtype).eps, rtol=0)


def test_numbers_that_float16_cannot_hold_stay_numbers() -> None:
    class Model(nn.Module):
        def forward(self, x: Any) -> Any:
            return x * 1e-3 * 1e6, x * 1e4 * 2e-7, torch.sub(x * 0.1, x, alpha=1e-7), 1e5 / (x + 200)

    x = torch.linspace(-5, 5, 64).half()
    found = ModelRunner(untuned_executable(load_model(Model(), example_inputs=(x,)).mod, detect_target(1)))(x.numpy())
    for got, want in zip(found, Model()(x), strict=True):
        np.testing.assert_allclose(got, want.numpy(), rtol=3e-3, atol=1e-7)


def test_products_are_summed_in_float32() -> None:
    """Sums of ones in bfloat16 end at 256."""
    ones = torch.ones(1, 4096, dtype=torch.bfloat16)
    layer = nn.Linear(4096, 3, bias=False, dtype=torch.bfloat16)
    nn.init.ones_(layer.weight)
    imported = load_model(layer, example_inputs=(ones,))
    (got,) = ModelRunner(untuned_executable(imported.mod, detect_target(1)))(np.ones((1, 4096), ml_dtypes.bfloat16))
    np.testing.assert_array_equal(got.astype(np.float32), 4096)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_operators_round_once(dtype: str) -> None:
    x = np.random.default_rng(0).standard_normal((4, 1000)).astype(numpy_dtype(dtype))
    parameter = relax.Var("x", relax.TensorType(x.shape, dtype))
    builder = relax.BlockBuilder()
    with builder.function("main", [parameter]):
        with builder.dataflow():
            weights = builder.emit(relax.op.nn.softmax(parameter))
            result = builder.emit_output(relax.op.sum(builder.emit(relax.op.exp(weights)), axis=[-1]))
        builder.emit_func_output(result)
    target = detect_target(1)
    kernels = lower_to_kernels(builder.get(), target)
    (got,) = ModelRunner(relax.build(kernels, target))(x)
    wide = x.astype(np.float64)
    weights = (np.exp(wide) / np.exp(wide).sum(-1, keepdims=True)).astype(numpy_dtype(dtype)).astype(np.float64)
    expected = np.exp(weights).astype(numpy_dtype(dtype)).astype(np.float64).sum(-1)
    np.testing.assert_allclose(got.astype(np.float64), expected, rtol=epsilon(dtype))


def test_a_module_of_bfloat16_is_tuned_and_resumed(tmp_path: Path) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(64, 48), nn.GELU(), nn.LayerNorm(48)).bfloat16().eval()
    x = torch.randn(4, 64).bfloat16()
    for _ in range(2):
        result = eqtune.tune_model(
            module, example_inputs=(x,), trials=4, graph="off", work_dir=tmp_path / "work", threads=1, progress=False
        )
        assert result.max_rel_error <= 8 * 2.0**-7
    (got,) = result.run(x.float().numpy().astype(ml_dtypes.bfloat16))
    assert got.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(got, result.run(x)[0])
    expected = module(x).detach().float().numpy()
    np.testing.assert_allclose(got.astype(np.float32), expected, atol=0.05)
