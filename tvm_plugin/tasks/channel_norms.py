"""Group and instance norms whose channels are last: the moments of all channels in one pass, then an operation on each.

The channels of a group lie between those of others, so that its elements are runs of a few. Summed channel by channel,
all of a row is read at once. Two threads of a Xeon, us, group norm in 32 groups and SiLU: 128 x 128 pixels of 128
channels 2782 as one kernel, 435 here (413 with channels first); of 64 channels 1941, 219 (211); 64 x 64 of 128 517, 99
(101); 32 x 32 of 256 139, 53 (48).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

from tvm import ir, relax, te, tirx
from tvm.relax import op
from tvm.relax.expr_functor import PyExprMutator, mutator
from tvm.script.ir_builder import tirx as T

from ..relax_ir.constants import is_static_tensor
from ..relax_ir.functions import map_functions, operator, top_level_bindings
from ..relax_ir.te_kernels import extern_kernel
from ..relax_ir.tensors import extents
from .workers import array, rest, share, variable, workers, worthwhile_threads

__all__ = ["legalize_channel_norms"]

LEAST_PIXELS = 64
LEAST_CHANNELS = 16
"""With fewer, one kernel is as fast, or vectors would be short."""

BLOCK = 64
"""Pixels that are summed relative to the first of them: their sums lose no digits to what they have in common."""

AT_ONCE = 4
"""Pixels that are added to the sums together, which are loaded and stored once for all of them."""


def legalize_channel_norms(mod: ir.IRModule, threads: int) -> ir.IRModule:
    """(x - mean) * (gamma / deviation) + beta, for each group or instance norm with channels last; for CPUs.

    Mean and gamma / deviation, of each image and channel, are a kernel of their own; the rest fuses with what follows.
    """
    rewriter = _ChannelNorms(mod, threads)

    def rewritten(function: relax.Function) -> relax.Function:
        has_norms = any(_groups(binding.value) for binding in top_level_bindings(function))
        return rewriter.visit_expr(function) if has_norms else function

    return map_functions(mod, rewritten, rewriter.builder_)


@mutator
class _ChannelNorms(PyExprMutator):
    def __init__(self, mod: ir.IRModule, threads: int) -> None:
        super().__init__(mod)
        self._threads = threads

    def visit_call_(self, call: relax.Call) -> relax.Expr:
        call = self.visit_expr_post_order(call)
        groups = _groups(call)
        if not groups:
            return call
        x, gamma, beta = call.args
        moments = partial(_moments, groups=groups, epsilon=float(call.attrs.epsilon), threads=self._threads)
        found = self.builder_.emit(self.builder_.call_te(moments, x, gamma, primfunc_name_hint="norm_moments"))
        mean, scale = (self.builder_.emit(relax.TupleGetItem(found, part)) for part in range(2))
        scaled = self.builder_.emit(op.multiply(self.builder_.emit(op.subtract(x, mean)), scale))
        return self.builder_.normalize(op.add(scaled, beta))


def _groups(call: Any) -> int:
    """Of a norm as here; 0 for everything else."""
    name = operator(call)
    if name not in ("relax.nn.group_norm", "relax.nn.instance_norm") or not is_static_tensor(call.ty):
        return 0
    shape, rank = extents(call.ty), call.ty.ndim
    groups = int(call.attrs.num_groups) if name == "relax.nn.group_norm" else shape[-1]
    reduced = sorted(int(axis) % rank for axis in call.attrs.axes)
    last = int(call.attrs.channel_axis) % rank == rank - 1 and reduced == list(range(1, rank - 1))
    large = shape[0] > 0 and math.prod(shape[1:-1]) >= LEAST_PIXELS and shape[-1] >= LEAST_CHANNELS
    return groups if last and large and groups > 1 and str(call.ty.dtype) == "float32" else 0


def _moments(x: te.Tensor, gamma: te.Tensor, groups: int, epsilon: float, threads: int) -> list[te.Tensor]:
    """Mean, and gamma over the root of the variance and epsilon, of [images, pixels..., channels]: [images, 1...,
    channels].

    Blocks of pixels, and then threads, are put together as in `search.space.memory_bound.moments` (Chan et al., 1983).
    """
    images, *sides, channels = (int(extent) for extent in x.shape)
    pixels, inside = math.prod(sides), channels // groups
    threads = worthwhile_threads(threads, images * pixels * channels)
    parts = min(share(threads, images), share(pixels, BLOCK))
    high = share(share(pixels, BLOCK), parts) * BLOCK
    zero = tirx.FloatImm("float32", 0.0)

    def float_of(count: Any) -> Any:
        return tirx.Cast("float32", count)

    def body(given: Any, factors: Any, mean: Any, scale: Any) -> None:
        means, squares = (array(images * parts * channels, "float32") for _ in range(2))
        with workers(images * parts, threads) as worker:
            image, begin, own = worker // parts, worker % parts * high, worker * channels
            center, sums, powers = (array(channels, "float32") for _ in range(3))
            with T.serial(0, channels) as c:
                means[own + c], squares[own + c] = zero, zero
            with T.serial(0, high // BLOCK) as block:
                count = rest(pixels, begin + block * BLOCK, BLOCK)
                with T.If(count > 0), T.Then():
                    at = (image * pixels + begin + block * BLOCK) * channels
                    with T.serial(0, channels) as c:
                        center[c], sums[c], powers[c] = given[at + c], zero, zero
                    with T.serial(0, count // AT_ONCE) as pixel:
                        add(given, at + pixel * (AT_ONCE * channels), AT_ONCE, center, sums, powers)
                    with T.serial(0, count % AT_ONCE) as pixel:
                        add(given, at + (count // AT_ONCE * AT_ONCE + pixel) * channels, 1, center, sums, powers)
                    before, inverse, weight = (variable("float32") for _ in range(3))
                    before[0] = float_of(block * BLOCK)
                    inverse[0] = 1.0 / float_of(count)
                    weight[0] = float_of(count) / (before[0] + float_of(count))
                    with T.serial(0, channels) as c:
                        apart = variable("float32")
                        apart[0] = center[c] + sums[c] * inverse[0] - means[own + c]
                        within = powers[c] - sums[c] * sums[c] * inverse[0]
                        squares[own + c] = squares[own + c] + within + apart[0] * apart[0] * (before[0] * weight[0])
                        means[own + c] = means[own + c] + apart[0] * weight[0]
        with T.serial(0, images * groups) as group:
            total, deviation = variable("float32"), variable("float32")

            def each(act: Any) -> None:
                """Of each part and channel of the group: its place, and its pixels."""
                with T.serial(0, parts) as part, T.serial(0, inside) as c:
                    place = (group // groups * parts + part) * channels + group % groups * inside + c
                    act(place, float_of(rest(pixels, part * high, high)))

            def add_mean(place: Any, count: Any) -> None:
                total[0] = total[0] + means[place] * (count / float(pixels * inside))

            def add_squares(place: Any, count: Any) -> None:
                apart = means[place] - total[0]
                deviation[0] = deviation[0] + squares[place] + apart * apart * count

            total[0] = zero
            each(add_mean)
            deviation[0] = zero
            each(add_squares)
            deviation[0] = tirx.rsqrt(deviation[0] / float(pixels * inside) + tirx.FloatImm("float32", epsilon))
            with T.serial(0, inside) as c:
                mean[group * inside + c] = total[0]
                scale[group * inside + c] = deviation[0] * factors[group % groups * inside + c]

    def add(given: Any, at: Any, count: int, center: Any, sums: Any, powers: Any) -> None:
        """Pixels one after another to the sums of each channel."""
        with T.serial(0, channels) as c:
            apart = [variable("float32") for _ in range(count)]
            for pixel, one in enumerate(apart):
                one[0] = given[at + pixel * channels + c] - center[c]
            sums[c] = sums[c] + _in_pairs([one[0] for one in apart])
            powers[c] = powers[c] + _in_pairs([one[0] * one[0] for one in apart])

    shape = (images, *[1] * len(sides), channels)
    return extern_kernel("norm_moments", body, [x, gamma], [(shape, "float32")] * 2)


def _in_pairs(terms: Sequence[Any]) -> Any:
    """Their sum."""
    half = len(terms) // 2
    return terms[0] if len(terms) == 1 else _in_pairs(terms[:half]) + _in_pairs(terms[half:])
