"""The term language of the graph search: operators, their attributes, and the types of their results.

A term is an operator, its attributes (one hashable value, or None) and its tensor arguments. Everything that a rule
may want to look at is an attribute or a type, as plain Python data; nothing here knows TVM or egglog. `OPS` is the
vocabulary. An operator that it lacks is an `opaque` term: it keeps its place, and no rule looks inside.

How each operator is written in Relax is a row of `relax_ops.py`; what it costs is in `cost.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

__all__ = [
    "BINARY_KINDS",
    "OPS",
    "REDUCE_KINDS",
    "UNARY_KINDS",
    "Axis",
    "Conv2d",
    "Full",
    "Kind",
    "Leaf",
    "NotTypeable",
    "Op",
    "Opaque",
    "Pad",
    "Permute",
    "Pool2d",
    "Reduce",
    "Shape",
    "Slice",
    "TensorType",
    "Term",
    "TermGraph",
    "WinogradData",
    "WinogradResult",
    "infer",
]

DTYPE_BYTES = {"float64": 8, "int64": 8, "float16": 2, "bfloat16": 2, "int16": 2, "int8": 1, "uint8": 1, "bool": 1}

UNARY_KINDS = (
    "abs", "ceil", "cos", "erf", "exp", "floor", "gelu", "gelu_tanh", "log", "negative", "relu", "rsqrt", "sigmoid",
    "silu", "sin", "sqrt", "square", "tanh",
)  # fmt: skip
"""Element-wise functions of one tensor that keep its shape and dtype."""

BINARY_KINDS = ("add", "subtract", "multiply", "divide", "maximum", "minimum", "power")
"""Element-wise functions of two tensors of one dtype, with numpy's broadcasting."""

REDUCE_KINDS = ("sum", "mean", "max", "min")


class NotTypeable(ValueError):
    """The operator cannot be applied to arguments of these types."""


