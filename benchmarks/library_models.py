"""Models as the libraries that people use define them, with random weights: what they really export.

The libraries are installed by hand: `pip install transformers timm torchvision diffusers ultralytics monai`. Layers are
few where all of them are alike.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["IMAGE_NETWORKS", "LIBRARY_MODELS"]


class Outputs(nn.Module):
    """A model of `transformers` whose inputs have an order, and whose one result is a tensor."""

    def __init__(self, model: nn.Module, *names: str, result: str = "last_hidden_state") -> None:
        super().__init__()
        self.model, self.names, self.result = model, names, result

    def forward(self, *inputs: Tensor) -> Tensor:
        result: Tensor = getattr(self.model(**dict(zip(self.names, inputs, strict=True))), self.result)
        return result


def _words(count: int) -> Tensor:
    return torch.randint(4, 2000, (1, count))


def _decoder(name: str, **config: Any) -> tuple[nn.Module, tuple[Tensor, ...]]:
    import transformers

    sizes = {"vocab_size": 2000, "pad_token_id": 0, "use_cache": False} | config
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, f"{name}Config")(**sizes))
    return Outputs(model, "input_ids", result="logits"), (_words(64),)


def _llama() -> tuple[nn.Module, tuple[Tensor, ...]]:
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4}
    return _decoder("Llama", hidden_size=512, intermediate_size=1376, num_hidden_layers=2, **heads)


def _encoder(name: str, words: int, **config: Any) -> tuple[nn.Module, tuple[Tensor, ...]]:
    import transformers

    sizes = {"vocab_size": 2000, "pad_token_id": 0} | config
    model = getattr(transformers, f"{name}Model")(getattr(transformers, f"{name}Config")(**sizes))
    return Outputs(model, "input_ids"), (_words(words),)


def _whisper() -> tuple[nn.Module, tuple[Tensor, ...]]:
    import transformers

    config = transformers.WhisperConfig(encoder_layers=2, d_model=384, encoder_attention_heads=6, encoder_ffn_dim=1536)
    return Outputs(transformers.WhisperModel(config).encoder, "input_features"), (torch.randn(1, 80, 3000),)


def _wav2vec2() -> tuple[nn.Module, tuple[Tensor, ...]]:
    import transformers

    return Outputs(transformers.Wav2Vec2Model(transformers.Wav2Vec2Config(num_hidden_layers=2)), "input_values"), (
        torch.randn(1, 16000),
    )


def _clip() -> tuple[nn.Module, tuple[Tensor, ...]]:
    import transformers

    layers = {"num_hidden_layers": 2}
    config = transformers.CLIPConfig(
        text_config=layers | {"vocab_size": 2000, "eos_token_id": 999, "bos_token_id": 998}, vision_config=layers
    )
    model = Outputs(transformers.CLIPModel(config), "input_ids", "pixel_values", result="logits_per_image")
    return model, (_words(16), torch.randn(1, 3, 224, 224))


def _segformer() -> tuple[nn.Module, tuple[Tensor, ...]]:
    import transformers

    model = transformers.SegformerForSemanticSegmentation(transformers.SegformerConfig())
    return Outputs(model, "pixel_values", result="logits"), (torch.randn(1, 3, 256, 256),)


def _image(name: str) -> tuple[nn.Module, tuple[Tensor, ...]]:
    import timm

    model = timm.create_model(name, pretrained=False)
    return model, (torch.randn(1, *model.default_cfg["input_size"]),)


def _of_torchvision(name: str) -> tuple[nn.Module, tuple[Tensor, ...]]:
    import torchvision

    # What segments images would load its backbone's weights.
    options = {"weights_backbone": None} if name.startswith("deeplab") else {}
    return torchvision.models.get_model(name, weights=None, **options), (torch.randn(1, 3, 224, 224),)


def _detector() -> tuple[nn.Module, tuple[Tensor, ...]]:
    """YOLO as it is exported: boxes and scores in one tensor."""
    from ultralytics.nn.tasks import DetectionModel

    model = DetectionModel("yolo11n.yaml", ch=3, verbose=False)
    model.model[-1].export, model.model[-1].format = True, "onnx"
    return model, (torch.rand(1, 3, 640, 640),)


class Sample(nn.Module):
    """A part of a diffusion model, by one of its methods."""

    def __init__(self, model: nn.Module, method: str = "forward") -> None:
        super().__init__()
        self.model, self.method = model, method

    def forward(self, *inputs: Tensor) -> Tensor:
        result: Tensor = getattr(self.model, self.method)(*inputs).sample
        return result


def _denoiser() -> tuple[nn.Module, tuple[Tensor, ...]]:
    import diffusers

    model = diffusers.UNet2DConditionModel(
        sample_size=32,
        block_out_channels=(128, 256),
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        layers_per_block=1,
        cross_attention_dim=256,
        attention_head_dim=8,
    )
    return Sample(model), (torch.randn(1, 4, 32, 32), torch.tensor([10]), torch.randn(1, 77, 256))


def _image_decoder() -> tuple[nn.Module, tuple[Tensor, ...]]:
    import diffusers

    sizes = (64, 128, 128)
    model = diffusers.AutoencoderKL(
        block_out_channels=sizes,
        down_block_types=("DownEncoderBlock2D",) * len(sizes),
        up_block_types=("UpDecoderBlock2D",) * len(sizes),
    )
    return Sample(model, "decode"), (torch.randn(1, 4, 32, 32),)


def _transformer_denoiser() -> tuple[nn.Module, tuple[Tensor, ...]]:
    import diffusers

    model = diffusers.DiTTransformer2DModel(
        num_attention_heads=6,
        attention_head_dim=64,
        out_channels=8,
        num_layers=4,
        sample_size=32,
        num_embeds_ada_norm=1000,
    )
    return Sample(model), (torch.randn(1, 4, 32, 32), torch.tensor([10]), torch.tensor([3]))


def _volumes() -> tuple[nn.Module, tuple[Tensor, ...]]:
    from monai.networks.nets import UNet

    return UNet(3, 1, 2, (16, 32, 64, 128), (2, 2, 2), num_res_units=2), (torch.randn(1, 1, 64, 64, 64),)


LIBRARY_MODELS: dict[str, Callable[[], tuple[nn.Module, tuple[Any, ...]]]] = {
    "llama": _llama,
    "gpt2": lambda: _decoder("GPT2", n_embd=768, n_layer=2, n_head=12),
    "modernbert": lambda: _encoder(
        "ModernBert", 128, num_hidden_layers=3, bos_token_id=1, eos_token_id=2, cls_token_id=1, sep_token_id=2
    ),
    "deberta": lambda: _encoder(
        "DebertaV2",
        128,
        hidden_size=512,
        num_hidden_layers=2,
        num_attention_heads=8,
        intermediate_size=2048,
        relative_attention=True,
        pos_att_type="p2c|c2p",
        position_buckets=256,
        max_relative_positions=-1,
    ),
    "whisper": _whisper,
    "wav2vec2": _wav2vec2,
    "clip": _clip,
    "segformer": _segformer,
    "swin": lambda: _image("swin_tiny_patch4_window7_224"),
    "efficientnet": lambda: _image("efficientnet_b0"),
    "convnextv2": lambda: _image("convnextv2_atto"),
    "yolo": _detector,
    "diffusion-unet": _denoiser,
    "diffusion-decoder": _image_decoder,
    "diffusion-transformer": _transformer_denoiser,
    "unet3d": _volumes,
}
"""By name; each makes a model and its inputs."""

_TIMM = (
    "regnety_016",
    "densenet121",
    "mobilenetv4_conv_small",
    "mobileone_s0",
    "repvgg_a2",
    "repvit_m0_9",
    "fastvit_t8",
    "dm_nfnet_f0",
    "visformer_tiny",
    "mobilevit_s",
    "cspresnet50",
    "dla34",
    "ese_vovnet19b_dw",
    "mixnet_s",
    "resmlp_12_224",
)

IMAGE_NETWORKS: dict[str, Callable[[], tuple[nn.Module, tuple[Any, ...]]]] = {
    **{f"timm:{name}": partial(_image, name) for name in _TIMM},
    **{
        f"torchvision:{name}": partial(_of_torchvision, name)
        for name in ("resnet18", "googlenet", "efficientnet_v2_s", "deeplabv3_mobilenet_v3_large", "vit_b_32")
    },
}
"""The same of networks of many families, whole."""
