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

from ..errors import InputError
from . import weights
from .builder import InputSpec, Network, ShapeOnly, Tensor
from .nasrnn import nasrnn
from .squeezenet import squeezenet

__all__ = ["MODELS", "ModelSpec", "inputs", "names", "relax"]


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

    def emit(self, backend: Any, seed: int, options: dict[str, Any]) -> list[Any]:
        """Emit on `backend`, and return the handles of the outputs."""
        self._check(options)
        return [out.handle for out in self.define(Network(backend, self.name, seed), **options)]

    def describe(self, **options: Any) -> Network[Any]:
        """Return a network without weights: its inputs, parameter count and multiply-adds."""
        self._check(options)
        network: Network[Any] = Network(ShapeOnly(), self.name, 0, draw_weights=False)
        self.define(network, **options)
        return network

    def _check(self, options: dict[str, Any]) -> None:
        unknown = sorted(set(options) - set(self.options))
        if unknown:
            allowed = ", ".join(self.options) or "none"
            raise InputError(f"{self.name} has no option {unknown[0]!r}; its options: {allowed}")


MODELS: dict[str, ModelSpec] = {
    spec.name: spec
    for spec in (
        ModelSpec("squeezenet", squeezenet, 1_235_496, 0.35e9),
        ModelSpec("nasrnn", nasrnn, 20_972_032, 20.97e6),
    )
}


def names() -> list[str]:
    """Names of all models."""
    return list(MODELS)


def _spec(name: str) -> ModelSpec:
    if name not in MODELS:
        raise InputError(f"no model {name!r} in the zoo; there are: {', '.join(MODELS)}")
    return MODELS[name]


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


def inputs(name: str, seed: int = 0, **options: Any) -> dict[str, npt.NDArray[Any]]:
    """Return random inputs by name, in the order of the model's parameters."""
    return {spec.name: _draw(name, seed, spec) for spec in _spec(name).describe(**options).inputs}


def _draw(model: str, seed: int, spec: InputSpec) -> npt.NDArray[Any]:
    key = f"{model}/input/{spec.name}"
    if spec.high:
        return weights.integers(seed, key, spec.shape, spec.high).astype(spec.dtype)
    return np.asarray(weights.normal(seed, key, spec.shape))
