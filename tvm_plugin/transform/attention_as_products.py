"""AttentionAsProducts: Relax's operators of attention become products and a softmax."""

from __future__ import annotations

from typing import Any

from tvm import relax, tirx, transform
from tvm.relax import op
from tvm.relax.expr_functor import PyExprMutator, mutator

from ..dtypes import HALVES
from ..relax_ir.functions import map_functions, operator, top_level_bindings
from ..relax_ir.tensors import as_dtype
from ..repairs.causal import without_later_places

__all__ = ["AttentionAsProducts"]

_OPERATORS = ("relax.nn.attention", "relax.nn.attention_bias")


@transform.module_pass(opt_level=0, name="AttentionAsProducts")
class AttentionAsProducts:
    """nn.attention(q, k, v), of [batch, places, heads, width], as softmax(scale * q @ k^T + bias) @ v over heads.

    As `relax.frontend.nn` writes `scaled_dot_product_attention`. TVM makes one kernel of its seventeen steps, which no
    sketch fits; as products, the graph search and `tasks.attention` know them. Scores of 16-bit floats are float32.
    Sliding windows stay.
    """

    def transform_module(self, mod: Any, _context: transform.PassContext) -> Any:
        """Rewrite `relax.nn.attention` and `relax.nn.attention_bias` in every Relax function."""
        return map_functions(mod, _spelled_out)


def _spelled_out(function: relax.Function) -> relax.Function:
    if not any(_is_known(binding.value) for binding in top_level_bindings(function)):
        return function
    return _Speller().visit_expr(function)


def _is_known(value: Any) -> bool:
    return operator(value) in _OPERATORS and value.attrs.window_size is None


@mutator
class _Speller(PyExprMutator):
    def visit_call_(self, call: relax.Call) -> Any:
        call = self.visit_expr_post_order(call)
        if not _is_known(call):
            return call
        emit = self.builder_.emit
        query, key, value = (emit(op.permute_dims(one, [0, 2, 1, 3])) for one in call.args[:3])
        dtype, width = str(query.ty.dtype), int(query.ty.shape[3])
        scale = width**-0.5 if call.attrs.scale is None else float(call.attrs.scale)
        transposed = emit(op.permute_dims(key, [0, 1, 3, 2]))
        wide = "float32" if dtype in HALVES else dtype
        scores = emit(op.matmul(query, transposed, out_dtype=wide))
        scores = emit(op.multiply(scores, relax.const(scale, wide)))
        if len(call.args) > 3:
            scores = emit(op.add(scores, as_dtype(emit, call.args[3], wide)))
        if call.attrs.causal_mask is not None:
            scores = self._causal(scores, str(call.attrs.causal_mask))
        weights = as_dtype(emit, emit(op.nn.softmax(scores, axis=-1)), dtype)
        result = emit(op.matmul(weights, value, out_dtype=dtype))
        return op.permute_dims(result, [0, 2, 1, 3])

    def _causal(self, scores: Any, kind: str) -> Any:
        """Minus infinity where a place comes after the row's: `kind` says which row is the first, "TopLeft", or which
        place is the last row's, "BottomRight"."""
        if kind != "BottomRight":
            return without_later_places(self.builder_.emit, scores)
        rows, places = (scores.ty.shape[axis] for axis in (2, 3))
        are_known = isinstance(rows, tirx.IntImm) and isinstance(places, tirx.IntImm)
        later = abs(int(rows) - int(places)) if are_known else tirx.abs(rows - places)
        return without_later_places(self.builder_.emit, scores, later)
