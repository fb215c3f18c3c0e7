"""The vocabulary: each operator with its number of tensors, its attributes, and the type of its result.

How each is written in Relax is a row of `relax_ops.py`; what it costs is in `cost.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

from .attributes import (
    Axis,
    Conv2d,
    Full,
    Kind,
    Leaf,
    Opaque,
    Pad,
    Permute,
    Pool2d,
    Reduce,
    Shape,
    Slice,
    TensorType,
    WinogradData,
    WinogradResult,
)

__all__ = [
    "OPS",
    "NotTypeable",
    "Op",
    "infer",
]


class NotTypeable(ValueError):
    """The operator cannot be applied to arguments of these types."""


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
