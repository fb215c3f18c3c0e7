"""VGG-19: Simonyan and Zisserman, "Very deep convolutional networks", ICLR 2015, configuration E."""

from __future__ import annotations

from .builder import H, Network, Tensor

__all__ = ["vgg19"]

_STAGES = ((64, 2), (128, 2), (256, 4), (512, 4), (512, 4))


def vgg19(net: Network[H]) -> list[Tensor[H]]:
    """Image `(1, 3, 224, 224)` -> class scores `(1, 1000)`."""
    x = net.input("input", (1, 3, 224, 224))
    for stage, (channels, layers) in enumerate(_STAGES):
        for layer in range(layers):
            x = net.relu(net.conv2d(x, f"stage{stage}.conv{layer}", channels, 3, padding=1))
        x = net.max_pool(x, 2, 2)
    x = net.flatten(x)
    x = net.relu(net.linear(x, "fc0", 4096))
    x = net.relu(net.linear(x, "fc1", 4096))
    return [net.linear(x, "fc2", 1000)]
