"""ONNX's operator Attention (opset 23 and later); TVM's importer knows only ONNX Runtime's of that name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import onnx
from tvm import relax
from tvm.relax import op

from ..errors import UnsupportedModelError
from ..transform.functions import extents
from .attention import attention, join_heads, split_heads
from .onnx_nodes import padded

__all__ = ["convert_attention", "is_plain_attention"]

_PLAIN_ATTRIBUTES = frozenset({"is_causal", "kv_num_heads", "q_num_heads", "scale", "softmax_precision"})


def is_plain_attention(node: onnx.NodeProto) -> bool:
    """Whether `convert_attention` takes the node."""
    if node.op_type != "Attention" or node.domain not in ("", "ai.onnx"):
        return False
    attributes = {attribute.name: onnx.helper.get_attribute_value(attribute) for attribute in node.attribute}
    return not _beyond(attributes, [name or None for name in node.input], len(node.output))


def _beyond(attributes: Mapping[str, Any], inputs: Sequence[Any], outputs: int) -> list[str]:
    """What a node asks for beside an attention that knows all lengths and has its scores for itself."""
    names = [name for name, value in attributes.items() if value and name not in _PLAIN_ATTRIBUTES]
    if attributes.get("softmax_precision", onnx.TensorProto.FLOAT) != onnx.TensorProto.FLOAT:
        names.append("softmax_precision")
    if attributes.get("is_causal", 0) and any(value is not None for value in inputs[4:]):
        names.append("is_causal with a cache")
    if any(value is not None for value in inputs[6:]):
        names.append("lengths of keys")
    return sorted(names) + ["scores as an output"] * (outputs > 3)


def convert_attention(bb: Any, inputs: Sequence[Any], attrs: dict[str, Any]) -> relax.Tuple:
    """The result, and all keys and values: those of the cache, where there is one, and the new ones.

    Operands are [batch, heads, places, width], or [batch, places, heads * width] with the heads in the attributes.

    Raises
    ------
    UnsupportedModelError
        It is more than a plain attention, and was not written as other operators.
    """
    others = {name: value for name, value in attrs.items() if name != "tvm_custom"}
    unknown = _beyond(others, inputs, int(attrs["tvm_custom"]["num_outputs"]))
    if unknown:
        raise UnsupportedModelError(f"Attention with {', '.join(unknown)} cannot be imported")
    query, key, value, mask, old_key, old_value, *_ = padded(inputs, 6)
    is_flat = len(extents(query.ty)) == 3
    if is_flat:
        shared = int(attrs["kv_num_heads"])
        query = split_heads(bb.emit, query, int(attrs["q_num_heads"]))
        key, value = (split_heads(bb.emit, part, shared) for part in (key, value))
    if old_key is not None:
        key, value = (bb.emit(op.concat(parts, 2)) for parts in ((old_key, key), (old_value, value)))
    scale = attrs.get("scale") or None
    result = attention(bb.emit, query, key, value, mask, bool(attrs.get("is_causal", 0)), scale)
    return relax.Tuple([join_heads(bb.emit, result) if is_flat else result, key, value])
