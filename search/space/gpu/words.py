"""Reductions across threads in words of 32 bits, which a warp can exchange.

TVM adds up bytes, booleans and bfloat16 through shared memory, and puts nothing between the steps of a warp:

    t[i] = t[i] + t[i + 8]                v = v + shuffle(v, 8)
    t[i] = t[i] + t[i + 4]         ->     v = v + shuffle(v, 4)
    ...                                   ...

On GPUs since Volta, a lane may store its sum before another has read what was there. Reductions that are `or` or `and`
it does not lower at all.
"""

from __future__ import annotations

from typing import Any

import tvm_ffi
from tvm import s_tir, tirx
from tvm.ir.expr import TensorLoad, TensorRegion

from ..expressions import nodes_of
from ..statements import block_with
from .bind import split_kinds

__all__ = ["are_exchanged", "keep_narrow_sums_apart", "reduce_in_words"]

_COMBINED_AS = {
    tirx.Add: tirx.Add,
    tirx.Mul: tirx.Mul,
    tirx.Max: tirx.Max,
    tirx.Min: tirx.Min,
    tirx.Or: tirx.Max,
    tirx.And: tirx.Min,
}
"""What combines words that stand for narrower values."""


def are_exchanged(dtype: str) -> bool:
    """Whether TVM exchanges values of this type between the threads of a warp."""
    return dtype == "float16" or tvm_ffi.dtype(dtype).bits >= 32


def keep_narrow_sums_apart(schedule: Any) -> None:
    """Where threads reduce narrower types in memory, let them do so in a register, which is written when it is done.

    Schedules of these sketches do; those of others, and old ones, are changed so that `reduce_in_words` can be right.
    """
    for block in schedule.get_child_blocks(schedule.get_sblock("root")):
        node = schedule.get(block)
        if node.init is None or not _is_narrow_reduction(node.body, in_memory=True):
            continue
        around, reduced = split_kinds(schedule, block, schedule.get_loops(block))
        if any(schedule.get(loop).thread_binding is not None for loop in reduced):
            place = around[-1] if around else schedule.add_unit_loop(reduced[0])
            schedule.reverse_compute_at(schedule.cache_write(block, 0, "local"), place, preserve_unit_loops=True)


def reduce_in_words(func: Any) -> Any:
    """Keep what is reduced in registers or shared memory in 32 bits, and narrow it where it is read.

    The same object where there are no reductions of narrower types, or all write to memory.
    """
    words: dict[Any, Any] = {}
    for block in nodes_of(func.body, s_tir.SBlock):
        if block.init is not None and _is_narrow_reduction(block.body, in_memory=False):
            narrow = block.body.buffer
            word = "float32" if "float" in str(narrow.dtype) else "int32"
            words[narrow] = tirx.decl_buffer(narrow.shape, word, narrow.name, scope=narrow.scope())
    if not words:
        return func

    def load(node: Any) -> Any:
        word = words.get(node.source)
        return node if word is None else tirx.Cast(str(node.source.dtype), tirx.BufferLoad(word, node.indices))

    def region(node: Any) -> Any:
        return tirx.BufferRegion(words[node.source], node.region) if node.source in words else node

    def in_words(node: Any) -> Any:
        if isinstance(node.body, tirx.BufferStore) and node.body.buffer in words:
            word = words[node.body.buffer]
            combine = _COMBINED_AS[type(node.body.value)]
            result, value = (_widened(part, word) for part in (node.body.value.a, node.body.value.b))
            body = tirx.BufferStore(word, combine(result, value), node.body.indices)
            init = tirx.BufferStore(word, _identity(combine, str(word.dtype)), node.init.indices)
            return block_with(node, body=body, init=init)
        if not any(buffer in words for buffer in node.alloc_buffers):
            return node
        return block_with(node, alloc_buffers=[words.get(buffer, buffer) for buffer in node.alloc_buffers])

    visits = [(TensorLoad, load), (TensorRegion, region), (s_tir.SBlock, in_words)]
    return func.with_body(tvm_ffi.structural_map(func.body, visits))


def _is_narrow_reduction(store: Any, in_memory: bool) -> bool:
    """Whether a store combines what is there with a value, of a type that is not exchanged."""
    if not isinstance(store, tirx.BufferStore) or type(store.value) not in _COMBINED_AS:
        return False
    parts = store.value.a, store.value.b
    own = any(isinstance(part, TensorLoad) and part.source.same_as(store.buffer) for part in parts)
    in_place = (str(store.buffer.scope()) == "global") == in_memory
    return own and in_place and not are_exchanged(str(store.buffer.dtype))


def _widened(value: Any, word: Any) -> Any:
    """As a word; what was one before it was narrowed, itself."""
    if isinstance(value, tirx.Cast) and isinstance(value.value, TensorLoad) and value.value.source.same_as(word):
        return value.value
    return tirx.Cast(str(word.dtype), value)


def _identity(combine: Any, dtype: str) -> Any:
    """What TVM knows a reduction by."""
    if combine is tirx.Max:
        return tirx.min_value(dtype)
    return tirx.max_value(dtype) if combine is tirx.Min else tirx.const(int(combine is tirx.Mul), dtype)
