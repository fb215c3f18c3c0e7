"""What a term costs, in seconds.

The unit of cost is a fused kernel, not an operator: an element-wise function that follows a product is nearly free, and
what depends on weights alone is computed ahead of time. A `TermCost` prices one term in the place where it stands;
the sum over a graph's terms is the cost that extraction minimises.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, Protocol

from ..space.hardware import Hardware
from .attributes import Conv2d, TensorType, WinogradData
from .terms import TermGraph

__all__ = ["AnalyticCost", "MeasuredCost", "Pricing", "TermCost", "TermKey", "graph_cost_s", "term_keys"]

TermKey = tuple[str, Any, tuple[TensorType, ...], tuple[bool, ...]]
"""What a measured price is filed under: operator, attributes, types of the arguments, which of them are weights."""

ELEMENTWISE = frozenset({"unary", "binary"})
"""Operators that TVM computes inside the kernel of their producer."""

MOVES = frozenset({"permute", "concat", "pad", "broadcast"})
"""Operators whose kernels can compute the slices that they read."""

STARTS_NO_KERNEL = frozenset({"leaf", "full"})


class TermCost(Protocol):
    """Prices terms. Must not be negative, and must depend on nothing but its arguments."""

    def term_s(
        self, op: str, attrs: Any, types: Sequence[TensorType], weights: Sequence[bool], result: TensorType, fused: bool
    ) -> float:
        """Seconds that one term adds to the run time of a graph.

        Parameters
        ----------
        op, attrs :
            The operator, which does not depend on weights alone, and its attributes.
        types : sequence of TensorType
            Of the arguments.
        weights : sequence of bool
            Which arguments depend on weights alone.
        result : TensorType
            Of the term.
        fused : bool
            For an element-wise term: whether some argument is computed by a kernel, which could compute this term too.
            For any other: whether some user could take this term into its kernel (see `users_that_join`).
        """


class Pricing(Protocol):
    """A source of prices that learns those of the terms it is shown, for example by measuring their kernels."""

    @property
    def cost(self) -> TermCost:
        """What is known so far. Terms whose price is unknown should be priced too low rather than too high: they are
        then extracted, shown, and learned.
        """

    def learn(self, graphs: Sequence[TermGraph]) -> bool:
        """Find the prices of these graphs' terms; whether any was new."""


