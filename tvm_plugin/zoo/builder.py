"""The interface the models are written against: layers on top, operators of one back end below.

A model is a function of a `Network`. The network names and draws the weights, infers shapes, counts parameters and
multiply-adds, and asks its `Backend` to emit operators; Relax, PyTorch and ONNX differ only there.
"""

# ruff: noqa: D102 - the methods of Backend are the operators of their names, documented in Network

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from . import weights

__all__ = ["Backend", "InputSpec", "Network", "ShapeOnly", "Tensor"]

H = TypeVar("H")
Pair = tuple[int, int]
Array = npt.NDArray[Any]


@dataclass(frozen=True)
class InputSpec:
    """A model's input. `high` bounds the values of an integer input (a vocabulary size)."""

    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"
    high: int = 0


@dataclass(frozen=True)
class Tensor(Generic[H]):
    """A value of the model: its shape, and what the back end calls it."""

    handle: H
    shape: tuple[int, ...]


class Backend(Protocol[H]):
    """Operators, one method each. Images are NCHW, convolution weights OIHW, pads symmetric (height, width)."""

    def input(self, spec: InputSpec) -> H: ...
    def weight(self, name: str, value: Array) -> H: ...
    def conv2d(self, x: H, weight: H, bias: H | None, stride: int, padding: Pair, groups: int) -> H: ...
    def batch_norm(self, x: H, gamma: H, beta: H, mean: H, variance: H, epsilon: float) -> H: ...
    def layer_norm(self, x: H, gamma: H, beta: H, width: int, epsilon: float) -> H: ...
    def max_pool(self, x: H, kernel: int, stride: int, padding: int) -> H: ...
    def avg_pool(self, x: H, kernel: int, stride: int, padding: int) -> H: ...
    def global_avg_pool(self, x: H) -> H: ...
    def linear(self, x: H, weight: H, bias: H, rank: int) -> H: ...
    def embedding(self, ids: H, table: H) -> H: ...
    def matmul(self, a: H, b: H) -> H: ...
    def add(self, a: H, b: H) -> H: ...
    def mul(self, a: H, b: H) -> H: ...
    def relu(self, x: H) -> H: ...
    def relu6(self, x: H) -> H: ...
    def sigmoid(self, x: H) -> H: ...
    def tanh(self, x: H) -> H: ...
    def gelu(self, x: H) -> H: ...
    def softmax(self, x: H) -> H: ...
    def attention(self, query: H, key: H, value: H, width: int) -> H: ...
    def concat(self, xs: Sequence[H], axis: int) -> H: ...
    def reshape(self, x: H, shape: Sequence[int]) -> H: ...
    def permute(self, x: H, axes: Sequence[int]) -> H: ...
    def slice(self, x: H, axis: int, begin: int, end: int) -> H: ...


class ShapeOnly:
    """The back end that emits nothing: for input shapes, parameter counts and multiply-adds alone."""

    def __getattr__(self, operator: str) -> Any:
        return lambda *args, **kwargs: None


