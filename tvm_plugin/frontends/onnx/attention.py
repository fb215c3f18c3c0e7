"""ONNX's operator Attention (opset 23 and later); TVM's importer knows only ONNX Runtime's of that name."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import onnx
from tvm import relax
from tvm.relax import op

from ...errors import UnsupportedModelError
from ...relax_ir.tensors import shape_of
from ..attention import attention, join_heads, split_heads, zero_without
from .nodes import padded

__all__ = ["convert_attention", "is_known_attention"]

_KNOWN = frozenset(
    {"is_causal", "kv_num_heads", "left_window_size", "q_num_heads", "qk_matmul_output_mode", "right_window_size"}
    | {"scale", "softcap", "softmax_precision"}  # the last one is what a softmax is computed in: no less, here
)


def is_known_attention(node: onnx.NodeProto) -> bool:
    """Whether `convert_attention` takes the node."""
    is_ours = node.op_type == "Attention" and node.domain in ("", "ai.onnx")
    return is_ours and all(attribute.name in _KNOWN for attribute in node.attribute)


def convert_attention(bb: Any, inputs: Sequence[Any], attrs: dict[str, Any], opset: int) -> relax.Tuple:
    """The result, and all keys and values: those of the cache, where there is one, and the new ones. Then, where it is
    asked for, one of the steps between: the scores, capped ones, those that masks leave, or their softmax.

    Where no key is left for a query, its result is zero, and so is its softmax. Of keys in a cache that is longer than
    they are, the lengths are given, [batch]; the last queries belong to the last of them.

    Operands are [batch, heads, places, width], or [batch, places, heads * width] with the heads in the attributes.

    Raises
    ------
    UnsupportedModelError
        It has attributes of a later version, and was not written as other operators.
    """
    unknown = sorted(attrs.keys() - _KNOWN - {"tvm_custom"})
    if unknown:
        raise UnsupportedModelError(f"Attention with {', '.join(unknown)} cannot be imported")
    query, key, value, mask, old_key, old_value, lengths = padded(inputs, 7)
    is_flat = len(shape_of(query)) == 3
    if is_flat:
        shared = int(attrs["kv_num_heads"])
        query = split_heads(bb.emit, query, int(attrs["q_num_heads"]))
        key, value = (split_heads(bb.emit, part, shared) for part in (key, value))
    if old_key is not None:
        key, value = (bb.emit(op.concat(parts, 2)) for parts in ((old_key, key), (old_value, value)))
    places = shape_of(key)[2]
    widths = (1, places) if opset < 24 else (places,)  # from then on, shorter ones are padded
    if mask is not None and isinstance(places, int) and shape_of(mask)[-1] not in widths:
        raise UnsupportedModelError(
            f"Attention to {places} keys with a mask of {shape_of(mask)[-1]} cannot be imported"
        )
    causal, scale = bool(attrs.get("is_causal", 0)), attrs.get("scale") or None
    first = 0 if old_key is None else shape_of(old_key)[2]
    before, behind = (int(attrs.get(f"{side}_window_size", -1)) for side in ("left", "right"))
    if lengths is not None or max(before, behind) >= 0 or (causal and mask is not None):
        behind = 0 if causal else behind
        seen = _seen(bb.emit, shape_of(query)[2], places, first, lengths, before, behind)
        mask, causal = _both(bb.emit, mask, seen), False
    steps: list[Any] = []
    softcap = float(attrs.get("softcap", 0.0))
    result = attention(bb.emit, query, key, value, mask, causal, scale, True, softcap, first, steps)
    results = [join_heads(bb.emit, result) if is_flat else result, key, value]
    if int(attrs["tvm_custom"]["num_outputs"]) > 3:
        results.append(_step(bb.emit, steps, int(attrs.get("qk_matmul_output_mode", 0))))
    return relax.Tuple(results)


def _step(emit: Any, steps: Sequence[Any], mode: int) -> Any:
    """One of the steps of an attention, a softmax with zeros where no key is left."""
    step = steps[mode]
    if mode < 3:
        return step
    return zero_without(emit, emit(op.greater(steps[2], relax.const(-math.inf, str(step.ty.dtype)))), step)


def _seen(emit: Any, rows: Any, places: Any, first: Any, lengths: Any, before: int, behind: int) -> Any:
    """Which keys queries see: at most so many before their own place, and behind it; -1 leaves that open.

    Booleans of [rows, places], or with lengths of keys, [batch], of [batch, 1, 1 or rows, places].
    """
    place = emit(op.arange(0, places, 1, "int64"))
    own = emit(op.expand_dims(emit(op.arange(0, rows, 1, "int64")), 1))
    seen = []
    if lengths is not None:
        count = emit(op.reshape(emit(op.astype(lengths, "int64")), [-1, 1, 1, 1]))
        seen.append(emit(op.less(place, count)))
        own = emit(op.add(own, emit(op.subtract(count, _number(rows)))))
    else:
        own = emit(op.add(own, _number(first)))
    if before >= 0:
        seen.append(emit(op.greater_equal(place, emit(op.subtract(own, _number(before))))))
    if behind >= 0:
        seen.append(emit(op.less_equal(place, emit(op.add(own, _number(behind))))))
    return functools.reduce(lambda one, other: emit(op.logical_and(one, other)), seen)


def _number(size: Any) -> Any:
    return relax.const(int(size), "int64") if isinstance(size, int) else op.shape_to_tensor(relax.ShapeExpr([size]))


def _both(emit: Any, mask: Any, seen: Any) -> Any:
    """A mask of booleans or numbers, if there is one, for those keys alone that are seen."""
    if mask is None:
        return seen
    if str(mask.ty.dtype) == "bool":
        return emit(op.logical_and(mask, seen))
    return emit(op.where(seen, mask, relax.const(-math.inf, str(mask.ty.dtype))))
