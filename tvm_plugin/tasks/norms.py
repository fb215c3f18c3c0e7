"""Group and instance norms whose variance is a sum of squared differences from the mean.

TVM subtracts the square of the mean from the mean of the squares: of values around ten times their deviation, one in
ten thousand is lost, around a hundred times one in a hundred. Sketches merge the two sums (search/space/memory_bound/
moments.py), so that what is read once stays so.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from tvm import ir, relax, te, tirx, topi

from ..transform.functions import operator, top_level_bindings
from .te_kernels import with_te_kernels

__all__ = ["legalize_norms"]

NORMS = ("group_norm", "instance_norm")


def legalize_norms(mod: ir.IRModule, sum_dtype: str = "float32") -> ir.IRModule:
    """A kernel for each group or instance norm; other operators stay.

    Sums are of `sum_dtype`, at least: what is summed one by one, in schedules without lanes, needs "float64".
    """
    for name in NORMS:
        mod = with_te_kernels(mod, name, partial(_norms, name, sum_dtype))
    return mod


@dataclass(frozen=True)
class _Norm:
    """(x - mean) / sqrt(variance + epsilon) * gamma + beta; an instance norm has a group for each channel."""

    arguments: list[Any]
    groups: int
    channel_axis: int
    axes: tuple[int, ...]
    epsilon: float
    sum_dtype: str

    def compute(self, x: te.Tensor, gamma: te.Tensor, beta: te.Tensor) -> te.Tensor:
        """Channels are split in groups, and put together again; other sizes may be open."""
        shape = [int(extent) if isinstance(extent, tirx.IntImm) else extent for extent in x.shape]
        axis = self.channel_axis
        inside = shape[axis] // self.groups
        split = [*shape[:axis], self.groups, inside, *shape[axis + 1 :]]
        reduced = sorted({axis + 1, *(other + (other > axis) for other in self.axes)})
        kept = [a for a in range(len(split)) if a not in reduced]
        groups = topi.reshape(x, split)
        wide = str(np.promote_types(str(x.dtype), self.sum_dtype))
        elements = math.prod(split[a] for a in reduced)
        count = float(elements) if isinstance(elements, int) else elements.astype(wide)

        def element(*at: Any) -> Any:
            return groups(*at).astype(wide)

        def sums(name: str, value: Any) -> te.Tensor:
            """Over the elements of each group; `value(x, group)`."""
            among = {a: te.reduce_axis((0, split[a]), name=f"k{a}") for a in reduced}

            def of_group(*group: Any) -> Any:
                places = dict(zip(kept, group, strict=True)) | among
                return te.sum(value(element(*[places[a] for a in range(len(split))]), group), axis=list(among.values()))

            return te.compute([split[a] for a in kept], of_group, name=name)

        total = sums("norm_sum", lambda x, group: x)
        mean = te.compute(total.shape, lambda *group: total(*group) / count, name="norm_mean")
        squares = sums("norm_squares", lambda x, group: (x - mean(*group)) * (x - mean(*group)))

        def normalised(*at: Any) -> Any:
            group = [at[a] for a in kept]
            channel = at[axis] * inside + at[axis + 1]
            deviation = te.rsqrt(squares(*group) / count + self.epsilon)
            scaled = ((element(*at) - mean(*group)) * deviation).astype(str(x.dtype))
            return scaled * gamma(channel) + beta(channel)

        return topi.reshape(te.compute(split, normalised, name="norm"), shape)


def _has_channels(norm: relax.Call) -> bool:
    """Whether it is known how many; other sizes may be open."""
    shape = getattr(norm.ty, "shape", None)
    return shape is not None and isinstance(shape.values[int(norm.attrs.channel_axis)], tirx.IntImm)


def _norms(name: str, sum_dtype: str, function: relax.Function) -> dict[relax.Var, _Norm]:
    found = {}
    for binding in top_level_bindings(function):
        call = binding.value
        if operator(call) != f"relax.nn.{name}" or not _has_channels(call):
            continue
        if str(call.ty.dtype) not in ("float32", "float64"):  # shorter ones are computed in float32 before
            continue
        channel = int(call.attrs.channel_axis) % call.ty.ndim
        groups = int(call.attrs.num_groups) if name == "group_norm" else int(call.ty.shape[channel])
        axes = tuple(int(axis) % call.ty.ndim for axis in call.attrs.axes)
        found[binding.var] = _Norm(list(call.args), groups, channel, axes, float(call.attrs.epsilon), sum_dtype)
    return found
