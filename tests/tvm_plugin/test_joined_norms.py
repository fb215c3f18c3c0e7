"""Norms that are written out, as PyTorch's users and older ONNX files do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import tvm
from tvm import relax
from tvm.relax import op

from eqtune.compile.untuned import untuned_executable
from eqtune.dtypes import numpy_dtype
from eqtune.frontends import load_model
from eqtune.machine import detect_target
from eqtune.relax_ir.constants import constant_of
from eqtune.relax_ir.functions import operator, top_level_bindings
from eqtune.runtime import ModelRunner
from eqtune.transform import JoinNorms
from eqtune.tune.forms import model_forms

SHAPE, EPSILON = (2, 5, 24), 0.1  # not what operators take by default
RNG = np.random.default_rng(0)
GAMMA, BETA = (RNG.uniform(0.5, 1.5, SHAPE[-1:]).astype("float32") for _ in range(2))


def module(write: Callable[..., Any], shape: tuple[int, ...] = SHAPE, dtype: str = "float32") -> Any:
    """`write(emit, x)` gives the outputs; `emit` makes a variable of a call."""
    builder, x = relax.BlockBuilder(), relax.Var("x", relax.TensorType(shape, dtype))
    with builder.function("main", [x]):
        with builder.dataflow():
            results = write(builder.emit, x)
            outputs = [builder.emit_output(one) for one in (results if isinstance(results, list) else [results])]
        builder.emit_func_output(outputs if len(outputs) > 1 else outputs[0])
    return builder.get()


def operators(mod: Any) -> list[str]:
    calls = [operator(binding.value) for binding in top_level_bindings(mod["main"])]
    return [call.removeprefix("relax.") for call in calls if call]


def outputs(mod: Any, x: Any) -> list[Any]:
    target = detect_target(1)
    return ModelRunner(untuned_executable(mod, target), threads=1)(x)


def number(value: float) -> Any:
    return relax.const(value, "float32")


def centred(emit: Any, x: Any) -> tuple[Any, Any]:
    mean = emit(op.mean(x, [-1], True))
    return emit(op.subtract(x, mean)), mean


def rms(emit: Any, x: Any) -> Any:
    """Llama's: weight * (x * rsqrt(mean(x^2) + epsilon))"""
    square = emit(op.mean(emit(op.power(x, number(2.0))), [-1], True))
    root = emit(op.rsqrt(emit(op.add(square, number(EPSILON)))))
    return emit(op.multiply(constant_of(GAMMA), emit(op.multiply(x, root))))


def rms_by_root(emit: Any, x: Any) -> Any:
    square = emit(op.mean(emit(op.multiply(x, x)), [-1], True))
    return emit(op.divide(x, emit(op.sqrt(emit(op.add(number(EPSILON), square))))))


def onnx_layer_norm(emit: Any, x: Any) -> Any:
    """What torch.onnx wrote before opset 17."""
    d, _ = centred(emit, x)
    variance = emit(op.mean(emit(op.power(d, number(2.0))), [2], True))
    normal = emit(op.divide(d, emit(op.sqrt(emit(op.add(variance, number(EPSILON)))))))
    return emit(op.add(emit(op.multiply(normal, constant_of(GAMMA))), constant_of(BETA)))


def layer_norm_written_twice(emit: Any, x: Any) -> Any:
    """What is subtracted twice, in two variables, is the same; gamma has the rank of x."""
    variance = emit(op.mean(emit(op.square(centred(emit, x)[0])), [-1], True))
    root = emit(op.rsqrt(emit(op.add(variance, number(EPSILON)))))
    normal = emit(op.multiply(centred(emit, x)[0], root))
    return emit(op.multiply(normal, constant_of(GAMMA.reshape(1, 1, -1))))


def layer_norm_of_variance(emit: Any, x: Any) -> Any:
    """torch.var_mean"""
    root = emit(op.rsqrt(emit(op.add(emit(op.variance(x, [2], True)), number(EPSILON)))))
    normal = emit(op.multiply(centred(emit, x)[0], root))
    return emit(op.add(constant_of(BETA), emit(op.multiply(normal, constant_of(GAMMA)))))


