"""What a size that a model leaves open may be."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tvm import relax

from ..errors import InputError
from ..relax_ir.tensors import BOUNDS, STEPS, symbols_of

__all__ = ["OpenSize", "open_sizes_of"]


@dataclass(frozen=True)
class OpenSize:
    """What an open size may be: `least`, and by steps more, to `most` (None: to anything)."""

    name: str
    least: int = 1
    most: int | None = None
    step: int = 1

    def permits(self, size: int) -> bool:
        """Whether it may be `size`."""
        is_more = self.most is not None and size > self.most
        return size >= self.least and not is_more and (size - self.least) % self.step == 0

    def check(self, size: int) -> None:
        """Raise InputError where it may not be `size`."""
        if not self.permits(size):
            raise InputError(f"the size {self.name} is {self._allowed()}, not {size}")

    def _allowed(self) -> str:
        allowed = f"at least {self.least}" if self.most is None else f"from {self.least} to {self.most}"
        if self.step == 1:
            return allowed
        rest = self.least % self.step
        return (f"{rest} more than " if rest else "") + f"a multiple of {self.step}, {allowed}"

    def nearest(self, size: float) -> int:
        """The largest that it may be that is no more than `size`; the least, where all are more."""
        below = int(size if self.most is None else min(size, self.most))
        return max(self.least, below - (below - self.least) % self.step)


def open_sizes_of(function: relax.Function) -> dict[str, OpenSize]:
    """By name, what inputs of a function leave open, as far as its attributes tell what that may be."""
    attributes: Mapping[str, Any] = function.attrs or {}
    low, high, steps = (attributes.get(name, {}) for name in (*BOUNDS, STEPS))
    sizes = {}
    for name in map(str, symbols_of(function)):
        step, first = map(int, steps.get(name, (1, 0)))
        least = max(1, int(low.get(name, 1)))
        most = None if high.get(name) is None else int(high[name])
        sizes[name] = OpenSize(name, least + (first - least) % step, most, step)
    return sizes
