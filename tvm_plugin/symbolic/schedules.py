"""Schedules of tiles. The tiles of a kernel differ in length, and read the same packed weights."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import tvm_ffi
from tvm import s_tir, tirx

from eqtune.records.workload import as_workload, workload_hash

from ..schedules.best import BestSchedule, best_schedule
from ..schedules.overwritable import overwritable
from ..schedules.pack_weights import SplitKernel, split_packing
from ..search.space.amx import AMX_FEATURES, PARTS, PRODUCTS
from ..search.space.base import Decision, Knob, Space
from ..search.space.generate import build_space
from ..search.space.hardware import FAR_WEIGHTS, ONE_THREAD, Hardware
from ..search.space.lowering import prepare_for_lowering
from .kernel import number_at
from .tile import Tile

__all__ = ["CannotShareWeights", "ScheduledTile", "TileSchedules", "UsedTile", "sharing"]

_READ_IN_PLACE = {product.left for product in PRODUCTS if not product.halves}
"""Dtypes of left operands that tile registers may read where they are."""

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
    overwritable : tuple of int
        In the memory of which parameters it may write its result.
    """

    function: tirx.PrimFunc
    packed: tuple[int, ...]
    overwritable: tuple[int, ...]

    def renewed(self) -> ScheduledTile:
        """The same with variables of its own, to be computed in a second place."""
        return replace(self, function=s_tir.renew_defs(self.function))


@dataclass(frozen=True, eq=False)
class UsedTile:
    """A tile that a kernel is made of.

    Attributes
    ----------
    tile : Tile
    workload : tvm.ir.IRModule
        It alone, not scheduled; with the attribute `ONE_THREAD` where one thread computes it.
    workload_hash : str
    shares : Decision or None
        Of the tile before whose packed weights it reads.
    runs : tvm.ir.Expr or int
        How often the kernel runs it, one after another, in terms of its symbols; about.
    """

    tile: Tile
    workload: Any
    workload_hash: str
    shares: Decision | None
    runs: Any

    def runs_at(self, sizes: Mapping[str, int], usual: int) -> int:
        """How often it runs in one call with these sizes, by the names of symbols; `usual` of those without one."""
        return self.runs if isinstance(self.runs, int) else number_at(self.runs, sizes, usual)


