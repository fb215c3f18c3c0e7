"""FakeQuantizationToInteger: what is dequantised, multiplied and quantised again is summed in integers."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from tvm import ir, relax, transform
from tvm.relax import op
from tvm.relax.expr_functor import mutator

from ..arrays import Array
from ..dtypes import is_byte, is_integer
from ..relax_ir.constants import array_of, constant_of, is_static_tensor
from ..relax_ir.functions import (
    LookupMutator,
    bound_values,
    has_call,
    map_functions,
    operator,
    rewrite_bindings,
    top_level_bindings,
    use_counts,
)
from ..relax_ir.tensors import extents
from .narrow_products import channel_sums, integer_product, padding_of
from .simplify_shapes import permutation_of

__all__ = ["MOVES", "FakeQuantizationToInteger", "is_quantized"]

QUANTIZE, DEQUANTIZE = "relax.quantize", "relax.dequantize"

MOVES = frozenset(
    f"relax.{name}"
    for name in ("expand_dims", "flatten", "nn.batch_flatten", "nn.max_pool2d", "permute_dims", "reshape", "squeeze")
)
"""Operators of one tensor whose results are some of its elements, the largest of several included."""

_SAME_SCALE = 1e-5
"""Relative difference of a bias's scale from that of the products: both were rounded."""


_AFTER_ROUNDING = frozenset(f"relax.{name}" for name in ("add", "clip", "maximum", "minimum", "subtract"))
"""What becomes of steps before they are stored: a zero point, and the limits of the type."""


def is_quantized(mod: ir.IRModule) -> bool:
    """Whether some activations of a Relax module are rounded to 8 bits, by `quantize` or by arithmetic and a cast."""
    functions = [function for function in mod.functions.values() if isinstance(function, relax.Function)]
    return any(_rounds_to_bytes(function) for function in functions)


def _rounds_to_bytes(function: relax.Function) -> bool:
    values = bound_values(function)
    return any(
        is_byte(str(var.ty.dtype)) and (operator(value) == QUANTIZE or _is_rounded(value.args[0], values))
        for var, value in values.items()
        if operator(value) in (QUANTIZE, "relax.astype")
    )


def _is_rounded(var: Any, values: Mapping[Any, Any]) -> bool:
    """Whether a variable is whole numbers of steps, as a model writes them that quantises by arithmetic (torchao)."""
    value: Any = values.get(var)
    while operator(value) in _AFTER_ROUNDING:
        value = values.get(value.args[0])
    return operator(value) == "relax.round"


@transform.module_pass(opt_level=0, name="FakeQuantizationToInteger")
class FakeQuantizationToInteger:
    """Compute with integers where a model says that it may: `dequantize`, a float operator, `quantize` (ONNX's QDQ).

    - product(dequantize(x), dequantize(W)) + dequantize(b) -> (product(x - z, W - z') + b) * scales, summed in int32,
      which is exact, for `relax.matmul` and `relax.nn.conv2d` with constant W; for `relax.matmul`, one scale and one
      zero point of x may be computed (dynamic quantisation)
    - quantize(f(dequantize(x))) -> f(x), where f moves or chooses elements and the parameters are the same
    - quantize(concat(a, b)) -> concat(quantize(a), quantize(b)), which then become less
    - scales that follow each other are multiplied beforehand
    - signed bytes that are only dequantised again become unsigned, as instructions want one operand
    - all other `quantize` and `dequantize` with constant parameters become arithmetic, which layouts and fusion know

    It is what runtimes do with such models, Relay's pass of this name among them: sums are more exact than those of
    the float operators, and a value that lies between two steps of the scale may be rounded to the other one.

    Parameters
    ----------
    products : bool
        Whether products become integers. Without instructions for small ones (`product_bits`), float32 is faster.
    """

    def __init__(self, products: bool = True) -> None:
        self._products = products

    def transform_module(self, mod: ir.IRModule, _context: transform.PassContext) -> ir.IRModule:
        """Rewrite every Relax function that dequantises."""
        return map_functions(mod, self._rewritten)

    def _rewritten(self, function: relax.Function) -> relax.Function:
        if not has_call(function, (QUANTIZE, DEQUANTIZE)):
            return function
        if self._products:
            function = _unsigned(function)
        integers = _Integers(self._products, function)
        integer = relax.analysis.remove_all_unused(integers.visit_expr(function))
        return relax.analysis.remove_all_unused(_Arithmetic(integer).visit_expr(integer))


