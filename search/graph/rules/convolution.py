"""Convolutions: merging, and what weights can absorb. Other forms of a single one are in `kernels.py`."""

from __future__ import annotations

from collections.abc import Callable
from math import prod

from ..attributes import Axis, Shape, Slice
from .pattern import add, concat, conv2d, full, multiply, reshape, slice_, tensors, weights
from .rule import Group, Match, Rule
from .shapes import block, box, keeps_range, keeps_sums_before_scale_small, numbered, same_shape

__all__ = ["CONVOLUTION_LAWS", "CONVOLUTION_RULES"]

x, y, p, q = tensors("x y p q")
c = full("c")
w, v = tensors("w v")
trained, s = weights("w s")


def ungrouped(m: Match) -> bool:
    """The convolution has one group."""
    return bool(m.a.groups == 1)


def same_kernels(m: Match) -> bool:
    """Both weights have the same shape."""
    return bool(m.w.shape == m.v.shape)


def agree_but_for_outputs(m: Match) -> bool:
    """The weights can be concatenated along their output channels."""
    outputs = m.a.kernel_layout.index("O")
    return all(a == b for i, (a, b) in enumerate(zip(m.w.shape, m.v.shape, strict=True)) if i != outputs)


def same_sums(m: Match) -> bool:
    """Both summands of the weight have the same shape."""
    return bool(m.p.shape == m.q.shape)


def same_but_for_batch(m: Match) -> bool:
    """The inputs can be concatenated along the batch."""
    batch = m.a.data_layout.index("N")
    return all(a == b for i, (a, b) in enumerate(zip(m.x.shape, m.y.shape, strict=True)) if i != batch)


def one_number(m: Match) -> bool:
    """The factor is a single number, with at most four dimensions."""
    return bool(prod(m.c.shape) == 1 and len(m.c.shape) <= 4)


def joins_channels(m: Match) -> bool:
    """The concatenation is along the channels."""
    return bool(m.c.axis == m.a.out_layout.index("C"))


def joins_batches(m: Match) -> bool:
    """The concatenation is along the batch."""
    return bool(m.c.axis == m.a.out_layout.index("N"))


def joins_inputs(m: Match) -> bool:
    """The concatenation is along the channels of the input."""
    return bool(m.c.axis == m.a.data_layout.index("C"))


def joins_input_batches(m: Match) -> bool:
    """The concatenation is along the batch of the input."""
    return bool(m.c.axis == m.a.data_layout.index("N"))


def joins_outputs(m: Match) -> bool:
    """The concatenation is along the output channels of the weight."""
    return bool(m.c.axis == m.a.kernel_layout.index("O"))


def cuts_channels(m: Match) -> bool:
    """The slice cuts channels only."""
    shape, channels = m.type(_CONVOLUTION).shape, m.a.out_layout.index("C")
    return all((m.c.begin[i], m.c.end[i]) == (0, n) for i, n in enumerate(shape) if i != channels)


def cuts_batch(m: Match) -> bool:
    """The slice cuts the batch only."""
    shape, batch = m.type(_CONVOLUTION).shape, m.a.out_layout.index("N")
    return all((m.c.begin[i], m.c.end[i]) == (0, n) for i, n in enumerate(shape) if i != batch)


def scales_channels(m: Match) -> bool:
    """s has one number for each output channel, or one for all."""
    return _along(m.s.shape, m.type(_TRAINED).shape, m.a.out_layout.index("C"))


def scales_inputs(m: Match) -> bool:
    """s has one number for each input channel of an ungrouped convolution, or one for all."""
    channelwise = _along(m.s.shape, m.x.shape, m.a.data_layout.index("C"))
    return channelwise and bool(m.a.groups == 1 or m.s.elements == 1)


def _along(shape: tuple[int, ...], target: tuple[int, ...], axis: int) -> bool:
    """Whether a tensor of this shape, broadcast to `target`, varies along one axis only."""
    full = (1,) * (len(target) - len(shape)) + shape
    return len(full) == len(target) and all(n in (1, target[i] if i == axis else 1) for i, n in enumerate(full))


def _without(shape: tuple[int, ...], axis: int) -> tuple[int, ...]:
    """The extents of all other axes."""
    return shape[:axis] + shape[axis + 1 :]


def kernel_axis(letter: str) -> Callable[[Match], Axis]:
    """The dimension of the weight with this letter."""
    return lambda m: Axis(m.a.kernel_layout.index(letter))


