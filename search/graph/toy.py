"""For tests of rules and extractors: random graphs, and prices that make any equal graph attractive to some seed."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .attributes import Axis, Conv2d, Full, Kind, Leaf, Pad, Permute, Pool2d, Reduce, Shape, Slice, TensorType
from .operators import NotTypeable
from .terms import Term, TermGraph

UNARY = ("relu", "tanh", "sigmoid", "negative", "abs", "exp")
BINARY = ("add", "subtract", "multiply", "maximum")


@dataclass(frozen=True)
class ArbitraryCost:
    """A price for each term that depends on nothing but the seed and the term."""

    seed: int

    def term_s(
        self, op: str, attrs: Any, types: Sequence[TensorType], weights: Sequence[bool], result: TensorType, fused: bool
    ) -> float:
        """See `cost.TermCost`: at most a microsecond."""
        text = f"{self.seed} {op} {attrs} {types}".encode()
        return 0.0 if op in ("leaf", "full") else 1e-6 * (1 + zlib.crc32(text) % 1000) / 1000


def random_graph(seed: int, size: int = 12) -> TermGraph:
    """A graph of about `size` operators over matrices and images, with shared values and one or two outputs."""
    generator = np.random.default_rng(seed)
    graph = TermGraph()

    def leaf(shape: tuple[int, ...], constant: bool) -> int:
        index = sum(term.op == "leaf" for term in graph.terms)
        return graph.add_typed(Term("leaf", Leaf(index), ()), TensorType(shape), constant)

    images = bool(generator.integers(2))
    values = [leaf((1, 4, 6, 6) if images else (4, 6), False) for _ in range(2)]
    while len(graph.terms) < size + 4:
        x = values[int(generator.integers(len(values)))]
        y = values[int(generator.integers(len(values)))]
        try:
            made = _grow(graph, generator, leaf, x, y)
        except NotTypeable:
            continue
        if graph.types[made].elements <= 4096:
            values.append(made)
    graph.outputs = [values[-1]] + ([values[-2]] if generator.integers(2) else [])
    return graph


def _grow(graph: TermGraph, generator: np.random.Generator, leaf: Any, x: int, y: int) -> int:
    shape = graph.types[x].shape
    rank = len(shape)
    axis = int(generator.integers(rank))
    choice = int(generator.integers(12))
    if choice == 0:
        return graph.add("unary", Kind(str(generator.choice(UNARY))), (x,))
    if choice == 1:
        return graph.add("binary", Kind(str(generator.choice(BINARY))), (x, y))
    if choice == 2:
        return graph.add("permute", Permute(tuple(int(i) for i in generator.permutation(rank))), (x,))
    if choice == 3:
        return graph.add("reshape", Shape((shape[0] * shape[1], *shape[2:]) if rank == 4 else shape[::-1]), (x,))
    if choice == 4:
        cut = int(generator.integers(1, shape[axis] + 1))
        begin, end = [0] * rank, list(shape)
        begin[axis], end[axis] = (0, cut) if generator.integers(2) else (shape[axis] - cut, shape[axis])
        return graph.add("slice", Slice(tuple(begin), tuple(end)), (x,))
    if choice == 5:
        return graph.add("concat", Axis(axis), (x, y))
    if choice == 6:
        return graph.add("reduce", Reduce(str(generator.choice(["sum", "mean", "max"])), (axis,), True), (x,))
    if choice == 7:
        return graph.add("binary", Kind("multiply"), (x, graph.add("full", Full((), 0.5), ())))
    if choice == 8:
        return graph.add("softmax", Axis(axis), (x,))
    if choice == 9 and rank == 4:
        return graph.add("pool2d", Pool2d(str(generator.choice(["max", "avg"])), (2, 2), padding=(0, 0, 1, 1)), (x,))
    if choice == 10 and rank == 4:
        return graph.add("pad", Pad((0, 0, 1, 0), (0, 0, 0, 1)), (x,))
    if rank == 4:
        kernel = int(generator.choice([1, 3]))
        weight = leaf((int(generator.choice([2, 4])), shape[1], kernel, kernel), True)
        return graph.add("conv2d", Conv2d(padding=(kernel // 2,) * 4), (x, weight))
    if rank == 2 and generator.integers(2):
        return graph.add("matmul", None, (x, y))
    if rank == 2:
        return graph.add("matmul", None, (x, leaf((shape[1], int(generator.choice([3, 6]))), True)))
    raise NotTypeable("no such operator for this rank")


def leaf_values(graph: TermGraph, seed: int = 0) -> list[Any]:
    """Float64 values for the graph's leaves, small enough that nothing overflows."""
    generator = np.random.default_rng(seed)
    leaves = sorted(
        (term.attrs.index, ty) for term, ty in zip(graph.terms, graph.types, strict=True) if term.op == "leaf"
    )
    return [generator.standard_normal(ty.shape) * 0.3 for _, ty in leaves]
