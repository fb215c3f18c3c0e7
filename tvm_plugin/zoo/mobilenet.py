"""MobileNet-v2, width 1: Sandler et al., "Inverted residuals and linear bottlenecks", CVPR 2018, table 2."""

from __future__ import annotations

from .builder import H, Network, Tensor

__all__ = ["mobilenetv2"]

# Expansion factor, output channels, repeats, stride of the first.
_STAGES = ((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1))
_LINEAR_INPUT_GAIN = 1.0
_BRANCH_SCALE = 0.5


def _conv_norm_relu6(
    net: Network[H], x: Tensor[H], name: str, channels: int, kernel: int, gain: float, stride: int = 1, groups: int = 1
) -> Tensor[H]:
    x = net.conv2d(
        x,
        f"{name}.conv",
        channels,
        kernel,
        stride=stride,
        padding=kernel // 2,
        groups=groups,
        bias=False,
        gain=gain,
    )
    return net.relu6(net.batch_norm(x, f"{name}.norm"))


def _inverted_residual(
    net: Network[H], x: Tensor[H], name: str, expansion: int, channels: int, stride: int
) -> Tensor[H]:
    width = x.shape[1] * expansion
    residual = stride == 1 and x.shape[1] == channels
    branch = x
    if expansion != 1:
        branch = _conv_norm_relu6(net, branch, f"{name}.expand", width, 1, _LINEAR_INPUT_GAIN)
    branch = _conv_norm_relu6(net, branch, f"{name}.depthwise", width, 3, 2**0.5, stride=stride, groups=width)
    branch = net.conv2d(branch, f"{name}.project.conv", channels, 1, bias=False)
    branch = net.batch_norm(branch, f"{name}.project.norm", gamma=_BRANCH_SCALE if residual else 1.0)
    return net.add(x, branch) if residual else branch


def mobilenetv2(net: Network[H]) -> list[Tensor[H]]:
    """Image `(1, 3, 224, 224)` -> class scores `(1, 1000)`."""
    x = net.input("input", (1, 3, 224, 224))
    x = _conv_norm_relu6(net, x, "stem", 32, 3, _LINEAR_INPUT_GAIN, stride=2)
    for stage, (expansion, channels, repeats, first_stride) in enumerate(_STAGES):
        for block in range(repeats):
            stride = first_stride if block == 0 else 1
            x = _inverted_residual(net, x, f"stage{stage}.block{block}", expansion, channels, stride)
    x = _conv_norm_relu6(net, x, "head", 1280, 1, _LINEAR_INPUT_GAIN)
    return [net.linear(net.flatten(net.global_avg_pool(x)), "fc", 1000)]
