"""Winograd's minimal filtering: a convolution as products of transformed tiles.

F(m, r) computes m outputs of a filter with r taps from m + r - 1 inputs, with as many multiplications, and F(m x m,
r x r) the same down and across (minimal_filtering.py): (m + r - 1)**2 multiplications for each pair of channels instead
of (m r)**2. All tiles and channels together make a batch of that many matrix products. The transforms of data and
results are a kernel each, or all is one kernel; that of the weight, a product with the Kronecker product of both G, is
computed ahead of time.

The transforms lose accuracy as their entries grow with m and r, hence `fast_math`. In float16 they would leave its
range: those of F(4x4, 3x3) are up to 32 times the pixels. In float32, for 64 channels, the error is 5e-7 of the largest
result directly, and (tests/search/test_graph_rules.py)

    F(2x2, 3x3)    F(4x4, 3x3)    F(6x6, 3x3)    F(4x4, 5x5)    F(1x4, 1x3)    F(1x6, 1x7)
    3e-7           2e-6           1e-5           7e-6           6e-7           1e-5
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from random import Random
from typing import Any

from ..attributes import Axis, Conv2d, Full, Permute, Shape, TensorType, WinogradData, WinogradResult
from ..minimal_filtering import Matrix, matrices
from .channels_last import convolves_channels_first
from .convolution import ungrouped
from .pattern import (
    Pattern,
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
from .pattern import weights as trained
from .rule import Condition, Match, Rule
from .shapes import keeps_range

__all__ = ["FEWEST_CHANNELS", "KERNELS", "WINOGRAD_RULES"]

(x,) = tensors("x")
(w,) = trained("w")

Pair = tuple[int, int]

FORMS: tuple[tuple[Pair, Pair], ...] = (
    ((2, 2), (3, 3)),
    ((4, 4), (3, 3)),
    ((6, 6), (3, 3)),
    ((4, 4), (5, 5)),
    ((1, 4), (1, 3)),
    ((4, 1), (3, 1)),
    ((1, 6), (1, 7)),
    ((6, 1), (7, 1)),
)
"""m and r, down and across, of each form in one kernel."""

KERNELS = frozenset(kernel for _, kernel in FORMS)
"""Down and across."""

FEWEST_CHANNELS = 16
"""With fewer inputs or outputs, the transforms cost more than the products save."""

FEWEST_TILES = 6
"""With fewer, reading the weight takes the time: at 7 x 7 and 8 x 8, F(2 x 2) wins over F(4 x 4), which has four."""


def slides_by_one(m: Match) -> bool:
    """Neighbouring outputs see neighbouring inputs, side by side."""
    return bool(m.a.strides == m.a.dilation == (1, 1))


def many_channels(m: Match) -> bool:
    """Enough inputs and outputs."""
    return bool(min(m.w.shape[:2]) >= FEWEST_CHANNELS)


def enough_tiles(outputs: Pair, kernel: Pair) -> Condition:
    """Whether weights, which the transform makes larger, are read for tiles enough to pay for it."""

    def tiles_enough(m: Match) -> bool:
        return m.x.shape[0] * prod(WinogradData(outputs, kernel, m.a.padding).grid(*m.x.shape[2:])) >= FEWEST_TILES

    return tiles_enough


def whole_vectors(m: Match) -> bool:
    """Inputs and outputs fill vectors, the only ones that the one kernel works on."""
    return bool(m.w.shape[0] % 16 == 0 and m.w.shape[1] % 16 == 0)


def _constant(rows: Matrix) -> Pattern:
    """A matrix of constants."""

    def number(value: float) -> Pattern:
        return full(lambda m: Full((1, 1), float(value), m.w.dtype))

    numbers = {value: number(value) for row in rows for value in row}
    return concat([concat([numbers[value] for value in row], Axis(1)) for row in rows], Axis(0))


def _kronecker(down: Matrix, across: Matrix) -> Pattern:
    """Transforms both dimensions of flattened boxes."""
    (rows, taps), (columns, more) = ((len(matrix), len(matrix[0])) for matrix in (down, across))
    outer = reshape(_constant(down), Shape((rows, 1, taps, 1)))
    inner = reshape(_constant(across), Shape((1, columns, 1, more)))
    return reshape(multiply(outer, inner), Shape((rows * columns, taps * more)))


def _transformed(outputs: Pair, kernel: Pair) -> Pattern:
    """The weight as (matrices, C, O)."""
    transforms = [matrices(m, r).weight for m, r in zip(outputs, kernel, strict=True)]
    count = prod(map(len, transforms))
    columns = permute(
        reshape(w, lambda m: Shape((m.w.shape[0] * m.w.shape[1], prod(kernel)))),
        Permute((1, 0)),
    )
    by_output = reshape(matmul(_kronecker(*transforms), columns), lambda m: Shape((count, *m.w.shape[:2])))
    return permute(by_output, Permute((0, 2, 1)))


def _example(kernel: Pair) -> Callable[[Random], tuple[dict[str, TensorType], dict[str, Any]]]:
    """Convolutions with this kernel; the rule fits two of three."""

    def example(random: Random) -> tuple[dict[str, TensorType], dict[str, Any]]:
        size, strides, dilation, groups, layout = kernel, (1, 1), (1, 1), 1, "NCHW"
        odd = random.randrange(12)
        if odd == 0:
            size = (kernel[0] + 1, max(1, kernel[1] - 1))
        elif odd == 1:
            strides, dilation = random.choice((((1, 2), (1, 1)), ((1, 1), (2, 1)), ((2, 1), (1, 2))))
        elif odd == 2:
            groups = 2
        elif odd == 3:
            layout = "NHWC"
        n, c, o, top, left, bottom, right = (random.choice((1, 2, 2)) for _ in range(7))
        image = {"N": n, "C": c * groups, "H": random.randint(2, 9), "W": random.randint(2, 9)}
        image["H"], image["W"] = image["H"] + 2 * size[0] - 2, image["W"] + 2 * size[1] - 2
        weight = {"O": o * groups, "I": c, "H": size[0], "W": size[1]}
        types = {"x": TensorType(tuple(image[d] for d in layout)), "w": TensorType(tuple(weight.values()))}
        return types, {"a": Conv2d(strides, (top, left, bottom, right), dilation, groups, layout, "OIHW", layout)}

    return example


def _rule(name: str, outputs: Pair, kernel: Pair, after: Pattern, *worth: Condition) -> Rule:
    def kernel_fits(m: Match) -> bool:
        return bool(m.w.shape[2:] == kernel)

    products = prod(m + r - 1 for m, r in zip(outputs, kernel, strict=True))
    return Rule(
        name,
        before=conv2d(x, w, "a"),
        after=after,
        when=(kernel_fits, slides_by_one, ungrouped, convolves_channels_first),
        worth=(keeps_range, many_channels, enough_tiles(outputs, kernel), *worth),
        fast_math=True,
        example=_example(kernel),
        reason=f"{prod(outputs) * prod(kernel) / products:.3g} times fewer multiplications",
        source="Winograd; Lavin and Gray 2016",
    )


def winograd(outputs: int) -> Rule:
    """3x3: conv(x, w) -> products of tiles that have outputs x outputs results each, in three kernels."""
    m, r = (outputs, outputs), (3, 3)
    data = winograd_data(x, lambda match: WinogradData(m, r, match.a.padding))
    products = matmul(data, _transformed(m, r))
    after = winograd_result(products, lambda match: WinogradResult(m, r, *match.out[0].shape[2:]))
    return _rule(f"winograd-{outputs}x{outputs}", m, r, after)


def winograd_in_one_kernel(outputs: Pair, kernel: Pair) -> Rule:
    """conv(x, w) -> the same in one kernel: for any kernel, and images whose transformed tiles overflow a cache."""
    after = winograd_conv2d(
        x, _transformed(outputs, kernel), lambda match: WinogradData(outputs, kernel, match.a.padding)
    )
    of_kernel = "" if kernel == (3, 3) else f"-of-{kernel[0]}x{kernel[1]}"
    name = f"winograd-{outputs[0]}x{outputs[1]}{of_kernel}-in-one-kernel"
    return _rule(name, outputs, kernel, after, whole_vectors)


WINOGRAD_RULES: tuple[Rule, ...] = (
    winograd(2),
    winograd(4),
    *(winograd_in_one_kernel(outputs, kernel) for outputs, kernel in FORMS),
)
