"""Inception-v3: Szegedy et al., "Rethinking the Inception architecture for computer vision", CVPR 2016.

The layers are those of torchvision's `inception_v3` without the auxiliary classifier, which inference does not use.
"""

from __future__ import annotations

from typing import Generic

from .builder import H, Network, Pair, Tensor

__all__ = ["inceptionv3"]


class _Module(Generic[H]):
    """Emits the layers of one inception module, numbering their names."""

    def __init__(self, net: Network[H], name: str) -> None:
        self.net = net
        self.name = name
        self.layers = 0

    def conv(
        self, x: Tensor[H], channels: int, kernel: int | Pair, stride: int = 1, padding: int | Pair = 0
    ) -> Tensor[H]:
        """Convolution, batch norm, ReLU."""
        name = f"{self.name}.layer{self.layers}"
        self.layers += 1
        x = self.net.conv2d(x, f"{name}.conv", channels, kernel, stride=stride, padding=padding, bias=False)
        return self.net.relu(self.net.batch_norm(x, f"{name}.norm", epsilon=1e-3))

    def chain(self, x: Tensor[H], *layers: tuple[int, int | Pair]) -> Tensor[H]:
        """Convolutions in a row that keep height and width: (channels, kernel) each."""
        for channels, kernel in layers:
            x = self.conv(x, channels, kernel, padding=_same(kernel))
        return x

    def pooled(self, x: Tensor[H], channels: int) -> Tensor[H]:
        """3x3 average pooling, then a 1x1 convolution."""
        return self.conv(self.net.avg_pool(x, 3, 1, padding=1), channels, 1)


def _same(kernel: int | Pair) -> Pair:
    height, width = kernel if isinstance(kernel, tuple) else (kernel, kernel)
    return height // 2, width // 2


def _block_35(net: Network[H], x: Tensor[H], name: str, pool_channels: int) -> Tensor[H]:
    module = _Module(net, name)
    return net.concat(
        [
            module.conv(x, 64, 1),
            module.chain(x, (48, 1), (64, 5)),
            module.chain(x, (64, 1), (96, 3), (96, 3)),
            module.pooled(x, pool_channels),
        ]
    )


def _reduce_35(net: Network[H], x: Tensor[H], name: str) -> Tensor[H]:
    module = _Module(net, name)
    return net.concat(
        [
            module.conv(x, 384, 3, stride=2),
            module.conv(module.chain(x, (64, 1), (96, 3)), 96, 3, stride=2),
            net.max_pool(x, 3, 2),
        ]
    )


def _block_17(net: Network[H], x: Tensor[H], name: str, width: int) -> Tensor[H]:
    module = _Module(net, name)
    return net.concat(
        [
            module.conv(x, 192, 1),
            module.chain(x, (width, 1), (width, (1, 7)), (192, (7, 1))),
            module.chain(x, (width, 1), (width, (7, 1)), (width, (1, 7)), (width, (7, 1)), (192, (1, 7))),
            module.pooled(x, 192),
        ]
    )


def _reduce_17(net: Network[H], x: Tensor[H], name: str) -> Tensor[H]:
    module = _Module(net, name)
    return net.concat(
        [
            module.conv(module.conv(x, 192, 1), 320, 3, stride=2),
            module.conv(module.chain(x, (192, 1), (192, (1, 7)), (192, (7, 1))), 192, 3, stride=2),
            net.max_pool(x, 3, 2),
        ]
    )


def _block_8(net: Network[H], x: Tensor[H], name: str) -> Tensor[H]:
    module = _Module(net, name)

    def forked(x: Tensor[H]) -> Tensor[H]:
        return net.concat([module.chain(x, (384, (1, 3))), module.chain(x, (384, (3, 1)))])

    return net.concat(
        [
            module.conv(x, 320, 1),
            forked(module.conv(x, 384, 1)),
            forked(module.chain(x, (448, 1), (384, 3))),
            module.pooled(x, 192),
        ]
    )


def inceptionv3(net: Network[H]) -> list[Tensor[H]]:
    """Image `(1, 3, 299, 299)` -> class scores `(1, 1000)`."""
    x = net.input("input", (1, 3, 299, 299))
    stem = _Module(net, "stem")
    x = stem.conv(x, 32, 3, stride=2)
    x = stem.conv(x, 32, 3)
    x = stem.conv(x, 64, 3, padding=1)
    x = net.max_pool(x, 3, 2)
    x = stem.conv(x, 80, 1)
    x = stem.conv(x, 192, 3)
    x = net.max_pool(x, 3, 2)
    for index, pool_channels in enumerate((32, 64, 64)):
        x = _block_35(net, x, f"block35_{index}", pool_channels)
    x = _reduce_35(net, x, "reduce35")
    for index, width in enumerate((128, 160, 160, 192)):
        x = _block_17(net, x, f"block17_{index}", width)
    x = _reduce_17(net, x, "reduce17")
    for index in range(2):
        x = _block_8(net, x, f"block8_{index}")
    return [net.linear(net.flatten(net.global_avg_pool(x)), "fc", 1000)]