def tensorflow_layer_norm(emit: Any, x: Any) -> Any:
    d, mean = centred(emit, x)
    variance = emit(op.mean(emit(op.multiply(d, d)), [2], True))
    root = emit(op.rsqrt(emit(op.add(variance, number(EPSILON)))))
    scale = emit(op.multiply(root, constant_of(GAMMA)))
    shift = emit(op.subtract(constant_of(BETA), emit(op.multiply(mean, scale))))
    return emit(op.add(emit(op.multiply(x, scale)), shift))


WAYS = {
    "rms": (rms, "nn.rms_norm"),
    "rms by root": (rms_by_root, "nn.rms_norm"),
    "onnx": (onnx_layer_norm, "nn.layer_norm"),
    "written twice": (layer_norm_written_twice, "nn.layer_norm"),
    "variance": (layer_norm_of_variance, "nn.layer_norm"),
    "tensorflow": (tensorflow_layer_norm, "nn.layer_norm"),
}


@pytest.mark.parametrize("name", WAYS)
def test_one_operator_computes_the_same(name: str) -> None:
    write, wanted = WAYS[name]
    mod = module(write)
    joined = JoinNorms()(mod)
    assert operators(joined) == [wanted]
    x = (3 + RNG.standard_normal(SHAPE)).astype("float32")
    for found, expected in zip(outputs(joined, x), outputs(mod, x), strict=True):
        np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-5)


def other_base(emit: Any, x: Any) -> Any:
    """x, divided by the root mean square of something else"""
    square = emit(op.mean(emit(op.square(emit(op.abs(x)))), [-1], True))
    return emit(op.multiply(x, emit(op.rsqrt(emit(op.add(square, number(EPSILON)))))))


def other_axes(emit: Any, x: Any) -> Any:
    """The mean over words, the variance over channels"""
    d = emit(op.subtract(x, emit(op.mean(x, [1], True))))
    square = emit(op.mean(emit(op.square(d)), [-1], True))
    return emit(op.multiply(d, emit(op.rsqrt(emit(op.add(square, number(EPSILON)))))))


def first_axes(emit: Any, x: Any) -> Any:
    square = emit(op.mean(emit(op.square(x)), [1], True))
    return emit(op.multiply(x, emit(op.rsqrt(emit(op.add(square, number(EPSILON)))))))


def read_twice(emit: Any, x: Any) -> list[Any]:
    square = emit(op.mean(emit(op.square(x)), [-1], True))
    root = emit(op.rsqrt(emit(op.add(square, number(EPSILON)))))
    return [emit(op.multiply(x, root)), root]


@pytest.mark.parametrize("write", [other_base, other_axes, first_axes, read_twice])
def test_what_is_no_norm_stays(write: Callable[..., Any]) -> None:
    """All but `other_axes`, whose d is a tensor like any other: what divides it is its own root mean square."""
    mod = module(write)
    wanted = ["nn.rms_norm"] if write is other_axes else []
    assert [name for name in operators(JoinNorms()(mod)) if name.startswith("nn.")] == wanted


def test_gamma_along_another_axis_is_no_gamma() -> None:
    def write(emit: Any, x: Any) -> Any:
        return emit(op.multiply(rms_by_root(emit, x), constant_of(GAMMA[:5].reshape(1, 5, 1))))

    assert operators(JoinNorms()(module(write))) == ["nn.rms_norm", "multiply"]


def test_what_another_block_multiplies_a_norm_by_is_no_gamma() -> None:
    """What is normalised is known in its own block alone."""
    builder, x = relax.BlockBuilder(), relax.Var("x", relax.TensorType(SHAPE, "float32"))
    with builder.function("main", [x]):
        with builder.dataflow():
            y = builder.emit(op.nn.relu(x))
            square = builder.emit(op.mean(builder.emit(op.square(y)), [-1], True))
            root = builder.emit(op.sqrt(builder.emit(op.add(square, number(EPSILON)))))
            normal = builder.emit_output(op.divide(y, root))
        builder.emit_func_output(builder.emit(op.multiply(normal, constant_of(GAMMA))))
    joined = JoinNorms()(builder.get())
    assert relax.analysis.check_well_formed(joined)
    assert operators(joined) == ["nn.relu", "nn.rms_norm", "multiply"]


