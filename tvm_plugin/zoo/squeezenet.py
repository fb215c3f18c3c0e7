"""SqueezeNet 1.1: Iandola et al., "SqueezeNet: AlexNet-level accuracy with 50x fewer parameters", 2016.

Version 1.1 is the authors' later release (2.4 times less computation than the paper's 1.0).
"""

from __future__ import annotations

from .builder import H, Network, Tensor

__all__ = ["squeezenet"]


def _fire(net: Network[H], x: Tensor[H], name: str, squeeze: int, expand: int) -> Tensor[H]:
    x = net.relu(net.conv2d(x, f"{name}.squeeze", squeeze, 1))
    return net.concat(
        [
            net.relu(net.conv2d(x, f"{name}.expand1x1", expand, 1)),
            net.relu(net.conv2d(x, f"{name}.expand3x3", expand, 3, padding=1)),
        ]
    )


def squeezenet(net: Network[H]) -> list[Tensor[H]]:
    """Image `(1, 3, 224, 224)` -> class scores `(1, 1000)`."""
    x = net.input("input", (1, 3, 224, 224))
    x = net.relu(net.conv2d(x, "conv1", 64, 3, stride=2))
    x = net.max_pool(x, 3, 2)
    x = _fire(net, x, "fire2", 16, 64)
    x = _fire(net, x, "fire3", 16, 64)
    x = net.max_pool(x, 3, 2)
    x = _fire(net, x, "fire4", 32, 128)
    x = _fire(net, x, "fire5", 32, 128)
    x = net.max_pool(x, 3, 2)
    x = _fire(net, x, "fire6", 48, 192)
    x = _fire(net, x, "fire7", 48, 192)
    x = _fire(net, x, "fire8", 64, 256)
    x = _fire(net, x, "fire9", 64, 256)
    x = net.relu(net.conv2d(x, "conv10", 1000, 1))
    return [net.flatten(net.global_avg_pool(x))]
