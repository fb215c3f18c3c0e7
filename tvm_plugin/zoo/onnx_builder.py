"""Zoo models as ONNX, with the operators that exporters write."""

# ruff: noqa: D102 - documented in builder.Backend

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from .builder import Array, InputSpec, Pair, Tensor

__all__ = ["OnnxBackend"]

_OPSET = 20  # the first with Gelu
_IR_VERSION = 9


class OnnxBackend:
    """Collects nodes and initializers; values are known by name."""

    def __init__(self) -> None:
        self._inputs: list[onnx.ValueInfoProto] = []
        self._initializers: dict[str, onnx.TensorProto] = {}
        self._nodes: list[onnx.NodeProto] = []

    def finish(self, outputs: Sequence[Tensor[str]], name: str) -> onnx.ModelProto:
        """Return the model, with float32 outputs."""
        float32 = onnx.TensorProto.FLOAT
        results = [helper.make_tensor_value_info(output.handle, float32, output.shape) for output in outputs]
        graph = helper.make_graph(self._nodes, name, self._inputs, results, list(self._initializers.values()))
        opset = helper.make_opsetid("", _OPSET)
        return helper.make_model(graph, opset_imports=[opset], ir_version=_IR_VERSION, producer_name="eqtune.zoo")

    def _node(self, operator: str, *inputs: str, **attributes: Any) -> str:
        output = f"{operator.lower()}_{len(self._nodes)}"
        self._nodes.append(helper.make_node(operator, inputs, [output], name=output, **attributes))
        return output

    def _constant(self, values: Any, dtype: type[np.generic]) -> str:
        name = f"const_{len(self._initializers)}"
        self._initializers[name] = numpy_helper.from_array(np.asarray(values, dtype), name)
        return name

    def input(self, spec: InputSpec) -> str:
        element = helper.np_dtype_to_tensor_dtype(np.dtype(spec.dtype))
        self._inputs.append(helper.make_tensor_value_info(spec.name, element, spec.shape))
        return spec.name

    def weight(self, name: str, value: Array) -> str:
        self._initializers[name] = numpy_helper.from_array(value, name)
        return name

    def conv2d(self, x: str, weight: str, bias: str | None, stride: int, padding: Pair, groups: int) -> str:
        kernel = self._initializers[weight].dims[2:]
        return self._node(
            "Conv",
            *[x, weight, *([bias] if bias else [])],
            kernel_shape=kernel,
            strides=[stride, stride],
            pads=[*padding, *padding],
            group=groups,
        )

    def batch_norm(self, x: str, gamma: str, beta: str, mean: str, variance: str, epsilon: float) -> str:
        return self._node("BatchNormalization", x, gamma, beta, mean, variance, epsilon=epsilon)

    def layer_norm(self, x: str, gamma: str, beta: str, width: int, epsilon: float) -> str:
        return self._node("LayerNormalization", x, gamma, beta, axis=-1, epsilon=epsilon)

    def max_pool(self, x: str, kernel: int, stride: int, padding: int) -> str:
        return self._node("MaxPool", x, **_window(kernel, stride, padding))

    def avg_pool(self, x: str, kernel: int, stride: int, padding: int) -> str:
        return self._node("AveragePool", x, count_include_pad=1, **_window(kernel, stride, padding))

    def global_avg_pool(self, x: str) -> str:
        return self._node("GlobalAveragePool", x)

    def linear(self, x: str, weight: str, bias: str, rank: int) -> str:
        if rank == 2:
            return self._node("Gemm", x, weight, bias, transB=1)
        transposed = self._node("Transpose", weight, perm=[1, 0])
        return self.add(self.matmul(x, transposed), bias)

    def embedding(self, ids: str, table: str) -> str:
        return self._node("Gather", table, ids, axis=0)

    def matmul(self, a: str, b: str) -> str:
        return self._node("MatMul", a, b)

    def add(self, a: str, b: str) -> str:
        return self._node("Add", a, b)

    def mul(self, a: str, b: str) -> str:
        return self._node("Mul", a, b)

    def relu(self, x: str) -> str:
        return self._node("Relu", x)

    def relu6(self, x: str) -> str:
        return self._node("Clip", x, self._constant(0.0, np.float32), self._constant(6.0, np.float32))

    def sigmoid(self, x: str) -> str:
        return self._node("Sigmoid", x)

    def tanh(self, x: str) -> str:
        return self._node("Tanh", x)

    def gelu(self, x: str) -> str:
        return self._node("Gelu", x)

    def softmax(self, x: str) -> str:
        return self._node("Softmax", x, axis=-1)

    def attention(self, query: str, key: str, value: str, width: int) -> str:
        scores = self.matmul(self.permute(query, (0, 2, 1, 3)), self.permute(key, (0, 2, 3, 1)))
        scores = self.mul(scores, self._constant(width**-0.5, np.float32))
        return self.permute(self.matmul(self.softmax(scores), self.permute(value, (0, 2, 1, 3))), (0, 2, 1, 3))

    def concat(self, xs: Sequence[str], axis: int) -> str:
        return self._node("Concat", *xs, axis=axis)

    def reshape(self, x: str, shape: Sequence[int]) -> str:
        return self._node("Reshape", x, self._constant(shape, np.int64))

    def permute(self, x: str, axes: Sequence[int]) -> str:
        return self._node("Transpose", x, perm=list(axes))

    def slice(self, x: str, axis: int, begin: int, end: int) -> str:
        bounds = [self._constant([value], np.int64) for value in (begin, end, axis)]
        return self._node("Slice", x, *bounds)


def _window(kernel: int, stride: int, padding: int) -> dict[str, list[int]]:
    return {"kernel_shape": [kernel, kernel], "strides": [stride, stride], "pads": [padding] * 4}
