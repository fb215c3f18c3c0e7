"""Types of tensors, and the attributes of each operator: plain values that rules look at."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod
from typing import Any

from ..space.access import dtype_bytes

__all__ = [
    "BINARY_KINDS",
    "REDUCE_KINDS",
    "UNARY_KINDS",
    "Axis",
    "Conv2d",
    "Full",
    "Kind",
    "Leaf",
    "Opaque",
    "Pad",
    "Permute",
    "Pool2d",
    "Reduce",
    "Shape",
    "Slice",
    "TensorType",
    "WinogradData",
    "WinogradResult",
]

UNARY_KINDS = (
    "abs", "ceil", "cos", "erf", "exp", "floor", "gelu", "gelu_tanh", "log", "negative", "relu", "rsqrt", "sigmoid",
    "silu", "sin", "sqrt", "square", "tanh",
)  # fmt: skip
"""Element-wise functions of one tensor that keep its shape and dtype."""

BINARY_KINDS = ("add", "subtract", "multiply", "divide", "maximum", "minimum", "power")
"""Element-wise functions of two tensors of one dtype, with numpy's broadcasting."""

REDUCE_KINDS = ("sum", "mean", "max", "min")


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
        return self.elements * dtype_bytes(self.dtype)


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