class _Builder(LookupMutator):
    """What the two rewriters share."""

    def _rounded(self, real: Any, zero: Array, dtype: str) -> Any:
        """round(real) + zero, within the range of `dtype`; ties to even."""
        limits, emit = np.iinfo(dtype), self.builder_.emit
        whole = emit(op.round(real))
        if not zero.any():
            return op.astype(emit(op.clip(whole, float(limits.min), float(limits.max))), dtype)
        steps = emit(op.astype(emit(op.clip(whole, -_MOST_STEPS, _MOST_STEPS)), "int32"))
        steps = emit(op.add(steps, _constant(zero, "int32", real)))
        return op.astype(emit(op.clip(steps, int(limits.min), int(limits.max))), dtype)

    def _centered(self, stored: Any, zero: Array) -> Any:
        """stored - zero, in int32."""
        wide = self.builder_.emit(op.astype(stored, "int32"))
        return self.builder_.emit(op.subtract(wide, _constant(zero, "int32", stored))) if zero.any() else wide


def _unsigned(function: relax.Function) -> relax.Function:
    """int8 that is only dequantised again as uint8, it and its zero point 128 higher: the same numbers."""
    dequantized: dict[relax.Var, int] = {}
    for binding in top_level_bindings(function):
        if _parameters(binding.value) is not None and operator(binding.value) == DEQUANTIZE:
            dequantized[binding.value.args[0]] = dequantized.get(binding.value.args[0], 0) + 1
    uses = use_counts(function)
    unsigned: dict[relax.Var, relax.Var] = {}
    normalize = relax.BlockBuilder().normalize

    def rewrite(binding: Any) -> list[Any]:
        value, var = binding.value, binding.var
        if _parameters(value) is None:
            return [binding]
        data, scale, zero = value.args
        if operator(value) == DEQUANTIZE and data in unsigned:
            real = op.dequantize(unsigned[data], scale, _raised(zero), axis=value.attrs.axis)
            return [relax.VarBinding(var, normalize(real))]
        if operator(value) == QUANTIZE and str(var.ty.dtype) == "int8" and dequantized.get(var) == uses.get(var):
            stored = normalize(op.quantize(data, scale, _raised(zero), axis=value.attrs.axis, out_dtype="uint8"))
            unsigned[var] = type(var)(var.name, stored.ty)
            return [relax.VarBinding(unsigned[var], stored)]
        return [binding]

    return rewrite_bindings(function, rewrite)


def _shared(function: relax.Function) -> set[relax.Var]:
    """What several operators read, not all of them `quantize`: it is computed in any case.

    By another scale as well, a residual stream of floats would be summed from its beginning for each layer.
    """
    bindings = top_level_bindings(function)
    quantized = Counter(binding.value.args[0] for binding in bindings if operator(binding.value) == QUANTIZE)
    return {var for var, uses in use_counts(function).items() if uses > 1 and uses != quantized[var]}


def _raised(zero: Any) -> Any:
    """In 32 bits, as a zero point may lie outside of bytes."""
    return constant_of(array_of(zero).astype(np.int32) + np.int32(128))