@dataclass(frozen=True)
class TensorType:
    """Shape and dtype of a tensor. Static: a model with symbolic shapes keeps what depends on them outside."""

    shape: tuple[int, ...]
    dtype: str = "float32"

    @property
    def elements(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def size_bytes(self) -> int:
        """Bytes of the elements."""
        return self.elements * DTYPE_BYTES.get(self.dtype, 4)


@dataclass(frozen=True)
class Leaf:
    """Attributes of `leaf`: an input, a constant, or a value computed outside, by its place in the encoded function."""

    index: int


@dataclass(frozen=True)
class Full:
    """Attributes of `full`: a constant whose elements are all `value`. Scalar constants of a model become this."""

    shape: tuple[int, ...]
    value: float | int | bool
    dtype: str = "float32"


@dataclass(frozen=True)
class Kind:
    """Attributes of `unary` and `binary`: which function."""

    name: str


@dataclass(frozen=True)
class Conv2d:
    """Attributes of `conv2d`, as Relax has them, and of `blocked_conv2d`; padding is (top, left, bottom, right)."""

    strides: tuple[int, int] = (1, 1)
    padding: tuple[int, int, int, int] = (0, 0, 0, 0)
    dilation: tuple[int, int] = (1, 1)
    groups: int = 1
    data_layout: str = "NCHW"
    kernel_layout: str = "OIHW"
    out_layout: str = "NCHW"


@dataclass(frozen=True)
class Pool2d:
    """Attributes of `pool2d`; kind is "max" or "avg"."""

    kind: str
    pool_size: tuple[int, int]
    strides: tuple[int, int] = (1, 1)
    padding: tuple[int, int, int, int] = (0, 0, 0, 0)
    dilation: tuple[int, int] = (1, 1)
    ceil_mode: bool = False
    count_include_pad: bool = False
    layout: str = "NCHW"


@dataclass(frozen=True)
class Permute:
    """Attributes of `permute`: dimension i of the result is dimension axes[i] of the argument."""

    axes: tuple[int, ...]


@dataclass(frozen=True)
class Shape:
    """Attributes of `reshape` and `broadcast`: the result's shape."""

    shape: tuple[int, ...]


@dataclass(frozen=True)
class Slice:
    """Attributes of `slice`: begin <= index < end, one entry for every dimension, none negative, step 1."""

    begin: tuple[int, ...]
    end: tuple[int, ...]


@dataclass(frozen=True)
class Axis:
    """Attributes of `concat` and `softmax`: a dimension, counted from 0."""

    axis: int


@dataclass(frozen=True)
class Pad:
    """Attributes of `pad`: zeros added before and after, one entry for every dimension."""

    before: tuple[int, ...]
    after: tuple[int, ...]


@dataclass(frozen=True)
class WinogradData:
    """Attributes of `winograd_data`: B' d B of each tile d of an image (N, C, H, W), as (matrices, tiles, C).

    `outputs` and `kernel` are m and r of F(m, r), down and across (minimal_filtering.py). Tiles have m + r - 1 rows and
    columns, as many matrices as these have elements. Tiles are m apart, and as many as cover every window of the padded
    image; the last ones may reach beyond it, into zeros. Padding is (top, left, bottom, right).
    """

    outputs: tuple[int, int]
    kernel: tuple[int, int]
    padding: tuple[int, int, int, int] = (0, 0, 0, 0)

    @property
    def size(self) -> tuple[int, int]:
        """Rows and columns of a tile."""
        return self.outputs[0] + self.kernel[0] - 1, self.outputs[1] + self.kernel[1] - 1

    def image(self, height: int, width: int) -> tuple[int, int]:
        """Rows and columns of the convolution's result."""
        top, left, bottom, right = self.padding
        return height + top + bottom - self.kernel[0] + 1, width + left + right - self.kernel[1] + 1

    def grid(self, height: int, width: int) -> tuple[int, int]:
        """Tiles down and across an image."""
        rows, columns = self.image(height, width)
        return -(-rows // self.outputs[0]), -(-columns // self.outputs[1])


@dataclass(frozen=True)
class WinogradResult:
    """Attributes of `winograd_result`: from (matrices, tiles, C) products M, the image (N, C, height, width) of A' M A.

    `outputs` and `kernel` are as those of `WinogradData`. What the last tiles compute beyond the image is dropped.
    """

    outputs: tuple[int, int]
    kernel: tuple[int, int]
    height: int
    width: int

    @property
    def size(self) -> tuple[int, int]:
        """Rows and columns of a tile of products."""
        return self.outputs[0] + self.kernel[0] - 1, self.outputs[1] + self.kernel[1] - 1

    @property
    def grid(self) -> tuple[int, int]:
        """Tiles down and across the image."""
        return -(-self.height // self.outputs[0]), -(-self.width // self.outputs[1])


@dataclass(frozen=True)
class Reduce:
    """Attributes of `reduce`: kind is one of REDUCE_KINDS, axes ascend and are not negative."""

    kind: str
    axes: tuple[int, ...]
    keepdims: bool = False


@dataclass(frozen=True)
class Opaque:
    """Attributes of `opaque`: an operator no rule looks into. Equal keys mean equal functions of the arguments."""

    name: str
    key: tuple[Any, ...]
    type: TensorType = field(compare=False)
    template: Any = field(compare=False, repr=False, default=None)


Infer = Callable[..., TensorType]


@dataclass(frozen=True)
class Op:
    """One operator of the vocabulary.

    Attributes
    ----------
    name : str
        The operator's name; with `arity` None, one e-graph constructor for each number of arguments.
    arity : int or None
        Number of tensor arguments; None for any number.
    attrs : type
        Type of the attributes; NoneType for none.
    infer : callable
        (attrs, *argument types) -> type of the result; raises `NotTypeable`.
    folds : bool
        Whether it is computed ahead of time where it depends on weights alone (numpy has no convolution).
    """

    name: str
    arity: int | None
    attrs: type
    infer: Infer
    folds: bool = True


@dataclass(frozen=True)
class Term:
    """A node of a `TermGraph`: `args` are indices of earlier nodes."""

    op: str
    attrs: Any
    args: tuple[int, ...]


@dataclass
class TermGraph:
    """A dataflow graph in topological order: what is encoded, extracted, priced, evaluated and decoded.

    Attributes
    ----------
    terms : list of Term
    types : list of TensorType
        Of each term's value.
    constant : list of bool
        Whether a term depends on weights alone: it is computed once, ahead of time.
    outputs : list of int
        The terms whose values are wanted.
    """

    terms: list[Term] = field(default_factory=list)
    types: list[TensorType] = field(default_factory=list)
    constant: list[bool] = field(default_factory=list)
    outputs: list[int] = field(default_factory=list)
    _index: dict[Term, int] = field(default_factory=dict, repr=False)

    def add(self, op: str, attrs: Any, args: Sequence[int]) -> int:
        """The index of this term, which is added unless it is there.

        Raises NotTypeable when the arguments' types do not fit.
        """
        term = Term(op, attrs, tuple(args))
        found = self._index.get(term)
        if found is not None:
            return found
        result_type = infer(op, attrs, *(self.types[i] for i in args))
        return self.add_typed(term, result_type, OPS[op].folds and all(self.constant[i] for i in args))

    def add_typed(self, term: Term, result_type: TensorType, constant: bool) -> int:
        """The same for a term whose type is given, as that of a leaf is, and whether it depends on weights alone."""
        found = self._index.get(term)
        if found is not None:
            return found
        self.terms.append(term)
        self.types.append(result_type)
        self.constant.append(constant)
        self._index[term] = len(self.terms) - 1
        return len(self.terms) - 1

    def users(self) -> list[int]:
        """How often each term's value is read, outputs included."""
        counts = [0] * len(self.terms)
        for term in self.terms:
            for argument in term.args:
                counts[argument] += 1
        for output in self.outputs:
            counts[output] += 1
        return counts

    def live(self) -> Iterator[int]:
        """Indices of the terms that outputs depend on, in order."""
        needed = set(self.outputs)
        for index in range(len(self.terms) - 1, -1, -1):
            if index in needed:
                needed.update(self.terms[index].args)
        return iter(sorted(needed))


def infer(op: str, attrs: Any, *types: TensorType) -> TensorType:
    """Type of the result of `op`. Raises NotTypeable when arguments do not fit, KeyError for an unknown operator."""
    return OPS[op].infer(attrs, *types)


def _require(condition: bool, why: str, *values: Any) -> None:
    if not condition:
        raise NotTypeable(why.format(*values))


def _broadcast(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...]:
    rank = max(len(a), len(b))
    result = []
    for x, y in zip((1,) * (rank - len(a)) + a, (1,) * (rank - len(b)) + b, strict=True):
        _require(x == y or x == 1 or y == 1, "shapes {} and {} do not broadcast", a, b)
        result.append(y if x == 1 else x)
    return tuple(result)


def _infer_leaf(attrs: Leaf) -> TensorType:
    raise NotTypeable(f"leaf {attrs.index}: a leaf's type is given, not inferred")


def _infer_full(attrs: Full) -> TensorType:
    return TensorType(attrs.shape, attrs.dtype)


def _infer_unary(attrs: Kind, x: TensorType) -> TensorType:
    return x


def _infer_binary(attrs: Kind, x: TensorType, y: TensorType) -> TensorType:
    _require(x.dtype == y.dtype, "dtypes {} and {} differ", x.dtype, y.dtype)
    return TensorType(_broadcast(x.shape, y.shape), x.dtype)


def _infer_matmul(attrs: None, x: TensorType, y: TensorType) -> TensorType:
    _require(len(x.shape) >= 2 and len(y.shape) >= 2, "matmul needs two matrices or batches of them")
    _require(x.dtype == y.dtype, "dtypes {} and {} differ", x.dtype, y.dtype)
    _require(x.shape[-1] == y.shape[-2], "matmul of {} and {}", x.shape, y.shape)
    return TensorType((*_broadcast(x.shape[:-2], y.shape[:-2]), x.shape[-2], y.shape[-1]), x.dtype)


def _window(size: int, kernel: int, stride: int, dilation: int, pad: int, ceil_mode: bool = False) -> int:
    span = size + pad - dilation * (kernel - 1) - 1
    _require(span >= 0, "a window of {} does not fit {} with padding {}", kernel, size, pad)
    return (span + (stride - 1 if ceil_mode else 0)) // stride + 1


def _infer_conv2d(attrs: Conv2d, x: TensorType, w: TensorType) -> TensorType:
    _require(len(x.shape) == 4 and len(w.shape) == 4, "conv2d needs four dimensions")
    _require(x.dtype == w.dtype, "dtypes {} and {} differ", x.dtype, w.dtype)
    data = dict(zip(attrs.data_layout, x.shape, strict=True))
    kernel = dict(zip(attrs.kernel_layout, w.shape, strict=True))
    _require(
        data["C"] == kernel["I"] * attrs.groups, "{} channels, weight {}, {} groups", data["C"], w.shape, attrs.groups
    )
    _require(kernel["O"] % attrs.groups == 0, "{} output channels in {} groups", kernel["O"], attrs.groups)
    (sh, sw), (dh, dw), (top, left, bottom, right) = attrs.strides, attrs.dilation, attrs.padding
    result = {
        "N": data["N"],
        "C": kernel["O"],
        "H": _window(data["H"], kernel["H"], sh, dh, top + bottom),
        "W": _window(data["W"], kernel["W"], sw, dw, left + right),
    }
    return TensorType(tuple(result[letter] for letter in attrs.out_layout), x.dtype)


def _infer_blocked_conv2d(attrs: Conv2d, x: TensorType, w: TensorType) -> TensorType:
    """Of x (N, C/b, H, W, b) and w (O/b, I/b, H, W, b in, b out), which stand for data NCHW and a kernel OIHW."""
    fits = len(x.shape) == 5 and len(w.shape) == 6 and x.shape[4] == w.shape[4] and attrs.groups == 1
    _require(fits, "blocks {}, {}, {} groups", x.shape, w.shape, attrs.groups)
    (n, c, *size, i), (o, k, *kernel, _, b) = x.shape, w.shape
    plain = _infer_conv2d(attrs, TensorType((n, c * i, *size), x.dtype), TensorType((o * b, k * i, *kernel), w.dtype))
    return TensorType((n, o, *plain.shape[2:], b), x.dtype)


def _infer_pool2d(attrs: Pool2d, x: TensorType) -> TensorType:
    _require(len(x.shape) == 4, "pool2d needs four dimensions")
    data = dict(zip(attrs.layout, x.shape, strict=True))
    (kh, kw), (sh, sw), (dh, dw) = attrs.pool_size, attrs.strides, attrs.dilation
    top, left, bottom, right = attrs.padding
    height, width = data["H"], data["W"]
    data["H"] = _window(height, kh, sh, dh, top + bottom, attrs.ceil_mode)
    data["W"] = _window(width, kw, sw, dw, left + right, attrs.ceil_mode)
    # Where rounding up adds a window that starts behind the data, TVM's types count it and its kernels do not.
    starts_inside = (data["H"] - 1) * sh < height + top and (data["W"] - 1) * sw < width + left
    _require(starts_inside or not attrs.ceil_mode, "a window that starts in the padding")
    return TensorType(tuple(data[letter] for letter in attrs.layout), x.dtype)


def _infer_permute(attrs: Permute, x: TensorType) -> TensorType:
    _require(sorted(attrs.axes) == list(range(len(x.shape))), "axes {} of shape {}", attrs.axes, x.shape)
    return TensorType(tuple(x.shape[axis] for axis in attrs.axes), x.dtype)


def _infer_reshape(attrs: Shape, x: TensorType) -> TensorType:
    _require(prod(attrs.shape) == x.elements, "{} does not reshape to {}", x.shape, attrs.shape)
    kept = all(extent or x.shape[i : i + 1] == (0,) for i, extent in enumerate(attrs.shape))
    _require(kept, "{} does not reshape to {}: Relax takes 0 for the extent that was there", x.shape, attrs.shape)
    return TensorType(attrs.shape, x.dtype)


def _infer_broadcast(attrs: Shape, x: TensorType) -> TensorType:
    _require(_broadcast(x.shape, attrs.shape) == attrs.shape, "{} does not broadcast to {}", x.shape, attrs.shape)
    return TensorType(attrs.shape, x.dtype)


def _infer_slice(attrs: Slice, x: TensorType) -> TensorType:
    _require(len(attrs.begin) == len(attrs.end) == len(x.shape), "slice {} of shape {}", attrs, x.shape)
    bounds = list(zip(attrs.begin, attrs.end, x.shape, strict=True))
    _require(all(0 <= begin <= end <= size for begin, end, size in bounds), "slice {} of shape {}", attrs, x.shape)
    return TensorType(tuple(end - begin for begin, end, _ in bounds), x.dtype)


def _infer_concat(attrs: Axis, *parts: TensorType) -> TensorType:
    first, axis = parts[0], attrs.axis
    _require(0 <= axis < len(first.shape), "axis {} of shape {}", axis, first.shape)
    rest = (first.shape[:axis], first.shape[axis + 1 :], first.dtype)
    for part in parts:
        same_rank = len(part.shape) == len(first.shape)
        same = same_rank and (part.shape[:axis], part.shape[axis + 1 :], part.dtype) == rest
        _require(same, "concat of {} at {}", parts, axis)
    size = sum(part.shape[axis] for part in parts)
    return TensorType((*first.shape[:axis], size, *first.shape[axis + 1 :]), first.dtype)


def _infer_pad(attrs: Pad, x: TensorType) -> TensorType:
    _require(len(attrs.before) == len(attrs.after) == len(x.shape), "pad {} of shape {}", attrs, x.shape)
    _require(min((*attrs.before, *attrs.after), default=0) >= 0, "pad {} is negative", attrs)
    return TensorType(tuple(map(sum, zip(attrs.before, x.shape, attrs.after, strict=True))), x.dtype)


def _infer_winograd_data(attrs: WinogradData, x: TensorType) -> TensorType:
    _require(len(x.shape) == 4, "an image has four dimensions")
    batch, channels, height, width = x.shape
    down, across = attrs.grid(height, width)
    _require(min(down, across) > 0, "no tile of {} fits {}", attrs, x.shape)
    return TensorType((prod(attrs.size), batch * down * across, channels), x.dtype)


def _infer_winograd_conv2d(attrs: WinogradData, x: TensorType, weight: TensorType) -> TensorType:
    _require(len(weight.shape) == 3, "a transformed weight has three dimensions")
    size, channels, columns = weight.shape
    data = _infer_winograd_data(attrs, x)
    _require((data.shape[0], data.shape[2]) == (size, channels), "{} for {}", weight.shape, data.shape)
    return TensorType((x.shape[0], columns, *attrs.image(*x.shape[2:])), x.dtype)


def _infer_winograd_result(attrs: WinogradResult, x: TensorType) -> TensorType:
    _require(len(x.shape) == 3 and x.shape[0] == prod(attrs.size), "{} of {}", attrs, x.shape)
    tiles = prod(attrs.grid)
    _require(tiles > 0 and x.shape[1] % tiles == 0, "{} of {} tiles", attrs, x.shape[1])
    return TensorType((x.shape[1] // tiles, x.shape[2], attrs.height, attrs.width), x.dtype)


def _infer_reduce(attrs: Reduce, x: TensorType) -> TensorType:
    _require(all(0 <= axis < len(x.shape) for axis in attrs.axes), "axes {} of shape {}", attrs.axes, x.shape)
    kept = [(1 if i in attrs.axes else n) for i, n in enumerate(x.shape) if attrs.keepdims or i not in attrs.axes]
    return TensorType(tuple(kept), x.dtype)


def _infer_softmax(attrs: Axis, x: TensorType) -> TensorType:
    _require(0 <= attrs.axis < len(x.shape), "axis {} of shape {}", attrs.axis, x.shape)
    return x


def _infer_opaque(attrs: Opaque, *types: TensorType) -> TensorType:
    return attrs.type


OPS: dict[str, Op] = {
    op.name: op
    for op in (
        Op("leaf", 0, Leaf, _infer_leaf, folds=False),
        Op("full", 0, Full, _infer_full),
        Op("unary", 1, Kind, _infer_unary),
        Op("binary", 2, Kind, _infer_binary),
        Op("matmul", 2, type(None), _infer_matmul),
        Op("conv2d", 2, Conv2d, _infer_conv2d, folds=False),
        Op("blocked_conv2d", 2, Conv2d, _infer_blocked_conv2d, folds=False),
        Op("pool2d", 1, Pool2d, _infer_pool2d, folds=False),
        Op("permute", 1, Permute, _infer_permute),
        Op("reshape", 1, Shape, _infer_reshape),
        Op("broadcast", 1, Shape, _infer_broadcast),
        Op("slice", 1, Slice, _infer_slice),
        Op("concat", None, Axis, _infer_concat),
        Op("pad", 1, Pad, _infer_pad),
        Op("winograd_data", 1, WinogradData, _infer_winograd_data, folds=False),
        Op("winograd_conv2d", 2, WinogradData, _infer_winograd_conv2d, folds=False),
        Op("winograd_result", 1, WinogradResult, _infer_winograd_result, folds=False),
        Op("reduce", 1, Reduce, _infer_reduce),
        Op("softmax", 1, Axis, _infer_softmax),
        Op("opaque", None, Opaque, _infer_opaque, folds=False),
    )
}
