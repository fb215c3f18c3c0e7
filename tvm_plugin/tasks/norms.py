"""Group and instance norms whose variance is a sum of squared differences from the mean.

TVM subtracts the square of the mean from the mean of the squares: of values around ten times their deviation, one in
ten thousand is lost, around a hundred times one in a hundred. Sketches merge the two sums (search/space/memory_bound/
moments.py), so that what is read once stays so. And RMS norms over all axes, whose kernels TVM cannot write.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from tvm import ir, relax, te, tirx, topi
from tvm.relax import op
from tvm.relax.expr_functor import PyExprMutator, mutator

from ..relax_ir.constants import is_static_tensor
from ..relax_ir.functions import map_functions, operator, top_level_bindings
from ..relax_ir.te_kernels import with_te_kernels
from ..relax_ir.tensors import as_dtype, shape_of

__all__ = ["legalize_norms", "legalize_rms_norm"]

NORMS = ("group_norm", "instance_norm")


def legalize_norms(mod: ir.IRModule, sum_dtype: str = "float32") -> ir.IRModule:
    """A kernel for each group or instance norm, several where sizes are open; other operators stay.

    Sums are of `sum_dtype`, at least: what is summed one by one, in schedules without lanes, needs "float64".
    Norms of bfloat16 are left as they are.
    """
    for name in NORMS:
        mod = with_te_kernels(mod, name, partial(_norms, name, sum_dtype))

    def with_operators(function: relax.Function) -> relax.Function:
        is_open = any(_is_open(binding.value) for binding in top_level_bindings(function))
        return _OpenNorms(sum_dtype).visit_expr(function) if is_open else function

    return map_functions(mod, with_operators)


def legalize_rms_norm(builder: relax.BlockBuilder, call: relax.Call) -> relax.Call:
    """TVM's kernel, over a tensor that has an axis more where the norm is over all: of none, TVM reads one."""
    rank = call.ty.ndim
    axes = [int(axis) % rank for axis in call.attrs.axes]

    def rms_norm(x: te.Tensor, gamma: te.Tensor) -> te.Tensor:
        if len(axes) < rank:
            return topi.nn.rms_norm(x, gamma, axes, call.attrs.epsilon)
        rows = topi.reshape(x, [1, *x.shape])
        return topi.reshape(topi.nn.rms_norm(rows, gamma, [axis + 1 for axis in axes], call.attrs.epsilon), x.shape)

    return builder.call_te(rms_norm, *call.args, primfunc_name_hint="rms_norm")


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
        """Channels are split in groups, and put together again."""
        shape, axis = [int(extent) for extent in x.shape], self.channel_axis
        inside = shape[axis] // self.groups
        split = [*shape[:axis], self.groups, inside, *shape[axis + 1 :]]
        reduced = sorted({axis + 1, *(other + (other > axis) for other in self.axes)})
        count = math.prod(split[a] for a in reduced)
        kept = [a for a in range(len(split)) if a not in reduced]
        groups = topi.reshape(x, split)
        wide = str(np.promote_types(str(x.dtype), self.sum_dtype))

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
        mean = te.compute(total.shape, lambda *group: total(*group) / float(count), name="norm_mean")
        squares = sums("norm_squares", lambda x, group: (x - mean(*group)) * (x - mean(*group)))

        def normalised(*at: Any) -> Any:
            group = [at[a] for a in kept]
            channel = at[axis] * inside + at[axis + 1]
            deviation = te.rsqrt(squares(*group) / float(count) + self.epsilon)
            scaled = ((element(*at) - mean(*group)) * deviation).astype(str(x.dtype))
            return scaled * gamma(channel) + beta(channel)

        return topi.reshape(te.compute(split, normalised, name="norm"), shape)


def _norms(name: str, sum_dtype: str, function: relax.Function) -> dict[relax.Var, _Norm]:
    found = {}
    for binding in top_level_bindings(function):
        call = binding.value
        if operator(call) != f"relax.nn.{name}" or not _is_plain(call) or not is_static_tensor(call.ty):
            continue
        channel = int(call.attrs.channel_axis) % call.ty.ndim
        groups = int(call.attrs.num_groups) if name == "group_norm" else int(call.ty.shape[channel])
        axes = tuple(int(axis) % call.ty.ndim for axis in call.attrs.axes)
        found[binding.var] = _Norm(list(call.args), groups, channel, axes, float(call.attrs.epsilon), sum_dtype)
    return found


def _is_plain(norm: relax.Call) -> bool:
    """Whether it is of floats that numpy has, too; norms of bfloat16 are computed in float32 before."""
    return str(norm.ty.dtype) in ("float16", "float32", "float64")


def _is_open(call: Any) -> bool:
    """Whether it is a norm of open sizes and so many channels, first or last, over all other axes but the batch."""
    if operator(call) not in {f"relax.nn.{name}" for name in NORMS} or is_static_tensor(call.ty) or not _is_plain(call):
        return False
    rank = call.ty.ndim
    channel, axes = int(call.attrs.channel_axis) % rank, sorted(int(axis) % rank for axis in call.attrs.axes)
    if call.ty.shape is None or channel not in (1, rank - 1) or axes != [a for a in range(1, rank) if a != channel]:
        return False
    return isinstance(call.ty.shape[channel], tirx.IntImm)


@mutator
class _OpenNorms(PyExprMutator):
    """Norms of open sizes, in operators whose kernels become tiles: in one kernel, sums go element by element."""

    def __init__(self, sum_dtype: str) -> None:
        super().__init__()
        self._sum_dtype = sum_dtype

    def visit_call_(self, call: relax.Call) -> relax.Expr:
        call = self.visit_expr_post_order(call)
        if not _is_open(call):
            return call
        emit, dtype = self.builder_.emit, str(call.ty.dtype)
        x, gamma, beta = call.args
        shape, channel = shape_of(x), int(call.attrs.channel_axis) % call.ty.ndim
        channels, pixels = shape[channel], math.prod(shape[1:channel] + shape[channel + 1 :])
        groups = int(getattr(call.attrs, "num_groups", channels))
        last = channel > 1
        split = [shape[0], pixels, channels] if last else [shape[0], groups, channels // groups * pixels]
        wide = str(np.promote_types(dtype, self._sum_dtype))

        def mean(value: Any) -> Any:
            """Of each group, for each of its elements or, with channels last, for each of its channels."""
            if not last or groups == channels:
                return emit(op.mean(value, [1 if last else 2], keepdims=True))
            of_channels = emit(op.reshape(emit(op.mean(value, [1])), [shape[0], groups, channels // groups]))
            of_groups = emit(op.broadcast_to(emit(op.mean(of_channels, [2], keepdims=True)), shape_of(of_channels)))
            return emit(op.reshape(of_groups, [shape[0], 1, channels]))

        parts = as_dtype(emit, emit(op.reshape(x, split)), wide)
        apart = emit(op.subtract(parts, mean(parts)))
        variance = mean(emit(op.multiply(apart, apart)))
        deviation = emit(op.rsqrt(emit(op.add(variance, relax.const(float(call.attrs.epsilon), wide)))))
        scaled = emit(op.reshape(as_dtype(emit, emit(op.multiply(apart, deviation)), dtype), shape))
        column = [channels, *[1] * (len(shape) - 1 - channel)]
        gamma, beta = (emit(op.reshape(factor, column)) for factor in (gamma, beta))
        return self.builder_.normalize(op.add(emit(op.multiply(scaled, gamma)), beta))
