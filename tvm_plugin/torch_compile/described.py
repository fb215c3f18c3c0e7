"""What a captured graph takes and returns, and whether a tuned one could take its place."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from .memory import Layout, View, copy_of, extent, is_dense, memory, shares_storage
from .stays import Stays
from .weights import State, own_tensors

__all__ = ["check_arguments", "check_operators", "described"]

EAGER_IS_ENOUGH_S = 30e-6
"""Graphs that PyTorch runs in less gain nothing: to hand tensors over takes as long."""

LOOKS = 3
"""So often PyTorch runs a graph before that is known: first runs are slow."""


def check_arguments(arguments: Sequence[Any]) -> None:
    """Raises Stays for what cannot be tuned."""
    for value in arguments:
        if isinstance(value, int):  # a size, perhaps: any_size.py
            continue
        if type(value) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer) or value.layout != torch.strided:
            raise Stays(f"it takes a {type(value).__name__}")
        if value.device.type != "cpu":
            raise Stays(f"its tensors are on {value.device}, and this backend compiles for the CPU")


_NOT_REPEATED = ("as_strided", "_assert_async", "_assert_scalar")
"""Reads memory that no argument holds; raises what a tuned graph would not."""


def check_operators(graph: torch.fx.GraphModule) -> None:
    """Raises Stays for a graph that calls what cannot be done again."""
    for node in graph.graph.nodes:
        name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
        if node.op.startswith("call") and name.split(".")[0] in _NOT_REPEATED:
            raise Stays(f"it calls {name}")


def described(graph: torch.fx.GraphModule, arguments: Sequence[torch.Tensor]) -> list[Any]:
    """What the graph returns for these, which it leaves as they are: layouts, views, and what is no tensor.

    Raises
    ------
    Stays
        It changes what it holds itself, takes no time, needs gradients, or returns what cannot be made again.
    """
    graph = copy.deepcopy(graph) if own_tensors(graph) else graph
    before = [(tensor, State.of(tensor)) for tensor in own_tensors(graph)]
    fastest_s = math.inf
    for _ in range(LOOKS):
        copies = [copy_of(value) for value in arguments]
        started = time.perf_counter()
        outputs = graph(*copies)
        fastest_s = min(fastest_s, time.perf_counter() - started)
    if any(not state.holds_for(tensor) for tensor, state in before):
        raise Stays("it changes tensors that are not among its arguments")
    if fastest_s < EAGER_IS_ENOUGH_S:
        raise Stays("")
    (returned,) = graph.graph.output_node().args
    for value, node in zip(outputs, returned, strict=True):
        if not isinstance(value, torch.Tensor) and isinstance(node, torch.fx.Node):
            raise Stays("it returns numbers that it computes")
    tensors = {index: value for index, value in enumerate(outputs) if isinstance(value, torch.Tensor)}
    for value in tensors.values():
        if value.requires_grad:
            raise Stays("it needs gradients, which eqtune does not compute; call it under torch.inference_mode()")
        if value.layout != torch.strided or value.is_neg() or value.is_conj():
            raise Stays("it returns a tensor of another kind than plain ones")
    return [
        _described_tensor(index, tensors, copies, arguments) if index in tensors else value
        for index, value in enumerate(outputs)
    ]


def _described_tensor(
    index: int, tensors: Mapping[int, torch.Tensor], copies: Sequence[torch.Tensor], arguments: Sequence[torch.Tensor]
) -> Layout | View:
    """An output: computed, or a view of an argument or of another output, the first that spans the most memory."""
    tensor = tensors[index]
    for owner, (given, argument) in enumerate(zip(copies, arguments, strict=True)):
        if isinstance(given, torch.Tensor) and shares_storage(tensor, given):
            if given.stride() != argument.stride():
                raise Stays("it returns a view of what it is given")
            return View.of(tensor, given, owner)
    siblings = [other for other, value in tensors.items() if shares_storage(tensor, value)]
    base = max(siblings, key=lambda other: (extent(tensors[other]), -other)) if siblings else index
    if base == index:
        return Layout.of(tensor)
    (first, end), (base_first, base_end) = memory(tensor), memory(tensors[base])
    if not base_first <= first <= end <= base_end or not is_dense(tensors[base]):
        raise Stays("its outputs share memory")
    return View.of(tensor, tensors[base], base, of_output=True)
