"""Tensors without axes, of which PyTorch lets operators take one, `x.sum().softmax(0)`: vectors of one element here.

TVM refuses axes that are not there, and sorts whatever memory lies there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.fx
from torch.utils import _pytree as pytree
from tvm import relax
from tvm.relax import op

from .nodes import Converter

__all__ = ["converted"]


def converted(convert: Converter, node: torch.fx.Node, importer: Any) -> Any:
    """What a converter makes of a node; of vectors where its operator may take an axis of tensors without axes."""
    if not _takes_axis_of_number(node):
        return convert(node, importer)
    env, emit, value = importer.env, importer.block_builder.emit, node.meta["val"]
    kept = {operand: env[operand] for operand in node.all_input_nodes if _is_number(operand.meta.get("val"))}
    env |= {operand: emit(op.reshape(number, [1])) for operand, number in kept.items()}
    node.meta["val"] = pytree.tree_map_only(torch.Tensor, lambda number: number.reshape(1), value)
    result = convert(node, importer)
    node.meta["val"] = value
    env |= kept
    return _without_axes(emit, result)


def _takes_axis_of_number(node: torch.fx.Node) -> bool:
    """Whether an operator of one tensor and an axis has neither axes to take, nor any in its results."""
    schema = getattr(node.target, "_schema", None)
    if schema is None or all(argument.name != "dim" for argument in schema.arguments):
        return False
    first, results = node.args[0], pytree.tree_leaves(node.meta.get("val"))
    return isinstance(first, torch.fx.Node) and all(map(_is_number, (first.meta.get("val"), *results)))


def _is_number(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.ndim == 0


def _without_axes(emit: Callable[[Any], Any], result: Any) -> Any:
    if isinstance(result, relax.Expr) and isinstance(result.ty, relax.TupleType):
        result = tuple(emit(relax.TupleGetItem(result, place)) for place in range(len(result.ty.fields)))
    if isinstance(result, tuple | list):
        return tuple(None if part is None else _without_axes(emit, part) for part in result)
    return emit(op.reshape(result, []))
