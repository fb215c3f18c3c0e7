"""ONNX's operator Attention (opset 23 and later); TVM's importer knows only ONNX Runtime's of that name."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import onnx
from tvm import relax
from tvm.relax import op

from ..errors import UnsupportedModelError
from ..transform.functions import shape_of
from .attention import attention, join_heads, split_heads
from .onnx_nodes import padded

__all__ = ["convert_attention", "is_plain_attention"]

_PLAIN_ATTRIBUTES = frozenset({"is_causal", "kv_num_heads", "q_num_heads", "scale", "softmax_precision"})


def is_plain_attention(node: onnx.NodeProto) -> bool:
    """Whether `convert_attention` takes the node."""
    if node.op_type != "Attention" or node.domain not in ("", "ai.onnx"):
        return False
    attributes = {attribute.name: onnx.helper.get_attribute_value(attribute) for attribute in node.attribute}
    return not _beyond(attributes, len(node.output))


def _beyond(attributes: Mapping[str, Any], outputs: int) -> list[str]:
    """What a node asks for beside an attention that has its scores for itself."""
    names = [name for name, value in attributes.items() if value and name not in _PLAIN_ATTRIBUTES]
    if attributes.get("softmax_precision", onnx.TensorProto.FLOAT) != onnx.TensorProto.FLOAT:
        names.append("softmax_precision")
    return sorted(names) + ["scores as an output"] * (outputs > 3)


def convert_attention(bb: Any, inputs: Sequence[Any], attrs: dict[str, Any]) -> relax.Tuple:
    """The result, and all keys and values: those of the cache, where there is one, and the new ones.

    Where no key is left for a query, its result is zero. Of keys in a cache that is longer than they are, the lengths
    are given, [batch]; the last queries belong to the last of them.

    Operands are [batch, heads, places, width], or [batch, places, heads * width] with the heads in the attributes.

    Raises
    ------
    UnsupportedModelError
        It is more than a plain attention, and was not written as other operators.
    """
    others = {name: value for name, value in attrs.items() if name != "tvm_custom"}
    unknown = _beyond(others, int(attrs["tvm_custom"]["num_outputs"]))
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
    if mask is not None and isinstance(places, int) and shape_of(mask)[-1] not in (1, places):
        raise UnsupportedModelError(
            f"Attention to {places} keys with a mask of {shape_of(mask)[-1]} cannot be imported"
        )
    causal, scale = bool(attrs.get("is_causal", 0)), attrs.get("scale") or None
    first = 0 if old_key is None else shape_of(old_key)[2]
    if lengths is not None or (causal and mask is not None):
        seen = _seen(bb.emit, shape_of(query)[2], places, first, lengths, causal)
        mask, causal = _both(bb.emit, mask, seen), False
    result = attention(bb.emit, query, key, value, mask, causal, scale, zero_without_keys=True, first=first)
    return relax.Tuple([join_heads(bb.emit, result) if is_flat else result, key, value])


def _seen(emit: Any, rows: Any, places: Any, first: Any, lengths: Any, causal: bool) -> Any:
    """Which keys queries see, as booleans of [rows, places], or [batch, 1, 1 or rows, places] with lengths of keys."""
    place = emit(op.arange(0, places, 1, "int64"))
    row = emit(op.expand_dims(emit(op.arange(0, rows, 1, "int64")), 1))
    if lengths is None:
        return emit(op.less_equal(place, emit(op.add(row, _number(first)))))
    count = emit(op.reshape(emit(op.astype(lengths, "int64")), [-1, 1, 1, 1]))
    seen = emit(op.less(place, count))
    if not causal:
        return seen
    last = emit(op.add(row, emit(op.subtract(count, _number(rows)))))
    return emit(op.logical_and(seen, emit(op.less_equal(place, last))))


def _number(size: Any) -> Any:
    return relax.const(int(size), "int64") if isinstance(size, int) else op.shape_to_tensor(relax.ShapeExpr([size]))


def _both(emit: Any, mask: Any, seen: Any) -> Any:
    """A mask of booleans or numbers, if there is one, for those keys alone that are seen."""
    if mask is None:
        return seen
    if str(mask.ty.dtype) == "bool":
        return emit(op.logical_and(mask, seen))
    return emit(op.where(seen, mask, relax.const(-math.inf, str(mask.ty.dtype))))
