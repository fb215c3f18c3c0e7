"""Winograd's minimal filtering: a 3x3 convolution as products of transformed tiles.

F(m x m, 3 x 3) computes m * m outputs from a tile of (m + 2)**2 inputs (minimal_filtering.py), with (m + 2)**2
multiplications for each pair of channels instead of 9 m**2: 2.25 times fewer for m = 2, 4 times for m = 4. All tiles
and channels together make a batch of (m + 2)**2 matrix products. The transforms of data and results are a kernel each,
or all is one kernel; that of the weight, a product with the Kronecker square of G, is computed ahead of time.

The transforms lose accuracy as their entries grow with m, hence `fast_math`. In float32, for 64 channels, the error is
5e-7 of the largest result directly, 3e-7 for m = 2 and 6e-6 for m = 4 (tests/search/test_graph_rules.py).
"""

from __future__ import annotations

from collections.abc import Callable

from ..minimal_filtering import MATRICES, Matrix
from ..terms import Axis, Full, Permute, Shape, WinogradData, WinogradResult
from .rule import (
    Match,
    Pattern,
    Rule,
    concat,
    conv2d,
    full,
    matmul,
    multiply,
    permute,
    reshape,
    tensors,
    winograd_conv2d,
    winograd_data,
    winograd_result,
)
from .rule import weights as trained

__all__ = ["WINOGRAD_RULES"]

(x,) = tensors("x")
(w,) = trained("w")

FEWEST_CHANNELS = 16
"""With fewer inputs or outputs, the transforms cost more than the products save."""


def three_by_three(m: Match) -> bool:
    """The kernel is 3x3."""
    return bool(m.w.shape[2:] == (3, 3))


def slides_by_one(m: Match) -> bool:
    """Neighbouring outputs see neighbouring inputs, side by side."""
    return bool(m.a.strides == m.a.dilation == (1, 1))


def ungrouped(m: Match) -> bool:
    """The convolution has one group."""
    return bool(m.a.groups == 1)


def channels_first(m: Match) -> bool:
    """Data NCHW, kernel OIHW."""
    return bool(m.a.data_layout == m.a.out_layout == "NCHW" and m.a.kernel_layout == "OIHW")


def many_channels(m: Match) -> bool:
    """Enough inputs and outputs."""
    return bool(min(m.w.shape[:2]) >= FEWEST_CHANNELS)


def whole_vectors(m: Match) -> bool:
    """Inputs and outputs fill vectors, the only ones that the one kernel works on."""
    return bool(m.w.shape[0] % 16 == 0 and m.w.shape[1] % 16 == 0)


def _constant(rows: Matrix) -> Pattern:
    """A matrix of constants."""

    def number(value: float) -> Pattern:
        return full(lambda m: Full((1, 1), float(value), m.w.dtype))

    numbers = {value: number(value) for row in rows for value in row}
    return concat([concat([numbers[value] for value in row], Axis(1)) for row in rows], Axis(0))


def _kronecker_square(rows: Matrix) -> Pattern:
    """Transforms both dimensions of flattened squares."""
    height, width = len(rows), len(rows[0])
    matrix = _constant(rows)
    outer, inner = reshape(matrix, Shape((height, 1, width, 1))), reshape(matrix, Shape((1, height, 1, width)))
    return reshape(multiply(outer, inner), Shape((height**2, width**2)))


def _transformed(outputs: int) -> Pattern:
    """The weight as (size**2, C, O)."""
    size = outputs + 2
    columns = permute(reshape(w, lambda m: Shape((m.w.shape[0] * m.w.shape[1], 9))), Permute((1, 0)))
    return permute(
        reshape(
            matmul(_kronecker_square(MATRICES[outputs].weight), columns),
            lambda m: Shape((size**2, *m.w.shape[:2])),
        ),
        Permute((0, 2, 1)),
    )


def _rule(name: str, outputs: int, after: Pattern, *worth: Callable[[Match], bool]) -> Rule:
    return Rule(
        name,
        before=conv2d(x, w, "a"),
        after=after,
        when=(three_by_three, slides_by_one, ungrouped, channels_first),
        worth=(many_channels, *worth),
        fast_math=True,
        reason=f"{9 * outputs**2 / (outputs + 2) ** 2:g} times fewer multiplications",
        source="Winograd; Lavin and Gray 2016",
    )


def winograd(outputs: int) -> Rule:
    """conv(x, w) -> products of tiles that have outputs x outputs results each, in three kernels."""
    data = winograd_data(x, lambda m: WinogradData(outputs, m.a.padding))
    products = matmul(data, _transformed(outputs))
    after = winograd_result(products, lambda m: WinogradResult(outputs, *m.out[0].shape[2:]))
    return _rule(f"winograd-{outputs}x{outputs}", outputs, after)


def winograd_in_one_kernel(outputs: int) -> Rule:
    """The same in one kernel: for images whose transformed tiles are larger than a cache."""
    after = winograd_conv2d(x, _transformed(outputs), lambda m: WinogradData(outputs, m.a.padding))
    return _rule(f"winograd-{outputs}x{outputs}-in-one-kernel", outputs, after, whole_vectors)


WINOGRAD_RULES: tuple[Rule, ...] = (winograd(2), winograd(4), winograd_in_one_kernel(4))
