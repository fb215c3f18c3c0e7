"""The kernels that are compared: each written once, emitted as Relax, PyTorch or ONNX with the same weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.dot_suites import DOT_SUITES, DotCase
from eqtune.errors import InputError
from eqtune.zoo import weights
from eqtune.zoo.builder import Network, ShapeOnly, Tensor

__all__ = ["SUITES", "Case", "named", "suite"]


@dataclass(frozen=True)
class Case:
    """One kernel.

    Attributes
    ----------
    name : str
        What rows are keyed by.
    define : callable
        Emits the kernel on a `Network`; returns its output.
    compute_bound : bool
        Whether its speed is counted in FLOP/s (else in bytes/s).
    multiplications : float
        Of each output element, where functions are evaluated: multiplications, multiply-adds and divisions, one each,
        in the shortest form known here with float32's accuracy. Additions and maxima run beside them and count
        nothing, so that no kernel does better.
    """

    name: str
    define: Callable[[Network[Any]], Tensor[Any]]
    compute_bound: bool = True
    multiplications: float = 0.0

    def relax(self, seed: int = 0) -> Any:
        """As an IRModule with weights as constants."""
        from eqtune.zoo.relax_builder import RelaxBackend

        backend = RelaxBackend()
        return backend.finish([self.define(Network(backend, self.name, seed))])

    def torch(self, seed: int = 0) -> Any:
        """As a torch.nn.Module."""
        from eqtune.zoo.torch_builder import TorchBackend

        backend = TorchBackend()
        return backend.finish([self.define(Network(backend, self.name, seed))], self.name)

    def onnx(self, seed: int = 0) -> Any:
        """As an onnx.ModelProto."""
        from eqtune.zoo.onnx_builder import OnnxBackend

        backend = OnnxBackend()
        return backend.finish([self.define(Network(backend, self.name, seed))], self.name)

    def describe(self) -> tuple[Network[Any], Tensor[Any]]:
        """Inputs, parameter count, multiply-adds; and the output's shape."""
        network: Network[Any] = Network(ShapeOnly(), self.name, 0, draw_weights=False)
        return network, self.define(network)

    def inputs(self, seed: int = 0) -> dict[str, NDArray[Any]]:
        """Random inputs by name."""
        return {
            spec.name: np.asarray(weights.normal(seed, f"{self.name}/input/{spec.name}", spec.shape))
            for spec in self.describe()[0].inputs
        }

    @property
    def flops(self) -> float:
        """Of matrix products and convolutions, counted directly: two for each multiply-add."""
        return 2.0 * self.describe()[0].multiply_adds

    @property
    def bytes_moved(self) -> float:
        """Of all inputs, weights and the output, each once, as float32."""
        network, output = self.describe()
        values = sum(math.prod(spec.shape) for spec in network.inputs) + network.parameters + math.prod(output.shape)
        return 4.0 * values

    def peak_flops_per_s(self, hardware: Any, cpu: str | None = None) -> float:
        """Of the multiply-adds that it consists of, on all threads of `hardware`, which is `cpu`'s."""
        return float(hardware.peak_flops_per_s_all)

    def arithmetic_s(self, peak_flops_per_s: float) -> float:
        """Seconds that the multiplications of a kernel take at a machine's FMA peak, where an FMA counts two FLOPs.

        A depthwise convolution's count directly, padding included: what skips zeros may come out slightly ahead.
        """
        functions = self.multiplications * math.prod(self.describe()[1].shape)
        return functions / (0.5 * peak_flops_per_s) + self.flops / peak_flops_per_s


def _matmul(m: int, n: int, k: int, batch: int = 1) -> Case:
    lead = (batch,) if batch > 1 else ()

    def define(net: Network[Any]) -> Tensor[Any]:
        return net.matmul(net.input("a", (*lead, m, k)), net.input("b", (*lead, k, n)))

    return Case(f"matmul_{f'{batch}x' if batch > 1 else ''}{m}x{n}x{k}", define)


