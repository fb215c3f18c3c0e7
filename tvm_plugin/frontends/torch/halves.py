"""PyTorch operators that become several of Relax: of 16 bits, they are computed in float32 and rounded once.

So PyTorch computes them on a CPU. Rounded step by step, squares of float16 are infinite where their root is not, and
small differences lose their digits.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.fx
from torch.utils import _pytree as pytree
from tvm import relax

from ...dtypes import HALVES
from .nodes import Converter, cast

__all__ = ["OF_SEVERAL_STEPS", "rounded_once"]

OF_SEVERAL_STEPS = frozenset(
    {
        "_cdist_forward.default",
        "_trilinear.default",
        "acos.default",
        "acosh.default",
        "asin.default",
        "asinh.default",
        "atan.default",
        "atan2.default",
        "atanh.default",
        "celu.default",
        "cosh.default",
        "elu.default",
        "erfc.default",
        "expm1.default",
        "group_norm.default",
        "hypot.default",
        "linalg_vector_norm.default",
        "log10.default",
        "log1p.default",
        "log2.default",
        "logaddexp.default",
        "logcumsumexp.default",
        "mish.default",
        "native_group_norm.default",
        "prelu.default",
        "scatter_add.default",
        "scatter_reduce.two",
        "selu.default",
        "sinh.default",
        "softplus.default",
        "softshrink.default",
        "std.correction",
        "tan.default",
        "var.correction",
        "var_mean.correction",
    }
)
"""By the operator's name in an exported graph; not products, whose operands stay as narrow as they are."""


def rounded_once(convert: Converter) -> Converter:
    """The converter, of operands of 16 bits as float32, its results in the dtypes that PyTorch gives them."""

    def of_node(node: torch.fx.Node, importer: Any) -> Any:
        env, value = importer.env, node.meta["val"]
        kept = {operand: env[operand] for operand in node.all_input_nodes if _is_half(env[operand])}
        if not kept:
            return convert(node, importer)
        env |= {operand: cast(narrow, "float32", importer) for operand, narrow in kept.items()}
        node.meta["val"] = pytree.tree_map_only(torch.Tensor, torch.Tensor.float, value)
        result = convert(node, importer)
        node.meta["val"] = value
        env |= kept
        if isinstance(value, torch.Tensor):
            return _as_in_torch(result, value, importer)
        # Some have fewer: the others are for training.
        return tuple(_as_in_torch(*pair, importer) for pair in zip(result, value, strict=False))

    return of_node


def _is_half(value: Any) -> bool:
    return isinstance(value, relax.Expr) and isinstance(value.ty, relax.TensorType) and str(value.ty.dtype) in HALVES


def _as_in_torch(result: relax.Expr, value: torch.Tensor, importer: Any) -> relax.Expr:
    return cast(result, str(value.dtype).removeprefix("torch."), importer)
