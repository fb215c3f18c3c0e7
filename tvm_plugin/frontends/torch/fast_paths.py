"""Encoder layers and attention in one operator each, which PyTorch's modules call where no gradients are asked for.

`torch.nn.TransformerEncoderLayer` and `torch.nn.MultiheadAttention` do so in evaluation mode under `torch.no_grad()`;
under `torch.inference_mode()`, graphs that Dynamo captures hold them, too. Here they are written in plain operators.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

__all__ = ["FAST_PATH_DECOMPOSITIONS"]

OF_PAIRS, OF_KEYS = 0, 1
"""What a mask is of: pairs of places (places, places), or keys of each sequence (batch, places); otherwise of pairs in
each head."""


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    width: int,
    heads: int,
    weight: Tensor,
    bias: Tensor,
    out_weight: Tensor,
    out_bias: Tensor,
    mask: Tensor | None = None,
    need_weights: bool = True,
    average_weights: bool = True,
    mask_type: int | None = None,
) -> Any:
    """Outputs (batch, places, width), and the weights: of each head (batch, heads, places, keys), or their mean."""
    batch = query.shape[0]
    weights, biases = weight.chunk(3), bias.chunk(3)
    q, k, v = (
        functional.linear(x, *both).view(batch, -1, heads, width // heads).transpose(1, 2)
        for x, *both in zip((query, key, value), weights, biases, strict=True)
    )
    if mask is None and not need_weights:
        mixed, shares = functional.scaled_dot_product_attention(q, k, v), None
    else:  # a place that sees nothing is NaN here, and would not be there
        scores = (q / (width // heads) ** 0.5) @ k.transpose(-2, -1)
        if mask is not None:
            scores = scores.masked_fill(_of_heads(mask.to(torch.bool), mask_type), -torch.inf)
        shares = scores.softmax(-1)
        mixed = shares @ v
    output = functional.linear(mixed.transpose(1, 2).reshape(batch, -1, width), out_weight, out_bias)
    if shares is None or not need_weights:
        return output, None
    return output, shares.mean(1) if average_weights else shares


def _of_heads(mask: Tensor, mask_type: int | None) -> Tensor:
    """A mask that broadcasts to (batch, heads, places, keys)."""
    if mask_type == OF_KEYS:
        return mask[:, None, None, :]
    return mask[None, None] if mask_type == OF_PAIRS else mask


def _encoder_layer(
    x: Tensor,
    width: int,
    heads: int,
    weight: Tensor,
    bias: Tensor,
    out_weight: Tensor,
    out_bias: Tensor,
    use_gelu: bool,
    norm_first: bool,
    epsilon: float,
    gamma_1: Tensor,
    beta_1: Tensor,
    gamma_2: Tensor,
    beta_2: Tensor,
    inner_weight: Tensor,
    inner_bias: Tensor,
    outer_weight: Tensor,
    outer_bias: Tensor,
    mask: Tensor | None = None,
    mask_type: int | None = None,
) -> Tensor:
    def attended(x: Tensor) -> Tensor:
        return _attention(
            x, x, x, width, heads, weight, bias, out_weight, out_bias, mask, need_weights=False, mask_type=mask_type
        )[0]

    def fed_forward(x: Tensor) -> Tensor:
        activate = functional.gelu if use_gelu else functional.relu
        return functional.linear(activate(functional.linear(x, inner_weight, inner_bias)), outer_weight, outer_bias)

    def first_norm(x: Tensor) -> Tensor:
        return functional.layer_norm(x, (width,), gamma_1, beta_1, epsilon)

    def second_norm(x: Tensor) -> Tensor:
        return functional.layer_norm(x, (width,), gamma_2, beta_2, epsilon)

    if norm_first:
        x = x + attended(first_norm(x))
        return x + fed_forward(second_norm(x))
    x = first_norm(x + attended(x))
    return second_norm(x + fed_forward(x))


FAST_PATH_DECOMPOSITIONS: dict[str, Callable[..., Any]] = {
    "aten._native_multi_head_attention.default": _attention,
    "aten._transformer_encoder_layer_fwd.default": _encoder_layer,
}
"""By what PyTorch prints of an operator, as those of experts are."""
