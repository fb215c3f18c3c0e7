"""Small models of today's architectures, written in PyTorch as their authors write them, with random weights.

They are not in the zoo, whose ten models are those that others published numbers of: these show what a user's own model
meets. Each is a part of the real one, of a few layers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from .library_models import IMAGE_NETWORKS, LIBRARY_MODELS

__all__ = ["ARCHITECTURES", "build"]


class RootMeanSquareNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(width) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight


def heads(x: Tensor, count: int) -> Tensor:
    """[batch, places, width] to [batch, count, places, width / count]."""
    return x.view(*x.shape[:2], count, -1).transpose(1, 2)


class GatedDecoderLayer(nn.Module):
    """As in Llama: rotated positions, queries that share keys, a gated product of two layers."""

    def __init__(self, width: int, queries: int, keys: int, hidden: int) -> None:
        super().__init__()
        self.queries, self.keys = queries, keys
        shared = width // queries * keys
        self.query, self.key, self.value, self.out = (
            nn.Linear(width, size, bias=False) for size in (width, shared, shared, width)
        )
        self.gate, self.up, self.down = (
            nn.Linear(*sizes, bias=False) for sizes in ((width, hidden), (width, hidden), (hidden, width))
        )
        self.norm_attention, self.norm_hidden = RootMeanSquareNorm(width), RootMeanSquareNorm(width)

    def forward(
        self, x: Tensor, cosines: Tensor, sines: Tensor, cache: tuple[Tensor, ...] = ()
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The result, and all keys and values; those in the `cache` are of earlier places, before a single one."""

        def rotated(part: Tensor) -> Tensor:
            first, second = part.chunk(2, -1)
            return part * cosines + torch.cat((-second, first), -1) * sines

        y = self.norm_attention(x)
        query, key = rotated(heads(self.query(y), self.queries)), rotated(heads(self.key(y), self.keys))
        value = heads(self.value(y), self.keys)
        if cache:
            key, value = torch.cat((cache[0], key), 2), torch.cat((cache[1], value), 2)
        y = F.scaled_dot_product_attention(query, key, value, is_causal=not cache, enable_gqa=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        y = self.norm_hidden(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y)), key, value


class GatedDecoder(nn.Module):
    """`places` words at once; with a cache, one word at the last of the places."""

    def __init__(
        self,
        width: int = 512,
        layers: int = 4,
        words: int = 4000,
        places: int = 64,
        queries: int = 8,
        keys: int = 2,
        hidden: int = 1376,
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.layers = nn.ModuleList(GatedDecoderLayer(width, queries, keys, hidden) for _ in range(layers))
        self.norm, self.head = RootMeanSquareNorm(width), nn.Linear(width, words, bias=False)
        half = width // queries // 2
        angles = torch.arange(places)[:, None] * 10000.0 ** (-torch.arange(half) / half)
        angles = torch.cat((angles, angles), -1)
        self.register_buffer("cosines", angles.cos())
        self.register_buffer("sines", angles.sin())

    def forward(self, tokens: Tensor, cache: list[Tensor] | None = None) -> Any:
        x, kept = self.embedding(tokens), []
        count = tokens.shape[1]
        for number, layer in enumerate(self.layers):
            before = () if cache is None else (cache[2 * number], cache[2 * number + 1])
            x, key, value = layer(x, self.cosines[-count:], self.sines[-count:], before)
            kept += [key, value]
        result = self.head(self.norm(x))
        return result if cache is None else (result, *kept)


class DecoderStep(nn.Module):
    """One word more, as in GPT-2: keys and values of those before come in, and go out with its own."""

    def __init__(self, width: int = 512, layers: int = 4, words: int = 4000) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(words, width), nn.Linear(width, words)
        self.projections = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(layers))
        self.outputs = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.hidden = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU("tanh"), nn.Linear(4 * width, width))
            for _ in range(layers)
        )
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2 * layers + 1))

    def forward(self, token: Tensor, cache: list[Tensor]) -> tuple[Tensor, ...]:
        x, kept = self.embedding(token), []
        for number, project in enumerate(self.projections):
            query, key, value = (heads(part, 8) for part in project(self.norms[2 * number](x)).chunk(3, -1))
            key, value = torch.cat((cache[2 * number], key), 2), torch.cat((cache[2 * number + 1], value), 2)
            kept += [key, value]
            y = F.scaled_dot_product_attention(query, key, value)
            x = x + self.outputs[number](y.transpose(1, 2).flatten(2))
            x = x + self.hidden[number](self.norms[2 * number + 1](x))
        return (self.head(self.norms[-1](x)), *kept)


