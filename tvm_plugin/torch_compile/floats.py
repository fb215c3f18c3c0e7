"""Floats that a captured graph takes: with `torch.compile(dynamic=True)` also what norms add to variances."""

from __future__ import annotations

import copy
from collections.abc import Mapping

import torch

__all__ = ["floats_of", "with_floats"]


def floats_of(graph: torch.fx.GraphModule) -> list[int]:
    """Which arguments are floats: Dynamo passes them as tensors, of which the graph only asks for the number."""
    placeholders = graph.graph.find_nodes(op="placeholder")
    return [index for index, node in enumerate(placeholders) if _is_float(node)]


def with_floats(graph: torch.fx.GraphModule, values: Mapping[int, float]) -> torch.fx.GraphModule:
    """The graph with known floats: item(argument) -> float(value). It takes the same arguments."""
    if not values:
        return graph
    known = copy.deepcopy(graph.graph)
    placeholders = known.find_nodes(op="placeholder")
    for index, value in values.items():
        for asked in list(placeholders[index].users):
            with known.inserting_before(asked):
                asked.replace_all_uses_with(known.call_function(float, (value,)))
            known.erase_node(asked)
    return torch.fx.GraphModule(graph, known)


def _is_float(node: torch.fx.Node) -> bool:
    example = node.meta.get("example_value")
    is_number = isinstance(example, torch.Tensor) and example.dtype == torch.float64 and not example.shape
    return is_number and bool(node.users) and all(user.target == "item" for user in node.users)
