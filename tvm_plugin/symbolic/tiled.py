"""A module's kernels with symbolic sizes, tiled."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from tvm import ir, tirx

from ..relax_ir.kernels import READY, is_scheduled, is_symbolic
from ..schedules.pack_weights import SplitKernel, pack_weights
from ..search.space.base import Decision
from ..search.space.expressions import substitute
from ..search.space.extrema import begin_with_infinity
from ..search.space.gpu.hardware import GpuHardware
from ..search.space.hardware import Hardware
from .assemble import assemble
from .blocks import NotInBlocks
from .inlined import with_cheap_stages_inlined
from .joined import seen_as_given, with_sizes_joined
from .kernel import SymbolicKernel, read_kernel
from .named_sizes import with_sizes_named
from .schedules import CannotShareWeights, TileSchedules, UsedTile
from .slices import with_slice_apart
from .winograd import read_convolution, winograd_kernel
from .winograd_choice import winograd_form

__all__ = ["TILED", "TiledKernels", "tile_symbolic_kernels", "tiled_kernels"]

_Tiled = tuple[tirx.PrimFunc, SplitKernel | None, tuple[UsedTile, ...]]

LOGGER = logging.getLogger("eqtune")

TILED = "eqtune.tiled"
"""Attribute of kernels that are loops over tiles of many lengths. They are `READY`, too."""


@dataclass(frozen=True)
class TiledKernels:
    """A module whose kernels with symbolic sizes are loops over tiles.

    Attributes
    ----------
    mod : tvm.ir.IRModule
    tiles : mapping of str to tuple of UsedTile
        By kernel, what it is made of.
    """

    mod: ir.IRModule
    tiles: Mapping[str, tuple[UsedTile, ...]]


def tile_symbolic_kernels(
    mod: ir.IRModule, hardware: Hardware, decisions: Mapping[str, Decision] | None = None
) -> ir.IRModule:
    """`tiled_kernels`, the module alone."""
    return tiled_kernels(mod, hardware, decisions).mod


def tiled_kernels(
    mod: ir.IRModule, hardware: Hardware, decisions: Mapping[str, Decision] | None = None
) -> TiledKernels:
    """Replace the kernels that have symbolic sizes by loops over tiles, and pack their constant weights.

    Parameters
    ----------
    mod : tvm.ir.IRModule
        Of `lower_to_kernels`. Kernels without symbolic sizes stay, those that are scheduled, and those that are no
        sequence of loop nests around one statement each (cumulative sums, sorting), which TVM compiles as they are
        written.
    hardware : Hardware
        For a GPU, all of them stay.
    decisions : mapping of str to Decision, optional
        By workload hash, of tiles that were measured; others are scheduled by the analytic model.
    """
    if isinstance(hardware, GpuHardware):
        return TiledKernels(mod, {})
    result = mod.clone()
    split: dict[str, SplitKernel] = {}
    tiles: dict[str, tuple[UsedTile, ...]] = {}
    for variable, function in mod.functions_items():
        if not isinstance(function, tirx.PrimFunc) or is_scheduled(function) or not is_symbolic(function):
            continue
        function, named = with_sizes_named(function)
        joined, given = with_sizes_joined(begin_with_infinity(with_cheap_stages_inlined(function)))
        sliced, whole = with_slice_apart(joined)
        if whole is not None:
            given[sliced.params[-1]] = given.get(whole, whole)
        kernel, name = read_kernel(sliced), variable.name_hint
        try:
            found = None if kernel is None else _by_winograd(kernel, given, hardware, decisions)
            if found is None and kernel is not None:
                found = _tiled(kernel, given, hardware, decisions)
        except ValueError:  # no schedule applies to one of its tiles
            found = None
        if found is None:
            LOGGER.info("%s has symbolic sizes and stays as TVM compiles it", name)
            continue
        tiled, packing, used = found
        tiles[name] = tuple(replace(tile, runs=substitute(tile.runs, named)) for tile in used)
        if packing is None:
            result.update_func(variable, tiled)
        else:
            split[name] = packing
    return TiledKernels(pack_weights(result, split) if split else result, tiles)


def _by_winograd(
    kernel: SymbolicKernel, given: Mapping[Any, Any], hardware: Hardware, decisions: Mapping[str, Decision] | None
) -> _Tiled | None:
    """The same by Winograd's minimal filtering, where that is permitted and possible."""
    convolution = read_convolution(kernel)
    form = None if convolution is None else winograd_form(convolution, hardware)
    if convolution is None or form is None:
        return None
    try:
        split, used = winograd_kernel(convolution, form.outputs, form.rows, form.shared, hardware, decisions)
    except ValueError:  # no schedule applies to one of its stages
        return None
    tiled = seen_as_given(split.kernel, given).with_attrs({READY: True, TILED: True})
    return tiled, SplitKernel(split.packing, tiled, split.positions), used


def _tiled(
    kernel: SymbolicKernel, given: Mapping[Any, Any], hardware: Hardware, decisions: Mapping[str, Decision] | None
) -> _Tiled:
    """The kernel as loops over tiles, where it takes its weights packed what packs them, and its tiles. `given`:
    parameters that it has in place of others."""
    function = kernel.function
    positions = function.attrs.get("layout_free_buffers", ())
    weights = frozenset(function.params[int(position)] for position in positions)
    for free, in_blocks in ((weights, True), (weights, False), (frozenset(), False)):
        schedules = TileSchedules(hardware, free, decisions)
        try:
            tiled, packing = assemble(kernel, schedules, in_blocks)
            break
        except (CannotShareWeights, NotInBlocks):
            continue
    tiled = seen_as_given(tiled, given).with_attrs({READY: True, TILED: True})
    used = tuple(schedules.used)
    if packing is None:
        return tiled, None, used
    places: list[Any] = list(function.params)
    return tiled, SplitKernel(packing, tiled, tuple(places.index(weight) for weight in schedules.weights)), used
