"""GroupQueryAttention of ONNX Runtime: attention with a cache of keys and values, as generated language models have it.

How many places of the cache count is an input. Its last places are the new ones: they are written where those before
them end, and turned by their places. Where more places are asked for than there are, the cache grows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from tvm import relax
from tvm.relax import op

from ...dtypes import numpy_dtype
from ...errors import UnsupportedModelError
from ...relax_ir.constants import constant_of
from ...relax_ir.tensors import extents
from ..attention import attention, join_heads, split_heads
from .nodes import Convert, numbers_of, padded, text_of
from .operators import OPERATORS
from .runtime_operators import ONNX_RUNTIME

__all__ = ["CACHED_ATTENTION"]

_NAME = "GroupQueryAttention"

_READ = frozenset(
    {"num_heads", "kv_num_heads", "do_rotary", "rotary_interleaved", "scale", "softcap", "local_window_size"}
    | {"qk_norm_epsilon", "tvm_custom"}  # of norms that are inputs, which are refused; of TVM's importer
)

_PLAIN: dict[str, tuple[Any, ...]] = {
    "causal": (1,),
    "k_quant_type": ("NONE",),
    "smooth_softmax": (0, -1),
    "v_quant_type": ("NONE",),
}
"""What other attributes are where nobody gives them; ONNX Runtime writes them out when it saves a model. Those that are
not here are zero."""


def _convert(bb: Any, inputs: Sequence[Any], attrs: dict[str, Any], convert: Convert) -> relax.Tuple:
    query, key, value, old_key, old_value, lengths, total, cosines, sines, positions, bias, *more = padded(inputs, 14)
    given = {name: text_of(value) if isinstance(value, bytes) else value for name, value in attrs.items()}
    beyond = sorted(name for name in given.keys() - _READ if given[name] not in _PLAIN.get(name, (0,)))
    beyond += ["another input"] * any(tensor is not None for tensor in more)
    if beyond:
        raise UnsupportedModelError(f"{_NAME} with {', '.join(beyond)} cannot be imported")
    heads, shared = int(attrs["num_heads"]), int(attrs["kv_num_heads"])
    if key is None:  # one tensor holds all three
        width = extents(query.ty)[-1] // (heads + 2 * shared)
        cuts = [heads * width, (heads + shared) * width, (heads + 2 * shared) * width]
        query, key, value = (
            bb.emit(op.strided_slice(query, [2], [begin], [end])) for begin, end in zip([0, *cuts], cuts, strict=False)
        )
    query, key, value = (
        split_heads(bb.emit, x, count) for x, count in ((query, heads), (key, shared), (value, shared))
    )
    batch, _, count, _ = extents(query.ty)
    (asked,) = (int(number) for number in numbers_of(_NAME, "total_sequence_length", total))
    kept = 0 if old_key is None else extents(old_key.ty)[2]
    places = max(asked, kept)
    is_first = count == asked
    ends = bb.emit(op.reshape(bb.emit(op.astype(lengths, "int64")), [batch, 1]))
    start: Any = constant_of(np.zeros((batch, 1), np.int64))
    if not is_first:
        start = bb.emit(op.clip(bb.emit(op.add(ends, relax.const(1 - count, "int64"))), 0, places - count))
    own = bb.emit(op.add(start, constant_of(np.arange(count, dtype=np.int64)[None])))
    if attrs.get("do_rotary", 0):
        tables = [own if positions is None else positions, cosines, sines]
        turned = {"interleaved": attrs.get("rotary_interleaved", 0)}
        query, key = (bb.emit(ONNX_RUNTIME["RotaryEmbedding"](bb, [x, *tables], turned, convert)) for x in (query, key))
    if is_first and places == count:
        keys, values = key, value
    else:
        keys, values = (
            _written(bb, old, new, start, places, convert) for old, new in ((old_key, key), (old_value, value))
        )
    numbers = constant_of(np.arange(places, dtype=np.int64).reshape(1, 1, 1, places))
    own = bb.emit(op.reshape(own, [batch, 1, count, 1]))
    counted = bb.emit(op.less_equal(numbers, own))
    if is_first:  # shorter sequences of a batch end earlier
        there = bb.emit(op.less_equal(numbers, bb.emit(op.reshape(ends, [batch, 1, 1, 1]))))
        counted = bb.emit(op.logical_and(counted, there))
    window = int(attrs.get("local_window_size", -1))
    if window > 0:
        first = bb.emit(op.subtract(own, relax.const(window, "int64")))
        counted = bb.emit(op.logical_and(counted, bb.emit(op.greater(numbers, first))))
    mask = counted
    if bias is not None:
        if extents(bias.ty)[3] == asked < places:  # the last places of a cache do not count
            bias = bb.emit(op.nn.pad(bias, [0, 0, 0, 0, 0, 0, 0, places - asked]))
        low = relax.const(float(np.finfo(numpy_dtype(str(query.ty.dtype))).min), str(query.ty.dtype))
        mask = bb.emit(op.where(counted, bias, low))
    scale, softcap = float(attrs.get("scale", 0.0)) or None, float(attrs.get("softcap", 0.0))
    result = attention(bb.emit, query, keys, values, mask, scale=scale, softcap=softcap)
    return relax.Tuple([join_heads(bb.emit, result), keys, values])


def _written(bb: Any, old: Any, new: Any, start: Any, places: int, convert: Convert) -> Any:
    """The cache, grown to so many places, with new ones from `start`, and zeros behind them."""
    batch, heads, _, width = extents(new.ty)
    kept = 0 if old is None else extents(old.ty)[2]
    if kept == 0:
        old = constant_of(np.zeros((batch, heads, places, width), numpy_dtype(str(new.ty.dtype))))
    elif kept < places:
        old = bb.emit(op.nn.pad(old, [0, 0, 0, 0, 0, places - kept, 0, 0]))
    starts = bb.emit(op.reshape(start, [batch]))
    written = bb.emit(OPERATORS["TensorScatter"](bb, [old, new, starts], {"axis": 2}, convert))
    numbers = constant_of(np.arange(places, dtype=np.int64).reshape(1, 1, places, 1))
    end = bb.emit(op.add(bb.emit(op.reshape(start, [batch, 1, 1, 1])), relax.const(extents(new.ty)[2], "int64")))
    return bb.emit(op.where(bb.emit(op.less(numbers, end)), written, relax.const(0, str(new.ty.dtype))))


CACHED_ATTENTION = {_NAME: _convert}
"""By operator: a function of the block builder, inputs, attributes, and what converts other nodes."""