@pytest.mark.parametrize("variance", [False, True])
def test_gamma_multiplies_a_beta_that_was_added_before(variance: bool) -> None:
    """(norm(x) + beta) * gamma is not norm(x) * gamma + beta."""

    def write(emit: Any, x: Any) -> Any:
        d, _ = centred(emit, x)
        square = emit(op.variance(x, [-1], True) if variance else op.mean(emit(op.square(d)), [-1], True))
        normal = emit(op.multiply(d, emit(op.rsqrt(emit(op.add(square, number(EPSILON)))))))
        return emit(op.multiply(emit(op.add(normal, constant_of(BETA))), constant_of(GAMMA)))

    mod = module(write)
    joined = JoinNorms()(mod)
    assert operators(joined) == ["nn.layer_norm", "multiply"]
    x = RNG.standard_normal(SHAPE).astype("float32")
    np.testing.assert_allclose(outputs(joined, x)[0], outputs(mod, x)[0], rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("shape", [(24,), (3, 5)])
def test_a_rms_norm_over_all_axes(shape: tuple[int, ...]) -> None:
    """TVM cannot write its kernel."""
    axes = list(range(len(shape)))

    def write(emit: Any, x: Any) -> Any:
        root = emit(op.rsqrt(emit(op.add(emit(op.mean(emit(op.square(x)), axes, True)), number(EPSILON)))))
        return emit(op.multiply(x, root))

    mod, target = module(write, shape), detect_target(1)
    x = RNG.standard_normal(shape).astype("float32")
    executable = tvm.compile(mod, target, relax_pipeline=relax.get_pipeline("eqtune"))
    found = ModelRunner(executable, threads=1)(x)[0]
    np.testing.assert_allclose(found, outputs(mod, x)[0], rtol=2e-5, atol=2e-5)


class Llama(torch.nn.Module):
    """A RMS norm as `transformers` writes it, between two products."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = torch.nn.Linear(24, 32), torch.nn.Linear(32, 24)
        self.weight = torch.nn.Parameter(torch.rand(32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.a(x)
        wide = x.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        y: torch.Tensor = self.b(self.weight * wide.to(x.dtype))
        return y


class Channels(torch.nn.Module):
    """A layer norm over the channels of an image, which come first."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = torch.nn.Conv2d(4, 16, 3), torch.nn.Conv2d(16, 4, 1)
        self.weight = torch.nn.Parameter(torch.rand(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.a(x)
        mean = x.mean(1, keepdim=True)
        variance = (x - mean).pow(2).mean(1, keepdim=True)
        y: torch.Tensor = self.b(self.weight[:, None, None] * ((x - mean) / torch.sqrt(variance + 1e-6)))
        return y


@pytest.mark.parametrize(
    ("model", "shape", "dtype"),
    [(Llama, (1, 6, 24), torch.float32), (Llama, (1, 6, 24), torch.bfloat16), (Channels, (1, 4, 9, 9), torch.float32)],
)
def test_one_kernel(model: Any, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """A norm of PyTorch is one kernel, and what it computes stays."""
    torch.manual_seed(0)
    network, x = model().eval().to(dtype), torch.randn(shape).to(dtype)
    imported = load_model(network, (x,))
    target = detect_target(1)
    form = model_forms(imported.mod, target, "off")[0].forms[0]
    assert not [task.name for task in form.tasks if "mean" in task.name or "power" in task.name]
    assert len([task.name for task in form.tasks if "norm" in task.name]) == 1
    expected = network(x).detach().float().numpy()
    given = x.float().numpy().astype(numpy_dtype(str(dtype).removeprefix("torch.")))
    found = outputs(form.mod, given)[0].astype("float32")
    np.testing.assert_allclose(found, expected, atol=1e-4 if dtype == torch.float32 else 3e-2)