def data_axis(letter: str) -> Callable[[Match], Axis]:
    """The dimension of the input with this letter."""
    return lambda m: Axis(m.a.data_layout.index(letter))


def out_axis(letter: str) -> Callable[[Match], Axis]:
    """The dimension of the output with this letter."""
    return lambda m: Axis(m.a.out_layout.index(letter))


def _scale_along(letter: str) -> Callable[[Match], Shape]:
    """s, to scale the weight along one of its dimensions."""
    return lambda m: Shape(tuple(m.s.elements if other == letter else 1 for other in m.a.kernel_layout))


def _inputs_of_first(m: Match) -> Slice:
    axis = m.a.kernel_layout.index("I")
    return box(m.w.shape, axis, 0, m.x.shape[m.c.axis])


def _inputs_of_second(m: Match) -> Slice:
    axis = m.a.kernel_layout.index("I")
    return box(m.w.shape, axis, m.x.shape[m.c.axis], m.w.shape[axis])


def _batch_of_slice(m: Match) -> Slice:
    batch = m.a.out_layout.index("N")
    return box(m.x.shape, m.a.data_layout.index("N"), m.c.begin[batch], m.c.end[batch])


def _outputs_of_slice(m: Match) -> Slice:
    channels = m.a.out_layout.index("C")
    return box(m.w.shape, m.a.kernel_layout.index("O"), m.c.begin[channels], m.c.end[channels])


def merge_shared_input(count: int) -> Rule:
    """conv(x, w1), ..., conv(x, wn) -> the channel blocks of conv(x, concat(w1, ..., wn))."""
    parts = numbered(trained, count)
    merged = conv2d(x, concat(parts, kernel_axis("O")), "a")
    return Rule(
        f"merge-conv2d-shared-input-{count}",
        before=tuple(conv2d(x, part, "a") for part in parts),
        after=tuple(block(merged, i, lambda m: m.a.out_layout.index("C")) for i in range(count)),
        when=(ungrouped,),
        reason=_MERGE_INPUT,
        source="TASO; Tensat's multi-pattern rule, for any number of convolutions at once",
    )


def merge_shared_weight(count: int) -> Rule:
    """conv(x1, w), ..., conv(xn, w) -> the batches of conv(concat(x1, ..., xn), w)."""
    parts = numbered(x, count)
    merged = conv2d(concat(parts, data_axis("N")), trained, "a")
    return Rule(
        f"merge-conv2d-shared-weight-{count}",
        before=tuple(conv2d(part, trained, "a") for part in parts),
        after=tuple(block(merged, i, lambda m: m.a.out_layout.index("N")) for i in range(count)),
        reason=_MERGE_WEIGHT,
        source="TASO",
    )


_CONVOLUTION = conv2d(x, w, "a")
_TRAINED = conv2d(x, trained, "a")
_MERGE_INPUT = "one convolution reads x once and fills the machine better"
_MERGE_WEIGHT = "one convolution reads the weight once"
_FREE_SCALE = "weights absorb the scale ahead of time"

CONVOLUTION_RULES: tuple[Rule | Group, ...] = (
    Rule(
        "sum-of-convolutions",
        before=add(_CONVOLUTION, conv2d(y, v, "a")),
        after=conv2d(concat((x, y), data_axis("C")), concat((w, v), kernel_axis("I")), "a"),
        when=(ungrouped,),
        reason="one convolution over more channels instead of two and an addition",
        source="TASO",
    ),
    Rule(
        "sum-of-convolutions-shared-input",
        before=add(_CONVOLUTION, conv2d(x, v, "a")),
        after=conv2d(x, add(w, v), "a"),
        when=(same_kernels,),
        worth=(keeps_range,),
        reason="weights are added ahead of time",
        source="TASO",
    ),
    Rule(
        "sum-of-convolutions-shared-weight",
        before=add(_CONVOLUTION, conv2d(y, w, "a")),
        after=conv2d(add(x, y), w, "a"),
        when=(same_shape,),
        worth=(keeps_range,),
        reason="one convolution instead of two",
        source="TASO",
    ),
    Rule(
        "concat-of-convolutions-shared-input",
        before=concat((_CONVOLUTION, conv2d(x, v, "a")), "c"),
        after=conv2d(x, concat((w, v), kernel_axis("O")), "a"),
        when=(ungrouped, joins_channels, agree_but_for_outputs),
        reason=_MERGE_INPUT,
        source="TASO",
    ),
    Rule(
        "scale-of-convolution",
        before=multiply(_TRAINED, s),
        after=conv2d(x, multiply(trained, reshape(s, _scale_along("O"))), "a"),
        when=(scales_channels,),
        worth=(keeps_range,),
        reason=_FREE_SCALE,
        source="TASO",
    ),
    Rule(
        "convolution-of-scaled",
        before=conv2d(multiply(x, s), trained, "a"),
        after=conv2d(x, multiply(trained, reshape(s, _scale_along("I"))), "a"),
        when=(scales_inputs,),
        worth=(keeps_range,),
        reason=_FREE_SCALE,
        source="TASO",
    ),
    Group(
        "merge-conv2d-shared-input",
        member=_TRAINED,
        shared=("x", "a"),
        make=merge_shared_input,
        reason=_MERGE_INPUT,
        source="TASO",
        alike=lambda types, attrs: _without(types["w"].shape, attrs["a"].kernel_layout.index("O")),
    ),
    Group(
        "merge-conv2d-shared-weight",
        member=_TRAINED,
        shared=("w", "a"),
        make=merge_shared_weight,
        reason=_MERGE_WEIGHT,
        source="TASO",
        alike=lambda types, attrs: _without(types["x"].shape, attrs["a"].data_layout.index("N")),
    ),
)
"""Rules that pay in models as people write them."""