class VisionTransformer(nn.Module):
    def __init__(self, width: int = 384, layers: int = 6) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 16, 16)
        self.first = nn.Parameter(torch.randn(1, 1, width))
        self.positions = nn.Parameter(0.02 * torch.randn(1, 197, width))
        layer = nn.TransformerEncoderLayer(width, 6, 4 * width, activation="gelu", batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 1000)

    def forward(self, image: Tensor) -> Tensor:
        x = self.patches(image).flatten(2).transpose(1, 2)
        x = torch.cat((self.first.expand(x.shape[0], -1, -1), x), 1) + self.positions
        return self.head(self.norm(self.encoder(x))[:, 0])


class WindowedAttention(nn.Module):
    """A block of Swin: attention in windows of 7 x 7, every other time moved by half a window."""

    window = 7

    def __init__(self, width: int, count: int, size: int, moved: bool) -> None:
        super().__init__()
        self.count, self.size, self.shift = count, size, self.window // 2 if moved else 0
        self.norm_attention, self.norm_hidden = nn.LayerNorm(width), nn.LayerNorm(width)
        self.project, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.hidden = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.bias = nn.Parameter(0.1 * torch.randn(count, self.window**2, self.window**2))
        if moved:
            self.register_buffer("mask", self._mask())

    def _mask(self) -> Tensor:
        """[windows, 49, 49]: places of a window that were not neighbours before it was moved."""
        parts = (slice(0, -self.window), slice(-self.window, -self.shift), slice(-self.shift, None))
        part = torch.zeros(1, self.size, self.size, 1)
        for number, (rows, columns) in enumerate((a, b) for a in parts for b in parts):
            part[:, rows, columns] = number
        places = self._windows(part)[..., 0]
        return -100.0 * (places[:, None] != places[:, :, None])

    def _windows(self, x: Tensor) -> Tensor:
        along = self.size // self.window
        x = x.view(-1, along, self.window, along, self.window, x.shape[-1])
        return x.permute(0, 1, 3, 2, 4, 5).reshape(-1, self.window**2, x.shape[-1])

    def forward(self, x: Tensor) -> Tensor:
        _, size, _, width = x.shape
        y = self.norm_attention(x)
        y = self._windows(torch.roll(y, (-self.shift, -self.shift), (1, 2)) if self.shift else y)
        query, key, value = (heads(part, self.count) for part in self.project(y).chunk(3, -1))
        scores = query * (width // self.count) ** -0.5 @ key.transpose(-2, -1) + self.bias
        scores = scores + self.mask[:, None] if self.shift else scores
        y = self.out((scores.softmax(-1) @ value).transpose(1, 2).flatten(2))
        along = size // self.window
        y = y.view(-1, along, along, self.window, self.window, width).permute(0, 1, 3, 2, 4, 5).reshape(x.shape)
        x = x + (torch.roll(y, (self.shift, self.shift), (1, 2)) if self.shift else y)
        return x + self.hidden(self.norm_hidden(x))


class WindowedTransformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 96, 4, 4)
        self.fine = nn.Sequential(*(WindowedAttention(96, 3, 56, moved) for moved in (False, True)))
        self.merge = nn.Sequential(nn.LayerNorm(384), nn.Linear(384, 192, bias=False))
        self.coarse = nn.Sequential(*(WindowedAttention(192, 6, 28, moved) for moved in (False, True)))
        self.head = nn.Linear(192, 1000)

    def forward(self, image: Tensor) -> Tensor:
        x = self.fine(self.patches(image).permute(0, 2, 3, 1))
        x = torch.cat([x[:, row::2, column::2] for column in (0, 1) for row in (0, 1)], -1)
        return self.head(self.coarse(self.merge(x)).mean((1, 2)))


