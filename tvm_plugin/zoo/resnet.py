"""ResNet-50: He et al., CVPR 2016. ResNeXt-50 (32x4d): Xie et al., CVPR 2017.

As in torchvision: the stride of a bottleneck is at its 3x3 convolution ("version 1.5"), batch norm after each
convolution, no biases.
"""

from __future__ import annotations

from .builder import H, Network, Tensor

__all__ = ["resnet50", "resnext50"]

_BLOCKS = (3, 4, 6, 3)
# The last scale of a residual branch is kept small, as in training, or the sum would double at each block.
_BRANCH_SCALE = 0.25


def _bottleneck(
    net: Network[H], x: Tensor[H], name: str, width: int, channels: int, stride: int, groups: int
) -> Tensor[H]:
    def conv_norm(x: Tensor[H], layer: str, out: int, kernel: int, gamma: float = 1.0, **attributes: int) -> Tensor[H]:
        x = net.conv2d(x, f"{name}.{layer}.conv", out, kernel, bias=False, **attributes)
        return net.batch_norm(x, f"{name}.{layer}.norm", gamma=gamma)

    branch = net.relu(conv_norm(x, "reduce", width, 1))
    branch = net.relu(conv_norm(branch, "spatial", width, 3, stride=stride, padding=1, groups=groups))
    branch = conv_norm(branch, "expand", channels, 1, gamma=_BRANCH_SCALE)
    if stride != 1 or x.shape[1] != channels:
        x = conv_norm(x, "shortcut", channels, 1, stride=stride)
    return net.relu(net.add(branch, x))


def _resnet(net: Network[H], groups: int, width_per_group: int) -> list[Tensor[H]]:
    x = net.input("input", (1, 3, 224, 224))
    x = net.conv2d(x, "stem.conv", 64, 7, stride=2, padding=3, bias=False)
    x = net.relu(net.batch_norm(x, "stem.norm"))
    x = net.max_pool(x, 3, 2, padding=1)
    for stage, blocks in enumerate(_BLOCKS):
        for block in range(blocks):
            stride = 2 if block == 0 and stage > 0 else 1
            width = groups * width_per_group << stage
            x = _bottleneck(net, x, f"stage{stage}.block{block}", width, 256 << stage, stride, groups)
    return [net.linear(net.flatten(net.global_avg_pool(x)), "fc", 1000)]


def resnet50(net: Network[H]) -> list[Tensor[H]]:
    """Image `(1, 3, 224, 224)` -> class scores `(1, 1000)`."""
    return _resnet(net, groups=1, width_per_group=64)


def resnext50(net: Network[H]) -> list[Tensor[H]]:
    """Image `(1, 3, 224, 224)` -> class scores `(1, 1000)`; 32 groups of 4 channels."""
    return _resnet(net, groups=32, width_per_group=4)
