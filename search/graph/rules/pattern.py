"""The terms that rules are written in: variables, operators applied to them, and a function for each operator."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from ..attributes import (
    Axis,
    Conv2d,
    Full,
    Kind,
    Pad,
    Permute,
    Pool2d,
    Reduce,
    Shape,
    Slice,
    WinogradData,
    WinogradResult,
)

if TYPE_CHECKING:
    from .rule import Match

__all__ = [
    "Attr",
    "Node",
    "Pattern",
    "Var",
    "add",
    "binary",
    "broadcast",
    "concat",
    "conv2d",
    "divide",
    "full",
    "matmul",
    "multiply",
    "negative",
    "nodes_of",
    "pad",
    "permute",
    "pool2d",
    "reduce",
    "relu",
    "reshape",
    "slice_",
    "softmax",
    "subtract",
    "tensors",
    "unary",
    "variables_of",
    "weights",
    "winograd_conv2d",
    "winograd_data",
    "winograd_result",
]


@dataclass(frozen=True)
class Var:
    """A tensor variable; with `weight`, it matches only what depends on weights alone."""

    name: str
    weight: bool = False


@dataclass(frozen=True)
class Attr:
    """A variable for attributes."""

    name: str


@dataclass(frozen=True)
class Node:
    """An operator applied to patterns. `attrs` is a value, an `Attr`, or (only in `after`) a function of the match."""

    op: str
    attrs: Any
    args: tuple[Pattern, ...]

    @cached_property
    def _hash(self) -> int:
        return hash((self.op, self.attrs, self.args))

    def __hash__(self) -> int:
        return self._hash  # patterns are looked up for every match: hashing them anew took half of that time


Pattern = Var | Node


def _walk(patterns: Sequence[Pattern]) -> Iterator[Pattern]:
    for pattern in patterns:
        if isinstance(pattern, Node):
            yield from _walk(pattern.args)
        yield pattern


def nodes_of(patterns: Sequence[Pattern]) -> tuple[Node, ...]:
    """Distinct operators of patterns, arguments first."""
    return tuple(dict.fromkeys(p for p in _walk(patterns) if isinstance(p, Node)))


def variables_of(patterns: Sequence[Pattern]) -> tuple[Var, ...]:
    """Distinct tensor variables of patterns, in the order in which they appear."""
    return tuple(dict.fromkeys(p for p in _walk(patterns) if isinstance(p, Var)))


def tensors(names: str) -> tuple[Var, ...]:
    """Tensor variables: `x, y = tensors("x y")`."""
    return tuple(Var(name) for name in names.split())


def weights(names: str) -> tuple[Var, ...]:
    """Tensor variables that match only what depends on weights alone."""
    return tuple(Var(name, weight=True) for name in names.split())


def _attrs(attrs: Any) -> Any:
    return Attr(attrs) if isinstance(attrs, str) else attrs


def matmul(x: Pattern, y: Pattern) -> Node:
    """Batched matrix product."""
    return Node("matmul", None, (x, y))


def conv2d(x: Pattern, w: Pattern, attrs: str | Attr | Conv2d | Callable[[Match], Conv2d]) -> Node:
    """Convolution; as below, a string names an attribute variable."""
    return Node("conv2d", _attrs(attrs), (x, w))


def pool2d(x: Pattern, attrs: str | Attr | Pool2d | Callable[[Match], Pool2d]) -> Node:
    """Pooling."""
    return Node("pool2d", _attrs(attrs), (x,))


def permute(x: Pattern, attrs: str | Attr | Permute | Callable[[Match], Permute]) -> Node:
    """Permutation of dimensions."""
    return Node("permute", _attrs(attrs), (x,))


def reshape(x: Pattern, attrs: str | Attr | Shape | Callable[[Match], Shape]) -> Node:
    """Reshape; also what expand_dims, squeeze and flatten are encoded as."""
    return Node("reshape", _attrs(attrs), (x,))


def broadcast(x: Pattern, attrs: str | Attr | Shape | Callable[[Match], Shape]) -> Node:
    """Broadcast to a shape."""
    return Node("broadcast", _attrs(attrs), (x,))


def slice_(x: Pattern, attrs: str | Attr | Slice | Callable[[Match], Slice]) -> Node:
    """A box cut out of a tensor; also what each result of split is encoded as."""
    return Node("slice", _attrs(attrs), (x,))


def concat(parts: Sequence[Pattern], attrs: str | Attr | Axis | Callable[[Match], Axis]) -> Node:
    """Concatenation along an axis, of any fixed number of parts."""
    return Node("concat", _attrs(attrs), tuple(parts))


def pad(x: Pattern, attrs: str | Attr | Pad | Callable[[Match], Pad]) -> Node:
    """Zeros around a tensor."""
    return Node("pad", _attrs(attrs), (x,))


def winograd_conv2d(
    x: Pattern, weight: Pattern, attrs: str | Attr | WinogradData | Callable[[Match], WinogradData]
) -> Node:
    """A convolution with a transformed weight; its window is `attrs.kernel`."""
    return Node("winograd_conv2d", _attrs(attrs), (x, weight))


def winograd_data(x: Pattern, attrs: str | Attr | WinogradData | Callable[[Match], WinogradData]) -> Node:
    """Transformed tiles of an image."""
    return Node("winograd_data", _attrs(attrs), (x,))


def winograd_result(x: Pattern, attrs: str | Attr | WinogradResult | Callable[[Match], WinogradResult]) -> Node:
    """The image of transformed products."""
    return Node("winograd_result", _attrs(attrs), (x,))


def reduce(x: Pattern, attrs: str | Attr | Reduce | Callable[[Match], Reduce]) -> Node:
    """Reduction over some dimensions."""
    return Node("reduce", _attrs(attrs), (x,))


def softmax(x: Pattern, attrs: str | Attr | Axis | Callable[[Match], Axis]) -> Node:
    """Softmax along an axis."""
    return Node("softmax", _attrs(attrs), (x,))


def full(attrs: str | Attr | Full | Callable[[Match], Full]) -> Node:
    """A constant tensor of one value; scalar constants of a model are encoded as this."""
    return Node("full", _attrs(attrs), ())


def unary(x: Pattern, attrs: str | Attr | Kind | Callable[[Match], Kind]) -> Node:
    """An element-wise function of one tensor (attributes.UNARY_KINDS)."""
    return Node("unary", _attrs(attrs), (x,))


def binary(x: Pattern, y: Pattern, attrs: str | Attr | Kind | Callable[[Match], Kind]) -> Node:
    """An element-wise function of two tensors, with broadcasting (attributes.BINARY_KINDS)."""
    return Node("binary", _attrs(attrs), (x, y))


def relu(x: Pattern) -> Node:
    """max(x, 0)."""
    return unary(x, Kind("relu"))


def negative(x: Pattern) -> Node:
    """-x."""
    return unary(x, Kind("negative"))


def add(x: Pattern, y: Pattern) -> Node:
    """x + y."""
    return binary(x, y, Kind("add"))


def subtract(x: Pattern, y: Pattern) -> Node:
    """x - y."""
    return binary(x, y, Kind("subtract"))


def multiply(x: Pattern, y: Pattern) -> Node:
    """x * y."""
    return binary(x, y, Kind("multiply"))


def divide(x: Pattern, y: Pattern) -> Node:
    """x / y."""
    return binary(x, y, Kind("divide"))
