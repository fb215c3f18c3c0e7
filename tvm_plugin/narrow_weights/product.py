"""The operator of Relax, "eqtune.narrow_product", registered with TVM when this module is imported, and its kernel."""

from __future__ import annotations

from typing import Any

from tvm import ir, relax, te, tirx

from ..operators import register_operator
from ..relax_ir.constants import constant_of, is_static_tensor
from ..relax_ir.tensors import extents
from ..search.space.narrow_weights import GROUP_PRODUCTS, TOTALS
from .codes import WORD_BITS, NarrowWeights

__all__ = ["OPERATOR", "narrow_product"]

OPERATOR = "eqtune.narrow_product"

_MANTISSA_BITS = 23
_ONE = 0x3F800000
"""The bits of 1.0."""

_OUT_ELEMENTWISE_FUSABLE = 4
"""TVM's OpPatternKind of products: element-wise operators may follow in the same kernel."""


def narrow_product(x: Any, weights: NarrowWeights) -> relax.Call:
    """A call of the operator: x, [..., places] of float32, times the weights, [..., columns]."""
    arrays = [weights.words, weights.scales]
    attrs: dict[str, Any] = {"bits": weights.bits}
    if isinstance(weights.offsets, float):
        attrs["offset"] = weights.offsets
    else:
        arrays.append(weights.offsets)
    operands = [constant_of(array) for array in arrays]
    return relax.Call(ir.Op.get(OPERATOR), [x, *operands], attrs=ir.make_node("ir.DictAttrs", **attrs))


def _infer_type(call: relax.Call, _builder: relax.BlockBuilder) -> Any:
    if not all(is_static_tensor(argument.ty) for argument in call.args):
        raise ValueError(f"{OPERATOR} needs tensors of known shapes")
    x, words = call.args[:2]
    return relax.TensorType([*extents(x.ty)[:-1], extents(words.ty)[0]], "float32")


def _legalize(builder: relax.BlockBuilder, call: relax.Call) -> Any:
    bits, offset = int(call.attrs["bits"]), call.attrs["offset"] if len(call.args) == 3 else None
    return builder.call_te(
        lambda *operands: _kernel(bits, offset, *operands),
        *call.args,
        primfunc_name_hint="narrow_product",
        primfunc_attrs={"op_pattern": _OUT_ELEMENTWISE_FUSABLE},
    )


def _kernel(
    bits: int, offset: float | None, x: te.Tensor, words: te.Tensor, scales: te.Tensor, *offsets: te.Tensor
) -> te.Tensor:
    *batch, places = (int(extent) for extent in x.shape)
    columns, groups = (int(extent) for extent in scales.shape)
    size, codes = places // groups, WORD_BITS // bits
    word = te.reduce_axis((0, size // codes), "word")
    group = te.reduce_axis((0, groups), "group")

    def product(*at: Any) -> Any:
        *rows, g, column = at
        packed = words[column, g * (size // codes) + word]
        first = g * size + word * codes
        ones = offsets[0][column, g] if offsets else tirx.const(float(offset or 0.0), "float32")
        terms = [x[(*rows, first + position)] * (_decoded(packed, position, bits) - ones) for position in range(codes)]
        return te.sum(sum(terms[1:], terms[0]), axis=word)

    products = te.compute([*batch, groups, columns], product, name=GROUP_PRODUCTS)

    def total(*at: Any) -> Any:
        *rows, column = at
        return te.sum(scales[column, group] * products(*rows, group, column), axis=group)

    return te.compute([*batch, columns], total, name=TOTALS)


def _decoded(word: Any, position: int, bits: int) -> Any:
    """1 + code / 2^bits of the code at a position of a word: its bits are the first of a mantissa."""
    down = position * bits - (_MANTISSA_BITS - bits)
    amount = tirx.const(abs(down), "uint32")
    moved = word if down == 0 else word >> amount if down > 0 else word << amount
    mask = ((1 << bits) - 1) << (_MANTISSA_BITS - bits)
    return tirx.reinterpret("float32", (moved & tirx.const(mask, "uint32")) | tirx.const(_ONE, "uint32"))


register_operator(OPERATOR, "A product by weights of 8 bits or fewer.", _infer_type, _legalize)