class ChannelsNorm(nn.LayerNorm):
    """Over the channels of an image with channels first."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class ConvNextBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.hidden = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU())
        self.out, self.scale = nn.Linear(4 * width, width), nn.Parameter(torch.full((width,), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        y = self.depthwise(x).permute(0, 2, 3, 1)
        return x + (self.scale * self.out(self.hidden(y))).permute(0, 3, 1, 2)


class ConvNext(nn.Sequential):
    def __init__(self) -> None:
        layers: list[nn.Module] = [nn.Conv2d(3, 96, 4, 4), ChannelsNorm(96)]
        for before, width, count in ((96, 96, 2), (96, 192, 2), (192, 384, 3)):
            if before != width:
                layers += [ChannelsNorm(before), nn.Conv2d(before, width, 2, 2)]
            layers += [ConvNextBlock(width) for _ in range(count)]
        super().__init__(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.LayerNorm(384), nn.Linear(384, 1000))


class Convolution(nn.Sequential):
    """Weights are so large that outputs vary as much as inputs; by PyTorch's default, nothing is left of an image."""

    def __init__(self, channels: int, outputs: int, kernel: int = 1, stride: int = 1) -> None:
        convolution = nn.Conv2d(channels, outputs, kernel, stride, kernel // 2, bias=False)
        nn.init.normal_(convolution.weight, std=1.45 / (channels * kernel**2) ** 0.5)
        super().__init__(convolution, nn.BatchNorm2d(outputs), nn.SiLU())


class SplitBlock(nn.Module):
    def __init__(self, channels: int, outputs: int) -> None:
        super().__init__()
        half = outputs // 2
        self.enter, self.leave = Convolution(channels, outputs), Convolution(3 * half, outputs)
        self.middle = nn.Sequential(Convolution(half, half, 3), Convolution(half, half, 3))

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.enter(x).chunk(2, 1)
        return self.leave(torch.cat((first, second, second + self.middle(second)), 1))


class Detector(nn.Module):
    """As YOLO: a pyramid of three scales, boxes and classes at each place."""

    def __init__(self) -> None:
        super().__init__()
        self.fine = nn.Sequential(
            Convolution(3, 16, 3, 2),
            Convolution(16, 32, 3, 2),
            SplitBlock(32, 32),
            Convolution(32, 64, 3, 2),
            SplitBlock(64, 64),
        )
        self.middle = nn.Sequential(Convolution(64, 128, 3, 2), SplitBlock(128, 128))
        self.coarse = nn.Sequential(Convolution(128, 256, 3, 2), SplitBlock(256, 256))
        self.narrow, self.wide = Convolution(256, 128), Convolution(512, 256)
        self.to_middle, self.to_fine = SplitBlock(384, 128), SplitBlock(192, 64)
        self.outputs = nn.ModuleList(nn.Conv2d(channels, 84, 1) for channels in (64, 128, 256))

    def forward(self, image: Tensor) -> Tensor:
        fine = self.fine(image)
        middle = self.middle(fine)
        pooled = [self.narrow(self.coarse(middle))]
        for _ in range(3):
            pooled.append(F.max_pool2d(pooled[-1], 5, 1, 2))
        coarse = self.wide(torch.cat(pooled, 1))
        middle = self.to_middle(torch.cat((F.interpolate(coarse, scale_factor=2), middle), 1))
        fine = self.to_fine(torch.cat((F.interpolate(middle, scale_factor=2), fine), 1))
        found = [layer(x).flatten(2) for layer, x in zip(self.outputs, (fine, middle, coarse), strict=True)]
        boxes, classes = torch.cat(found, 2).split((4, 80), 1)
        return torch.cat((boxes.exp(), classes.sigmoid()), 1).transpose(1, 2)


class DiffusionBlock(nn.Module):
    """A level of a diffusion model's U-Net: residual convolutions, attention to itself and to a text."""

    def __init__(self, width: int = 128, text: int = 256, count: int = 4) -> None:
        super().__init__()
        self.count = count
        self.enter, self.leave = nn.Conv2d(4, width, 3, padding=1), nn.Conv2d(width, 4, 3, padding=1)
        self.first = nn.Sequential(nn.GroupNorm(32, width), nn.SiLU(), nn.Conv2d(width, width, 3, padding=1))
        self.second = nn.Sequential(nn.GroupNorm(32, width), nn.SiLU(), nn.Conv2d(width, width, 3, padding=1))
        self.step = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width))
        self.down, self.up = nn.Conv2d(width, width, 3, 2, 1), nn.Conv2d(width, width, 3, padding=1)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(3))
        self.own = nn.ModuleList(nn.Linear(width, width) for _ in range(4))
        self.others = nn.ModuleList(nn.Linear(size, width) for size in (width, text, text, width))
        self.gated, self.hidden = nn.Linear(width, 8 * width), nn.Linear(4 * width, width)

    def attend(self, layers: nn.ModuleList, x: Tensor, to: Tensor) -> Tensor:
        query, key, value = (heads(layers[i](given), self.count) for i, given in enumerate((x, to, to)))
        return layers[3](F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2))

    def forward(self, image: Tensor, time: Tensor, text: Tensor) -> Tensor:
        x = self.enter(image)
        half = x.shape[1] // 2
        angles = time[:, None] * torch.exp(-math.log(10000) / half * torch.arange(half))
        step = self.step(torch.cat((angles.cos(), angles.sin()), -1))
        x = x + self.second(self.first(x) + step[:, :, None, None])
        y = self.down(x)
        places = y.flatten(2).transpose(1, 2)
        places = places + self.attend(self.own, self.norms[0](places), self.norms[0](places))
        places = places + self.attend(self.others, self.norms[1](places), text)
        values, gates = self.gated(self.norms[2](places)).chunk(2, -1)
        places = places + self.hidden(values * F.gelu(gates))
        y = places.transpose(1, 2).reshape(y.shape)
        return self.leave(F.silu(x + self.up(F.interpolate(y, scale_factor=2))))


