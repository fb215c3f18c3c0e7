"""State of PyTorch models: buffers that they change, and caches that they are given, as inputs and outputs."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.export
from torch.export.graph_signature import OutputKind
from torch.utils import _pytree as pytree

from ..errors import UnsupportedModelError
from ..runtime import first_line

__all__ = ["STATE", "WithState", "changed_buffers", "decomposed", "register_caches"]

STATE = "state"
"""Keyword of the inputs that are buffers, by name."""


_OF_TRAINING = frozenset({"running_mean", "running_var", "num_batches_tracked"})
"""Buffers of norms that only training changes."""


class WithState(torch.nn.Module):
    """A module that changes some of its buffers, as one that takes them and returns them with its outputs.

    Parameters
    ----------
    module : torch.nn.Module
        It keeps its buffers as they are.
    names : sequence of str
        Of the buffers that it changes.
    """

    def __init__(self, module: torch.nn.Module, names: Sequence[str]) -> None:
        super().__init__()
        self.module, self.names = module, tuple(names)

    @property
    def state(self) -> dict[str, torch.Tensor]:
        """Copies of what the buffers hold, by names without dots."""
        buffers = dict(self.module.named_buffers())
        return {_plain(name): buffers[name].detach().clone() for name in self.names}

    def forward(self, *arguments: Any, state: dict[str, torch.Tensor], **keywords: Any) -> tuple[Any, ...]:
        """The outputs, and the buffers as they are then, in their order."""
        buffers = {name: state[_plain(name)].clone() for name in self.names}
        outputs = torch.func.functional_call(self.module, buffers, arguments, keywords)
        return (outputs, *buffers.values())


def _plain(name: str) -> str:
    return name.replace(".", "_")


def changed_buffers(program: torch.export.ExportedProgram) -> list[str]:
    """The buffers that an exported program changes when it runs; none for one in training mode, which is refused."""
    if any(spec.kind == OutputKind.BUFFER_MUTATION for spec in program.graph_signature.output_specs):
        functional = program
    elif any(_is_in_place(node) for node in program.graph.nodes):
        functional = decomposed(program, {})
    else:
        return []
    outputs = functional.graph_signature.output_specs
    changed = [str(spec.target) for spec in outputs if spec.kind == OutputKind.BUFFER_MUTATION]
    return [] if any(name.rpartition(".")[2] in _OF_TRAINING for name in changed) else changed


def decomposed(
    program: torch.export.ExportedProgram, table: Mapping[Any, Callable[..., Any]]
) -> torch.export.ExportedProgram:
    """The program without operators that change tensors, and in place of those of the table what they are made of.

    Raises
    ------
    UnsupportedModelError
        torch.export cannot do so.
    """
    try:
        return program.run_decompositions(dict(table))
    except Exception as error:  # of torch: what it has exported is traced again
        raise UnsupportedModelError(
            f"torch.export cannot write the model without operators that change tensors: {first_line(error)}"
        ) from error


def _is_in_place(node: torch.fx.Node) -> bool:
    name = getattr(node.target, "__name__", "").split(".")[0] if node.op == "call_function" else ""
    return name.endswith("_") and not name.endswith("__")


def register_caches(given: Any) -> None:
    """Have PyTorch look into caches of keys and values of Hugging Face's decoders, where some are given."""
    kinds = {f"{type(leaf).__module__}.{type(leaf).__qualname__}" for leaf in pytree.tree_leaves(given)}
    if "transformers.cache_utils.DynamicCache" in kinds and "transformers" in sys.modules:
        with contextlib.suppress(ImportError):  # a version without
            from transformers.integrations.executorch import (  # type: ignore[import-not-found]
                register_dynamic_cache_export_support,
            )

            register_dynamic_cache_export_support()