def _dense(m: int, n: int, k: int, relu: bool = False) -> Case:
    def define(net: Network[Any]) -> Tensor[Any]:
        y = net.linear(net.input("x", (m, k)), "dense", n)
        return net.relu(y) if relu else y

    return Case(f"dense_{m}x{n}x{k}{'_relu' if relu else ''}", define, compute_bound=m > 4)


def _conv(
    size: int, channels: int, out: int, kernel: int, stride: int = 1, groups: int = 1, padding: int | None = None
) -> Case:
    def define(net: Network[Any]) -> Tensor[Any]:
        x = net.input("x", (1, channels, size, size))
        pad = kernel // 2 if padding is None else padding
        return net.relu(net.conv2d(x, "conv", out, kernel, stride=stride, groups=groups, padding=pad))

    suffix = (f"_s{stride}" if stride > 1 else "") + (f"_g{groups}" if groups > 1 else "")
    return Case(
        f"conv{kernel}x{kernel}_{size}x{size}_{channels}_{out}{suffix}", define, compute_bound=groups < channels
    )


def _memory(
    name: str,
    shape: Sequence[int],
    body: Callable[[Network[Any], Tensor[Any]], Tensor[Any]],
    multiplications: float = 0.0,
) -> Case:
    return Case(
        f"{name}_{'x'.join(map(str, shape))}",
        lambda net: body(net, net.input("x", shape)),
        compute_bound=False,
        multiplications=multiplications,
    )


def _add(shape: Sequence[int]) -> Case:
    return Case(
        f"add_{'x'.join(map(str, shape))}",
        lambda net: net.add(net.input("x", shape), net.input("y", shape)),
        compute_bound=False,
    )


def _attention(heads: int, length: int, width: int) -> Case:
    def define(net: Network[Any]) -> Tensor[Any]:
        return net.attention(*[net.input(name, (1, length, heads, width)) for name in ("q", "k", "v")])

    return Case(f"attention_{heads}x{length}x{width}", define)


# Multiplications of an element, multiply-adds included (search/space/memory_bound/math_forms.py).
_EXP = 8  # round(x / ln 2): 1; the rest of x: 2; a polynomial of degree 5: 5
_EXP_BELOW_ZERO = 7  # softmax's: the rest of x is taken of x / ln 2, which needs one only
_TANH = 12  # x^2, 6 and 3 for numerator and denominator, times x, a division
_GELU = 16  # x / sqrt 2, its square, 6 and 4 for erf, times x, a division, the product with x / 2
_NORM = 3  # the square of a difference, two to normalise