class SpeechSeparator(nn.Module):
    """As Conv-TasNet: dilated depthwise convolutions over time, a mask for each of two voices."""

    def __init__(self, width: int = 256, narrow: int = 128) -> None:
        super().__init__()
        self.encode, self.decode = nn.Conv1d(1, width, 16, 8), nn.ConvTranspose1d(width, 1, 16, 8)
        self.enter = nn.Sequential(nn.GroupNorm(1, width), nn.Conv1d(width, narrow, 1))
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Conv1d(narrow, width, 1),
                nn.PReLU(),
                nn.GroupNorm(1, width),
                nn.Conv1d(width, width, 3, padding=2**level, dilation=2**level, groups=width),
                nn.PReLU(),
                nn.GroupNorm(1, width),
                nn.Conv1d(width, narrow, 1),
            )
            for level in range(6)
        )
        self.masks = nn.Conv1d(narrow, 2 * width, 1)

    def forward(self, sound: Tensor) -> Tensor:
        waves = F.relu(self.encode(sound))
        x = self.enter(waves)
        for block in self.blocks:
            x = x + block(x)
        return self.decode(waves * torch.sigmoid(self.masks(x)).view(2, waves.shape[1], -1))


class Recommender(nn.Module):
    """As DLRM: bags of categories and numbers, products of all pairs, a small network."""

    def __init__(self, tables: int = 8, rows: int = 10000, width: int = 64) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(rows, width, mode="sum") for _ in range(tables))
        self.bottom = nn.Sequential(nn.Linear(13, 512), nn.ReLU(), nn.Linear(512, width), nn.ReLU())
        pairs = (tables + 1) * tables // 2
        self.top = nn.Sequential(nn.Linear(width + pairs, 512), nn.ReLU(), nn.Linear(512, 1), nn.Sigmoid())

    def forward(self, numbers: Tensor, categories: Tensor) -> Tensor:
        x = self.bottom(numbers)
        vectors = torch.stack([x, *(table(categories[:, i]) for i, table in enumerate(self.tables))], 1)
        rows, columns = torch.tril_indices(vectors.shape[1], vectors.shape[1], -1)
        return self.top(torch.cat((x, (vectors @ vectors.transpose(1, 2))[:, rows, columns]), 1))


class GraphNetwork(nn.Module):
    """Three convolutions over a graph: what a node's neighbours say is added up."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(*sizes) for sizes in ((64, 128), (128, 128), (128, 10)))

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        sources, targets = edges
        for layer in self.layers:
            nodes = layer(nodes)
            nodes = F.relu(torch.zeros_like(nodes).index_add(0, targets, nodes[sources]))
        return nodes


class MaskedEncoder(nn.Module):
    """As T5's: distances between places are a bias of the scores, and a mask leaves out what only fills up."""

    def __init__(self, width: int = 256, count: int = 4, places: int = 64, layers: int = 3) -> None:
        super().__init__()
        self.count = count
        self.embedding, self.distances = nn.Embedding(2000, width), nn.Embedding(32, count)
        self.norms = nn.ModuleList(RootMeanSquareNorm(width) for _ in range(2 * layers))
        self.project = nn.ModuleList(nn.Linear(width, 3 * width, bias=False) for _ in range(layers))
        self.out = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(layers))
        self.hidden = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width, bias=False), nn.ReLU(), nn.Linear(4 * width, width, bias=False))
            for _ in range(layers)
        )
        place = torch.arange(places)
        self.register_buffer("apart", (place - place[:, None]).clamp(-15, 16) + 15)

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        x = self.embedding(tokens)
        left_out = (1 - mask[:, None, None].to(x.dtype)) * torch.finfo(x.dtype).min
        bias = self.distances(self.apart).permute(2, 0, 1) + left_out
        for number, project in enumerate(self.project):
            query, key, value = (heads(part, self.count) for part in project(self.norms[2 * number](x)).chunk(3, -1))
            weights = (query @ key.transpose(-1, -2) + bias).softmax(-1)
            x = x + self.out[number]((weights @ value).transpose(1, 2).flatten(2))
            x = x + self.hidden[number](self.norms[2 * number + 1](x))
        return x


