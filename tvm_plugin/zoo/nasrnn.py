"""NasRNN: the recurrent cell found by Zoph and Le, "Neural Architecture Search with RL", ICLR 2017, figure 8.

Unrolled as in the benchmark of TASO (Jia et al., SOSP 2019, `examples/nasrnn.py`) and Tensat (Yang et al., MLSys
2021): 5 steps of hidden size 512, eight combines a step, every step with weights of its own.
"""

from __future__ import annotations

from .builder import H, Network, Tensor

__all__ = ["nasrnn"]


def _cell(net: Network[H], state: Tensor[H], x: Tensor[H], name: str, hidden: int) -> Tensor[H]:
    def combine(index: int) -> Tensor[H]:
        from_x = net.weight(f"{name}.combine{index}.x", (hidden, hidden), hidden)
        from_state = net.weight(f"{name}.combine{index}.state", (hidden, hidden), hidden)
        return net.add(net.matmul(x, from_x), net.matmul(state, from_state))

    t = [combine(index) for index in range(8)]
    first = net.add(net.relu(t[0]), net.sigmoid(t[3]))
    second = net.add(net.sigmoid(t[1]), net.tanh(t[2]))
    third = net.mul(net.sigmoid(t[4]), net.tanh(t[5]))
    fourth = net.mul(net.sigmoid(t[6]), net.relu(t[7]))
    left = net.add(net.sigmoid(second), net.tanh(third))
    right = net.mul(net.tanh(first), net.tanh(fourth))
    return net.tanh(net.mul(net.tanh(left), net.tanh(right)))


def nasrnn(net: Network[H], steps: int = 5, hidden: int = 512) -> list[Tensor[H]]:
    """`steps` inputs `(1, hidden)` -> the last state `(1, hidden)`."""
    xs = [net.input(f"x{step}", (1, hidden)) for step in range(steps)]
    state = net.weight("state", (1, hidden), fan_in=1)
    for step, x in enumerate(xs):
        state = _cell(net, state, x, f"step{step}", hidden)
    return [state]
