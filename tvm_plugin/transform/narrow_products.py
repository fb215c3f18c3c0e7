"""NarrowProducts: products of 8-bit integers that a front end widened to 32 bits, in 8 or 16 bits again."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from tvm import ir, relax, transform
from tvm.relax import op
from tvm.relax.expr_functor import mutator

from ..arrays import Array
from ..dtypes import is_byte
from ..gpu_machine import is_gpu
from ..machine import describe_machine
from ..relax_ir.constants import array_of, constant_of, is_static_tensor
from ..relax_ir.functions import LookupMutator, map_functions, operator
from ..relax_ir.tensors import extents
from ..search.space.contraction.dot_intrinsics import find_dot_product
from .simplify_shapes import permutation_of

__all__ = ["NarrowProducts", "channel_sums", "integer_product", "padding_of", "product_bits"]

_PRODUCTS = ("relax.matmul", "relax.nn.conv2d")

_REUSE = 64
"""Products of one element of the data from which it pays to make signed bytes unsigned in a pass of its own, as the
dot-product instruction takes them (Zen 4, 512^3: 470 instead of 334 GOPS)."""


def product_bits(target: Any) -> int:
    """Bits of the integers that a CPU multiplies and sums in groups by one instruction: 8, else 16.

    0 where it has none: products of float32 are faster there.
    """
    if is_gpu(target):
        return 0
    hardware = describe_machine(target, measure=False)
    dtypes = {8: ("uint8", "int8"), 16: ("int16", "int16")}
    return next((bits for bits, two in dtypes.items() if find_dot_product(*two, "int32", hardware)), 0)


_GROUP = 4
"""Bytes that one instruction multiplies and sums."""


@transform.module_pass(opt_level=0, name="NarrowProducts")
class NarrowProducts:
    """Lower quantised matrix products and convolutions to products of narrow integers, exactly.

    A quantised layer sums (x - z) * w in int32, x being bytes, z their zero point, and w the centred weights, which
    are constant. With w = v + c, v in int8 and c = 0 unless w needs it,

        sum((x - z) * w) -> sum(x * v) + c * sum(x) - z * sum(w)

    where the last sum is a constant of each output channel; z may be computed, too (dynamic quantisation). Padding is
    written out with z, which is what it means. Signed x is made unsigned first where that pays, with z + 128 (Jacob et
    al., "Quantization and training of neural networks for efficient integer-arithmetic-only inference", CVPR 2018,
    section 2.3). All of it holds modulo 2^32. Padding of first layers is written out, too, whose sums span several
    pixels: 33 instead of 70 us, and 10 to 24 for the padded image (224 x 224 pixels, two threads of Zen 5).

    Parameters
    ----------
    bits : int
        8 for the above; 16 for CPUs that multiply pairs of 16-bit integers (`product_bits`): x - z and w as such.
    """

    def __init__(self, bits: int = 8) -> None:
        self._bits = bits

    def transform_module(self, mod: ir.IRModule, _context: transform.PassContext) -> ir.IRModule:
        """Rewrite `relax.matmul` and `relax.nn.conv2d` of int32; weights must be folded already."""
        return map_functions(mod, self._narrowed)

    def _narrowed(self, function: relax.Function) -> relax.Function:
        return relax.analysis.remove_all_unused(_Narrower(self._bits, function).visit_expr(function))


@mutator
class _Narrower(LookupMutator):
    def __init__(self, bits: int, function: relax.Function) -> None:
        super().__init__(function)
        self._bits = bits

    def visit_call_(self, call: relax.Call) -> Any:
        call = self.visit_expr_post_order(call)
        if operator(call) == "relax.add":
            return self._one_addition(call)
        if operator(call) not in _PRODUCTS or not is_static_tensor(call.ty) or str(call.ty.dtype) != "int32":
            return call
        if any(not is_static_tensor(arg.ty) or arg.ty.ndim < 2 or 0 in extents(arg.ty) for arg in call.args):
            return call
        data = self._bytes(call.args[0])
        if data is None:
            return call
        if self._bits == 16:
            left, right = (self._sixteen(arg) for arg in call.args)
            return call if left is None or right is None else integer_product(call, left, right, padding_of(call))
        weight, order = self._constant(call.args[1])
        if weight is not None:
            narrowed = self._by_constant(call, *data, weight, order)
            return call if narrowed is None else narrowed
        other = self._bytes(call.args[1])
        if other is not None and all(isinstance(zero, int) and zero == 0 for _, zero in (data, other)):
            return integer_product(call, data[0], other[0], padding_of(call))
        return call

    def _one_addition(self, call: relax.Call) -> Any:
        """sums - correction + bias, both constants of each channel: one constant."""
        difference, bias = self._value(call.args[0]), call.args[1]
        if operator(difference) != "relax.subtract" or str(call.ty.dtype) != "int32":
            return call
        sums, correction = difference.args
        if not all(isinstance(known, ir.GenericConst) for known in (correction, bias)):
            return call
        together = array_of(bias).astype(np.int64) - array_of(correction)
        if np.abs(together).max(initial=0) >= 2**31:
            return call
        return op.add(sums, constant_of(together.astype(np.int32)))

    def _sixteen(self, arg: Any) -> Any:
        """The number `arg` in int16; None where it may not fit. -32768 is left out: two pairs of it would overflow."""
        weight, order = self._constant(arg)
        if weight is not None:
            if np.abs(weight).max() >= 2**15:
                return None
            narrow: Any = constant_of(weight.astype(np.int16))
            return narrow if order is None else self.builder_.emit(op.permute_dims(narrow, order))
        bytes_ = self._bytes(arg)
        if bytes_ is None:
            return None
        value, zero = bytes_
        wide = self.builder_.emit(op.astype(value, "int16"))
        if isinstance(zero, int):
            if abs(zero) > 2**14:
                return None
            return wide if zero == 0 else self.builder_.emit(op.subtract(wide, relax.const(zero, "int16")))
        whole = self._value(zero)
        if operator(whole) != "relax.astype" or not is_byte(str(whole.args[0].ty.dtype)):
            return None
        return self.builder_.emit(op.subtract(wide, self.builder_.emit(op.astype(whole.args[0], "int16"))))

    def _by_constant(self, call: relax.Call, data: Any, zero: Any, weight: Array, order: list[int] | None) -> Any:
        """The product by constant weights; None where they do not fit 8 bits."""
        known = isinstance(zero, int)
        least, most = int(weight.min()), int(weight.max())
        offset = 0 if least >= -128 and most <= 127 else least + 128
        groups = _groups(call)
        if most - least > 255 or (offset and groups > 1):
            return None
        reused = math.prod(weight.shape) * _places(call) >= _REUSE * math.prod(extents(data.ty))
        if str(data.ty.dtype) == "int8" and groups == 1 and reused and known:
            wide = self.builder_.emit(op.add(self.builder_.emit(op.astype(data, "int32")), relax.const(128, "int32")))
            data, zero = self.builder_.emit(op.astype(wide, "uint8")), zero + 128
        padding = padding_of(call)
        is_first = groups == 1 and bool(padding) and _channels(call) < _GROUP
        if (is_first or not (known and zero == 0)) and any(padding):
            limits = np.iinfo(str(data.ty.dtype))
            if not known or not limits.min <= zero <= limits.max:
                return None
            data, padding = self._padded(call, data, zero), [0, 0, 0, 0]
        narrow: Any = constant_of((weight - offset).astype(np.int8))
        if order is not None:
            narrow, weight = self.builder_.emit(op.permute_dims(narrow, order)), weight.transpose(order)
        result = integer_product(call, data, narrow, padding)
        if offset:
            ones = constant_of(np.ones(_one_output(call, weight.shape), np.int8))
            sums = op.multiply(
                self.builder_.emit(integer_product(call, data, ones, padding)), relax.const(offset, "int32")
            )
            result = op.add(self.builder_.emit(result), self.builder_.emit(sums))
        if not known:
            correction = self.builder_.emit(op.multiply(zero, constant_of(channel_sums(call, weight).astype(np.int32))))
            result = op.subtract(self.builder_.emit(result), correction)
        elif zero:
            correction = constant_of((zero * channel_sums(call, weight)).astype(np.int32))
            result = op.subtract(self.builder_.emit(result), correction)
        return result

    def _padded(self, call: relax.Call, data: Any, zero: int) -> Any:
        """The data with its padding written out."""
        sides = {"H": (0, 2), "W": (1, 3)}
        widths = [
            0 if side is None else int(call.attrs.padding[side])
            for letter in str(call.attrs.data_layout)
            for side in sides.get(letter, (None, None))
        ]
        return self.builder_.emit(op.nn.pad(data, widths, "constant", zero))

    def _bytes(self, arg: Any) -> tuple[Any, Any] | None:
        """An 8-bit tensor x and a number z, or a tensor of one, such that `arg` is x - z in int32."""
        value, zero = self._value(arg), 0
        if operator(value) == "relax.subtract":
            known = value.args[1]
            if not is_static_tensor(known.ty) or math.prod(extents(known.ty)) != 1:
                return None
            if known.ty.ndim > value.args[0].ty.ndim:
                return None
            value = self._value(value.args[0])
            zero = int(array_of(known).reshape(())) if isinstance(known, ir.GenericConst) else known
        if operator(value) != "relax.astype" or str(value.ty.dtype) != "int32":
            return None  # another cast may wrap around
        return (value.args[0], zero) if is_byte(str(value.args[0].ty.dtype)) else None

    def _constant(self, arg: Any) -> tuple[Array | None, list[int] | None]:
        """The weights, as stored, and the order in which their axes are read; None for what is no constant."""
        if isinstance(arg, ir.GenericConst):
            return array_of(arg).astype(np.int64), None
        value = self._value(arg)
        if operator(value) == "relax.permute_dims" and isinstance(value.args[0], ir.GenericConst):
            return array_of(value.args[0]).astype(np.int64), permutation_of(value)
        return None, None


def integer_product(call: relax.Call, data: Any, weight: Any, padding: list[int]) -> Any:
    """The matrix product or convolution `call` of other operands, summed in int32."""
    if operator(call) == "relax.matmul":
        return op.matmul(data, weight, out_dtype="int32")
    attrs = call.attrs
    return op.nn.conv2d(
        data,
        weight,
        strides=list(attrs.strides),
        padding=padding,
        dilation=list(attrs.dilation),
        groups=int(attrs.groups),
        data_layout=str(attrs.data_layout),
        kernel_layout=str(attrs.kernel_layout),
        out_layout=str(attrs.out_layout),
        out_dtype="int32",
    )


def padding_of(call: relax.Call) -> list[int]:
    """A convolution's padding; nothing for a matrix product."""
    return [int(width) for width in call.attrs.padding] if operator(call) == "relax.nn.conv2d" else []


