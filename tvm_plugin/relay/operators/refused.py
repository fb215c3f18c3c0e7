"""Why operators of Relay have no row here, for those that people ask about."""

from __future__ import annotations

__all__ = ["reason_of"]

_DATA_DEPENDENT = "the shape of its result depends on the data"
_RANDOM = "Relax draws no random numbers"
_COMPILED = "the compiler made it: save the module before relay.build or relay.vm.compile"
_DETECTION = "Relax has no such operator: end the network before it, and compute the rest outside"
_TRAINING = "it belongs to training"
_REFERENCE = "Relax has no reference cells"

_REASONS = {
    "argwhere": _DATA_DEPENDENT,
    "sparse_fill_empty_rows": _DATA_DEPENDENT,
    "unique": _DATA_DEPENDENT,
    "vision.all_class_non_max_suppression": _DATA_DEPENDENT,
    "vision": _DETECTION,
    "call_lowered": _COMPILED,
    "memory": _COMPILED,
    "vm": _COMPILED,
    "nn.avg_pool2d_grad": _TRAINING,
    "nn.conv2d_backward_weight": _TRAINING,
    "nn.max_pool2d_grad": _TRAINING,
    "random": _RANDOM,
    "ref_read": _REFERENCE,
    "ref_write": _REFERENCE,
    "reinterpret": "Relax casts values, not bits",
    "torch_op": "it calls PyTorch",
}
"""By operator, or by its dialect."""


def reason_of(name: str) -> str:
    """Why an operator cannot be converted; "" where nothing more is known."""
    return _REASONS.get(name) or _REASONS.get(name.partition(".")[0], "")