SUITES: dict[str, tuple[Case, ...]] = {
    "matmul": (
        _matmul(512, 512, 512),
        _matmul(1024, 1024, 1024),
        _matmul(100, 200, 300),
        _matmul(2048, 64, 256),
        _matmul(64, 2048, 256),
        _matmul(64, 64, 64, batch=12),
        _matmul(197, 197, 64, batch=12),
    ),
    "dense": (
        _dense(64, 768, 768),
        _dense(128, 768, 768),
        _dense(128, 3072, 768, relu=True),
        _dense(128, 768, 3072),
        _dense(64, 3072, 1024, relu=True),
        _dense(8, 1024, 1024),
        _dense(1, 4096, 4096),
        _dense(1, 1000, 2048),
        _dense(1, 512, 512),
    ),
    "conv": (
        _conv(224, 3, 64, 3, stride=2, padding=0),
        _conv(224, 3, 64, 7, stride=2),
        _conv(56, 64, 64, 3),
        _conv(28, 128, 128, 3),
        _conv(14, 256, 256, 3),
        _conv(7, 512, 512, 3),
        _conv(56, 64, 256, 1),
        _conv(56, 256, 64, 1),
        _conv(28, 512, 128, 1),
        _conv(14, 256, 1024, 1),
        _conv(14, 1024, 256, 1),
        _conv(7, 2048, 512, 1),
        _conv(56, 128, 128, 3, stride=2),
        _conv(28, 256, 512, 1, stride=2),
        _conv(55, 16, 64, 1),
        _conv(55, 16, 64, 3),
        _conv(27, 32, 128, 3),
        _conv(13, 64, 256, 3),
        _conv(13, 512, 1000, 1),
        _conv(35, 192, 64, 1),
        _conv(35, 48, 64, 5),
        _conv(17, 768, 192, 1),
        _conv(224, 64, 64, 3),
        _conv(14, 512, 512, 3),
    ),
    "grouped": (
        _conv(56, 128, 128, 3, groups=32),
        _conv(28, 256, 256, 3, groups=32),
        _conv(14, 512, 512, 3, groups=32),
        _conv(7, 1024, 1024, 3, groups=32),
    ),
    "depthwise": (
        _conv(112, 32, 32, 3, groups=32),
        _conv(112, 96, 96, 3, stride=2, groups=96),
        _conv(56, 144, 144, 3, groups=144),
        _conv(28, 192, 192, 3, groups=192),
        _conv(14, 576, 576, 3, groups=576),
        _conv(7, 960, 960, 3, groups=960),
    ),
    "memory": (
        _memory("relu", (1, 256, 56, 56), lambda net, x: net.relu(x)),
        _memory("gelu", (64, 3072), lambda net, x: net.gelu(x), _GELU),
        _memory("sigmoid", (64, 4096), lambda net, x: net.sigmoid(x), _EXP + 1),
        _memory("tanh", (64, 4096), lambda net, x: net.tanh(x), _TANH),
        _add((1, 256, 56, 56)),
        _memory("softmax", (12, 64, 64), lambda net, x: net.softmax(x), _EXP_BELOW_ZERO + 1),
        _memory("softmax", (1024, 1024), lambda net, x: net.softmax(x), _EXP_BELOW_ZERO + 1),
        _memory("layer_norm", (64, 768), lambda net, x: net.layer_norm(x, "norm", epsilon=1e-12), _NORM),
        _memory("layer_norm", (512, 1024), lambda net, x: net.layer_norm(x, "norm", epsilon=1e-12), _NORM),
        _memory("max_pool3x3s2", (1, 64, 112, 112), lambda net, x: net.max_pool(x, 3, 2, 1)),
        _memory("avg_pool3x3", (1, 256, 35, 35), lambda net, x: net.avg_pool(x, 3, 1, 1)),
        _memory("global_avg_pool", (1, 2048, 7, 7), lambda net, x: net.global_avg_pool(x)),
        _memory("transpose", (1024, 1024), lambda net, x: net.permute(x, 1, 0)),
        _memory("transpose", (64, 12, 64), lambda net, x: net.permute(x, 1, 0, 2)),
        _memory("concat", (1, 128, 27, 27), lambda net, x: net.concat([net.relu(x), net.add(x, x)])),
    ),
    "attention": (
        *(_attention(12, 64, 64), _attention(12, 128, 64), _attention(16, 64, 64)),
        *(_attention(12, 512, 64), _attention(16, 512, 64), _attention(8, 1024, 64)),
    ),
}


def suite(names: str) -> tuple[Case | DotCase, ...]:
    """The cases of the comma-separated suites `names`, or of "all" of float32. Raises InputError for an unknown one."""
    suites: dict[str, Sequence[Case | DotCase]] = {**SUITES, **DOT_SUITES}
    chosen = list(SUITES) if names == "all" else names.split(",")
    unknown = set(chosen) - set(suites)
    if unknown:
        raise InputError(f"unknown suites {sorted(unknown)}; there are {list(suites)}")
    return tuple(case for name in chosen for case in suites[name])


def named(kernel: str) -> Case | DotCase:
    """The case of this name, of any suite."""
    return next(case for case in suite(",".join([*SUITES, *DOT_SUITES])) if case.name == kernel)