def _groups(call: relax.Call) -> int:
    return int(call.attrs.groups) if operator(call) == "relax.nn.conv2d" else 1


def _channels(call: relax.Call) -> int:
    """Of the image that a convolution reads."""
    return extents(call.args[0].ty)[str(call.attrs.data_layout).index("C")]


def _places(call: relax.Call) -> int:
    """How many outputs of one channel there are: each multiplies all weights of its channel."""
    shape = extents(call.ty)
    channels = shape[-1] if operator(call) == "relax.matmul" else shape[str(call.attrs.out_layout).index("C")]
    return math.prod(shape) // channels


def _one_output(call: relax.Call, shape: tuple[int, ...]) -> list[int]:
    """The shape of weights with one output channel."""
    if operator(call) == "relax.matmul":
        return [*shape[:-1], 1]
    return [1 if letter == "O" else n for letter, n in zip(str(call.attrs.kernel_layout), shape, strict=True)]


def channel_sums(call: relax.Call, weight: Array) -> Array:
    """The sum of the weights of each output channel, as it broadcasts against the result."""
    if operator(call) == "relax.matmul":
        return weight.sum(axis=weight.ndim - 2, keepdims=True)
    axis = str(call.attrs.kernel_layout).index("O")
    sums = weight.sum(axis=tuple(a for a in range(weight.ndim) if a != axis))
    return sums.reshape([-1 if letter == "C" else 1 for letter in str(call.attrs.out_layout)])