@dataclass(frozen=True)
class AnalyticCost:
    """A roofline: arithmetic at an efficiency that depends on the shape, memory traffic, a fixed price for a kernel."""

    hardware: Hardware = field(default_factory=Hardware)

    def term_s(
        self, op: str, attrs: Any, types: Sequence[TensorType], weights: Sequence[bool], result: TensorType, fused: bool
    ) -> float:
        """See `TermCost`."""
        if op in STARTS_NO_KERNEL:
            return 0.0
        if op == "reshape":
            # The same memory under another shape; but an element-wise user must start a kernel of its own behind it.
            return self.hardware.parallel_overhead_s + self._traffic_s(2 * result.size_bytes) if fused else _A_NAME
        activations = [ty.size_bytes for ty, weight in zip(types, weights, strict=True) if not weight]
        read_once = sum(ty.size_bytes for ty, weight in zip(types, weights, strict=True) if weight)
        if op in ELEMENTWISE and fused:
            return _A_NAME + self._traffic_s(sum(activations) - max(activations, default=0)) + self._stream_s(read_once)
        if op == "slice":
            # In a user's kernel, which often serves several slices and may or may not have read its operand anyway.
            kernels, passes = (0.25, 1) if fused else (1.0, 2)
            return kernels * self.hardware.parallel_overhead_s + self._traffic_s(passes * result.size_bytes)
        traffic_s = self._traffic_s(sum(activations) + result.size_bytes) + self._stream_s(read_once)
        if op == "concat" and not fused:
            # Kernels write what they compute for it alone into their slices; other parts, and all if an element-wise
            # user makes a kernel of it, are copied.
            return 0.25 * (self.hardware.parallel_overhead_s + traffic_s)
        if op == "matmul":
            work_s = self._product_s(result.shape[-2], result.shape[-1], types[0].shape[-1], result)
        elif op == "conv2d":
            work_s = self._conv2d_s(attrs, types[1], result)
        elif op == "blocked_conv2d":
            channels = result.shape[1] * result.shape[4]
            depth = types[1].elements // max(1, channels)
            work_s = self._product_s(result.elements // max(1, channels), channels, depth, result)
        elif op == "winograd_conv2d":
            work_s = self._winograd_s(attrs, types[0], types[1])
        else:
            work_s = {"softmax": 1.0, "permute": 1.0, "winograd_data": 1.0, "opaque": 1.0}.get(op, 0.0) * traffic_s
            traffic_s += work_s
        return self.hardware.parallel_overhead_s + max(work_s, traffic_s)

    def _stream_s(self, size_bytes: float) -> float:
        """Weights: all of a model's together are larger than a cache, and each is read once a run."""
        return size_bytes / self.hardware.bandwidth_bytes_per_s

    def _traffic_s(self, size_bytes: float) -> float:
        """Activations: what fits the cache was left there by the kernel before."""
        cached = min(size_bytes, self.hardware.l2_bytes)
        return cached / self.hardware.cache_bandwidth_bytes_per_s + self._stream_s(size_bytes - cached)

    def _product_s(self, rows: int, columns: int, depth: int, result: TensorType, *, either: bool = False) -> float:
        """Arithmetic of a (batched or grouped) matrix product of rows x depth by depth x columns.

        `either`: whether the rows could be vectorised as well as the columns.
        """
        lanes = self.hardware.lanes(4)
        fill = _fill(rows, 8) * _fill(columns, 2 * lanes)
        if either:
            fill = max(fill, _fill(columns, 8) * _fill(rows, 2 * lanes))
        fill *= depth / (depth + lanes)
        flops = 2.0 * result.elements * depth
        return flops / (self.hardware.peak_flops_per_s_all * max(fill, 0.02) * _EFFICIENCY)

    def _winograd_s(self, attrs: WinogradData, image: TensorType, weight: TensorType) -> float:
        """Products of transformed tiles, and what lies before and behind them, written and read in the cache."""
        (matrices, depth, columns), (batch, _, *size) = weight.shape, image.shape
        tiles = batch * prod(attrs.grid(*size))
        products = TensorType((matrices, tiles, columns), image.dtype)
        between = 2.0 * (products.size_bytes + products.size_bytes * depth / columns)
        return self._product_s(tiles, columns, depth, products) + between / self.hardware.cache_bandwidth_bytes_per_s

    def _conv2d_s(self, attrs: Conv2d, weight: TensorType, result: TensorType) -> float:
        """Arithmetic of a convolution."""
        kernel = dict(zip(attrs.kernel_layout, weight.shape, strict=True))
        depth = kernel["I"] * kernel["H"] * kernel["W"]
        columns = kernel["O"] // attrs.groups
        if columns == 1:  # depthwise: vectorised over pixels, one load for every multiplication
            return 2.0 * result.elements * depth / (self.hardware.peak_flops_per_s_all * _DEPTHWISE_EFFICIENCY)
        pixels = result.elements // max(1, kernel["O"])
        return self._product_s(pixels, columns, depth, result, either=True)


_A_NAME = 1e-8
"""Seconds: what is nearly free still costs something, so that of two equal graphs the smaller one is chosen."""

_EFFICIENCY = 0.9
_DEPTHWISE_EFFICIENCY = 0.12


def _fill(extent: int, tile: int) -> float:
    """Useful share of the work when `extent` is covered by tiles."""
    return extent / (-(-extent // tile) * tile) if extent else 1.0


@dataclass(frozen=True)
class MeasuredCost:
    """Measured prices where there are any, another model's elsewhere."""

    prices_s: Mapping[TermKey, float]
    otherwise: TermCost = field(default_factory=AnalyticCost)

    def term_s(
        self, op: str, attrs: Any, types: Sequence[TensorType], weights: Sequence[bool], result: TensorType, fused: bool
    ) -> float:
        """See `TermCost`."""
        key = (op, attrs, tuple(types), tuple(weights))
        price = None if fused and op in (*ELEMENTWISE, "slice") else self.prices_s.get(key)
        return self.otherwise.term_s(op, attrs, types, weights, result, fused) if price is None else price


def term_keys(graph: TermGraph) -> Mapping[TermKey, TensorType]:
    """What a graph's terms are priced by, and the types of their results; without those that need no kernel."""
    keys: dict[TermKey, TensorType] = {}
    for index in graph.live():
        term = graph.terms[index]
        if not graph.constant[index] and term.op not in STARTS_NO_KERNEL:
            types = tuple(graph.types[argument] for argument in term.args)
            weights = tuple(graph.constant[argument] for argument in term.args)
            keys[term.op, term.attrs, types, weights] = graph.types[index]
    return keys


def graph_cost_s(graph: TermGraph, cost: TermCost) -> float:
    """Seconds of a graph: the sum of its terms' prices, each value once."""
    live = [index for index in graph.live() if not graph.constant[index]]
    joins = users_that_join((graph.terms[index].op, graph.terms[index].args, index) for index in live)
    total = 0.0
    for index in live:
        term = graph.terms[index]
        types = [graph.types[argument] for argument in term.args]
        weights = [graph.constant[argument] for argument in term.args]
        if term.op in ELEMENTWISE:
            fused = any(is_computed(graph.terms[a].op) and not graph.constant[a] for a in term.args)
        else:
            fused = joins(term.op, index)
        total += cost.term_s(term.op, term.attrs, types, weights, graph.types[index], fused)
    return total


def users_that_join(nodes: Iterable[tuple[str, Sequence[int], int]]) -> Callable[[str, int], bool]:
    """Whether a term, by its operator and value, has a user into whose kernel it fits.

    Element-wise users count for any operator; for slices also those that move data, and those behind a reshape.

    Parameters
    ----------
    nodes : iterable of (operator, operands, value)
        Operands and values are indices, of terms or of classes.
    """
    elementwise: set[int] = set()
    moving: set[int] = set()
    views = []
    for op, operands, value in nodes:
        if op in ELEMENTWISE:
            elementwise.update(operands)
        elif op in MOVES:
            moving.update(operands)
        elif op == "reshape":
            views.append((operands[0], value))
    moving |= elementwise
    moving |= {operand for operand, value in views if value in moving}
    return lambda op, value: value in (moving if op == "slice" else elementwise)


def is_computed(op: str) -> bool:
    """Whether a kernel of this operator could compute an element-wise user as well."""
    return op not in ("leaf", "full", "opaque")
