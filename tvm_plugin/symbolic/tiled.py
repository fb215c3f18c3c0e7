"""A module's kernels with symbolic sizes, tiled."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from tvm import ir, tirx

from ..search.space.extrema import begin_with_infinity
from ..search.space.gpu.hardware import GpuHardware
from ..search.space.hardware import Hardware
from ..transform.pack_weights import SplitKernel, pack_weights
from .assemble import assemble
from .blocks import NotInBlocks
from .inlined import with_cheap_stages_inlined
from .joined import seen_as_given, with_sizes_joined
from .kernel import SymbolicKernel, is_symbolic, read_kernel
from .schedules import CannotShareWeights, TileSchedules

__all__ = ["READY", "tile_symbolic_kernels"]

LOGGER = logging.getLogger("eqtune")

READY = "eqtune.ready"
"""Attribute of kernels that are scheduled and need nothing else before TVM lowers them."""


def tile_symbolic_kernels(mod: ir.IRModule, hardware: Hardware) -> ir.IRModule:
    """Replace the kernels that have symbolic sizes by loops over tiles, and pack their constant weights.

    Parameters
    ----------
    mod : tvm.ir.IRModule
        Of `lower_to_kernels`, not scheduled. Kernels without symbolic sizes stay, and those that are no sequence of
        loop nests around one statement each (cumulative sums, sorting), which TVM compiles as they are written.
    hardware : Hardware
        For a GPU, all of them stay.
    """
    if isinstance(hardware, GpuHardware):
        return mod
    result = mod.clone()
    split: dict[str, SplitKernel] = {}
    for variable, function in mod.functions_items():
        if not isinstance(function, tirx.PrimFunc) or not is_symbolic(function):
            continue
        joined, given = with_sizes_joined(begin_with_infinity(with_cheap_stages_inlined(function)))
        kernel = read_kernel(joined)
        try:
            tiled, packing = (None, None) if kernel is None else _tiled(kernel, given, hardware)
        except ValueError:  # no schedule applies to one of its tiles
            tiled, packing = None, None
        if tiled is None:
            LOGGER.info("%s has symbolic sizes and stays as TVM compiles it", variable.name_hint)
            continue
        if packing is None:
            result.update_func(variable, tiled)
        else:
            split[variable.name_hint] = packing
    return pack_weights(result, split) if split else result


def _tiled(
    kernel: SymbolicKernel, given: Mapping[Any, Any], hardware: Hardware
) -> tuple[tirx.PrimFunc, SplitKernel | None]:
    """The kernel as loops over tiles, and where it takes its weights packed, what packs them. `given`: parameters that
    it has in place of others."""
    function = kernel.function
    positions = function.attrs.get("layout_free_buffers", ())
    weights = frozenset(function.params[int(position)] for position in positions)
    for free, in_blocks in ((weights, True), (weights, False), (frozenset(), False)):
        schedules = TileSchedules(hardware, free)
        try:
            tiled, packing = assemble(kernel, schedules, in_blocks)
            break
        except (CannotShareWeights, NotInBlocks):
            continue
    tiled = seen_as_given(tiled, given).with_attr(READY, True)
    if packing is None:
        return tiled, None
    places: list[Any] = list(function.params)
    return tiled, SplitKernel(packing, tiled, tuple(places.index(weight) for weight in schedules.weights))