@mutator
class _Integers(_Builder):
    """Works on what the builder holds already: operands come before their users."""

    def __init__(self, products: bool, function: relax.Function) -> None:
        super().__init__(function)
        self._products, self._shared = products, _shared(function)
        self._sums_of_products: set[relax.Var] = set()

    def visit_call_(self, call: relax.Call) -> Any:
        call = self.visit_expr_post_order(call)
        name = operator(call)
        if not is_static_tensor(call.ty):
            return call
        if name in ("relax.matmul", "relax.nn.conv2d") and self._products:
            product = self._product(call)
            return call if product is None else product
        if name == "relax.add":
            sides = call.args, call.args[::-1]
            return next((found for side in sides if (found := self._biased(*side)) is not None), call)
        if name == "relax.mean":
            mean = self._mean(call)
            return call if mean is None else mean
        if name == QUANTIZE:
            parameters = _parameters(call)
            known = self._value(call.args[0])
            if parameters is not None and isinstance(known, ir.GenericConst):
                return _quantized_constant(call, array_of(known), *parameters)
            if parameters is not None and _are_numbers(*parameters):
                return self._quantized(call.args[0], *parameters, str(call.ty.dtype))
        return call

    def _product(self, call: relax.Call) -> Any:
        """The product as integer sums times a scale; None where the operands are no quantised data and weights."""
        data, weight = self._dequantized(call.args[0]), self._weight(call)
        if weight is None or str(call.ty.dtype) != "float32":
            return None
        if data is None:
            return self._product_as_it_runs(call, *weight)
        stored, scale, zero = data
        integers, weight_scale, shape = weight
        if not is_byte(str(stored.ty.dtype)):
            return None
        limits = np.iinfo(str(stored.ty.dtype))
        largest = max(int(limits.max) - int(zero.min()), int(zero.max()) - int(limits.min))
        if _largest_sum(call, integers) * largest > _LARGEST:
            return None
        centered, kernel = self._centered(stored, zero.reshape(())), constant_of(integers.astype(np.int32))
        sums = self.builder_.emit(integer_product(call, centered, kernel, padding_of(call)))
        self._sums_of_products.add(sums)
        return self._scaled(sums, (scale.reshape(()) * weight_scale).reshape(shape))

    def _product_as_it_runs(self, call: relax.Call, integers: Array, weight_scale: Array, shape: list[int]) -> Any:
        """The same where scale and zero point of the data are computed: of matrices, which need no padding by zeros."""
        value, emit = self._value(call.args[0]), self.builder_.emit
        while operator(value) in MOVES:
            value = self._value(value.args[0])
        if operator(call) != "relax.matmul" or operator(value) != DEQUANTIZE:
            return None
        stored, scale, zero = value.args
        if not is_byte(str(stored.ty.dtype)) or str(scale.ty.dtype) != "float32":
            return None
        if scale.ty.ndim or zero.ty.ndim or not is_integer(str(zero.ty.dtype)):
            return None
        if _largest_sum(call, integers) * _BYTES > _LARGEST:
            return None
        centered = emit(
            op.subtract(emit(op.astype(self._moved(call.args[0]), "int32")), emit(op.astype(zero, "int32")))
        )
        sums = emit(integer_product(call, centered, constant_of(integers.astype(np.int32)), []))
        factor = emit(op.multiply(scale, constant_of(weight_scale.reshape(shape).astype(np.float32))))
        return op.multiply(emit(op.astype(sums, "float32")), factor)

    def _moved(self, real: Any) -> Any:
        """What was dequantised, with the moves that follow."""
        value = self._value(real)
        if operator(value) == DEQUANTIZE:
            return value.args[0]
        return self.builder_.emit(relax.Call(value.op, [self._moved(value.args[0]), *value.args[1:]], value.attrs))

    def _scaled(self, sums: Any, scale: Array) -> Any:
        return op.multiply(self.builder_.emit(op.astype(sums, "float32")), _constant(scale, "float32", sums))

    def _weight(self, call: relax.Call) -> tuple[Array, Array, list[int]] | None:
        """Centred integers, their scales, and the shape in which those broadcast against the product."""
        value, order, shape = self._value(call.args[1]), None, None
        if operator(value) == "relax.permute_dims":
            order, value = permutation_of(value), self._value(value.args[0])
        elif operator(value) == "relax.reshape" and is_static_tensor(value.ty):  # TFLite: depthwise, (1, H, W, C)
            shape, value = extents(value.ty), self._value(value.args[0])
        parameters = _parameters(value)
        stored = None if parameters is None else self._value(value.args[0])
        if parameters is None or not isinstance(stored, ir.GenericConst):
            return None
        scale, zero = parameters
        axis = int(value.attrs.axis) % value.ty.ndim
        integers = array_of(stored).astype(np.int64) - zero.astype(np.int64).reshape(_along(axis, zero, value))
        if order is not None:
            integers, axis = integers.transpose(order), order.index(axis)
        if shape is not None:
            moved = _same_axis(integers.shape, axis, shape)
            if moved is None:
                return None
            integers, axis = integers.reshape(shape), moved
        if operator(call) == "relax.matmul":
            along, outputs = [-1], integers.ndim - 1
        else:
            along = [-1 if letter == "C" else 1 for letter in str(call.attrs.out_layout)]
            outputs = str(call.attrs.kernel_layout).index("O")
        if scale.size > 1 and (axis != outputs or integers.ndim == 1):  # the only axis of a vector is summed
            return None
        return integers, scale.reshape(-1), along if scale.size > 1 else []

    def _mean(self, call: relax.Call) -> Any:
        """The mean of integers as their sum, which reads bytes; None where the operand is no quantised data."""
        data = self._dequantized(call.args[0])
        if data is None or not is_byte(str(data[0].ty.dtype)) or not is_static_tensor(call.args[0].ty):
            return None
        count = math.prod(extents(call.args[0].ty)) // max(1, math.prod(extents(call.ty)))
        if not 0 < count < _LARGEST // _BYTES:
            return None
        stored, scale, zero = data
        wide = self.builder_.emit(op.astype(stored, "int32"))
        sums = self.builder_.emit(op.sum(wide, axis=call.attrs.axis, keepdims=call.attrs.keepdims))
        total = zero.reshape(()).astype(np.int64) * count
        if abs(total) > _LARGEST:
            return None
        if total:
            sums = self.builder_.emit(op.subtract(sums, _constant(total, "int32", sums)))
        return self._scaled(sums, scale.reshape(()) / count)

    def _biased(self, scaled: Any, bias: Any) -> Any:
        """scaled + bias with the integers of the bias added to the sums; None where they are not of one scale."""
        sums, other = self._sums(scaled), self._value(bias)
        if sums is None:
            return None
        while operator(other) in ("relax.reshape", "relax.expand_dims"):
            other = self._value(other.args[0])
        parameters = _parameters(other)
        if parameters is None or not isinstance(other.args[0], ir.GenericConst) or parameters[1].any():
            return None
        integers, scale = sums
        stored = array_of(other.args[0])
        along = scale.size == 1 or stored.size == 1 or _trimmed(extents(bias.ty)) == _trimmed(scale.shape)
        if stored.dtype != np.int32 or not along or np.abs(stored.astype(np.int64)).max(initial=0) > _LARGEST:
            return None
        ours, theirs = scale.reshape(-1), parameters[0].reshape(-1)
        if len({ours.size, theirs.size} - {1}) > 1 or not (np.abs(theirs - ours) <= _SAME_SCALE * ours).all():
            return None
        added = self.builder_.emit(op.add(integers, constant_of(stored.reshape(extents(bias.ty)))))
        return self._scaled(added, scale)

    def _sums(self, expr: Any) -> tuple[Any, Array] | None:
        """The sums of a product, none above `_LARGEST`, and the scale that are multiplied to make `expr`."""
        value = self._value(expr)
        if operator(value) != "relax.multiply" or not isinstance(value.args[1], ir.GenericConst):
            return None
        cast = self._value(value.args[0])
        if operator(cast) != "relax.astype" or cast.args[0] not in self._sums_of_products:
            return None
        return cast.args[0], array_of(value.args[1])

    def _quantized(self, real: Any, scale: Array, zero: Array, dtype: str) -> Any:
        """quantize(real), by integers alone where they are there already."""
        stored = self._stored(real, scale, zero, dtype)
        if stored is not None:
            return stored
        value = self._value(real)
        if operator(value) == "relax.concat":
            parts = self._value(value.args[0])
            if isinstance(parts, relax.Tuple):
                quantized = [self.builder_.emit(self._quantized(part, scale, zero, dtype)) for part in parts.fields]
                return op.concat(quantized, axis=value.attrs.axis)
        steps = self.builder_.emit(self._divided(real, scale.reshape(())))
        return self._rounded(steps, zero.reshape(()), dtype)

    def _stored(self, real: Any, scale: Array, zero: Array, dtype: str) -> Any:
        """The integers that `real` was dequantised from, moved as it was; None where they are others."""
        known = self._dequantized(real)
        if known is None or (known[1] != scale).any() or (known[2] != zero).any():
            return None
        return known[0] if str(known[0].ty.dtype) == dtype else None

    def _dequantized(self, real: Any) -> tuple[Any, Array, Array] | None:
        """The integers that `real` was dequantised from, moved as it was, with their one scale and zero point."""
        value = self._value(real)
        if operator(value) in MOVES:
            inner = self._dequantized(value.args[0])
            if inner is None:
                return None
            return self.builder_.emit(relax.Call(value.op, [inner[0], *value.args[1:]], value.attrs)), *inner[1:]
        parameters = _parameters(value) if operator(value) == DEQUANTIZE else None
        return (value.args[0], *parameters) if parameters is not None and _are_numbers(*parameters) else None

    def _divided(self, real: Any, scale: Any) -> Any:
        """real / scale, where possible without a division: scales of constants, sums and what was dequantised."""
        value = self._value(real)
        if isinstance(value, ir.GenericConst):
            return constant_of((array_of(value) / scale).astype(np.float32))
        if operator(value) == "relax.multiply" and isinstance(value.args[1], ir.GenericConst):
            return op.multiply(value.args[0], constant_of((array_of(value.args[1]) / scale).astype(np.float32)))
        parameters = _parameters(value)
        if parameters is not None and _are_numbers(*parameters):
            centered = self._centered(value.args[0], parameters[1].reshape(()))
            return self._scaled(centered, parameters[0].reshape(()) / scale)
        if real in self._shared:
            return op.divide(real, _constant(scale, "float32", real))
        if (
            operator(value) == "relax.add"
            and all(is_static_tensor(term.ty) for term in value.args)
            and operator(self._value(value.args[0]))
        ):
            return op.add(*(self.builder_.emit(self._divided(term, scale)) for term in value.args))
        if operator(value) in ("relax.minimum", "relax.maximum") and isinstance(value.args[1], ir.GenericConst):
            limit = constant_of((array_of(value.args[1]) / scale).astype(np.float32))
            choose = op.minimum if operator(value) == "relax.minimum" else op.maximum
            return choose(self.builder_.emit(self._divided(value.args[0], scale)), limit)
        if operator(value) == "relax.nn.relu":
            return op.nn.relu(self.builder_.emit(self._divided(value.args[0], scale)))
        return op.divide(real, _constant(scale, "float32", real))


