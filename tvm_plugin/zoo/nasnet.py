"""NasNet-A: Zoph et al., "Learning transferable architectures for scalable image recognition", CVPR 2018, figure 4.

In the form of the benchmark of TASO (`examples/nasnet_a.py`) and Tensat (`src/nasneta.rs`): three stacks of five normal
cells and a reduction cell, 128 channels doubling at each, every separable convolution applied once and without batch
norm, and the last reduction cell as the output.
"""

from __future__ import annotations

from typing import Generic

from .builder import H, Network, Tensor

__all__ = ["nasneta"]

_LINEAR = 1.0  # gain of convolutions that are not followed by a ReLU, or that end in a sum


class _Cell(Generic[H]):
    """Emits the layers of one cell on its two inputs."""

    def __init__(self, net: Network[H], name: str, channels: int) -> None:
        self.net = net
        self.name = name
        self.channels = channels
        self.layers = 0

    def conv(self, x: Tensor[H], kernel: int, stride: int = 1, groups: int = 1) -> Tensor[H]:
        """Convolution to the cell's channels, padded to keep the size (over stride)."""
        name = f"{self.name}.conv{self.layers}"
        self.layers += 1
        return self.net.conv2d(
            x,
            name,
            self.channels,
            kernel,
            stride=stride,
            padding=kernel // 2,
            groups=groups,
            bias=False,
            gain=_LINEAR,
        )

    def separable(self, x: Tensor[H], kernel: int, stride: int = 1) -> Tensor[H]:
        """Depthwise convolution, then 1x1."""
        return self.conv(self.conv(x, kernel, stride, groups=self.channels), 1)

    def avg_pool(self, x: Tensor[H], stride: int = 1) -> Tensor[H]:
        """3x3 average pooling."""
        return self.net.avg_pool(x, 3, stride, padding=1)

    def max_pool(self, x: Tensor[H], stride: int) -> Tensor[H]:
        """3x3 max pooling."""
        return self.net.max_pool(x, 3, stride, padding=1)

    def prepare(self, previous: Tensor[H], current: Tensor[H]) -> tuple[Tensor[H], Tensor[H]]:
        """Bring both inputs to the cell's channels and to the size of `current`."""
        same_size = previous.shape[2] == current.shape[2]
        current = self.net.relu(self.conv(current, 1))
        previous = self.net.relu(self.conv(previous, 1) if same_size else self.conv(previous, 3, stride=2))
        return previous, current


def _normal_cell(net: Network[H], previous: Tensor[H], current: Tensor[H], name: str, channels: int) -> Tensor[H]:
    cell = _Cell(net, name, channels)
    previous, current = cell.prepare(previous, current)
    return net.concat(
        [
            net.add(cell.separable(current, 3), current),
            net.add(cell.separable(previous, 3), cell.separable(current, 3)),
            net.add(cell.avg_pool(current), previous),
            net.add(cell.avg_pool(previous), cell.avg_pool(previous)),
            net.add(cell.separable(previous, 3), cell.separable(previous, 3)),
        ]
    )


def _reduction_cell(net: Network[H], previous: Tensor[H], current: Tensor[H], name: str, channels: int) -> Tensor[H]:
    cell = _Cell(net, name, channels)
    previous, current = cell.prepare(previous, current)
    first = net.add(cell.separable(previous, 7, 2), cell.separable(current, 5, 2))
    second = net.add(cell.max_pool(current, 2), cell.separable(previous, 7, 2))
    third = net.add(cell.avg_pool(current, 2), cell.separable(previous, 5, 2))
    fourth = net.add(cell.max_pool(current, 2), cell.separable(first, 3))
    fifth = net.add(cell.avg_pool(first), second)
    return net.concat([first, second, third, fourth, fifth])


def nasneta(net: Network[H]) -> list[Tensor[H]]:
    """Image `(1, 3, 224, 224)` -> features `(1, 5120, 7, 7)`."""
    x = net.input("input", (1, 3, 224, 224))
    x = net.relu(net.conv2d(x, "stem", 64, 7, stride=2, padding=3, bias=False))
    x = net.max_pool(x, 3, 2, padding=1)
    channels = 128
    for stack in range(3):
        previous = current = x
        for index in range(5):
            new = _normal_cell(net, previous, current, f"stack{stack}.normal{index}", channels)
            previous, current = current, new
        channels *= 2
        x = _reduction_cell(net, previous, current, f"stack{stack}.reduction", channels)
    return [x]
