"""Stages as they are written: loops over their elements, or vectors of them, without a schedule."""

from __future__ import annotations

from typing import Any

import tvm_ffi
from tvm import ir, tirx

from ..search.space.statements import looped
from .kernel import AXIS, Stage, axes_of
from .part import Part, number

__all__ = ["as_written"]

LANES = range(64, 3, -1)
"""Elements that are copied (padded, masked) at once, where they lie side by side."""


def as_written(stage: Stage, part: Part) -> Any:
    """The loops of a stage over a part of the kernel; threads share the outermost one, unless each has its part.

    Where a stage reads and writes the same places of a known last axis, several of them are one vector.
    """
    block = stage.block
    at: list[tuple[Any, Any]] = []
    places: tuple[list[Any], list[Any]] = [], []
    sums: tuple[list[Any], list[Any]] = [], []
    for axis, size in zip(block.iter_vars, stage.sizes, strict=True):
        loop = tirx.Var(str(axis.var.name), "int64")
        at.append((axis.var, loop + part.starts[size] if size in part.starts else loop))
        loops, extents = sums if int(axis.iter_type) == tirx.IterVar.CommReduce else places
        loops.append(loop)
        extents.append(number(part.lengths.get(size, size.extent)))
    lanes = _lanes(stage, places[1][-1]) if places[1] and not stage.reduced else 1
    lane = tirx.Var("lane", "int64")
    if lanes > 1:
        variable, last = at[-1]
        at[-1] = variable, last + (places[0][-1] * (lanes - 1) + lane)
        places[1][-1] = number(int(places[1][-1]) // lanes)
    body = looped(*sums, part.statement(block.body, at))
    if block.init is not None:
        body = tirx.SeqStmt([part.statement(block.init, at), body])
    if lanes > 1:
        body = tirx.For(lane, number(0), number(lanes), tirx.ForKind.VECTORIZED, body)
    wide = next((place for place, extent in enumerate(places[1]) if not _is_one(extent)), None)
    return looped(*places, body, parallel=None if part.parallel else wide)


def _lanes(stage: Stage, extent: Any) -> int:
    """How many elements along its last axis a stage without sums can compute at once: 1 unless neighbours."""
    variable, store = stage.block.iter_vars[-1].var, stage.block.body
    accesses: list[Any] = [store]
    tvm_ffi.structural_walk(store.value, (ir.TensorLoad, accesses.append))
    alike = all(_ends_with(access.indices, variable) for access in accesses)
    if not alike or (variable, AXIS) in axes_of(store.value) or not isinstance(extent, tirx.IntImm):
        return 1
    return next((lanes for lanes in LANES if int(extent) % lanes == 0), 1)


def _ends_with(indices: Any, variable: Any) -> bool:
    """Whether a variable is the last index, and in no other one."""
    found: list[Any] = []
    for index in indices:
        tvm_ffi.structural_walk(index, (ir.Var, found.append))
    return found.count(variable) == 1 and variable.same_as(indices[-1])


def _is_one(extent: Any) -> bool:
    return isinstance(extent, tirx.IntImm) and int(extent) == 1