@mutator
class _Arithmetic(_Builder):
    """`quantize` and `dequantize` in elementary operators, as TVM legalises them."""

    def visit_call_(self, call: relax.Call) -> Any:
        call = self.visit_expr_post_order(call)
        parameters = _parameters(call) if is_static_tensor(call.ty) else None
        if parameters is None:
            return call
        axis = int(call.attrs.axis)
        scale, zero = (known.reshape(_along(axis, known, call)) for known in parameters)
        if operator(call) == DEQUANTIZE:
            whole = self.builder_.emit(op.astype(self._centered(call.args[0], zero), "float32"))
            return op.multiply(whole, _constant(scale, "float32", whole))
        steps = self.builder_.emit(op.divide(call.args[0], _constant(scale, "float32", call)))
        return self._rounded(steps, zero, str(call.ty.dtype))


_MOST_STEPS = 4e6
"""More than any limit and zero point together, and few enough to be rounded in vectors (search/space/rounding.py)."""


def _constant(value: Array, dtype: str, beside: Any) -> ir.GenericConst:
    """A constant operand. One number has as many axes as what it stands beside.

    A scalar would be written into the kernel, and layers that differ in their scales alone be different kernels.
    """
    array = np.asarray(value, dtype)
    return constant_of(array.reshape([1] * beside.ty.ndim) if array.ndim == 0 else array)


