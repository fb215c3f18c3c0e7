"""Schedules of tiles. The tiles of a kernel differ in length, and read the same packed weights."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import Any

import tvm_ffi
from tvm import tirx

from eqtune.records.workload import as_workload, workload_hash

from ..search.space.base import Decision, Knob, Space
from ..search.space.generate import build_space
from ..search.space.hardware import Hardware
from ..search.space.lowering import prepare_for_lowering
from ..transform.best_schedule import best_schedule
from ..transform.pack_weights import SplitKernel, split_packing
from .tile import Tile

__all__ = ["CannotShareWeights", "ScheduledTile", "TileSchedules"]

_LAYOUT_KNOBS = ("nr", "pack")
"""What the layout of packed weights depends on."""


class CannotShareWeights(ValueError):
    """A tile has no schedule that reads the weights as the tiles before pack them."""


@dataclass(frozen=True, eq=False)
class ScheduledTile:
    """The scheduled kernel of a tile.

    Attributes
    ----------
    function : tvm.tirx.PrimFunc
        Ready to be lowered; takes its weights packed.
    packed : tuple of int
        Which of its parameters those are.
    """

    function: tirx.PrimFunc
    packed: tuple[int, ...]


class TileSchedules:
    """The schedules that the analytic model likes best, for the tiles of one kernel.

    Parameters
    ----------
    hardware : Hardware
        A CPU.
    weights : frozenset of Buffer
        Arguments of the symbolic kernel that may be packed ahead of time.

    Attributes
    ----------
    split : SplitKernel or None
        What packs the weights, if they are.
    weights : tuple of Buffer
        Which weights it packs, in the order of its parameters.
    """

    def __init__(self, hardware: Hardware, weights: frozenset[Any] = frozenset()) -> None:
        self.hardware = hardware
        self.free = weights
        self._first: Decision | None = None
        self._found: dict[tuple[str, int, bool], tuple[Decision, float]] = {}
        self.split: SplitKernel | None = None
        self.weights: tuple[Any, ...] = ()

    def seconds(self, tile: Tile) -> float:
        """Estimated, of a tile that one thread computes, with weights in whatever layout it likes best."""
        workload = as_workload(self._function(tile))
        _, (_, seconds) = self._best(workload, replace(self.hardware, threads=1), shares=False)
        return seconds

    def __call__(self, tile: Tile, alone: bool) -> ScheduledTile:
        """Schedule a tile; `alone`: all threads are its own.

        Raises
        ------
        CannotShareWeights
            When it would need weights in another layout than the tiles before.
        ValueError
            When no schedule applies.
        """
        function = self._function(tile)
        is_free = "layout_free_buffers" in function.attrs
        hardware = self.hardware if alone else replace(self.hardware, threads=1)
        shares = is_free and self._first is not None
        schedule, (decision, _) = self._best(as_workload(function), hardware, shares)
        return self._with_weights_packed(tile, schedule.mod["main"], decision if is_free else None)

    def _function(self, tile: Tile) -> tirx.PrimFunc:
        """The kernel of a tile, with what may be packed: all of it, for all tiles alike."""
        whole = self.free - tile.parts
        free = [place for place, buffer in enumerate(tile.buffers) if buffer in whole]
        return tile.function.with_attr("layout_free_buffers", free) if free else tile.function

    def _best(self, workload: Any, hardware: Hardware, shares: bool) -> tuple[Any, tuple[Decision, float]]:
        """The schedule that the analytic model likes best, what it is, and how many seconds it is said to take."""
        space = build_space(workload, hardware)
        if shares and self._first is not None:
            space = _sharing(space, self._first)
        key = workload_hash(workload), hardware.threads, shares
        if key in self._found:
            return space.apply(self._found[key][0]), self._found[key]
        best = best_schedule(space)
        if best is None:
            raise ValueError("no schedule applies to the tile")
        schedule, decision, seconds = best
        self._found[key] = decision, seconds
        return schedule, self._found[key]

    def _with_weights_packed(self, tile: Tile, function: tirx.PrimFunc, decision: Decision | None) -> ScheduledTile:
        if decision is None:
            return ScheduledTile(prepare_for_lowering(function), ())
        split = split_packing(function, len(tile.buffers) - tile.outputs)
        weights = () if split is None else tuple(tile.buffers[place] for place in split.positions)
        if self._first is None:
            self._first, self.split, self.weights = decision, split, weights
        elif weights != self.weights or not _equal_packing(split, self.split):
            raise CannotShareWeights("tiles of two lengths pack their weights in two ways")
        if split is None:
            return ScheduledTile(prepare_for_lowering(function), ())
        return ScheduledTile(prepare_for_lowering(split.kernel), split.positions)


def _sharing(space: Space, first: Decision) -> Space:
    """The part of a space that packs weights as a decision for another length does."""
    for sketch in space.sketches:
        if sketch.name == first.sketch:
            narrowed = copy.copy(sketch)
            narrowed.knobs = tuple(_fixed(knob, first) for knob in sketch.knobs)
            return Space([narrowed])
    raise CannotShareWeights(f"no sketch {first.sketch!r} for the tile")


def _fixed(knob: Knob, first: Decision) -> Knob:
    if knob.name not in _LAYOUT_KNOBS:
        return knob
    if first.values[knob.name] not in knob.values:
        raise CannotShareWeights(f"{knob.name} cannot be {first.values[knob.name]}")
    return Knob(knob.name, (first.values[knob.name],))


def _equal_packing(one: SplitKernel | None, other: SplitKernel | None) -> bool:
    if one is None or other is None:
        return one is other
    return bool(tvm_ffi.structural_equal(one.packing, other.packing))