class TextRecognizer(nn.Module):
    """As CRNN (Shi et al.): convolutions make columns of a line of text, two-way LSTMs read them."""

    def __init__(self, hidden: int = 256, letters: int = 37) -> None:
        super().__init__()
        widths, pools = (64, 128, 256, 256, 512), ((2, 2), (2, 2), None, (2, 1), (4, 1))
        steps: list[nn.Module] = []
        for before, width, pool in zip((1, *widths), widths, pools, strict=False):
            convolution = nn.Conv2d(before, width, 3, padding=1)
            nn.init.kaiming_normal_(convolution.weight)
            steps += [convolution, nn.BatchNorm2d(width), nn.ReLU()]
            steps += [nn.MaxPool2d(pool)] if pool else []
        self.columns = nn.Sequential(*steps)
        self.reader = nn.LSTM(widths[-1], hidden, 2, bidirectional=True, batch_first=True)
        self.head = nn.Linear(2 * hidden, letters)

    def forward(self, line: Tensor) -> Tensor:
        columns = self.columns(line).squeeze(2).transpose(1, 2)
        return self.head(self.reader(columns)[0]).log_softmax(-1)


class SpeechRecognizer(nn.Module):
    """As Deep Speech 2: two convolutions over a spectrogram, then GRUs of one direction."""

    def __init__(self, hidden: int = 512) -> None:
        super().__init__()
        self.frames = nn.Sequential(
            nn.Conv2d(1, 32, (41, 11), 2, (20, 5)),
            nn.BatchNorm2d(32),
            nn.Hardtanh(0, 20),
            nn.Conv2d(32, 32, (21, 11), (2, 1), (10, 5)),
            nn.BatchNorm2d(32),
            nn.Hardtanh(0, 20),
        )
        self.reader = nn.GRU(32 * 20, hidden, 2, batch_first=True)
        self.head = nn.Linear(hidden, 29)

    def forward(self, spectrogram: Tensor) -> Tensor:
        frames = self.frames(spectrogram).flatten(1, 2).transpose(1, 2)
        return self.head(self.reader(frames)[0])


def _words(count: int, *shape: int) -> Tensor:
    return torch.randint(0, count, shape)


ARCHITECTURES: dict[str, Callable[[], tuple[nn.Module, tuple[Any, ...]]]] = {
    "decoder": lambda: (GatedDecoder(), (_words(4000, 1, 64),)),
    "decoder-step": lambda: (DecoderStep(), (_words(4000, 1, 1), [torch.randn(1, 8, 127, 64) for _ in range(8)])),
    "encoder": lambda: (MaskedEncoder(), (_words(2000, 1, 64), (torch.arange(64) < 50).long()[None])),
    "vision-transformer": lambda: (VisionTransformer(), (torch.randn(1, 3, 224, 224),)),
    "windows": lambda: (WindowedTransformer(), (torch.randn(1, 3, 224, 224),)),
    "convnext": lambda: (ConvNext(), (torch.randn(1, 3, 224, 224),)),
    "detector": lambda: (Detector(), (torch.rand(1, 3, 320, 320),)),
    "diffusion": lambda: (
        DiffusionBlock(),
        (torch.randn(1, 4, 32, 32), torch.tensor([10.0]), torch.randn(1, 77, 256)),
    ),
    "speech": lambda: (SpeechSeparator(), (torch.randn(1, 1, 8000),)),
    "recommender": lambda: (Recommender(), (torch.randn(32, 13), _words(10000, 32, 8, 3))),
    "text-recognizer": lambda: (TextRecognizer(), (torch.rand(1, 1, 32, 128),)),
    "speech-recognizer": lambda: (SpeechRecognizer(), (torch.rand(1, 1, 80, 200),)),
    "graph": lambda: (GraphNetwork(), (torch.randn(1000, 64), _words(1000, 2, 5000))),
}


def build(name: str, seed: int = 0, dtype: str = "float32", batch: int = 1) -> tuple[nn.Module, tuple[Any, ...]]:
    """A model, of this file or a library, in evaluation mode, and inputs; floats as `dtype`, the same for a seed.

    The inputs are repeated `batch` times along their first axis.
    """
    torch.manual_seed(seed)
    module, inputs = (ARCHITECTURES | LIBRARY_MODELS | IMAGE_NETWORKS)[name]()
    wanted = getattr(torch, dtype)
    inputs = pytree.tree_map(lambda leaf: leaf.to(wanted) if leaf.is_floating_point() else leaf, inputs)
    inputs = pytree.tree_map(lambda leaf: leaf.repeat(batch, *[1] * (leaf.dim() - 1)), inputs)
    return module.to(wanted).eval(), inputs
