"""Scaled dot-product attention, spelled out: the graph search looks into it, and lowering makes one kernel of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from tvm import relax
from tvm.relax import op
from tvm_ffi import structural_equal

from ..dtypes import HALVES
from ..errors import UnsupportedModelError
from ..relax_ir.tensors import as_dtype, extents, shape_of
from ..repairs.causal import without_later_places

__all__ = ["attention", "join_heads", "split_heads", "zero_without"]


def attention(
    emit: Any,
    query: relax.Expr,
    key: relax.Expr,
    value: relax.Expr,
    mask: relax.Expr | None = None,
    causal: bool = False,
    scale: float | None = None,
    zero_without_keys: bool = False,
    softcap: float = 0.0,
    first: Any = 0,
    steps: list[relax.Expr] | None = None,
) -> relax.Expr:
    """softmax(scale * query @ key^T + mask) @ value, of [..., heads, places, width].

    Scores of 16-bit floats stay in float32, where they do not overflow, up to the softmax, whose result is rounded.

    Parameters
    ----------
    emit : callable
        Of a block builder.
    query, key, value : relax.Expr
        Several heads of `query` one after another may share one of `key` and `value`; other axes may broadcast.
    mask : relax.Expr, optional
        Booleans, True where a place counts, or numbers to add.
    causal : bool
        Places see themselves and those before them only.
    scale : float, optional
        One over the root of the width unless given.
    zero_without_keys : bool
        Rows for which the mask leaves no place are zero, as in PyTorch, not NaN.
    softcap : float
        Scores s become softcap * tanh(s / softcap), before the mask; 0 leaves them.
    first : int or tvm.ir.Expr
        Where `causal`, the place of the first query among the keys.
    steps : list of relax.Expr, optional
        Gets four more: the scores, what `softcap` makes of them, those that the mask leaves, and their softmax, of
        [..., heads, places, places].

    Raises
    ------
    UnsupportedModelError
        Heads share keys, and other axes broadcast.
    """
    *batch, length, width = shape_of(query)
    places, rank = shape_of(key)[-2], len(shape_of(key))
    # Queries that share a key lie one after another: for the products, they are rows of one matrix.
    shared = _queries_for_a_key(batch, shape_of(key)[:-2], shape_of(value)[:-2])
    rows = [*batch[:-1], batch[-1] // shared, shared * length] if batch else [length]
    query = emit(op.reshape(query, [*rows, width])) if shared > 1 else query
    transposed = emit(op.permute_dims(key, [*range(rank - 2), rank - 1, rank - 2]))
    dtype = str(query.ty.dtype)
    wide = "float32" if dtype in HALVES else dtype
    scores = emit(op.matmul(query, transposed, out_dtype=wide))
    scores = emit(op.reshape(scores, [*batch, length, places])) if shared > 1 else scores
    scores = emit(op.multiply(scores, relax.const(width**-0.5 if scale is None else scale, wide)))
    products = scores
    if softcap:
        scores = emit(op.tanh(emit(op.multiply(scores, relax.const(1.0 / softcap, wide)))))
        scores = emit(op.multiply(scores, relax.const(softcap, wide)))
    capped = scores
    if causal:
        scores = without_later_places(emit, scores, first)
    is_boolean = mask is not None and str(mask.ty.dtype) == "bool"
    if is_boolean:
        scores = emit(op.where(mask, scores, relax.const(-math.inf, wide)))
    elif mask is not None:
        scores = emit(op.add(scores, as_dtype(emit, mask, wide)))
    weights = emit(op.nn.softmax(scores, axis=-1))
    if steps is not None:
        steps += [as_dtype(emit, step, dtype) for step in (products, capped, scores, weights)]
    weights = as_dtype(emit, weights, dtype)
    weights = emit(op.reshape(weights, [*rows, places])) if shared > 1 else weights
    result = emit(op.matmul(weights, value, out_dtype=dtype))
    result = emit(op.reshape(result, [*batch, length, shape_of(value)[-1]])) if shared > 1 else result
    if mask is None or not zero_without_keys:
        return result
    keys = mask if is_boolean else emit(op.greater(mask, relax.const(-math.inf, str(mask.ty.dtype))))
    # The result is cleared, not the softmax: `tasks.attention` looks for a product that reads a softmax.
    return zero_without(emit, keys, result)


def zero_without(emit: Any, keys: relax.Expr, rows: relax.Expr) -> relax.Expr:
    """The rows, those of which no key counts as zeros; `keys` are booleans of [..., rows, places]."""
    count = emit(op.sum(emit(op.astype(keys, "int32")), axis=-1, keepdims=True))
    return emit(op.where(emit(op.greater(count, relax.const(0, "int32"))), rows, relax.const(0, str(rows.ty.dtype))))


def split_heads(emit: Any, x: relax.Expr, heads: int) -> relax.Expr:
    """[batch, places, heads * width] -> [batch, heads, places, width]."""
    batch, places, width = extents(x.ty)
    parts = emit(op.reshape(x, [batch, places, heads, width // heads]))
    return emit(op.permute_dims(parts, [0, 2, 1, 3]))


def join_heads(emit: Any, x: relax.Expr) -> relax.Expr:
    """[batch, heads, places, width] -> [batch, places, heads * width]."""
    batch, heads, places, width = extents(x.ty)
    return emit(op.reshape(emit(op.permute_dims(x, [0, 2, 1, 3])), [batch, places, heads * width]))


def _queries_for_a_key(queries: Sequence[Any], keys: Sequence[Any], values: Sequence[Any]) -> int:
    """How many heads share one of `keys`, of operands before places and width; 1 where products broadcast instead."""
    heads, others = (batch[-1] if batch else 1 for batch in (queries, keys))
    if not (isinstance(heads, int) and isinstance(others, int)) or heads in (1, others):
        return 1
    if keys[-1:] == values[-1:] and all(_broadcasts_to(queries[:-1], batch[:-1]) for batch in (keys, values)):
        return heads // others
    if others != 1:
        raise UnsupportedModelError(
            f"an attention of queries {queries}, keys {keys} and values {values} (before places and width) both shares "
            "keys and repeats queries; repeat them in the model"
        )
    return 1


def _broadcasts_to(shape: Sequence[Any], batch: Sequence[Any]) -> bool:
    """Whether a tensor of these axes is as large as `shape`, once those of one element are repeated."""
    padded = [1] * (len(shape) - len(batch)) + list(batch)
    return len(padded) == len(shape) and all(
        structural_equal(one, other) or structural_equal(one, 1) for one, other in zip(padded, shape, strict=True)
    )