_STORED = {QUANTIZE: ("int8", "uint8", "int16", "uint16"), DEQUANTIZE: ("int8", "uint8", "int16", "uint16", "int32")}
"""Of integers; what is rounded to 32 bits is left to TVM."""

_BYTES = 2**8
"""How far a byte may be from a zero point that is one, too."""

_LARGEST = 2**30 - 1
"""What a sum, and a bias, must not exceed, so that they fit 32 bits together."""


def _parameters(value: Any) -> tuple[Array, Array] | None:
    """Scale (float32) and whole zero point of a `quantize` or `dequantize` of float32 and integers, if constant."""
    if operator(value) not in (QUANTIZE, DEQUANTIZE):
        return None
    data, scale, zero = value.args
    if not all(isinstance(known, ir.GenericConst) for known in (scale, zero)):
        return None
    dtypes = [str(data.ty.dtype), str(value.ty.dtype)]
    real, stored = dtypes if operator(value) == QUANTIZE else reversed(dtypes)
    if real != "float32" or stored not in _STORED[operator(value)] or not is_static_tensor(value.ty):
        return None
    scales, zeros = array_of(scale), array_of(zero)
    usable = scales.dtype == np.float32 and scales.ndim <= 1 and (scales > 0).all() and zeros.dtype.kind in "iu"
    return (scales, zeros) if usable else None


