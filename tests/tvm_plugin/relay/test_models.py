"""Whole networks: the zoo's printed and read back, and programs as Relay's importers wrote them, against PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import tvm
import tvm_ffi
from numpy.typing import NDArray
from tvm import relax

from eqtune import relay, zoo
from eqtune.compile.untuned import untuned_executable
from eqtune.dtypes import numpy_dtype
from eqtune.frontends import load_model
from eqtune.relax_ir.constants import constant_of
from eqtune.runtime import ModelRunner

Array = NDArray[Any]

EXACT = ["squeezenet", "mobilenetv2", "resnet50", "resnext50", "inceptionv3", "nasneta", "nasrnn", "tensat_bert"]


@pytest.mark.parametrize("name", EXACT)
def test_a_network_is_read_back_as_it_was_printed(name: str) -> None:
    mod = zoo.relax(name)
    text, params = relay.astext_and_params(mod)
    assert tvm_ffi.structural_equal(relay.from_text(text, params), mod, skip_tensor_content=True)


def test_weights_in_the_metadata_section_are_read_back_exactly() -> None:
    mod = zoo.relax("squeezenet")
    assert tvm_ffi.structural_equal(relay.from_text(relay.astext(mod)), mod)


def test_what_relay_lacks_is_printed_with_what_it_has() -> None:
    mod = zoo.relax("bert_base", sequence_length=16)
    once, params = relay.astext_and_params(mod)
    twice, _ = relay.astext_and_params(relay.from_text(once, params))
    again, _ = relay.astext_and_params(relay.from_text(twice, params))
    assert once.count("erf(") == 12
    assert once.count("nn.batch_matmul(") == 24
    assert again == twice


def test_ties_to_even_are_printed_with_what_relay_has() -> None:
    data = np.array([-2.5, -1.5, -0.5, 0.49999997, 0.5, 1.5, 1.75, np.inf], "float32")
    block = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType(data.shape, "float32"))
    with block.function("main", [x]):
        block.emit_func_output(block.emit(relax.op.round(x)))
    mod = relay.from_text(relay.astext(block.get()))
    machine = relax.VirtualMachine(tvm.compile(mod, "llvm"), tvm.cpu())
    np.testing.assert_array_equal(machine["main"](tvm.runtime.tensor(data)).numpy(), np.round(data))


def printed(*results: Callable[[relax.Var], relax.Expr], dtype: str = "float32") -> str:
    """What a function of x, which is [2, 4, 10], is in Relay."""
    block = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((2, 4, 10), dtype))
    with block.function("main", [x]):
        block.emit_func_output(relax.Tuple([block.emit(result(x)) for result in results]))
    return relay.astext(block.get())


def test_parts_of_different_lengths_are_printed_by_their_places() -> None:
    text = printed(lambda x: relax.op.split(x, 3, axis=-1), lambda x: relax.op.split(x, 1))
    parts, whole = relay.from_text(text)["main"].ret_ty.fields
    assert [int(part.shape[2]) for part in parts.fields] == [4, 4, 2]
    assert [int(extent) for extent in whole.shape] == [2, 4, 10]


def test_norms_over_axes_that_relay_does_not_take_are_not_printed() -> None:
    ones = constant_of(np.ones(4, "float32"))
    assert "nn.group_norm(" in printed(lambda x: relax.op.nn.group_norm(x, ones, ones, 2, 1, [2]))
    with pytest.raises(relay.UnsupportedRelayError, match=r"nn\.group_norm: over the axes \[0, 2\] of 3"):
        printed(lambda x: relax.op.nn.group_norm(x, ones, ones, 2, 1, [0, 2]))


def test_weights_of_bfloat16_are_read_back_as_they_were_printed() -> None:
    weight = constant_of(np.linspace(-1, 1, 10).astype(numpy_dtype("bfloat16")))
    text = printed(lambda x: relax.op.add(x, weight), dtype="bfloat16")
    stored, again = (t.partition("#[metadata]")[2] for t in (text, relay.astext(relay.from_text(text))))
    assert stored == again != ""


class Text:
    """Writes Relay as its importers did, with random weights as parameters."""

    def __init__(self, inputs: dict[str, tuple[int, ...]]) -> None:
        self._random = np.random.default_rng(0)
        self.params: dict[str, Array] = {}
        self._types = [f"%{name}: {tensor_type(shape)}" for name, shape in inputs.items()]
        self._lines: list[str] = []

    def weight(self, name: str, *shape: int) -> str:
        scale = 1.0 if len(shape) == 1 else 1.0 / np.sqrt(np.prod(shape[1:]))
        self.params[name] = (self._random.uniform(0.5, 1.5, shape) * scale).astype("float32")
        if len(shape) > 1:
            self.params[name] *= self._random.choice([-1, 1], shape)
        return f"%{name}"

    def bind(self, right: str) -> str:
        self._lines.append(f"  %{len(self._lines)} = {right};\n")
        return f"%{len(self._lines) - 1}"

    def program(self, result: str) -> str:
        weights = [f"%{name}: {tensor_type(array.shape)}" for name, array in self.params.items()]
        return '#[version = "0.0.5"]\ndef @main({}) {{\n{}  {}\n}}\n'.format(
            ", ".join(self._types + weights), "".join(self._lines), result
        )

    def conv_bn(self, x: str, name: str, out: int, into: int, k: int, stride: int = 1, groups: int = 1) -> str:
        weight, pad = self.weight(f"{name}_weight", out, into // groups, k, k), k // 2
        x = self.bind(
            f"nn.conv2d({x}, {weight}, strides=[{stride}, {stride}], padding=[{pad}, {pad}, {pad}, {pad}], "
            f"groups={groups}, channels={out}, kernel_size=[{k}, {k}])"
        )
        norm = ", ".join(self.weight(f"{name}_{part}", out) for part in ("gamma", "beta", "mean", "var"))
        return self.bind(f"{self.bind(f'nn.batch_norm({x}, {norm})')}.0")

    def dense(self, x: str, name: str, out: int, into: int) -> str:
        product = self.bind(f"nn.dense({x}, {self.weight(f'{name}_weight', out, into)}, units={out})")
        return self.bind(f"nn.bias_add({product}, {self.weight(f'{name}_bias', out)}, axis=-1)")


def tensor_type(shape: tuple[int, ...]) -> str:
    return f"Tensor[({', '.join(map(str, shape))}), float32]"


class Weights:
    """The same layers in PyTorch."""

    def __init__(self, params: dict[str, Array]) -> None:
        self._params = {name: torch.from_numpy(array) for name, array in params.items()}

    def conv_bn(self, x: Any, name: str, stride: int = 1, groups: int = 1) -> Any:
        weight = self._params[f"{name}_weight"]
        x = F.conv2d(x, weight, stride=stride, padding=weight.shape[-1] // 2, groups=groups)
        gamma, beta, mean, var = (self._params[f"{name}_{part}"] for part in ("gamma", "beta", "mean", "var"))
        return F.batch_norm(x, mean, var, gamma, beta)

    def dense(self, x: Any, name: str) -> Any:
        return F.linear(x, self._params[f"{name}_weight"], self._params[f"{name}_bias"])

    def __getitem__(self, name: str) -> Any:
        return self._params[name]


def mobilenet() -> tuple[Text, str, Callable[..., Any]]:
    """MobileNet-v2's inverted residuals, 17 as published, narrow."""
    blocks = [(8, 1)] + [(12, 2), (12, 1)] + [(16, 2), (16, 1), (16, 1)] + [(16, 1)] * 11
    net = Text({"data": (1, 3, 32, 32)})

    def relu6(x: str) -> str:
        return net.bind(f"clip({x}, a_min=0f, a_max=6f)")

    x, width = relu6(net.conv_bn("%data", "stem", 8, 3, 3, 2)), 8
    for i, (out, stride) in enumerate(blocks):
        hidden = relu6(net.conv_bn(x, f"b{i}_expand", width * 6, width, 1))
        hidden = relu6(net.conv_bn(hidden, f"b{i}_depth", width * 6, width * 6, 3, stride, width * 6))
        y = net.conv_bn(hidden, f"b{i}_project", out, width * 6, 1)
        x, width = net.bind(f"add({x}, {y})") if stride == 1 and width == out else y, out
    pooled = net.bind(f"nn.batch_flatten({net.bind(f'nn.global_avg_pool2d({x})')})")
    result = net.bind(f"nn.softmax({net.dense(pooled, 'classes', 10, width)})")

    def reference(data: Any) -> Any:
        w, width = Weights(net.params), 8
        x = F.relu6(w.conv_bn(data, "stem", 2))
        for i, (out, stride) in enumerate(blocks):
            y = F.relu6(w.conv_bn(x, f"b{i}_expand"))
            y = w.conv_bn(F.relu6(w.conv_bn(y, f"b{i}_depth", stride, width * 6)), f"b{i}_project")
            x, width = x + y if stride == 1 and width == out else y, out
        return F.softmax(w.dense(x.mean((2, 3)), "classes"), -1)

    return net, result, reference


