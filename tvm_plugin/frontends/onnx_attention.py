"""ONNX's operator Attention (opset 23 and later); TVM's importer knows only ONNX Runtime's of that name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx
from tvm import relax
from tvm.relax import op

from ..transform.functions import extents
from .attention import attention

__all__ = ["convert_attention", "is_plain_attention"]

_PLAIN_ATTRIBUTES = frozenset({"is_causal", "kv_num_heads", "q_num_heads", "scale", "softmax_precision"})


def is_plain_attention(node: onnx.NodeProto) -> bool:
    """Whether `convert_attention` takes the node: that it caps no scores, nor returns them, and knows all lengths."""
    attributes = {attribute.name: onnx.helper.get_attribute_value(attribute) for attribute in node.attribute}
    given = {name for name, value in attributes.items() if value}
    return (
        node.op_type == "Attention"
        and node.domain in ("", "ai.onnx")
        and not any(node.input[6:])
        and not any(node.output[3:])
        and not (any(node.input[4:]) and attributes.get("is_causal", 0))
        and given <= _PLAIN_ATTRIBUTES
        and attributes.get("softmax_precision", onnx.TensorProto.FLOAT) == onnx.TensorProto.FLOAT
    )


def convert_attention(bb: Any, inputs: Sequence[Any], attrs: dict[str, Any]) -> relax.Tuple:
    """The result, and all keys and values: those of the cache, where there is one, and the new ones.

    Operands are [batch, heads, places, width], or [batch, places, heads * width] with the heads in the attributes.
    """
    query, key, value, mask, old_key, old_value, *_ = [*inputs, None, None, None]
    is_flat = len(extents(query.ty)) == 3
    if is_flat:
        shared = int(attrs["kv_num_heads"])
        query = _split(bb, query, int(attrs["q_num_heads"]))
        key, value = _split(bb, key, shared), _split(bb, value, shared)
    if old_key is not None:
        key, value = (bb.emit(op.concat(parts, 2)) for parts in ((old_key, key), (old_value, value)))
    scale = attrs.get("scale") or None
    result = attention(bb.emit, query, key, value, mask, bool(attrs.get("is_causal", 0)), scale)
    if is_flat:
        joined = bb.emit(op.permute_dims(result, [0, 2, 1, 3]))
        result = bb.emit(op.reshape(joined, [*extents(joined.ty)[:2], -1]))
    return relax.Tuple([result, key, value])


def _split(bb: Any, x: Any, heads: int) -> Any:
    batch, places, width = extents(x.ty)
    parts = bb.emit(op.reshape(x, [batch, places, heads, width // heads]))
    return bb.emit(op.permute_dims(parts, [0, 2, 1, 3]))
