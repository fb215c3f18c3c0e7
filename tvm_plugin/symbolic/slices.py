"""Kernels that write a slice of a larger tensor, a part of a concatenation, as kernels of that part alone."""

from __future__ import annotations

from typing import Any

import tvm_ffi
from tvm import ir, s_tir, tirx

from ..search.space.expressions import substitute, uses
from ..search.space.statements import function_of
from .part import number

__all__ = ["is_slice", "with_slice_apart"]


def with_slice_apart(function: tirx.PrimFunc) -> tuple[tirx.PrimFunc, Any | None]:
    """A kernel whose last stage copies its result into a slice of its last parameter, without that stage.

    Returns
    -------
    function : tvm.tirx.PrimFunc
        Its last parameter is the slice, whose rows lie apart; the given kernel where it is no such kernel.
    whole : Buffer or None
        The parameter that it has the slice in place of.
    """
    root, whole = function.body, function.params[-1]
    if not isinstance(root, s_tir.SBlockRealize) or not isinstance(root.block.body, tirx.SeqStmt):
        return function, None
    *statements, last = root.block.body.seq
    while isinstance(last, tirx.For):
        last = last.body
    if not isinstance(last, s_tir.SBlockRealize) or not isinstance(last.block.body, tirx.BufferStore):
        return function, None
    part = _copied(last.block, whole)
    others = tirx.SeqStmt(statements) if len(statements) > 1 else statements[0]
    if part is None or part not in root.block.alloc_buffers or uses(others, whole):
        return function, None
    strides = [number(1)]
    for extent in reversed(whole.shape[1:]):
        strides.insert(0, strides[0] * extent)
    begin = number(0)
    for index, axis, stride in zip(last.block.body.indices, last.block.iter_vars, strides, strict=True):
        begin = begin + _beyond(index, axis.var) * stride
    view = tirx.decl_buffer(part.shape, str(part.dtype), str(part.name), strides=strides, elem_offset=begin)
    own = [buffer for buffer in root.block.alloc_buffers if not buffer.same_as(part)]
    statements = [substitute(statement, [(part, view)]) for statement in statements]
    return function_of([*list(function.params)[:-1], view], statements, function.attrs, own), whole


def is_slice(buffer: Any) -> bool:
    """Whether a parameter is such a slice: what it is written in is larger than itself."""
    return len(buffer.strides) > 0


def _copied(block: Any, whole: Any) -> Any | None:
    """What a block copies, as a whole, into a slice of a buffer; None where it does something else."""
    store, axes = block.body, [axis.var for axis in block.iter_vars]
    if not store.buffer.same_as(whole) or not isinstance(store.value, ir.TensorLoad) or len(axes) != len(whole.shape):
        return None
    if not all(index.same_as(axis) for index, axis in zip(store.value.indices, axes, strict=True)):
        return None
    extents = [axis.dom.extent for axis in block.iter_vars]
    if not all(map(tvm_ffi.structural_equal, extents, store.value.source.shape)):
        return None  # a slice of what it reads
    begins = [_beyond(index, axis) for index, axis in zip(store.indices, axes, strict=True)]
    return None if any(begin is None for begin in begins) else store.value.source


def _beyond(index: Any, axis: Any) -> Any | None:
    """How much an index is more than a variable; None where that is no constant."""
    if index.same_as(axis):
        return number(0)
    is_sum = isinstance(index, tirx.Add) and index.a.same_as(axis) and isinstance(index.b, tirx.IntImm)
    return index.b if is_sum else None