_LAW = "needed to prove other equalities"


CONVOLUTION_LAWS: tuple[Rule, ...] = (
    Rule(
        "convolution-of-sum",
        before=conv2d(add(x, y), p, "a"),
        after=add(conv2d(x, p, "a"), conv2d(y, p, "a")),
        when=(same_shape,),
        reason=_LAW,
        source="TASO",
    ),
    Rule(
        "convolution-with-sum",
        before=conv2d(x, add(p, q), "a"),
        after=add(conv2d(x, p, "a"), conv2d(x, q, "a")),
        when=(same_sums,),
        reason=_LAW,
        source="TASO",
    ),
    Rule(
        "convolution-of-channels-joined",
        before=conv2d(concat((x, y), "c"), w, "a"),
        after=add(
            conv2d(x, slice_(w, _inputs_of_first), "a"),
            conv2d(y, slice_(w, _inputs_of_second), "a"),
        ),
        when=(ungrouped, joins_inputs),
        reason="what is concatenated for a convolution need not be copied",
        source="TASO",
    ),
    Rule(
        "convolution-of-batches-joined",
        before=conv2d(concat((x, y), "c"), p, "a"),
        after=concat((conv2d(x, p, "a"), conv2d(y, p, "a")), out_axis("N")),
        when=(joins_input_batches,),
        reason=_LAW,
        source="TASO",
    ),
    Rule(
        "concat-of-convolutions-shared-weight",
        before=concat((conv2d(x, p, "a"), conv2d(y, p, "a")), "c"),
        after=conv2d(concat((x, y), data_axis("N")), p, "a"),
        when=(joins_batches, same_but_for_batch),
        reason=_MERGE_WEIGHT,
        source="TASO",
    ),
    Rule(
        "convolution-with-outputs-joined",
        before=conv2d(x, concat((p, q), "c"), "a"),
        after=concat((conv2d(x, p, "a"), conv2d(x, q, "a")), out_axis("C")),
        when=(ungrouped, joins_outputs),
        reason=_LAW,
        source="TASO",
    ),
    Rule(
        "slice-of-convolution-channels",
        before=slice_(_CONVOLUTION, "c"),
        after=conv2d(x, slice_(w, _outputs_of_slice), "a"),
        when=(ungrouped, cuts_channels),
        reason="what is not needed is not computed",
    ),
    Rule(
        "slice-of-convolution-batch",
        before=slice_(_CONVOLUTION, "c"),
        after=conv2d(slice_(x, _batch_of_slice), w, "a"),
        when=(cuts_batch,),
        reason="what is not needed is not computed",
    ),
    Rule(
        "convolution-of-scaled-by-one-number",
        before=conv2d(multiply(x, c), p, "a"),
        after=multiply(conv2d(x, p, "a"), c),
        when=(one_number,),
        worth=(keeps_sums_before_scale_small,),
        reason=_LAW,
        source="TASO",
    ),
    Rule(
        "convolution-with-scaled-by-one-number",
        before=conv2d(x, multiply(p, c), "a"),
        after=multiply(conv2d(x, p, "a"), c),
        when=(one_number,),
        worth=(keeps_sums_before_scale_small,),
        reason=_LAW,
        source="TASO",
    ),
)
"""Bilinearity, and groups taken apart."""
