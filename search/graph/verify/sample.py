"""Random types and attributes that a rule's pattern fits.

A pattern is walked from its roots down with a *wish*, the shape that would suit what is above; each operator chooses
its attributes and passes wishes on to its arguments, the bound ones first, so that the others can follow them. What a
wish says need not come true: the types are inferred afterwards as always, and a sample that does not fit is dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from math import prod
from random import Random
from typing import Any

from ..attributes import (
    BINARY_KINDS,
    REDUCE_KINDS,
    UNARY_KINDS,
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
    TensorType,
)
from ..operators import NotTypeable, infer
from ..rules.pattern import Attr, Node, Pattern, Var
from ..rules.rule import Rule

__all__ = ["sample_match"]

Shaped = tuple[int, ...]
Wish = Shaped | None

_EXTENTS = (1, 2, 2, 3, 3, 4, 5)
_LARGEST = 2000
"""Elements of a tensor: larger ones find no more mistakes and take longer."""
_NUMBERS = (0, 1, -1, 2, 3, 0.5, 0.25, 0.125, 7, -4)
_LAYOUTS = (("NCHW", "OIHW"),) * 3 + (("NHWC", "HWIO"), ("NHWC", "OHWI"))


def sample_match(rule: Rule, random: Random) -> tuple[dict[str, TensorType], dict[str, Any]] | None:
    """Types of the variables and values of the attributes; None where this attempt does not fit the pattern."""
    sampler = _Sampler(random)
    try:
        for root in rule.roots:
            sampler.visit(root, None)
    except NotTypeable:
        return None
    if any(ty.elements > _LARGEST for ty in sampler.types.values()):
        return None
    return {var.name: sampler.types[var] for var in rule.variables}, sampler.attrs


class _Sampler:
    def __init__(self, random: Random) -> None:
        self.random = random
        self.types: dict[Pattern, TensorType] = {}
        self.attrs: dict[str, Any] = {}
        self.kernel: dict[str, int] = {}
        """Rows and columns of the last convolution's kernel, so that the next may resemble it."""

    def visit(self, pattern: Pattern, wish: Wish) -> Shaped:
        """The shape of a pattern, after choosing whatever is still free in it."""
        if pattern not in self.types:
            if isinstance(pattern, Var):
                self.types[pattern] = TensorType(self.shape() if wish is None else wish)
            else:
                given = self.given(pattern)
                attrs = _OPERATORS[pattern.op](self, pattern, given, wish)
                if isinstance(pattern.attrs, Attr):
                    self.attrs[pattern.attrs.name] = attrs
                self.types[pattern] = infer(pattern.op, attrs, *(self.types[argument] for argument in pattern.args))
        return self.types[pattern].shape

    def given(self, node: Node) -> Any:
        """Attributes that are fixed, or that another node has bound; else None."""
        return self.attrs.get(node.attrs.name) if isinstance(node.attrs, Attr) else node.attrs

    def bound(self, pattern: Pattern) -> bool:
        """Whether a part of this pattern has a type already, so that it is to be visited first."""
        return pattern in self.types or (isinstance(pattern, Node) and any(map(self.bound, pattern.args)))

    def chance(self, probability: float) -> bool:
        return self.random.random() < probability

    def shape(self, rank: int | None = None) -> Shaped:
        rank = self.random.choice((1, 2, 2, 3, 3, 4)) if rank is None else rank
        return tuple(self.random.choice(_EXTENTS) for _ in range(rank))

    def broadcastable(self, shape: Shaped) -> Shaped:
        """A shape that broadcasts to this one: itself more often than not."""
        if self.chance(0.6):
            return shape
        ones = tuple(1 if self.chance(0.5) else extent for extent in shape)
        return ones[self.random.randint(0, len(shape)) :] if self.chance(0.5) else ones

    def split(self, total: int, count: int) -> list[int]:
        """`count` positive numbers with this sum, where it is large enough."""
        parts = [1] * count
        for _ in range(total - count):
            parts[self.random.randrange(count)] += 1
        return parts

    def regrouped(self, shape: Shaped) -> Shaped:
        """Another shape with as many elements, most often a close relative."""
        result = list(shape)
        for _ in range(self.random.randint(1, 2)):
            i = self.random.randrange(len(result) + 1)
            if self.chance(0.25):
                result.insert(i, 1)
            elif i + 1 < len(result) and self.chance(0.6):
                result[i : i + 2] = [result[i] * result[i + 1]]
            elif i < len(result) and result[i] > 1:
                divisor = self.random.choice([d for d in range(1, result[i] + 1) if result[i] % d == 0])
                result[i : i + 1] = [divisor, result[i] // divisor]
            elif i < len(result) and result[i] == 1:
                del result[i]
        return tuple(result)

    def full(self, node: Node, given: Any, wish: Wish) -> Any:
        shape = () if wish is None or self.chance(0.7) else self.broadcastable(wish)
        return given or Full(shape, self.random.choice(_NUMBERS))

    def unary(self, node: Node, given: Any, wish: Wish) -> Any:
        self.visit(node.args[0], wish)
        return given or Kind(self.random.choice(UNARY_KINDS))

    def binary(self, node: Node, given: Any, wish: Wish) -> Any:
        first, second = sorted(node.args, key=lambda argument: not self.bound(argument))
        if wish is None and not self.bound(first):
            wish = self.shape()
        wished = None if wish is None else self.broadcastable(wish)
        shape = self.visit(first, wished)
        whole = wish if wish is not None and shape == wished else shape
        self.visit(second, whole if shape != whole else self.broadcastable(whole))
        return given or Kind(self.random.choice(BINARY_KINDS))

    def matmul(self, node: Node, given: Any, wish: Wish) -> Any:
        x, y = node.args
        *batch, m, n = self.shape(self.random.choice((2, 2, 3, 4))) if wish is None or len(wish) < 2 else wish
        depth = self.random.choice(_EXTENTS)
        if self.bound(y) and not self.bound(x):
            right = self.visit(y, (*self.broadcastable(tuple(batch)), depth, n))
            self.visit(x, (*batch, m, right[-2] if len(right) > 1 else depth))
        else:
            left = self.visit(x, (*batch, m, depth))
            other = () if self.chance(0.4) else self.broadcastable(left[:-2])
            self.visit(y, (*other, left[-1] if left else depth, n))

    def permute(self, node: Node, given: Any, wish: Wish) -> Any:
        (x,) = node.args
        if given is None:
            if self.bound(x):
                rank = len(self.visit(x, None))
            else:
                rank = self.random.choice((2, 3, 3, 4)) if wish is None else len(wish)
            axes = list(range(rank))
            self.random.shuffle(axes)
            given = Permute(tuple(axes))
        if wish is None or len(wish) != len(given.axes):
            wish = self.shape(len(given.axes))
        self.visit(x, tuple(wish[given.axes.index(axis)] for axis in range(len(wish))))
        return given

    def reshape(self, node: Node, given: Any, wish: Wish) -> Any:
        target = given.shape if given is not None else wish
        shape = self.visit(node.args[0], None if target is None else self.regrouped(target))
        if given is not None:
            return given
        same = wish is not None and prod(wish) == prod(shape)
        return Shape(wish if same and wish is not None else self.regrouped(shape))

    def broadcast(self, node: Node, given: Any, wish: Wish) -> Any:
        target = given.shape if given is not None else self.shape() if wish is None else wish
        shape = self.visit(node.args[0], self.broadcastable(target))
        if given is not None:
            return given
        larger = tuple(self.random.choice(_EXTENTS) if extent == 1 else extent for extent in shape)
        fits = len(target) >= len(shape) and all(a in (1, b) for a, b in zip(shape[::-1], target[::-1], strict=False))
        return Shape(target if fits else (*self.shape(self.random.randint(0, 1)), *larger))

    def slice(self, node: Node, given: Any, wish: Wish) -> Any:
        if given is not None:
            target = tuple(end + self.random.randint(0, 1) for end in given.end)
        else:
            target = tuple(n + self.random.choice((0, 0, 1, 2)) for n in (self.shape() if wish is None else wish))
        shape = self.visit(node.args[0], target)
        if given is not None:
            return given
        size = wish if wish is not None and len(wish) == len(shape) else tuple(self.random.randint(1, n) for n in shape)
        size = tuple(map(min, size, shape))
        begin = tuple(
            self.random.choice((0, n - s, self.random.randint(0, n - s))) for n, s in zip(shape, size, strict=True)
        )
        return Slice(begin, tuple(map(sum, zip(begin, size, strict=True))))

    def concat(self, node: Node, given: Any, wish: Wish) -> Any:
        shape = wish or self.shape()
        if not any(map(self.bound, node.args)) and self.chance(0.3) and wish is None:
            shape = self.shape(4)
        axis = given.axis if given is not None else self.random.randrange(len(shape))
        if axis >= len(shape):
            shape = self.shape(axis + 1 + self.random.randint(0, 1))
        sizes = dict(zip(node.args, self.split(shape[axis], len(node.args)), strict=False))
        for part in sorted(node.args, key=lambda argument: not self.bound(argument)):
            found = self.visit(part, (*shape[:axis], sizes[part], *shape[axis + 1 :]))
            if len(found) > axis:
                shape = found
            elif given is None:
                raise NotTypeable("a part without the axis")
        return given or Axis(axis)

    def pad(self, node: Node, given: Any, wish: Wish) -> Any:
        (x,) = node.args
        shape = self.shape() if wish is None else wish
        if given is None and self.bound(x):
            shape = self.visit(x, None)
            widths = [(self.random.choice((0, 0, 1, 2)), self.random.choice((0, 0, 1))) for _ in shape]
            return Pad(tuple(w[0] for w in widths), tuple(w[1] for w in widths))
        if given is None:
            outer = [self.random.randint(0, min(n - 1, 2)) if n else 0 for n in shape]
            before = tuple(self.random.randint(0, n) for n in outer)
            given = Pad(before, tuple(n - b for n, b in zip(outer, before, strict=True)))
        inner = tuple(max(1, n - b - c) for n, b, c in zip(shape, given.before, given.after, strict=False))
        self.visit(x, inner)
        return given

    def reduce(self, node: Node, given: Any, wish: Wish) -> Any:
        (x,) = node.args
        if given is None and (wish is None or self.bound(x)):
            shape = self.visit(x, wish)
            axes = tuple(i for i in range(len(shape)) if self.chance(0.5))
            return Reduce(self.random.choice(REDUCE_KINDS), axes, self.chance(0.5))
        if given is None:
            assert wish is not None
            count = self.random.randint(0, 2)
            axes = tuple(sorted(self.random.sample(range(len(wish) + count), count)))
            given = Reduce(self.random.choice(REDUCE_KINDS), axes, self.chance(0.5))
        rest = iter(wish or self.shape(2))
        kept = len(wish or (1, 1)) - (len(given.axes) if given.keepdims else 0)
        rank = max(kept + len(given.axes), max(given.axes, default=-1) + 1)
        result = []
        for axis in range(rank):
            reduced = axis in given.axes
            extent = next(rest, 1) if given.keepdims or not reduced else 1
            result.append(self.random.choice(_EXTENTS) if reduced else extent)
        self.visit(x, tuple(result))
        return given

    def softmax(self, node: Node, given: Any, wish: Wish) -> Any:
        shape = self.visit(node.args[0], wish)
        if not shape:
            raise NotTypeable("a scalar")
        return given or Axis(self.random.randrange(len(shape)))

    def conv2d(self, node: Node, given: Any, wish: Wish) -> Any:
        x, w = node.args
        a = given or self.convolution()
        out = dict(zip(a.out_layout, wish, strict=True)) if wish is not None and len(wish) == 4 else {}
        out = {letter: out.get(letter) or self.random.choice((1, 2, 3, 4)) for letter in "NCHW"}
        if not self.kernel or self.chance(0.2):
            height = self.random.choice((1, 1, 2, 3, 3))
            self.kernel = {"H": height, "W": height if self.chance(0.5) else self.random.choice((1, 1, 2, 3, 3))}
        kernel = dict(self.kernel)
        if self.bound(w):
            kernel |= self.extents(self.visit(w, None), a.kernel_layout)
        groups = a.groups
        channels = kernel["I"] * groups if "I" in kernel else groups * self.random.choice((1, 2, 3))
        top, left, bottom, right = a.padding
        size = {
            "N": out["N"],
            "C": channels,
            "H": self.seen(out["H"], kernel["H"], a.strides[0], a.dilation[0], top + bottom),
            "W": self.seen(out["W"], kernel["W"], a.strides[1], a.dilation[1], left + right),
        }
        data = self.extents(self.visit(x, tuple(size[letter] for letter in a.data_layout)), a.data_layout)
        kernel = {"I": max(1, data["C"] // groups), "O": max(1, out["C"] // groups) * groups} | kernel
        weight = self.extents(self.visit(w, tuple(kernel[letter] for letter in a.kernel_layout)), a.kernel_layout)
        if given is None and data["C"] != weight["I"] * groups and data["C"] % weight["I"] == 0:
            a = replace(a, groups=data["C"] // weight["I"])
        return a

    def seen(self, size: int, window: int, stride: int, dilation: int, padding: int) -> int:
        """An extent over which so many windows fit, with some room to spare."""
        return max(1, (size - 1) * stride + dilation * (window - 1) + 1 - padding + self.random.randrange(stride))

    def convolution(self) -> Conv2d:
        data, kernel = self.random.choice(_LAYOUTS)
        return Conv2d(
            self.twice((1, 1, 2)),
            self.padding(),
            self.twice((1, 1, 1, 2)),
            self.random.choice((1, 1, 1, 2, 4)),
            data,
            kernel,
            data,
        )

    def padding(self) -> tuple[int, int, int, int]:
        if self.chance(0.4):
            return (0, 0, 0, 0)
        if self.chance(0.5):
            return (1, 1, 1, 1)
        top, left, bottom, right = (self.random.randint(0, 2) for _ in range(4))
        return (top, left, bottom, right)

    def twice(self, choices: tuple[int, ...]) -> tuple[int, int]:
        first = self.random.choice(choices)
        return (first, first if self.chance(0.7) else self.random.choice(choices))

    def extents(self, shape: Shaped, layout: str) -> dict[str, int]:
        if len(shape) != len(layout):
            raise NotTypeable(f"{shape} is not {layout}")
        return dict(zip(layout, shape, strict=True))

    def pool2d(self, node: Node, given: Any, wish: Wish) -> Any:
        a = given or self.pooling()
        out = dict(zip(a.layout, wish, strict=True)) if wish is not None and len(wish) == 4 else {}
        out = {letter: out.get(letter) or self.random.choice((1, 2, 3)) for letter in "NCHW"}
        top, left, bottom, right = a.padding
        size = {
            "N": out["N"],
            "C": out["C"],
            "H": self.seen(out["H"], a.pool_size[0], a.strides[0], a.dilation[0], top + bottom),
            "W": self.seen(out["W"], a.pool_size[1], a.strides[1], a.dilation[1], left + right),
        }
        self.visit(node.args[0], tuple(size[letter] for letter in a.layout))
        return a

    def pooling(self) -> Pool2d:
        kernel = self.twice((1, 2, 3, 3))
        top, left, bottom, right = self.padding()
        padding = (min(top, kernel[0]), min(left, kernel[1]), min(bottom, kernel[0]), min(right, kernel[1]))
        return Pool2d(
            self.random.choice(("max", "avg")),
            kernel,
            self.twice((1, 1, 2)),
            padding,
            self.twice((1, 1, 1, 2)),
            self.chance(0.2),
            self.chance(0.5),
            self.random.choice(("NCHW", "NCHW", "NHWC")),
        )


_OPERATORS: Mapping[str, Callable[[_Sampler, Node, Any, Wish], Any]] = {
    "full": _Sampler.full,
    "unary": _Sampler.unary,
    "binary": _Sampler.binary,
    "matmul": _Sampler.matmul,
    "conv2d": _Sampler.conv2d,
    "pool2d": _Sampler.pool2d,
    "permute": _Sampler.permute,
    "reshape": _Sampler.reshape,
    "broadcast": _Sampler.broadcast,
    "slice": _Sampler.slice,
    "concat": _Sampler.concat,
    "pad": _Sampler.pad,
    "reduce": _Sampler.reduce,
    "softmax": _Sampler.softmax,
}
