"""Kernels of 8-bit integers and of bfloat16, compared with the machine's dot-product instructions.

The int8 kernels are ONNX nodes, which eqtune imports as anyone's: MatMulInteger, QLinearMatMul and QLinearConv, with
zero points. The bfloat16 kernels sum in float32. Peers: ONNX Runtime for int8 (its CPU kernels have no bfloat16);
oneDNN, through PyTorch, for bfloat16, and for the one product of signed bytes that PyTorch offers (`torch._int_mm`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from benchmarks.peers.timing import in_own_process

__all__ = ["DOT_SUITES", "DotCase"]


@dataclass(frozen=True)
class DotCase:
    """One kernel; the public side of `benchmarks.suites.Case`.

    Attributes
    ----------
    name : str
        What rows are keyed by.
    kind : str
        An ONNX operator, or "bfloat16".
    data, weight : tuple of int
        Shapes: (M, K) and (K, N), or NCHW and OIHW.
    left : str
        Dtype of the data; of the weight it is int8, or bfloat16.
    zero : int
        The data's zero point.
    """

    name: str
    kind: str
    data: tuple[int, ...]
    weight: tuple[int, ...]
    left: str = "uint8"
    zero: int = 0
    compute_bound = True

    @property
    def _padding(self) -> int:
        return self.weight[-1] // 2 if len(self.weight) == 4 else 0

    @property
    def _channels(self) -> int:
        return self.weight[0 if len(self.weight) == 4 else 1]

    @property
    def _output(self) -> tuple[int, ...]:
        return (1, self._channels, *self.data[2:]) if len(self.weight) == 4 else (self.data[0], self._channels)

    @property
    def flops(self) -> float:
        """Operations, two for each product."""
        return 2.0 * math.prod(self._output) * math.prod(self.weight) / self._channels

    @property
    def bytes_moved(self) -> float:
        """Of data and weights as stored, and sums of 32 bits."""
        size = 2 if self.kind == "bfloat16" else 1
        return float(size * (math.prod(self.data) + math.prod(self.weight)) + 4 * math.prod(self._output))

    def peak_flops_per_s(self, hardware: Any, cpu: str | None = None) -> float:
        """What the instruction reaches on this machine, measured now, on all threads of `hardware`, which is `cpu`'s.

        NaN where `cpu` has no such instruction.
        """
        from eqtune.search.space.contraction.dot_intrinsics import find_dot_product

        if hardware.tile_flops_per_s:  # AMX multiplies twice as many bytes as pairs of bytes
            return float(hardware.tile_flops_per_s * hardware.threads * (1 if self.kind == "bfloat16" else 2))
        dtypes = ("bfloat16", "bfloat16", "float32") if self.kind == "bfloat16" else ("uint8", "int8", "int32")
        dot = find_dot_product(*dtypes, hardware)
        if dot is None:
            return math.nan
        arguments = {"dtype": dtypes[1], "threads": hardware.threads, "lanes": dot.lanes, "cpu": cpu}
        return float(in_own_process("benchmarks.peers.dot_peak", **arguments)["flops_per_s"])

    def weights(self, seed: int = 0) -> NDArray[Any]:
        """The constant operand."""
        rng = np.random.default_rng([seed, 1])
        if self.kind == "bfloat16":
            return rng.standard_normal(self.weight).astype(ml_dtypes.bfloat16)
        return rng.integers(-128, 127, self.weight, np.int8, endpoint=True)

    def inputs(self, seed: int = 0) -> dict[str, NDArray[Any]]:
        """Random data, over the whole range of its dtype."""
        rng = np.random.default_rng(seed)
        if self.kind == "bfloat16":
            return {"x": rng.standard_normal(self.data).astype(ml_dtypes.bfloat16)}
        limits = np.iinfo(self.left)
        return {"x": rng.integers(limits.min, limits.max, self.data, self.left, endpoint=True)}

    def relax(self, seed: int = 0) -> Any:
        """As an IRModule with weights as constants."""
        from tvm import relax

        from eqtune.frontends import load_model

        if self.kind != "bfloat16":
            return load_model(self.onnx(seed)).mod
        builder = relax.BlockBuilder()
        x = relax.Var("x", relax.TensorType(self.data, self.kind))
        weight = relax.const(self.weights(seed), self.kind)
        with builder.function("main", [x]):
            with builder.dataflow():
                if len(self.weight) == 2:
                    product = relax.op.matmul(x, weight, out_dtype="float32")
                else:
                    product = relax.op.nn.conv2d(x, weight, padding=self._padding, out_dtype="float32")
                result = builder.emit_output(product)
            builder.emit_func_output(result)
        return builder.get()

    def onnx(self, seed: int = 0) -> Any:
        """As an onnx.ModelProto. Raises ValueError for bfloat16."""
        import onnx
        from onnx import TensorProto, helper

        if self.kind == "bfloat16":
            raise ValueError("ONNX Runtime has no kernels for bfloat16 on CPUs")
        tensors = {"w": self.weights(seed), "x_zero": np.array(self.zero, self.left), "w_zero": np.array(0, np.int8)}
        names = ["x", "w", "x_zero", "w_zero"]
        result = TensorProto.INT32
        if self.kind.startswith("QLinear"):
            # Results fill their range: 127^2 sqrt(K) / 3 is about the spread of a sum.
            spread = 127.0**2 * math.sqrt(math.prod(self.weight) / self._channels) / 3
            scales = {"x_scale": 0.1, "w_scale": 0.01, "y_scale": 0.001 * spread / 60}
            tensors |= {name: np.array(value, np.float32) for name, value in scales.items()}
            tensors["y_zero"] = np.array(128 if self.left == "uint8" else 0, self.left)
            names = ["x", "x_scale", "x_zero", "w", "w_scale", "w_zero", "y_scale", "y_zero"]
            result = helper.np_dtype_to_tensor_dtype(np.dtype(self.left))
        padding = {"pads": [self._padding] * 4} if len(self.weight) == 4 else {}
        graph = helper.make_graph(
            [helper.make_node(self.kind, names, ["y"], **padding)],
            self.name,
            [helper.make_tensor_value_info("x", helper.np_dtype_to_tensor_dtype(np.dtype(self.left)), self.data)],
            [helper.make_tensor_value_info("y", result, self._output)],
            [onnx.numpy_helper.from_array(tensors[name], name) for name in names[1:]],
        )
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)

    def torch(self, seed: int = 0) -> Any:
        """As a torch.nn.Module over the inputs as numpy knows them. Raises ValueError where PyTorch has no kernel."""
        import torch

        product = self.kind == "MatMulInteger" and self.left == "int8" and self.zero == 0
        if self.kind != "bfloat16" and not product:
            raise ValueError("PyTorch multiplies signed bytes only, without zero points")
        weights = self.weights(seed)
        case = self

        class Kernel(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                dtype = torch.bfloat16 if case.kind == "bfloat16" else torch.int8
                plain = weights.astype(np.float32) if case.kind == "bfloat16" else weights
                self.weight = torch.nn.Parameter(torch.from_numpy(plain).to(dtype), requires_grad=False)

            def forward(self, x: Any) -> Any:
                if product:
                    return torch._int_mm(x, self.weight)
                if len(case.weight) == 2:
                    return x @ self.weight
                return torch.nn.functional.conv2d(x, self.weight, padding=case._padding)

        return Kernel()


def _product(kind: str, m: int, n: int, k: int, left: str = "uint8", zero: int = 0) -> DotCase:
    name = f"{kind.lower()}_{left}_{m}x{n}x{k}" if kind != "bfloat16" else f"bfloat16_{m}x{n}x{k}"
    return DotCase(name, kind, (m, k), (k, n), left, zero)


def _conv(kind: str, size: int, channels: int, out: int, window: int, left: str = "uint8", zero: int = 0) -> DotCase:
    name = f"{kind.lower()}_{left}" if kind != "bfloat16" else kind
    name = f"{name}_conv{window}x{window}_{size}x{size}_{channels}_{out}"
    return DotCase(name, kind, (1, channels, size, size), (out, channels, window, window), left, zero)


DOT_SUITES: dict[str, tuple[DotCase, ...]] = {
    "int8": (
        _product("MatMulInteger", 512, 512, 512),
        _product("MatMulInteger", 512, 512, 512, "int8"),
        _product("MatMulInteger", 1024, 1024, 1024, zero=128),
        _product("MatMulInteger", 100, 200, 300, zero=7),
        _product("QLinearMatMul", 128, 768, 768, zero=120),
        _product("QLinearMatMul", 128, 3072, 768, "int8", -3),
        _product("QLinearMatMul", 2048, 64, 256, zero=128),
        _conv("QLinearConv", 28, 256, 128, 1, zero=128),
        _conv("QLinearConv", 14, 1024, 256, 1, "int8", 5),
        _conv("QLinearConv", 28, 64, 64, 3, zero=3),
        _conv("QLinearConv", 14, 256, 256, 3, "int8", -10),
    ),
    "bf16": (
        _product("bfloat16", 512, 512, 512),
        _product("bfloat16", 1024, 1024, 1024),
        _product("bfloat16", 100, 200, 300),
        _product("bfloat16", 128, 768, 768),
        _product("bfloat16", 128, 3072, 768),
        _product("bfloat16", 2048, 64, 256),
        _conv("bfloat16", 28, 256, 128, 1),
        _conv("bfloat16", 28, 64, 64, 3),
        _conv("bfloat16", 14, 256, 256, 3),
    ),
}
"""Not part of "all", whose kernels are float32."""
