"""Whether the cores are at full speed just now.

A core of a virtual machine is often one of two hardware threads, and shares its multiply-add units with whatever
another tenant runs on the other. Kernels then take up to twice as long, for 25 ms or for seconds; nothing that the
operating system counts tells. A few microseconds of nothing but multiply-adds do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..search.space.hardware import Hardware

__all__ = ["Gauge", "multiply_adds", "multiply_adds_at_peak_s"]

SLOWER = 1.2
"""A core that another tenant uses, too, takes 1.7 to 2 times as long; its clock alone changes it by a few percent."""

STEPS = 20_000
"""Multiply-adds of each chain, 32 to 64 us: starting threads takes a microsecond or two more at one time than at
another. With 5000 (8 us on a Xeon), two threads were called disturbed in a fifth of all looks, and candidates ran three
times for nothing; now in 0.2 %."""

CALLS = 3
"""The fastest counts: an interrupt is no tenant."""

LOOKS = 8
"""So many times slower, one after the other, is disturbed: a core that idled takes up to a millisecond to reach its
full speed, a tenant stays longer."""


class Gauge:
    """Compares multiply-adds now with the fastest ever seen.

    Parameters
    ----------
    time_s : callable
        Seconds that they take now.
    best_s : float
        Seconds that they are known to take at full speed; without, a tenant who was there first goes unseen.
    """

    def __init__(self, time_s: Callable[[], float], best_s: float = float("inf")) -> None:
        self._time_s = time_s
        self._best_s = best_s

    def disturbed(self) -> bool:
        """Whether they take clearly longer now than they can."""
        for _ in range(LOOKS):
            now_s = self._time_s()
            self._best_s = min(self._best_s, now_s)
            if now_s <= SLOWER * self._best_s:
                return False
        return True


def multiply_adds(target: Any, hardware: Hardware) -> Callable[[], float]:
    """A kernel of multiply-adds on all of `hardware.threads`; a call runs it and returns its seconds."""
    import tvm

    from .peak_kernels import arguments_of, fma

    kernel = fma(hardware.threads, hardware.lanes(4), STEPS)
    module = tvm.compile(tvm.IRModule({"fma": kernel.with_attr("global_symbol", "fma")}), target).jit()
    timer = module.time_evaluator("fma", tvm.cpu(), number=1, repeat=CALLS)
    arguments = arguments_of(kernel)
    return lambda: min(timer(*arguments).results)


def multiply_adds_at_peak_s(hardware: Hardware) -> float:
    """Seconds that a call of `multiply_adds` takes at the machine's peak."""
    from .peak_kernels import CHAINS

    flops = 2.0 * hardware.lanes(4) * CHAINS * STEPS * hardware.threads
    return flops / hardware.peak_flops_per_s_all + hardware.parallel_overhead_s
