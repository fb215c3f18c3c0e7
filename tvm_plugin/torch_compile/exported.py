"""A captured graph as a program that can be tuned: weights inside, changes returned."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.export
from torch.export.graph_signature import OutputKind

from ..errors import InputError, UnsupportedModelError
from ..frontends.torch.export import exported, quiet
from ..frontends.torch.state import decomposed
from .stays import Stays

__all__ = ["Frozen", "changed_arguments", "program_of"]

_CHANGES = (OutputKind.BUFFER_MUTATION, OutputKind.USER_INPUT_MUTATION)


class Frozen(torch.nn.Module):
    """A captured graph that takes its weights from itself, and returns what it changes behind its outputs.

    Parameters
    ----------
    graph : torch.fx.GraphModule
    arguments : sequence of Tensor
    frozen : sequence of int
        Which of them are weights.
    computed : sequence of int
        The outputs to return.
    changed : sequence of int
        The arguments that the graph changes.
    numbers : mapping
        Arguments that are sizes: of which argument, and along which dimension.

    Attributes
    ----------
    inputs : list of int
        The arguments that are left.
    """

    def __init__(
        self,
        graph: torch.fx.GraphModule,
        arguments: Sequence[torch.Tensor],
        frozen: Sequence[int],
        computed: Sequence[int],
        changed: Sequence[int] = (),
        numbers: Mapping[int, tuple[int, int]] | None = None,
    ) -> None:
        super().__init__()
        self.graph = graph
        self._computed = tuple(computed)
        self._numbers = dict(numbers or {})
        self.inputs = [index for index in range(len(arguments)) if index not in (*frozen, *self._numbers)]
        self._changed = tuple(changed)
        self._names = {index: f"argument_{index}" for index in frozen}
        for index, name in self._names.items():
            self.register_buffer(name, arguments[index].detach())

    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The computed outputs, and what the graph has changed."""
        values = dict(zip(self.inputs, inputs, strict=True))
        values |= {index: self.get_buffer(name) for index, name in self._names.items()}
        values |= {index: values[index].clone() for index in self._changed}
        sizes = {index: values[source].size(dimension) for index, (source, dimension) in self._numbers.items()}
        outputs = self.graph(*(given for _, given in sorted((values | sizes).items())))
        return (*(outputs[index] for index in self._computed), *(values[index] for index in self._changed))

    def argument(self, buffer: str) -> int:
        """Which argument a buffer is."""
        return next(index for index, name in self._names.items() if name == buffer)


def program_of(
    module: Frozen, arguments: Sequence[torch.Tensor], dimensions: Mapping[int, Iterable[int]] | None = None
) -> torch.export.ExportedProgram:
    """A captured graph, exported without gradients; `dimensions` of arguments stay open.

    Raises Stays where torch.export cannot follow it.
    """
    dynamic = None
    if dimensions:
        own = [{d: torch.export.Dim.DYNAMIC for d in dimensions.get(index, ())} for index in module.inputs]
        dynamic = (tuple(own),)
    with torch.inference_mode(False), torch.no_grad(), quiet():
        inputs = tuple(arguments[index].detach().clone() for index in module.inputs)
        try:
            return exported(module, inputs, {}, "it", dynamic_shapes=dynamic)
        except InputError as error:
            raise Stays(str(error)) from error


def changed_arguments(program: torch.export.ExportedProgram, module: Frozen) -> list[int]:
    """The arguments that a graph changes."""
    with quiet():
        try:
            functional = decomposed(program, {})
        except UnsupportedModelError as error:
            raise Stays(str(error)) from error
    inputs = list(functional.graph_signature.user_inputs)
    changed = []
    for spec in functional.graph_signature.output_specs:
        if spec.kind in _CHANGES and spec.target is not None:
            of_input = spec.kind == OutputKind.USER_INPUT_MUTATION
            changed.append(module.inputs[inputs.index(spec.target)] if of_input else module.argument(spec.target))
    return sorted(changed)
