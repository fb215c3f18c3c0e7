"""PyTorch models: a torch.nn.Module is exported, an ExportedProgram is translated to Relax.

The exported graph is made functional: no in-place operators, no training forms.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.export
from numpy.typing import NDArray
from torch.utils import _pytree as pytree
from tvm import relax

from ...errors import InputError, UnsupportedModelError
from ..imported import ImportedModel, Reference, imported_model
from ..relax_model import bind_shapes
from .complex import has_complex_numbers, with_real_numbers
from .decompositions import check_signature, translatable
from .export import as_tensors, evaluating, exported, quiet, specialised, unchanged
from .importer import translated
from .nodes import array_of_torch, torch_of_array
from .order import EqualsInOrder
from .state import WithState, changed_buffers, register_caches

__all__ = ["from_exported_program", "from_module"]


def from_module(
    module: torch.nn.Module,
    example_inputs: Sequence[Any] | Mapping[str, Any] | torch.Tensor | None,
    shapes: Mapping[str, Sequence[int]],
) -> ImportedModel:
    """Export `module` in evaluation mode (it keeps its own mode) for the shapes of `example_inputs`, and import it.

    Inputs are positional, or keywords where they are a mapping.

    Raises
    ------
    InputError
        There are no example inputs, or they are not tensors, or torch.export cannot follow the model with them.
    """
    if example_inputs is None:
        raise InputError("a torch.nn.Module needs example_inputs=(tensor, ...): the shapes to tune for")
    given: Any = (example_inputs,) if isinstance(example_inputs, torch.Tensor) else example_inputs
    register_caches(given)
    given = as_tensors(dict(given) if isinstance(given, Mapping) else tuple(given))
    arguments, keywords = ((), given) if isinstance(given, dict) else (given, {})
    name = type(module).__name__
    with evaluating(module), unchanged(module), quiet():
        program = exported(module, arguments, keywords, name)
        strict = False
        try:
            changed = changed_buffers(program)
        except UnsupportedModelError:  # buffers that several modules share
            strict = True
            program = exported(module, arguments, keywords, name, strict)
            changed = changed_buffers(program)
        if changed:
            module = WithState(module, changed, arguments, keywords)
            program = exported(module, module.arguments, module.keywords, name, strict)

    def evaluate(*arguments: Any, **keywords: Any) -> Any:
        with evaluating(module):
            return module(*arguments, **keywords)

    return from_exported_program(program, shapes, name, evaluate)


def from_exported_program(
    program: torch.export.ExportedProgram,
    shapes: Mapping[str, Sequence[int]],
    name: str = "torch",
    evaluate: Callable[..., Any] | None = None,
    any_size: bool = False,
) -> ImportedModel:
    """Translate `program` to Relax; `evaluate` is the model itself if there is more than the program.

    Raises
    ------
    UnsupportedModelError
        The program changes its inputs, takes something other than tensors, has dynamic dimensions that
        `shapes` does not give (unless `any_size` lets them be), or has an operator that TVM's importer does not know.
    InputError
        `shapes` does not fit the inputs.
    """
    with quiet():
        changed = [] if evaluate is not None else changed_buffers(program)
        if changed:
            program, evaluate, shapes = *_with_state(specialised(program, shapes, name), changed, name), {}
        check_signature(program)
        wanted = program if any_size and not shapes else specialised(program, shapes, name)
        wanted = with_real_numbers(wanted, name) if has_complex_numbers(wanted) else wanted
        mod = translated(*translatable(wanted), name)
    mod = relax.transform.DeadCodeElimination(["main"])(bind_shapes(mod, shapes))
    reference = _reference(program, evaluate or program.module())
    return imported_model(mod, name, "torch", reference, examples=_examples(program), any_size=any_size)


def _with_state(
    program: torch.export.ExportedProgram, changed: Sequence[str], name: str
) -> tuple[torch.export.ExportedProgram, WithState]:
    """A program that changes buffers, as one that takes and returns them; and what it was made of."""
    if program.example_inputs is None:
        raise UnsupportedModelError("the model changes its buffers, and its program holds no example inputs")
    module = WithState(program.module(), changed, *program.example_inputs)
    return exported(module, module.arguments, module.keywords, name), module


def _examples(program: torch.export.ExportedProgram) -> tuple[NDArray[Any], ...]:
    """What the program was exported with, input by input."""
    leaves = pytree.tree_leaves(program.example_inputs) if program.example_inputs else []
    wanted = len(program.graph_signature.user_inputs)
    if len(leaves) != wanted or not all(isinstance(leaf, torch.Tensor) for leaf in leaves):
        return ()
    return tuple(array_of_torch(leaf) for leaf in leaves)


def _reference(program: torch.export.ExportedProgram, evaluate: Callable[..., Any]) -> Reference:
    in_spec = program.call_spec.in_spec

    def reference(*arrays: NDArray[Any]) -> list[NDArray[Any]]:
        tensors = [torch_of_array(array) for array in arrays]
        arguments, keywords = pytree.tree_unflatten(tensors, in_spec)
        with torch.no_grad(), EqualsInOrder():
            outputs = evaluate(*arguments, **keywords)
        leaves = pytree.tree_leaves(outputs)
        return [array_of_torch(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor)]

    return reference
