"""Zoo models as PyTorch modules: straight-line code of torch.nn.functional calls."""

# ruff: noqa: D102 - documented in builder.Backend

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
import torch.fx
from torch.nn import functional

from .builder import Array, InputSpec, Pair, Tensor

__all__ = ["TorchBackend"]

Node: TypeAlias = torch.fx.Node


class TorchBackend:
    """Writes an FX graph; `finish` turns it into a module whose `forward` is generated Python."""

    def __init__(self) -> None:
        self._graph = torch.fx.Graph()
        self._weights: dict[str, torch.nn.Parameter] = {}

    def finish(self, outputs: Sequence[Tensor[Node]], name: str) -> torch.nn.Module:
        """Return the module in evaluation mode; no weight requires a gradient."""
        values = [output.handle for output in outputs]
        self._graph.output(values[0] if len(values) == 1 else tuple(values))
        return torch.fx.GraphModule(self._weights, self._graph, class_name=name).eval()

    def _call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Node:
        return self._graph.call_function(function, args, kwargs)

    def input(self, spec: InputSpec) -> Node:
        return self._graph.placeholder(spec.name)

    def weight(self, name: str, value: Array) -> Node:
        self._weights[name] = torch.nn.Parameter(torch.from_numpy(value), requires_grad=False)
        return self._graph.get_attr(name)

    def conv2d(self, x: Node, weight: Node, bias: Node | None, stride: int, padding: Pair, groups: int) -> Node:
        return self._call(functional.conv2d, x, weight, bias, stride=stride, padding=padding, groups=groups)

    def batch_norm(self, x: Node, gamma: Node, beta: Node, mean: Node, variance: Node, epsilon: float) -> Node:
        return self._call(functional.batch_norm, x, mean, variance, gamma, beta, training=False, eps=epsilon)

    def layer_norm(self, x: Node, gamma: Node, beta: Node, width: int, epsilon: float) -> Node:
        return self._call(functional.layer_norm, x, (width,), gamma, beta, epsilon)

    def max_pool(self, x: Node, kernel: int, stride: int, padding: int) -> Node:
        return self._call(functional.max_pool2d, x, kernel, stride, padding)

    def avg_pool(self, x: Node, kernel: int, stride: int, padding: int) -> Node:
        return self._call(functional.avg_pool2d, x, kernel, stride, padding)

    def global_avg_pool(self, x: Node) -> Node:
        return self._call(functional.adaptive_avg_pool2d, x, (1, 1))

    def linear(self, x: Node, weight: Node, bias: Node, rank: int) -> Node:
        return self._call(functional.linear, x, weight, bias)

    def embedding(self, ids: Node, table: Node) -> Node:
        return self._call(functional.embedding, ids, table)

    def matmul(self, a: Node, b: Node) -> Node:
        return self._call(torch.matmul, a, b)

    def add(self, a: Node, b: Node) -> Node:
        return self._call(operator.add, a, b)

    def mul(self, a: Node, b: Node) -> Node:
        return self._call(operator.mul, a, b)

    def relu(self, x: Node) -> Node:
        return self._call(functional.relu, x)

    def relu6(self, x: Node) -> Node:
        return self._call(functional.relu6, x)

    def sigmoid(self, x: Node) -> Node:
        return self._call(torch.sigmoid, x)

    def tanh(self, x: Node) -> Node:
        return self._call(torch.tanh, x)

    def gelu(self, x: Node) -> Node:
        return self._call(functional.gelu, x)

    def softmax(self, x: Node) -> Node:
        return self._call(torch.softmax, x, -1)

    def attention(self, query: Node, key: Node, value: Node, width: int) -> Node:
        heads_first = [self._call(torch.transpose, x, 1, 2) for x in (query, key, value)]
        return self._call(torch.transpose, self._call(functional.scaled_dot_product_attention, *heads_first), 1, 2)

    def concat(self, xs: Sequence[Node], axis: int) -> Node:
        return self._call(torch.cat, list(xs), axis)

    def reshape(self, x: Node, shape: Sequence[int]) -> Node:
        batch, *others = shape
        return self._call(torch.reshape, x, (-1 if batch == 1 else batch, *others))  # so that it may be exported open

    def permute(self, x: Node, axes: Sequence[int]) -> Node:
        return self._call(torch.permute, x, tuple(axes))

    def slice(self, x: Node, axis: int, begin: int, end: int) -> Node:
        return self._call(operator.getitem, x, (*[slice(None)] * axis, slice(begin, end)))