def _are_numbers(scale: Array, zero: Array) -> bool:
    """Whether both are of all elements: either may be one of each channel."""
    return scale.size == zero.size == 1


def _quantized_constant(call: relax.Call, real: Array, scale: Array, zero: Array) -> ir.GenericConst:
    """quantize of what is known."""
    dtype, axis = np.dtype(str(call.ty.dtype)), int(call.attrs.axis)
    limits = np.iinfo(dtype)
    steps = np.rint(real / scale.reshape(_along(axis, scale, call))) + zero.reshape(_along(axis, zero, call))
    return constant_of(np.clip(steps, limits.min, limits.max).astype(dtype))


def _along(axis: int, parameter: Array, value: Any) -> list[int]:
    """The shape in which scales or zero points broadcast against a tensor; one of all elements is a scalar."""
    if parameter.size == 1:
        return []
    shape = [1] * value.ty.ndim
    shape[axis] = parameter.size
    return shape


def _same_axis(before: Sequence[int], axis: int, after: Sequence[int]) -> int | None:
    """The axis that one of a tensor is after a reshape; None where it is split or joined."""
    outside, extent = math.prod(before[:axis]), before[axis]
    found = (one for one, size in enumerate(after) if size == extent and math.prod(after[:one]) == outside)
    return next(found, None)


def _trimmed(shape: Sequence[int]) -> list[int]:
    """A shape without the ones that it begins with."""
    return list(shape[next((axis for axis, extent in enumerate(shape) if extent != 1), len(shape)) :])


def _largest_sum(call: relax.Call, integers: Array) -> int:
    """The largest sum of the absolute weights of one output channel."""
    return int(channel_sums(call, np.abs(integers)).max(initial=0))
