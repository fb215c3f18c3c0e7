"""Mixtures of experts: products of each row with the weights of the expert that it was sent to, in plain operators.

Exported language models sort rows by expert, count each expert's rows (`histc`), and call one operator that reads the
counts while it runs. Shapes are fixed here, so that the rows of an expert cannot be: either every expert multiplies
every row, and each row's result is picked, or, where there are fewer rows than experts (one token at a time), each row
gets its expert's weights.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["EXPERT_DECOMPOSITIONS"]


def _grouped_product(
    x: Tensor, weight: Tensor, ends: Tensor | None = None, bias: Tensor | None = None, dtype: Any = None
) -> Tensor:
    """Rows (rows, k) of each group times its weights (groups, k, n); groups end before the rows `ends` (groups,).

    Rows after the last group are zero, as in `transformers.grouped_mm_fallback`.
    """
    if x.ndim != 2 or weight.ndim != 3 or ends is None or bias is not None or dtype not in (None, x.dtype):
        return NotImplemented
    rows, groups = x.shape[0], weight.shape[0]
    expert = (torch.arange(rows)[:, None] >= ends[None, :]).sum(-1)
    picked = expert.clamp(max=groups - 1)
    if rows < groups:
        result = torch.bmm(x[:, None, :], weight.index_select(0, picked))[:, 0]
    else:
        every = torch.bmm(x[None].expand(groups, -1, -1), weight)
        result = every.reshape(groups * rows, -1).index_select(0, picked * rows + torch.arange(rows))
    return torch.where((expert < groups)[:, None], result, 0.0)


def _counts(x: Tensor, bins: int = 100, low: Any = 0, high: Any = 0) -> Tensor:
    """`torch.histc`: how many values lie in each of `bins` equal parts of [low, high], or of all values' range."""
    x = x.reshape(-1)
    if not len(x):
        return x.new_zeros(bins)
    if low == high:
        is_point = x.amin() == x.amax()
        low, high = torch.where(is_point, x.amin() - 1, x.amin()), torch.where(is_point, x.amax() + 1, x.amax())
    part = ((x - low) * bins / (high - low)).floor().clamp(max=bins - 1)
    inside = (x >= low) & (x <= high)
    return ((part[:, None] == torch.arange(bins)) & inside[:, None]).sum(0).to(x.dtype)


EXPERT_DECOMPOSITIONS: dict[str, Callable[..., Tensor]] = {
    "transformers.grouped_mm_fallback.default": _grouped_product,
    "aten._grouped_mm.default": _grouped_product,
    "aten.histc.default": _counts,
}
"""By what PyTorch prints of an operator: libraries add operators of their own, which may not be installed."""
