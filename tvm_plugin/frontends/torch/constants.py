"""What PyTorch itself can compute when a model is imported: masks, positions and angles, made of numbers and buffers.

Language models make their masks anew in each run, of `arange` and comparisons in many operators. Values that depend on
no input and no parameter are constants; operators that lead to them need no converter.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch
import torch.export
import torch.fx
from torch.export.graph_signature import InputKind

from ..imported import is_number

__all__ = ["LIKE_ANOTHER", "Constants", "is_repetition", "makes_number"]

MOST_BYTES = 8 << 20
"""Of a value. Larger ones are computed where they are used: a mask costs fewer operations than reads from memory."""

aten = torch.ops.aten

LIKE_ANOTHER = {
    aten.zeros_like.default,
    aten.ones_like.default,
    aten.full_like.default,
    aten.new_zeros.default,
    aten.new_ones.default,
    aten.new_full.default,
}
"""What takes a tensor's shape or dtype, not its values."""

ASSERTIONS = {
    aten._assert_scalar.default,
    aten._assert_async.msg,
    aten._assert_tensor_metadata.default,
    aten.sym_constrain_range_for_size.default,
}

NUMBERS = (bool, int, float, torch.SymBool, torch.SymInt, torch.SymFloat)
"""What an operator on numbers makes; symbolic ones are numbers where all that they are made of is known."""

OF_DATA = {aten.item.default, aten._local_scalar_dense.default}
"""What makes numbers of tensors' elements."""

REPETITIONS = {*LIKE_ANOTHER, aten.zeros.default, aten.ones.default, aten.full.default, aten.expand.default}


def is_repetition(node: torch.fx.Node) -> bool:
    """Whether a node makes a large tensor of a number or a smaller tensor: cheaper than to read it."""
    return node.target in REPETITIONS


def makes_number(node: torch.fx.Node) -> bool:
    """Whether a call makes a number of sizes, or only asserts something of one."""
    if node.op != "call_function" or node.target in OF_DATA:
        return False
    asserts = node.target in ASSERTIONS and not any(_is_tensor(operand) for operand in node.all_input_nodes)
    return asserts or isinstance(node.meta.get("val"), NUMBERS)


def _is_tensor(node: torch.fx.Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor)


class Constants:
    """The values of the calls that depend on nothing but numbers and buffers: tensors, several of them, or numbers.

    They are computed when they are asked for. Tensors of more than `MOST_BYTES` are left, and so is what depends on
    buffers alone, unless they are masks or places: what is done to the statistics of a batch norm or to quantised
    weights is the graph search's to see. Assertions on such values have the value None: torch.export saw them hold.
    """

    def __init__(self, program: torch.export.ExportedProgram) -> None:
        self._values: dict[torch.fx.Node, Any] = dict(_buffers(program))
        self._nodes: dict[torch.fx.Node, None] = {}
        known = set(self._values)
        for node in program.graph.nodes:
            operands = _operands(node)
            if not _can_be_computed(node) or not known.issuperset(operands):
                continue
            known.add(node)
            if not operands or any(operand in self._nodes or _is_index(operand) for operand in operands):
                self._nodes[node] = None

    def __contains__(self, node: torch.fx.Node) -> bool:
        return node in self._nodes

    def __iter__(self) -> Iterator[torch.fx.Node]:
        return iter(self._nodes)

    def __getitem__(self, node: torch.fx.Node) -> Any:
        if node.target in ASSERTIONS:
            return None
        waiting = [node]
        while waiting:  # no recursion: chains may be longer than Python's stack
            needed = [one for one in _operands(waiting[-1]) if one not in self._values and one.target not in ASSERTIONS]
            if needed:
                waiting += needed
            else:
                self._compute(waiting.pop())
        return self._values[node]

    def _compute(self, node: torch.fx.Node) -> None:
        """Of operands whose values are known."""
        if node not in self._values:
            like = set(node.all_input_nodes) - set(_operands(node))
            operands = {one: _of_any_values(one) if one in like else self[one] for one in node.all_input_nodes}
            arguments, keywords = torch.fx.map_arg((node.args, node.kwargs), operands.__getitem__)
            with torch.no_grad():
                self._values[node] = node.target(*arguments, **keywords)


def _buffers(program: torch.export.ExportedProgram) -> dict[torch.fx.Node, torch.Tensor]:
    """By their placeholders."""
    tensors = dict(program.named_buffers()) | program.constants
    kinds = (InputKind.BUFFER, InputKind.CONSTANT_TENSOR)
    targets = {spec.arg.name: spec.target for spec in program.graph_signature.input_specs if spec.kind in kinds}
    found = {
        node: tensors.get(targets[node.name])
        for node in program.graph.nodes
        if node.op == "placeholder" and node.name in targets
    }
    return {node: tensor for node, tensor in found.items() if isinstance(tensor, torch.Tensor)}


def _can_be_computed(node: torch.fx.Node) -> bool:
    """One of PyTorch's own operators, not at random, whose result is not large, or arithmetic on numbers."""
    target, value = node.target, node.meta.get("val")
    if node.op != "call_function":
        return False
    if target in ASSERTIONS:
        return bool(node.all_input_nodes)
    if target in LIKE_ANOTHER and not _is_static(node.args[0].meta["val"]):
        return False
    if not isinstance(target, torch._ops.OpOverload):
        return target is operator.getitem or isinstance(value, NUMBERS)
    parts = list(value) if isinstance(value, list | tuple) else [value]
    if target.namespace != "aten" or torch.Tag.nondeterministic_seeded in target.tags:
        return False
    return all(isinstance(part, NUMBERS) or _is_small(part) for part in parts)


def _is_small(value: Any) -> bool:
    """Whether a value is a tensor of known shape, and not a large one."""
    return _is_static(value) and value.numel() * value.itemsize <= MOST_BYTES


def _is_static(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and all(map(is_number, value.shape))


def _is_index(node: torch.fx.Node) -> bool:
    """Whether a value is of places or a mask."""
    return getattr(node.meta["val"], "dtype", None) in (torch.int64, torch.bool)


def _operands(node: torch.fx.Node) -> list[torch.fx.Node]:
    """The tensors whose values a node needs."""
    shape_alone = node.args[0] if node.target in LIKE_ANOTHER else None
    return [operand for operand in node.all_input_nodes if operand is not shape_alone]


def _of_any_values(node: torch.fx.Node) -> torch.Tensor:
    return torch.empty(node.meta["val"].shape, dtype=node.meta["val"].dtype)
