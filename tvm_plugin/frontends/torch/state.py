"""State of PyTorch models: buffers that they change, and caches that they are given, as inputs and outputs."""

from __future__ import annotations

import contextlib
import inspect
import itertools
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.export
from torch.export.graph_signature import OutputKind
from torch.utils import _pytree as pytree

from ...errors import InputError, UnsupportedModelError
from ...runtime import first_line

__all__ = ["WithState", "changed_buffers", "decomposed", "register_caches"]

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
    arguments, keywords
        That it is called with. Here, positional ones are keywords of the names that the module gives them.
    """

    def __init__(
        self, module: torch.nn.Module, names: Sequence[str], arguments: Sequence[Any], keywords: Mapping[str, Any]
    ) -> None:
        super().__init__()
        self.module, self.names = module, tuple(names)
        self._positional = _names(module, arguments, keywords)
        given = {**dict(zip(self._positional, arguments, strict=False)), **keywords}
        self.arguments = tuple(arguments[len(self._positional) :])
        self._state = next(name for name in _numbered("state") if name not in given)
        self._keys = _distinct(name.replace(".", "_") for name in self.names)
        buffers = dict(module.named_buffers(remove_duplicate=False))
        kept = {key: buffers[name].detach().clone() for key, name in zip(self._keys, self.names, strict=True)}
        self.keywords: dict[str, Any] = {**given, self._state: kept}

    def forward(self, *arguments: Any, **keywords: Any) -> tuple[Any, ...]:
        """The outputs, and the buffers as they are then, in their order."""
        state = keywords.pop(self._state)
        arguments = (*(keywords.pop(name) for name in self._positional), *arguments)
        buffers = {name: state[key].clone() for key, name in zip(self._keys, self.names, strict=True)}
        outputs = torch.func.functional_call(self.module, buffers, arguments, keywords)
        return (*([] if outputs is None else [outputs]), *buffers.values())


def _names(module: torch.nn.Module, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> list[str]:
    """What the module calls its positional arguments; none where some have no names."""
    try:
        parameters = inspect.signature(module.forward).parameters
        inspect.signature(module.forward).bind(*arguments, **keywords)
    except (TypeError, ValueError):
        return []
    names = list(parameters)[: len(arguments)]
    plain = all(parameters[name].kind == inspect.Parameter.POSITIONAL_OR_KEYWORD for name in names)
    return names if plain and len(names) == len(arguments) and not set(names) & set(keywords) else []


def _numbered(name: str) -> Iterable[str]:
    """The name, and others like it."""
    return itertools.chain([name], (f"{name}_{number}" for number in itertools.count(2)))


def _distinct(names: Iterable[str]) -> list[str]:
    found: list[str] = []
    for name in names:
        found.append(next(one for one in _numbered(name) if one not in found))
    return found


def changed_buffers(program: torch.export.ExportedProgram) -> list[str]:
    """The buffers that an exported program changes when it runs; none for one in training mode, which is refused.

    Raises
    ------
    UnsupportedModelError
        torch.export cannot tell.
    """
    if any(spec.kind == OutputKind.BUFFER_MUTATION for spec in program.graph_signature.output_specs):
        functional = program
    elif any(_changes_buffer(node, program.graph_signature.inputs_to_buffers) for node in program.graph.nodes):
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
            "torch.export cannot write the model without operators that change tensors (exporting it with "
            f"torch.export.export(..., strict=True) may help): {first_line(error)}"
        ) from error


def _changes_buffer(node: torch.fx.Node, buffers: Mapping[str, str]) -> bool:
    """Whether an operator changes a buffer, or what may be a view of one."""
    name = getattr(node.target, "__name__", "").split(".")[0] if node.op == "call_function" else ""
    if not name.endswith("_") or name.endswith("__"):
        return False
    changed: Any = node
    while isinstance(changed, torch.fx.Node) and changed.op == "call_function" and changed.args:
        changed = changed.args[0]
    return isinstance(changed, torch.fx.Node) and changed.name in buffers


def register_caches(given: Any) -> None:
    """Have PyTorch look into caches of keys and values of Hugging Face's decoders, where some are given.

    Raises
    ------
    InputError
        A cache forgets words: what it holds does not tell how many there were.
    """
    caches = [leaf for leaf in pytree.tree_leaves(given, is_leaf=_is_cache) if _is_cache(leaf)]
    if not caches or "transformers" not in sys.modules:
        return
    for layer in (layer for cache in caches for layer in getattr(cache, "layers", ())):
        keys = getattr(layer, "keys", None)
        if isinstance(keys, torch.Tensor) and keys.ndim > 2 and layer.get_seq_length() != keys.shape[-2]:
            raise InputError(
                f"example_inputs holds a cache of {keys.shape[-2]} words of {layer.get_seq_length()} that there were "
                "(a sliding window); give one that forgot none, or let a module around the model take keys, values "
                "and position_ids"
            )
    with contextlib.suppress(ImportError):  # a version without
        from transformers.integrations.executorch import (  # type: ignore[import-not-found]
            register_dynamic_cache_export_support,
        )

        register_dynamic_cache_export_support()


def _is_cache(leaf: Any) -> bool:
    return (type(leaf).__module__, type(leaf).__qualname__) == ("transformers.cache_utils", "DynamicCache")
