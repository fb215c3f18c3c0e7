"""torch.export: what it makes of a module, for which sizes, and what it leaves as it was."""

from __future__ import annotations

import contextlib
import io
import logging
import re
import sys
import warnings
from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.export
from torch.utils import _pytree as pytree

from ...errors import InputError
from ...runtime import first_line
from ..imported import check_shapes, check_static, is_number
from .nodes import torch_of_array

__all__ = ["as_tensors", "evaluating", "exported", "quiet", "specialised", "unchanged"]

_CONTAINERS = (dict, OrderedDict, defaultdict, list, set)
"""Not what is derived from them, which may refuse to be changed."""


def exported(
    module: torch.nn.Module,
    arguments: tuple[Any, ...],
    keywords: dict[str, Any],
    name: str,
    strict: bool = False,
    dynamic_shapes: Any = None,
) -> torch.export.ExportedProgram:
    """What torch.export makes of a module, which the error calls `name`. Raises InputError where it cannot."""
    try:
        with _without_graph():
            return torch.export.export(module, arguments, keywords, dynamic_shapes=dynamic_shapes, strict=strict)
    except Exception as error:  # the model's own code runs, which may raise anything
        foreign = re.search(r"Found <class '(?:.*\.)?(\w+)'> in output", str(error))
        if foreign:
            raise InputError(
                f"torch.export cannot export {name}, which returns {foreign[1]}, no tensor: let a module around it "
                "return tensors (language models of Hugging Face return no cache with model.config.use_cache = False)"
            ) from error
        raise InputError(f"torch.export cannot export {name}: {first_line(error)}") from error


@contextlib.contextmanager
def _without_graph() -> Iterator[None]:
    """Let what is written to standard error pass, but for the graph that torch.export prints, twice, where it fails."""
    written, graph = io.StringIO(), ""
    try:
        with contextlib.redirect_stderr(written):
            yield
    except Exception as error:
        graph = f"{error.partial_fx_graph}\n" if hasattr(error, "partial_fx_graph") else ""
        raise
    finally:
        sys.stderr.write(written.getvalue().replace(graph, ""))


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Hide what torch says of its own code: torch.export uses what torch deprecates, and logs what it then raises."""
    loggers = [logging.getLogger(name) for name in logging.root.manager.loggerDict if name.split(".")[0] == "torch"]
    levels = {handler: handler.level for logger in loggers for handler in logger.handlers}
    with warnings.catch_warnings():
        for category in (DeprecationWarning, FutureWarning):
            warnings.simplefilter("ignore", category)
        warnings.filterwarnings("ignore", "The tensor attributes? .* assigned during export")  # LSTM, detectors
        warnings.filterwarnings("ignore", "While compiling, we found certain side effects")  # buffers that change
        try:
            for handler in levels:
                handler.setLevel(logging.CRITICAL)
            yield
        finally:
            for handler, level in levels.items():
                handler.setLevel(level)


def specialised(
    program: torch.export.ExportedProgram, shapes: Mapping[str, Sequence[int]], name: str
) -> torch.export.ExportedProgram:
    """`program` with the extents that `shapes` gives to its dynamic dimensions: its converters compute with them."""
    placeholders = {node.name: node.meta["val"] for node in program.graph.nodes if node.op == "placeholder"}
    inputs = {input_name: placeholders[input_name] for input_name in program.graph_signature.user_inputs}
    if all(is_number(dim) for value in inputs.values() for dim in value.shape):
        return program
    check_shapes(shapes, list(inputs))
    extents = _dynamic_extents(inputs, shapes)
    tensors = []
    for input_name, value in inputs.items():
        shape = shapes.get(input_name) or [extents.get(str(dim), dim) for dim in value.shape]
        check_static(shape, f"input {input_name!r}")
        tensors.append(torch.zeros(tuple(shape), dtype=value.dtype))
    arguments, keywords = pytree.tree_unflatten(tensors, program.call_spec.in_spec)
    return exported(program.module(), arguments, keywords, name)


def _dynamic_extents(inputs: Mapping[str, Any], shapes: Mapping[str, Sequence[int]]) -> dict[str, int]:
    """By the names that torch gave the dynamic dimensions, which several inputs may share."""
    extents: dict[str, int] = {}
    for name, shape in shapes.items():
        dims = inputs[name].shape
        if len(dims) != len(shape) or any(is_number(d) and d != n for d, n in zip(dims, shape, strict=True)):
            raise InputError(
                f"input {name!r} is ({', '.join(map(str, dims))}), which the shape {tuple(shape)} does not fit"
            )
        for dim, extent in zip(dims, shape, strict=True):
            if not is_number(dim) and extents.setdefault(str(dim), extent) != extent:
                raise InputError(f"the dynamic dimension {dim} would be both {extents[str(dim)]} and {extent}")
    return extents


def as_tensors(example_inputs: Any) -> Any:
    """Example inputs with tensors for numpy arrays. InputError: something else is among them, or a tensor twice."""

    def convert(leaf: Any) -> Any:
        leaf = torch_of_array(leaf) if isinstance(leaf, np.ndarray) else leaf
        if not isinstance(leaf, torch.Tensor):
            raise InputError(f"example_inputs holds {leaf!r}; every input must be a tensor or a numpy array")
        return leaf

    tensors = pytree.tree_map(convert, example_inputs)
    leaves = pytree.tree_leaves(tensors)
    first = next((i for i, leaf in enumerate(leaves) if any(leaf is other for other in leaves[:i])), None)
    if first is not None:
        raise InputError(
            f"input {first} of example_inputs is the same tensor as an earlier one, which torch.export would build on; "
            "give a clone of it, or wrap the module in one that takes the tensor once"
        )
    return tensors


@contextlib.contextmanager
def evaluating(module: torch.nn.Module) -> Iterator[None]:
    """Evaluation mode for a while; each submodule gets back the mode that it had."""
    training = [child for child in module.modules() if child.training]
    module.eval()
    try:
        yield
    finally:
        for child in training:
            child.training = True


@contextlib.contextmanager
def unchanged(module: torch.nn.Module) -> Iterator[None]:
    """Take back what a module assigns to its attributes meanwhile, or puts into dictionaries and lists there: detectors
    keep their anchors, which in an export are no numbers, and would compute with them from then on.
    """
    kept: dict[int, tuple[Any, Any]] = {}
    waiting: list[Any] = [vars(child) for child in module.modules()]
    while waiting:
        container = waiting.pop()
        if type(container) in _CONTAINERS and id(container) not in kept:
            kept[id(container)] = container, container.copy()
            waiting += container.values() if isinstance(container, dict) else container
        elif type(container) is tuple:
            waiting += container
    try:
        yield
    finally:
        for container, before in kept.values():
            container.clear()
            (container.extend if isinstance(container, list) else container.update)(before)
