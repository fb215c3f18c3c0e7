"""Operators that PyTorch's attention and encoder layers call where no gradients are asked for."""

from __future__ import annotations

from typing import Any

import pytest

from eqtune.frontends import load_model, verify_import

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.unoptimised

PAIRS = torch.triu(torch.ones(5, 5, dtype=torch.bool), 1)
KEYS = torch.tensor([[False] * 5, [False, False, False, True, True]])
MASKS = {
    "none": (None, None),
    "of pairs": (PAIRS, 0),
    "of keys": (KEYS, 1),
    "of heads": ((PAIRS | KEYS[:, None, None]).expand(2, 2, 5, 5), 2),
}


class Encoder(torch.nn.Module):
    def __init__(self, activation: str, norm_first: bool, mask: str) -> None:
        super().__init__()
        options = {"activation": activation, "norm_first": norm_first, "batch_first": True, "layer_norm_eps": 1e-3}
        self.layer = torch.nn.TransformerEncoderLayer(8, 2, 16, **options)
        self.options, self.mask = (activation == "gelu", norm_first, 1e-3), MASKS[mask]

    def forward(self, x: Any) -> Any:
        layer = self.layer
        attention = (
            layer.self_attn.in_proj_weight,
            layer.self_attn.in_proj_bias,
            *layer.self_attn.out_proj.parameters(),
        )
        rest = (
            part for child in (layer.norm1, layer.norm2, layer.linear1, layer.linear2) for part in child.parameters()
        )
        return torch._transformer_encoder_layer_fwd(x, 8, 2, *attention, *self.options, *rest, *self.mask)


class Attention(torch.nn.Module):
    def __init__(self, need_weights: bool, average: bool, mask: str) -> None:
        super().__init__()
        self.layer = torch.nn.MultiheadAttention(8, 2)
        self.options, (self.mask, self.kind) = (need_weights, average), MASKS[mask]

    def forward(self, x: Any) -> Any:
        layer = self.layer
        weights = (layer.in_proj_weight, layer.in_proj_bias, *layer.out_proj.parameters())
        return torch._native_multi_head_attention(x, x, x, 8, 2, *weights, self.mask, *self.options, self.kind)


def exported(module: Any) -> Any:
    torch.manual_seed(0)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter)
    with torch.no_grad():
        return torch.export.export(module.eval(), (torch.randn(2, 5, 8),))


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(("activation", "norm_first"), [("relu", False), ("gelu", True)])
def test_encoder_layers_in_one_operator(activation: str, norm_first: bool, mask: str) -> None:
    assert verify_import(load_model(exported(Encoder(activation, norm_first, mask)))) < 1e-5


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(("need_weights", "average"), [(False, True), (True, True), (True, False)])
def test_attention_in_one_operator(need_weights: bool, average: bool, mask: str) -> None:
    assert verify_import(load_model(exported(Attention(need_weights, average, mask)))) < 1e-5


def test_outputs_that_are_no_tensors_are_left_out() -> None:
    class Two(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            return {"nothing": None, "doubled": x * 2, "number": 3, "one": x + 1}

    imported = load_model(Two(), example_inputs=(torch.randn(2, 3),))
    assert verify_import(imported) < 1e-6
    assert len(imported.mod["main"].ret_ty.fields) == 2
