"""Weights of a captured graph: which ones they are, and whether they are still what they were."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter

import torch

__all__ = ["Number", "State", "Weights", "own_tensors"]


def own_tensors(graph: torch.fx.GraphModule) -> list[torch.Tensor]:
    """Tensors that a graph holds: what it was made with, and parameters where an optimizer was captured."""
    held = (attrgetter(node.target)(graph) for node in graph.graph.nodes if node.op == "get_attr")
    return [value for value in held if isinstance(value, torch.Tensor)]


@dataclass(frozen=True)
class Number:
    """A float that a graph takes: a new tensor in each call. As text, which tells -0.0 from 0.0."""

    text: str

    @staticmethod
    def of(tensor: torch.Tensor) -> Number:
        """That of a tensor of one element."""
        return Number(tensor.item().hex())

    def holds_for(self, tensor: torch.Tensor) -> bool:
        """Whether it is the same number."""
        return tensor.item().hex() == self.text


@dataclass(frozen=True)
class State:
    """What tells that a tensor has been assigned to. Assignments to its `.data` show only where it moves.

    It does not keep the tensor.
    """

    tensor: weakref.ref[torch.Tensor]
    version: int
    address: int

    @staticmethod
    def of(tensor: torch.Tensor) -> State:
        """That of a tensor now."""
        return State(weakref.ref(tensor), _version(tensor), tensor.data_ptr())

    def holds_for(self, tensor: torch.Tensor) -> bool:
        """Whether it is the same tensor, and nobody has assigned to it since."""
        is_same = self.tensor() is tensor
        return is_same and _version(tensor) == self.version and tensor.data_ptr() == self.address


def _version(tensor: torch.Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


class Weights:
    """The arguments that became constants, and what the graph holds, as they were.

    Parameters
    ----------
    states : mapping of int to State or Number
        Of the arguments that became constants.
    arguments : sequence of Tensor
    graph : torch.fx.GraphModule
    """

    def __init__(
        self, states: Mapping[int, State | Number], arguments: Sequence[torch.Tensor], graph: torch.fx.GraphModule
    ) -> None:
        self._states = list(states.items())
        self._own = [(tensor, State.of(tensor)) for tensor in own_tensors(graph)]
        self._parameters = {
            index: weakref.ref(value) for index, value in enumerate(arguments) if isinstance(value, torch.nn.Parameter)
        }

    def are_unchanged(self, arguments: Sequence[torch.Tensor]) -> bool:
        """Whether all are the same tensors with the same values."""
        return all(state.holds_for(arguments[index]) for index, state in self._states) and all(
            state.holds_for(tensor) for tensor, state in self._own
        )

    def are_of_one_module(self, arguments: Sequence[torch.Tensor]) -> bool:
        """Whether the parameters are the same ones, whatever their values."""
        return all(arguments[index] is parameter() for index, parameter in self._parameters.items())

    def are_gone(self) -> bool:
        """Whether some parameter exists no more."""
        return any(parameter() is None for parameter in self._parameters.values())

    def changed(self, arguments: Sequence[torch.Tensor]) -> list[int]:
        """The arguments that are others, or have other values."""
        return [index for index, state in self._states if not state.holds_for(arguments[index])]
