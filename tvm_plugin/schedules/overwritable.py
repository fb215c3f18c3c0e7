"""In the memory of which operands a scheduled kernel may write its result."""

from __future__ import annotations

from typing import Any

import tvm_ffi
from tvm import ir, s_tir, tirx

from ..search.space.marks import OVERLAPPING_TAIL, PICKED_LANES

__all__ = ["OVERWRITABLE", "overwritable", "with_overwritable"]

OVERWRITABLE = "eqtune.overwritable"
"""Attribute of scheduled kernels: the places of parameters in whose memory they may write their result."""


def with_overwritable(function: tirx.PrimFunc) -> tirx.PrimFunc:
    """A scheduled kernel with what it may overwrite as an attribute; see `overwritable`."""
    found = overwritable(function)
    return function.with_attr(OVERWRITABLE, found) if found else function


def overwritable(function: tirx.PrimFunc) -> list[int]:
    """In the memory of which parameters a scheduled kernel may write its result, the last parameter: their places.

    Each element of such a parameter is read only for the element of the result that is stored in its place, and for
    every one of those; nothing else is stored there before, and nothing twice. Ask before the kernel is prepared for
    lowering. None of a kernel for a GPU.
    """
    stores: list[Any] = []
    loads: list[Any] = []
    special: list[Any] = []

    def visit_block(block: Any) -> None:
        special.extend(block.match_buffers)

    def visit_loop(loop: Any) -> None:
        # What two vectors of a row share is computed twice.
        shares = OVERLAPPING_TAIL in loop.annotations or _is_ragged(loop)
        if loop.thread_binding is not None or shares:
            special.append(loop)

    visitors = [
        (tirx.BufferStore, stores.append),
        (ir.TensorLoad, loads.append),
        (s_tir.SBlock, visit_block),
        (tirx.For, visit_loop),
        (tirx.DeclBuffer, special.append),
    ]
    tvm_ffi.structural_walk(function.body, visitors)
    *operands, result = function.params
    own = [store for store in stores if store.buffer.same_as(result)]
    if special or not own or any(load.source.same_as(result) for load in loads):
        return []
    return [
        place
        for place, operand in enumerate(operands)
        if _are_alike(operand, result)
        and all(_reads(store, operand) for store in own)
        and sum(load.source.same_as(operand) for load in loads) == sum(_reads(store, operand) for store in own)
    ]


def _is_ragged(loop: Any) -> bool:
    """Whether it will be vectors of which the last one overlaps the one before (`pick_lanes`)."""
    lanes = loop.annotations.get(PICKED_LANES)
    return lanes is not None and int(loop.extent) % int(lanes) != 0


def _are_alike(one: Any, other: Any) -> bool:
    return str(one.dtype) == str(other.dtype) and bool(tvm_ffi.structural_equal(one.ty.shape, other.ty.shape))


def _reads(store: Any, buffer: Any) -> int:
    """How often a store's value reads the buffer, all in the place of what is stored; 0 where it reads another place,
    too."""
    loads: list[Any] = []
    tvm_ffi.structural_walk(store.value, (ir.TensorLoad, loads.append))
    own = [load for load in loads if load.source.same_as(buffer)]
    here = [load for load in own if tvm_ffi.structural_equal(load.indices, store.indices, map_free_vars=False)]
    return len(here) if len(here) == len(own) else 0
