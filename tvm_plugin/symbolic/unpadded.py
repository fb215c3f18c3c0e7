"""Windows of padded images that lie inside of the image: tiles read them there, and nothing is padded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tvm import ir, tirx

from ..search.space.expressions import conjuncts, substitute, uses
from .kernel import Stage
from .part import Part, number

__all__ = ["UnpaddedWindows", "unpadded_windows"]

_COMPARISONS = (tirx.LT, tirx.LE, tirx.GT, tirx.GE)


@dataclass(frozen=True)
class UnpaddedWindows:
    """Where tiles may read images instead of padded ones.

    Attributes
    ----------
    condition : tvm.ir.Expr
        Whether they may.
    regions : mapping
        By padded buffer, what is the same region of the image.
    """

    condition: Any
    regions: Mapping[Any, Any]


def unpadded_windows(stages: Sequence[Stage], part: Part) -> UnpaddedWindows | None:
    """When the part of what these stages write is the same as some part of what they read; None where it may never be.

    Parameters
    ----------
    stages : sequence of Stage
        Each writes one buffer: an image inside, something else where conditions on single indices do not hold.
    part : Part
        With the windows' lengths and where they begin.
    """
    condition, regions = None, {}
    for stage in stages:
        padded = _padding(stage)
        if padded is None:
            return None
        inside, image = padded
        first, last = [], []
        for axis, size in zip(stage.block.iter_vars, stage.sizes, strict=True):
            begin, length = part.starts.get(size, number(0)), number(part.lengths.get(size, size.extent))
            first.append((axis.var, begin))
            last.append((axis.var, begin + length - 1))
        # Each comparison is of one index: where it holds for the first and for the last one, it does in between.
        for corner in (first, last):
            holds = substitute(inside, corner)
            condition = holds if condition is None else tirx.And(condition, holds)
        begins, ends = ([substitute(index, at) for index in image.indices] for at in (first, last))
        ranges = [ir.Range.from_min_extent(begin, end - begin + 1) for begin, end in zip(begins, ends, strict=True)]
        own, local = part.buffers[image.source]
        if local:
            return None
        regions[stage.writes[0]] = tirx.BufferRegion(own, ranges)
    return UnpaddedWindows(condition, regions)


def _padding(stage: Stage) -> tuple[Any, Any] | None:
    """The condition under which a stage copies what it loads, and the load; None where it is no padding."""
    value, axes = stage.block.body.value, [axis.var for axis in stage.block.iter_vars]
    if isinstance(value, tirx.Select):
        parts = value.condition, value.true_value
    elif isinstance(value, ir.Call) and getattr(value.op, "name", "") == "prim.if_then_else":
        parts = value.args[0], value.args[1]
    else:
        return None
    condition, load = parts
    if not isinstance(load, ir.TensorLoad) or len(load.indices) != len(axes):
        return None
    shifted = all(_is_shifted(index, axis) for index, axis in zip(load.indices, axes, strict=True))
    single = all(isinstance(one, _COMPARISONS) and _of_one_index(one, axes) for one in conjuncts(condition))
    return (condition, load) if shifted and single else None


def _of_one_index(comparison: Any, axes: Sequence[Any]) -> bool:
    """Whether one side of a comparison is an index, perhaps shifted, and the other one none."""
    for side, other in ((comparison.a, comparison.b), (comparison.b, comparison.a)):
        if any(_is_shifted(side, axis) for axis in axes) and not uses(other, *axes):
            return True
    return False


def _is_shifted(value: Any, variable: Any) -> bool:
    """Whether it is a variable, or that and a constant."""
    if isinstance(value, tirx.Add | tirx.Sub) and isinstance(value.b, tirx.IntImm):
        value = value.a
    return bool(value.same_as(variable))