class TileSchedules:
    """The schedules of the tiles of one kernel: those given, or what the analytic model likes best.

    Parameters
    ----------
    hardware : Hardware
        A CPU.
    weights : frozenset of Buffer
        Arguments of the symbolic kernel that may be packed ahead of time.
    decisions : mapping, optional
        By workload hash, of tiles that were measured. One that packs weights otherwise than the tiles before, or that
        its tile no longer has, counts for nothing.

    Attributes
    ----------
    split : SplitKernel or None
        What packs the weights, if they are.
    weights : tuple of Buffer
        Which weights it packs, in the order of its parameters.
    used : list of UsedTile
        What was scheduled, each tile once, in order.
    """

    def __init__(
        self,
        hardware: Hardware,
        weights: frozenset[Any] = frozenset(),
        decisions: Mapping[str, Decision] | None = None,
    ) -> None:
        self.hardware = hardware
        self.free = weights
        self._decisions = decisions or {}
        self._first: Decision | None = None
        self._found: dict[tuple[str, bool], BestSchedule] = {}
        self._taken: set[tuple[str, bool]] = set()
        self.split: SplitKernel | None = None
        self.weights: tuple[Any, ...] = ()
        self.used: list[UsedTile] = []

    def seconds(self, tile: Tile) -> float:
        """Estimated, of a tile that one thread computes, with weights in whatever layout it likes best."""
        workload = self._workload(tile, alone=False)
        return self._best(workload, workload_hash(workload), shares=False).latency_s

    def __call__(self, tile: Tile, alone: bool, runs: Any) -> ScheduledTile:
        """Schedule a tile; `alone`: all threads are its own. It runs so often.

        Raises
        ------
        CannotShareWeights
            When it would need weights in another layout than the tiles before.
        ValueError
            When no schedule applies.
        """
        workload = self._workload(tile, alone)
        is_free = "layout_free_buffers" in workload["main"].attrs
        shares = self._first if is_free else None
        used = UsedTile(tile, workload, workload_hash(workload), shares, runs)
        function, decision = self._scheduled(workload, used.workload_hash, shares is not None)
        scheduled = self._with_weights_packed(tile, function, decision if is_free else None)
        known = next((place for place, one in enumerate(self.used) if one.workload_hash == used.workload_hash), None)
        if known is None:
            self.used.append(used)
        else:
            self.used[known] = replace(self.used[known], runs=self.used[known].runs + runs)
        return scheduled

    def _workload(self, tile: Tile, alone: bool) -> Any:
        """The kernel of a tile, with what may be packed: all of it, for all tiles alike."""
        whole, function = self.free - tile.parts, tile.function
        free = [place for place, buffer in enumerate(tile.buffers) if buffer in whole]
        function = function.with_attr("layout_free_buffers", free) if free else function
        apart = self._apart(tile)
        function = function.with_attr(PARTS, apart) if apart else function
        return as_workload(function if alone else function.with_attr(ONE_THREAD, 1))

    def _apart(self, tile: Tile) -> list[int]:
        """The attribute `PARTS`; nothing where no tile registers would read an operand in place."""
        if not set(AMX_FEATURES).intersection(self.hardware.dot_products):
            return []
        found = [tile.apart.get(one, -1) if str(one.dtype) in _READ_IN_PLACE else -1 for one in tile.buffers]
        return found if max(found, default=-1) >= 0 else []

    def _scheduled(self, workload: Any, workload_hash: str, shares: bool) -> tuple[tirx.PrimFunc, Decision]:
        """The function of a tile, scheduled, with variables of its own, and what was decided."""
        found = self._best(workload, workload_hash, shares)
        if found.scheduled is None:
            raise ValueError("no schedule applies to the tile")
        schedule, decision = found.scheduled
        if (workload_hash, shares) in self._taken:
            schedule = self._space(workload, shares).apply(decision)
        self._taken.add((workload_hash, shares))
        return schedule.mod["main"], decision

    def _best(self, workload: Any, workload_hash: str, shares: bool) -> BestSchedule:
        """What was measured, or what the analytic model likes best."""
        key = workload_hash, shares
        if key not in self._found:
            space = self._space(workload, shares)
            best = _measured(space, self._decisions.get(workload_hash)) or best_schedule(space)
            if best is None:
                raise ValueError("no schedule is legal for the tile")
            self._found[key] = best
        return self._found[key]

    def _space(self, workload: Any, shares: bool) -> Space:
        space = build_space(workload, self.hardware)
        return sharing(space, self._first) if shares and self._first is not None else space

    def _with_weights_packed(self, tile: Tile, function: tirx.PrimFunc, decision: Decision | None) -> ScheduledTile:
        may_go = tuple(overwritable(function))
        if decision is None:
            return ScheduledTile(prepare_for_lowering(function), (), may_go)
        split = split_packing(function, len(tile.buffers) - tile.outputs)
        weights = () if split is None else tuple(tile.buffers[place] for place in split.positions)
        if self._first is None:
            self._first, self.split, self.weights = decision, split, weights
        elif weights != self.weights or not _equal_packing(split, self.split):
            raise CannotShareWeights("tiles of two lengths pack their weights in two ways")
        if split is None:
            return ScheduledTile(prepare_for_lowering(function), (), may_go)
        return ScheduledTile(prepare_for_lowering(split.kernel), split.positions, may_go)


def _measured(space: Space, decision: Decision | None) -> BestSchedule | None:
    """What was measured; None where the space does not have it any more.

    Its weights may have been elsewhere when it was measured.
    """
    if decision is None:
        return None
    knobs = (knob for sketch in space.sketches if sketch.name == decision.sketch for knob in sketch.knobs)
    here = {knob.name: knob.values[0] for knob in knobs if knob.name == FAR_WEIGHTS}
    decision = Decision(decision.sketch, {**decision.values, **here})
    point = space.point(decision)
    if point is None:
        return None
    measured = BestSchedule(space, [decision], float(space.latency_s(point[None])[0]))
    return None if measured.scheduled is None else measured


def sharing(space: Space, first: Decision) -> Space:
    """The part of a space that packs weights as a decision for another length does.

    Raises CannotShareWeights where there is none.
    """
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
