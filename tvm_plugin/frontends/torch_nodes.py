"""What converters of PyTorch operators read of a node of the exported graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.fx
from tvm import relax

__all__ = ["Converter", "arguments", "dtype_of", "evaluated", "makes_constant", "shape_of"]

Converter = Callable[[Any, Any], relax.Expr | tuple[relax.Expr, ...]]
"""Takes a node and the importer, and returns the Relax value."""


def arguments(node: Any, importer: Any, names: Sequence[str], defaults: Sequence[Any]) -> list[Any]:
    """Positional and keyword arguments of `node` in the order of `names`, nodes replaced by their values."""
    given = dict(zip(names, node.args, strict=False)) | node.kwargs
    defaulted = dict(zip(names[len(names) - len(defaults) :], defaults, strict=True))
    values = [given.get(name, defaulted.get(name)) for name in names]
    return [importer.env[value] if isinstance(value, torch.fx.Node) else value for value in values]


def shape_of(value: relax.Expr) -> list[int]:
    """The extents of a tensor, none of them symbolic."""
    return [int(dim) for dim in value.ty.shape]


def dtype_of(node: Any) -> str:
    """What PyTorch computes the node in."""
    return str(node.meta["val"].dtype).removeprefix("torch.")


def makes_constant(node: Any) -> bool:
    """Whether PyTorch can compute the one tensor of a node now: of numbers alone, and not at random."""
    is_random = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
    return not node.all_input_nodes and not is_random and isinstance(node.meta.get("val"), torch.Tensor)


def evaluated(node: Any, importer: Any) -> relax.Expr:
    """What a node that `makes_constant` computes."""
    return relax.const(node.target(*node.args, **node.kwargs).cpu().numpy())
