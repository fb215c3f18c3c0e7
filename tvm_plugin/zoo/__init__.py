"""Ten reference models with seeded weights, each written once and emitted as Relax, PyTorch or ONNX.

For demonstrations, tests and benchmarks: `zoo.relax` needs TVM alone, and the peers get the very same weights.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from .. import _checked  # noqa: F401 - refuses versions that cannot work
from ..errors import InputError, MissingExtraError
from . import weights
from .bert import bert_base, tensat_bert
from .builder import Backend, H, InputSpec, Network, ShapeOnly, Tensor
from .inception import inceptionv3
from .mobilenet import mobilenetv2
from .nasnet import nasneta
from .nasrnn import nasrnn
from .resnet import resnet50, resnext50
from .squeezenet import squeezenet
from .vgg import vgg19

__all__ = ["MODELS", "ModelSpec", "check", "inputs", "names", "onnx", "relax", "torch"]


@dataclass(frozen=True)
class ModelSpec:
    """One model of the zoo.

    Attributes
    ----------
    name
        What the functions of this module and the command line call it.
    define
        Emits it on a `Network`; its keyword arguments are the model's options.
    parameters
        Number of trained weights, as published.
    multiply_adds
        Of one inference, as published.
    """

    name: str
    define: Callable[..., Sequence[Tensor[Any]]]
    parameters: int
    multiply_adds: float

    @property
    def options(self) -> dict[str, Any]:
        """Option names with their defaults."""
        parameters = list(inspect.signature(self.define).parameters.values())[1:]
        return {parameter.name: parameter.default for parameter in parameters}

    def emit(self, backend: Backend[H], seed: int, options: dict[str, Any]) -> Sequence[Tensor[H]]:
        """Emit on `backend`, and return the outputs."""
        self.check(options)
        return self.define(Network(backend, self.name, seed), **options)

    def describe(self, **options: Any) -> Network[Any]:
        """Return a network without weights: its inputs, parameter count and multiply-adds."""
        self.check(options)
        network: Network[Any] = Network(ShapeOnly(), self.name, 0, draw_weights=False)
        self.define(network, **options)
        return network

    def check(self, options: dict[str, Any]) -> None:
        """Raise InputError for an option that the model does not have, and for a value that is none of it."""
        unknown = sorted(set(options) - set(self.options))
        if unknown:
            allowed = ", ".join(self.options) or "none"
            raise InputError(f"{self.name} has no option {unknown[0]!r}; its options: {allowed}")
        for name, value in options.items():
            is_flag = isinstance(self.options[name], bool)
            if is_flag != isinstance(value, bool) or not (is_flag or (isinstance(value, int) and value >= 1)):
                allowed = "True or False" if is_flag else "a whole number, at least 1"
                raise InputError(f"{self.name}: {name} is {allowed}, not {value!r}")


MODELS: dict[str, ModelSpec] = {
    spec.name: spec
    for spec in (
        # Published: torchvision's table of weights ("Num params", "GFLOPS"), without auxiliary classifiers.
        ModelSpec("squeezenet", squeezenet, 1_235_496, 0.349e9),
        ModelSpec("mobilenetv2", mobilenetv2, 3_504_872, 0.301e9),
        ModelSpec("resnet50", resnet50, 25_557_032, 4.09e9),
        ModelSpec("resnext50", resnext50, 25_028_904, 4.23e9),
        ModelSpec("inceptionv3", inceptionv3, 23_834_568, 5.71e9),
        ModelSpec("vgg19", vgg19, 143_667_240, 19.63e9),
        # Counted from the shapes that TASO's scripts give to `new_weight`, `conv2d` and `matmul`.
        ModelSpec("nasneta", nasneta, 39_838_528, 15.05e9),
        ModelSpec("nasrnn", nasrnn, 20_972_032, 20.97e6),
        # Twelve layers of 7,087,872; with `token_ids` the 109,482,240 of the published uncased model.
        ModelSpec("bert_base", bert_base, 85_054_464, 5.51e9),
        ModelSpec("tensat_bert", tensat_bert, 33_554_432, 2.215e9),
    )
}


def names() -> list[str]:
    """Names of all models."""
    return list(MODELS)


def _spec(name: str) -> ModelSpec:
    if name not in MODELS:
        raise InputError(f"no model {name!r} in the zoo; there are: {', '.join(MODELS)}")
    return MODELS[name]


def check(name: str, seed: int = 0, **options: Any) -> None:
    """Raise InputError for a model or an option that does not exist; draws no weights."""
    _spec(name).check(options)


def relax(name: str, seed: int = 0, **options: Any) -> Any:
    """Return the model as a Relax IRModule with one function, "main", and its weights as constants.

    Raises
    ------
    InputError
        No such model or option.
    """
    from .relax_builder import RelaxBackend

    backend = RelaxBackend()
    return backend.finish(_spec(name).emit(backend, seed, options))


def torch(name: str, seed: int = 0, **options: Any) -> tuple[Any, tuple[Any, ...]]:
    """Return the model as a torch.nn.Module with the same weights, and a tuple of example inputs.

    Raises
    ------
    InputError
        No such model or option.
    MissingExtraError
        PyTorch is not installed.
    """
    spec = _spec(name)
    try:
        from torch import from_numpy

        from .torch_builder import TorchBackend
    except ImportError as error:
        raise MissingExtraError('PyTorch is needed for this: pip install "eqtune[torch]"') from error
    backend = TorchBackend()
    module = backend.finish(spec.emit(backend, seed, options), name)
    return module, tuple(from_numpy(array) for array in inputs(name, seed, **options).values())


def onnx(name: str, seed: int = 0, **options: Any) -> Any:
    """Return the model as an onnx.ModelProto with the same weights.

    Raises
    ------
    InputError
        No such model or option.
    MissingExtraError
        onnx is not installed.
    """
    spec = _spec(name)
    try:
        from .onnx_builder import OnnxBackend
    except ImportError as error:
        raise MissingExtraError('onnx is needed for this: pip install "eqtune[onnx]"') from error
    backend = OnnxBackend()
    return backend.finish(spec.emit(backend, seed, options), name)


def inputs(name: str, seed: int = 0, **options: Any) -> dict[str, npt.NDArray[Any]]:
    """Return random inputs by name, in the order of the model's parameters."""
    return {spec.name: _draw(name, seed, spec) for spec in _spec(name).describe(**options).inputs}


def _draw(model: str, seed: int, spec: InputSpec) -> npt.NDArray[Any]:
    key = f"{model}/input/{spec.name}"
    if spec.high:
        return weights.integers(seed, key, spec.shape, spec.high).astype(spec.dtype)
    return np.asarray(weights.normal(seed, key, spec.shape))