class Network(Generic[H]):
    """Layers with named, seeded weights, emitted through `backend`.

    Parameters
    ----------
    backend
        Where operators go.
    model
        The model's name; part of every weight's seed.
    seed
        Of all weights and inputs.
    draw_weights
        False leaves all weights zero without allocating them (to count).

    Attributes
    ----------
    inputs
        In the order of creation.
    parameters
        Number of trained weights. Running statistics of batch norms are not counted, as everywhere.
    multiply_adds
        Of convolutions and matrix products, as publications count them (one multiply-add is two FLOPs).
    """

    def __init__(self, backend: Backend[H], model: str, seed: int, *, draw_weights: bool = True) -> None:
        self.backend = backend
        self.inputs: list[InputSpec] = []
        self.parameters = 0
        self.multiply_adds = 0
        self._model = model
        self._seed = seed
        self._draw_weights = draw_weights

    # -- inputs and weights

    def input(self, name: str, shape: Sequence[int], dtype: str = "float32", high: int = 0) -> Tensor[H]:
        """Declare a model input."""
        spec = InputSpec(name, tuple(shape), dtype, high)
        self.inputs.append(spec)
        return Tensor(self.backend.input(spec), spec.shape)

    def weight(self, name: str, shape: Sequence[int], fan_in: int, gain: float = 1.0) -> Tensor[H]:
        """Declare a free-standing weight; see `weights.fan_in_scaled`."""
        shape = tuple(shape)
        self.parameters += math.prod(shape)
        value = (
            weights.fan_in_scaled(self._seed, self._key(name), shape, fan_in, gain)
            if self._draw_weights
            else _zeros(shape)
        )
        return Tensor(self.backend.weight(name, value), shape)

    def _vector(self, name: str, length: int, low: float, high: float, *, trained: bool = True) -> H:
        self.parameters += length if trained else 0
        value = (
            weights.uniform(self._seed, self._key(name), (length,), low, high)
            if self._draw_weights
            else _zeros((length,))
        )
        return self.backend.weight(name, value)

    def _key(self, name: str) -> str:
        return f"{self._model}/{name}"

    # -- layers with weights

    def conv2d(
        self,
        x: Tensor[H],
        name: str,
        channels: int,
        kernel: int | Pair,
        *,
        stride: int = 1,
        padding: int | Pair = 0,
        groups: int = 1,
        bias: bool = True,
        gain: float = math.sqrt(2.0),
    ) -> Tensor[H]:
        """Convolution with weight `name.weight` and, if asked for, bias `name.bias`."""
        kernel_h, kernel_w = kernel if isinstance(kernel, tuple) else (kernel, kernel)
        pad = padding if isinstance(padding, tuple) else (padding, padding)
        batch, in_channels, height, width = x.shape
        fan_in = in_channels // groups * kernel_h * kernel_w
        weight = self.weight(f"{name}.weight", (channels, in_channels // groups, kernel_h, kernel_w), fan_in, gain)
        bias_handle = self._vector(f"{name}.bias", channels, -0.1, 0.1) if bias else None
        out_h = (height + 2 * pad[0] - kernel_h) // stride + 1
        out_w = (width + 2 * pad[1] - kernel_w) // stride + 1
        self.multiply_adds += batch * channels * out_h * out_w * fan_in
        handle = self.backend.conv2d(x.handle, weight.handle, bias_handle, stride, pad, groups)
        return Tensor(handle, (batch, channels, out_h, out_w))

    def batch_norm(self, x: Tensor[H], name: str, *, epsilon: float = 1e-5, gamma: float = 1.0) -> Tensor[H]:
        """Batch norm of inference, with running statistics near (0, 1) and scales around `gamma`."""
        channels = x.shape[1]
        handle = self.backend.batch_norm(
            x.handle,
            self._vector(f"{name}.weight", channels, 0.75 * gamma, 1.25 * gamma),
            self._vector(f"{name}.bias", channels, -0.1, 0.1),
            self._vector(f"{name}.running_mean", channels, -0.1, 0.1, trained=False),
            self._vector(f"{name}.running_var", channels, 0.75, 1.25, trained=False),
            epsilon,
        )
        return Tensor(handle, x.shape)

    def layer_norm(self, x: Tensor[H], name: str, *, epsilon: float) -> Tensor[H]:
        """Layer norm over the last axis."""
        width = x.shape[-1]
        gamma = self._vector(f"{name}.weight", width, 0.75, 1.25)
        beta = self._vector(f"{name}.bias", width, -0.1, 0.1)
        return Tensor(self.backend.layer_norm(x.handle, gamma, beta, width, epsilon), x.shape)

    def linear(self, x: Tensor[H], name: str, features: int, *, gain: float = math.sqrt(2.0)) -> Tensor[H]:
        """x W^T + b over the last axis, with W `(features, width)`."""
        *rows, width = x.shape
        weight = self.weight(f"{name}.weight", (features, width), width, gain)
        bias = self._vector(f"{name}.bias", features, -0.1, 0.1)
        self.multiply_adds += math.prod(rows) * width * features
        return Tensor(self.backend.linear(x.handle, weight.handle, bias, len(x.shape)), (*rows, features))

    def embedding(self, ids: Tensor[H], name: str, count: int, width: int) -> Tensor[H]:
        """Rows of the table `name.weight` of shape `(count, width)`."""
        table = self.weight(f"{name}.weight", (count, width), fan_in=1)
        return Tensor(self.backend.embedding(ids.handle, table.handle), (*ids.shape, width))

    # -- operators

    def matmul(self, a: Tensor[H], b: Tensor[H]) -> Tensor[H]:
        """Matrix product; leading axes of both sides are equal, or `b` has none."""
        shape = (*a.shape[:-1], b.shape[-1])
        self.multiply_adds += math.prod(shape) * a.shape[-1]
        return Tensor(self.backend.matmul(a.handle, b.handle), shape)

    def add(self, a: Tensor[H], b: Tensor[H]) -> Tensor[H]:
        """a + b, with broadcasting."""
        return Tensor(self.backend.add(a.handle, b.handle), np.broadcast_shapes(a.shape, b.shape))

    def mul(self, a: Tensor[H], b: Tensor[H]) -> Tensor[H]:
        """a * b, with broadcasting."""
        return Tensor(self.backend.mul(a.handle, b.handle), np.broadcast_shapes(a.shape, b.shape))

    def relu(self, x: Tensor[H]) -> Tensor[H]:
        """max(x, 0)."""
        return Tensor(self.backend.relu(x.handle), x.shape)

    def relu6(self, x: Tensor[H]) -> Tensor[H]:
        """min(max(x, 0), 6)."""
        return Tensor(self.backend.relu6(x.handle), x.shape)

    def sigmoid(self, x: Tensor[H]) -> Tensor[H]:
        """1 / (1 + exp(-x))."""
        return Tensor(self.backend.sigmoid(x.handle), x.shape)

    def tanh(self, x: Tensor[H]) -> Tensor[H]:
        """Hyperbolic tangent."""
        return Tensor(self.backend.tanh(x.handle), x.shape)

    def gelu(self, x: Tensor[H]) -> Tensor[H]:
        """x Phi(x), the exact form with erf."""
        return Tensor(self.backend.gelu(x.handle), x.shape)

    def softmax(self, x: Tensor[H]) -> Tensor[H]:
        """exp(x) over its sum along the last axis."""
        return Tensor(self.backend.softmax(x.handle), x.shape)

    def attention(self, query: Tensor[H], key: Tensor[H], value: Tensor[H]) -> Tensor[H]:
        """softmax(Q K^T / sqrt(width)) V for each head; all shapes are (batch, length, heads, width)."""
        batch, length, heads, width = query.shape
        self.multiply_adds += 2 * batch * heads * length * length * width
        return Tensor(self.backend.attention(query.handle, key.handle, value.handle, width), query.shape)

    def max_pool(self, x: Tensor[H], kernel: int, stride: int, padding: int = 0) -> Tensor[H]:
        """Largest value of each window; sizes round down."""
        handle = self.backend.max_pool(x.handle, kernel, stride, padding)
        return Tensor(handle, _pooled(x.shape, kernel, stride, padding))

    def avg_pool(self, x: Tensor[H], kernel: int, stride: int, padding: int = 0) -> Tensor[H]:
        """Mean of each window, padding included; sizes round down."""
        handle = self.backend.avg_pool(x.handle, kernel, stride, padding)
        return Tensor(handle, _pooled(x.shape, kernel, stride, padding))

    def global_avg_pool(self, x: Tensor[H]) -> Tensor[H]:
        """Mean over height and width, which stay as axes of length one."""
        return Tensor(self.backend.global_avg_pool(x.handle), (*x.shape[:2], 1, 1))

    def concat(self, xs: Sequence[Tensor[H]], axis: int = 1) -> Tensor[H]:
        """Join along `axis`."""
        shape = list(xs[0].shape)
        shape[axis] = sum(x.shape[axis] for x in xs)
        return Tensor(self.backend.concat([x.handle for x in xs], axis), tuple(shape))

    def reshape(self, x: Tensor[H], *shape: int) -> Tensor[H]:
        """Same elements, another shape."""
        return Tensor(self.backend.reshape(x.handle, shape), shape)

    def flatten(self, x: Tensor[H]) -> Tensor[H]:
        """All axes but the first become one."""
        return self.reshape(x, x.shape[0], math.prod(x.shape[1:]))

    def permute(self, x: Tensor[H], *axes: int) -> Tensor[H]:
        """Axes in another order."""
        return Tensor(self.backend.permute(x.handle, axes), tuple(x.shape[axis] for axis in axes))

    def slice(self, x: Tensor[H], axis: int, begin: int, end: int) -> Tensor[H]:
        """The range [begin, end) of `axis`."""
        shape = list(x.shape)
        shape[axis] = end - begin
        return Tensor(self.backend.slice(x.handle, axis, begin, end), tuple(shape))


def _zeros(shape: tuple[int, ...]) -> Array:
    return np.broadcast_to(np.float32(0), shape)


def _pooled(shape: tuple[int, ...], kernel: int, stride: int, padding: int) -> tuple[int, ...]:
    batch, channels, height, width = shape
    return (
        batch,
        channels,
        (height + 2 * padding - kernel) // stride + 1,
        (width + 2 * padding - kernel) // stride + 1,
    )