def resnet() -> tuple[Text, str, Callable[..., Any]]:
    """ResNet-50's bottlenecks: 3, 4, 6, 3 of them, narrow."""
    stages = [(8, 3, 1), (12, 4, 2), (16, 6, 2), (16, 3, 2)]
    net = Text({"data": (1, 3, 32, 32)})
    x = net.bind(f"nn.relu({net.conv_bn('%data', 'stem', 8, 3, 7, 2)})")
    x, width = net.bind(f"nn.max_pool2d({x}, pool_size=[3, 3], strides=[2, 2], padding=[1, 1, 1, 1])"), 8
    for s, (out, count, first) in enumerate(stages):
        for i in range(count):
            name, stride = f"s{s}_b{i}", first if i == 0 else 1
            y = net.bind(f"nn.relu({net.conv_bn(x, f'{name}_a', out // 2, width, 1)})")
            y = net.bind(f"nn.relu({net.conv_bn(y, f'{name}_b', out // 2, out // 2, 3, stride)})")
            y = net.conv_bn(y, f"{name}_c", out, out // 2, 1)
            skip = net.conv_bn(x, f"{name}_skip", out, width, 1, stride) if i == 0 else x
            x, width = net.bind(f"nn.relu({net.bind(f'add({y}, {skip})')})"), out
    pooled = net.bind(f"nn.batch_flatten({net.bind(f'nn.adaptive_avg_pool2d({x}, output_size=[1, 1])')})")
    result = net.dense(pooled, "classes", 10, width)

    def reference(data: Any) -> Any:
        w = Weights(net.params)
        x = F.max_pool2d(F.relu(w.conv_bn(data, "stem", 2)), 3, 2, 1)
        for s, (_, count, first) in enumerate(stages):
            for i in range(count):
                name, stride = f"s{s}_b{i}", first if i == 0 else 1
                y = F.relu(w.conv_bn(x, f"{name}_a"))
                y = w.conv_bn(F.relu(w.conv_bn(y, f"{name}_b", stride)), f"{name}_c")
                x = F.relu(y + (w.conv_bn(x, f"{name}_skip", stride) if i == 0 else x))
        return w.dense(x.mean((2, 3)), "classes")

    return net, result, reference


def lstm() -> tuple[Text, str, Callable[..., Any]]:
    """An LSTM of two layers over twelve steps, unrolled, as the PyTorch importer of Relay did."""
    steps, width, into = 12, 16, 8
    net = Text({"data": (1, steps, into)})
    parts = net.bind(f"split(%data, indices_or_sections={steps}, axis=1)")
    sequence = [net.bind(f"squeeze({parts}.{t}, axis=[1])") for t in range(steps)]
    for layer in range(2):
        size = into if layer == 0 else width
        weights = [net.weight(f"l{layer}_ih", 4 * width, size), net.weight(f"l{layer}_hh", 4 * width, width)]
        biases = [net.weight(f"l{layer}_bih", 4 * width), net.weight(f"l{layer}_bhh", 4 * width)]
        hidden = cell = f'zeros(shape=[1, {width}], dtype="float32")'
        for t in range(steps):
            into_gates = net.bind(f"nn.dense({sequence[t]}, {weights[0]}, units={4 * width}) + {biases[0]}")
            own_gates = net.bind(f"nn.dense({hidden}, {weights[1]}, units=None) + {biases[1]}")
            gates = net.bind(f"split({into_gates} + {own_gates}, indices_or_sections=4, axis=1)")
            keep = net.bind(f"sigmoid({gates}.1) * {cell}")
            cell = net.bind(f"{keep} + sigmoid({gates}.0) * tanh({gates}.2)")
            hidden = sequence[t] = net.bind(f"sigmoid({gates}.3) * tanh({cell})")
    result = net.bind(f"stack(({', '.join(sequence)}), axis=1)")

    def reference(data: Any) -> Any:
        module = torch.nn.LSTM(into, width, 2, batch_first=True)
        names = {"weight_ih": "ih", "weight_hh": "hh", "bias_ih": "bih", "bias_hh": "bhh"}
        state = {
            f"{theirs}_l{layer}": torch.from_numpy(net.params[f"l{layer}_{ours}"])
            for layer in range(2)
            for theirs, ours in names.items()
        }
        module.load_state_dict(state)
        return module(data)[0]

    return net, result, reference


def bert() -> tuple[Text, str, Callable[..., Any]]:
    """Twelve layers of an encoder, narrow, in the operators that importers chose: batch_matmul over reshaped heads."""
    length, width, heads, layers = 8, 24, 4, 12
    size = width // heads
    net = Text({"data": (1, length, width)})
    x = "%data"
    for i in range(layers):
        flat = net.bind(f"reshape({x}, newshape=[-1, {width}])")

        def project(part: str, axes: str, flat: str = flat, i: int = i) -> str:
            rows = net.dense(flat, f"l{i}_{part}", width, width)
            split = net.bind(f"reshape({rows}, newshape=[1, {length}, {heads}, {size}])")
            moved = net.bind(f"transpose({split}, axes={axes})")
            return net.bind(f"reshape({moved}, newshape=[-3, -2])")

        query, key, value = (project(part, "[0, 2, 1, 3]") for part in ("query", "key", "value"))
        scores = net.bind(f"nn.batch_matmul({query}, {key}, transpose_b=True) * {size**-0.5!r}f")
        weights = net.bind(f"nn.softmax({scores}, axis=-1)")
        context = net.bind(f"reshape(nn.batch_matmul({weights}, {value}), newshape=[-4, 1, {heads}, -2])")
        rows = net.bind(f"reshape(transpose({context}, axes=[0, 2, 1, 3]), newshape=[-1, {width}])")
        attended = net.bind(
            f"add(reshape({net.dense(rows, f'l{i}_out', width, width)}, newshape=[1, -1, {width}]), {x})"
        )
        norm = f"{net.weight(f'l{i}_g1', width)}, {net.weight(f'l{i}_b1', width)}"
        x = net.bind(f"nn.layer_norm({attended}, {norm}, epsilon=1e-12f)")
        flat = net.bind(f"reshape({x}, newshape=[-1, {width}])")
        hidden = net.dense(flat, f"l{i}_up", 4 * width, width)
        gelu = net.bind(f"{hidden} * (0.5f + erf({hidden} * 0.70710678f) * 0.5f)")
        down = net.bind(f"reshape({net.dense(gelu, f'l{i}_down', width, 4 * width)}, newshape=[1, -1, {width}])")
        norm = f"{net.weight(f'l{i}_g2', width)}, {net.weight(f'l{i}_b2', width)}"
        x = net.bind(f"nn.layer_norm({net.bind(f'add({down}, {x})')}, {norm}, epsilon=1e-12f)")

    def reference(x: Any) -> Any:
        w = Weights(net.params)
        for i in range(layers):
            q, k, v = (
                w.dense(x, f"l{i}_{part}").reshape(1, length, heads, size).transpose(1, 2)
                for part in ("query", "key", "value")
            )
            context = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(1, length, width)
            x = F.layer_norm(w.dense(context, f"l{i}_out") + x, (width,), w[f"l{i}_g1"], w[f"l{i}_b1"], 1e-12)
            down = w.dense(F.gelu(w.dense(x, f"l{i}_up")), f"l{i}_down")
            x = F.layer_norm(down + x, (width,), w[f"l{i}_g2"], w[f"l{i}_b2"], 1e-12)
        return x

    return net, x, reference


@pytest.mark.parametrize("build", [mobilenet, resnet, lstm, bert])
def test_a_program_as_importers_wrote_it_computes_what_pytorch_computes(
    build: Callable[[], tuple[Text, str, Callable[..., Any]]],
) -> None:
    net, result, reference = build()
    model = load_model(net.program(result), params=net.params)
    (data,) = model.random_inputs()
    simplified = relay.transform.SimplifyInference()(model.mod)
    (actual,) = ModelRunner(untuned_executable(simplified, tvm.target.Target("llvm")))(data)
    with torch.no_grad():
        expected = reference(torch.from_numpy(data)).numpy()
    assert np.abs(actual - expected).max() <= 1e-5 * np.abs(expected).max()
