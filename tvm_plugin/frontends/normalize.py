"""One spelling for what importers and people write differently."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import tvm
from tvm import relax

from ..dtypes import HALVES, is_floating, is_integer
from ..errors import InputError
from ..relax_ir.constants import array_of, constant_of
from ..relax_ir.functions import operator
from ..repairs.in_float32 import ORDERING, SUMS, compute_in_float32
from ..search.graph.attributes import Conv2d
from ..search.graph.blocked_ops import blocked_conv2d

__all__ = [
    "with_blocked_convolutions",
    "with_boolean_logic",
    "with_channels_first",
    "with_corners_apart",
    "with_no_division_by_zero",
    "with_out_dtypes",
    "with_places_of_extrema",
    "with_plain_powers",
    "with_signs_of_unsigned",
    "with_small_integers_sorted",
    "with_unequal_nans",
    "with_what_bfloat16_lacks",
    "with_wide_sums",
]


def _with_main(mutator: Any, mod: tvm.IRModule) -> tvm.IRModule:
    """The module with "main" as the mutator makes it."""
    mutator.builder_.update_func(mod.get_global_var("main"), mutator.visit_expr(mod["main"]))
    return mutator.builder_.get()


def _with_out_dtype(call: relax.Call, dtype: Any) -> relax.Call:
    info = type(call.attrs).__tvm_ffi_type_info__
    values = {field.name: getattr(call.attrs, field.name) for field in info.fields} | {"out_dtype": dtype}
    return relax.Call(call.op, call.args, tvm.ir.make_node(info.type_key, **values), call.ty_args, call.span)


@relax.expr_functor.mutator
class _OutDtypes(relax.PyExprMutator):
    def visit_call_(self, call: relax.Call) -> relax.Expr:
        call = self.visit_expr_post_order(call)
        if getattr(call.attrs, "out_dtype", "given") is not None:
            return call
        return _with_out_dtype(call, call.ty.dtype.dtype)


def with_out_dtypes(mod: tvm.IRModule) -> tvm.IRModule:
    """Write out the `out_dtype` of every call in "main" that leaves it open.

    matmul(a, b) -> matmul(a, b, out_dtype="float32") for float32 operands. PyTorch's importer writes it, ONNX's and
    people do not; rewrites of the graph then see one operator, not two.
    """
    return _with_main(_OutDtypes(mod), mod)


@relax.expr_functor.mutator
class _WideSums(relax.PyExprMutator):
    def visit_call_(self, call: relax.Call) -> relax.Expr:
        call = self.visit_expr_post_order(call)
        dtype = str(getattr(call.ty, "dtype", ""))
        if not hasattr(call.attrs, "out_dtype") or dtype not in HALVES:
            return call
        if any(str(getattr(argument.ty, "dtype", "")) != dtype for argument in call.args):  # a size, of a resized image
            return call
        return relax.op.astype(self.builder_.emit(_with_out_dtype(call, "float32")), dtype)


def with_wide_sums(mod: tvm.IRModule) -> tvm.IRModule:
    """Let products and other sums of 16-bit floats in "main" be taken in float32, and rounded once.

    matmul(a, b) -> astype(matmul(a, b, out_dtype="float32"), "bfloat16"). PyTorch and ONNX Runtime do; TVM would round
    each partial sum: the mean of 5000 numbers in float16 is off by a third.
    """
    return compute_in_float32(_with_main(_WideSums(mod), mod), SUMS, HALVES)


_NOT_OF_BFLOAT16 = ORDERING | {
    f"relax.{name}"
    for name in (
        *("power", "mod", "isnan", "isfinite", "isinf", "argmax", "argmin"),
        *("nn.layer_norm", "nn.group_norm", "nn.instance_norm", "nn.rms_norm"),
    )
}


def with_what_bfloat16_lacks(mod: tvm.IRModule) -> tvm.IRModule:
    """Compute in float32 what TVM cannot build of bfloat16 tensors."""
    return compute_in_float32(mod, _NOT_OF_BFLOAT16, ["bfloat16"])


def with_small_integers_sorted(mod: tvm.IRModule) -> tvm.IRModule:
    """Sort small integers and truth values, which TVM's sorts do not take, as float32, which holds all of them."""
    return compute_in_float32(mod, ORDERING, ["bool", "int16", "int8", "uint8"])


_not, _and, _or, _xor = (getattr(relax.op, f"logical_{name}") for name in ("not", "and", "or", "xor"))

BOOLEAN_LOGIC: dict[str, Callable[..., relax.Expr]] = {
    "equal": lambda a, b: _not(_xor(a, b)),
    "not_equal": _xor,
    "greater": lambda a, b: _and(a, _not(b)),
    "greater_equal": lambda a, b: _or(a, _not(b)),
    "less": lambda a, b: _and(_not(a), b),
    "less_equal": lambda a, b: _or(_not(a), b),
    "maximum": _or,
    "minimum": _and,
    "add": _or,
    "multiply": _and,
    "bitwise_and": _and,
    "bitwise_or": _or,
    "bitwise_xor": _xor,
    "bitwise_not": _not,
}
"""What an operator on tensors of bool means, as PyTorch and numpy define it with False < True."""

_EXTREMA = ("relax.max", "relax.min")


@relax.expr_functor.mutator
class _BooleanLogic(relax.PyExprMutator):
    def visit_call_(self, call: relax.Call) -> relax.Expr:
        call = self.visit_expr_post_order(call)
        if operator(call) in _EXTREMA and str(call.args[0].ty.dtype) == "bool":
            numbers = self.builder_.emit(relax.op.astype(call.args[0], "int8"))
            found = relax.Call(call.op, [numbers], call.attrs)
            return self.builder_.normalize(relax.op.astype(self.builder_.emit(found), "bool"))
        logic = BOOLEAN_LOGIC.get(operator(call).removeprefix("relax."))
        if logic is None or any(argument.ty.dtype.dtype != "bool" for argument in call.args):
            return call
        return self.builder_.normalize(logic(*call.args))


def with_boolean_logic(mod: tvm.IRModule) -> tvm.IRModule:
    """Write the comparisons and sums of bool tensors in "main" as logical operators, and find extrema of bytes.

    equal(a, b) -> logical_not(logical_xor(a, b)). TVM builds the logical ones for a CPU; the others it accepts, and
    fails while it generates code.
    """
    return _with_main(_BooleanLogic(mod), mod)


@relax.expr_functor.mutator
class _SignsOfUnsigned(relax.PyExprMutator):
    def visit_call_(self, call: relax.Call) -> relax.Expr:
        call = self.visit_expr_post_order(call)
        if operator(call) not in ("relax.negative", "relax.sign"):
            return call
        (x,), dtype = call.args, str(call.ty.dtype)
        if dtype == "bool" and operator(call) == "relax.sign":
            return x
        if not dtype.startswith("uint"):
            return call
        zero, one = (relax.const(number, dtype) for number in (0, 1))
        result = relax.op.subtract(zero, x) if operator(call) == "relax.negative" else relax.op.minimum(x, one)
        return self.builder_.normalize(result)


def with_signs_of_unsigned(mod: tvm.IRModule) -> tvm.IRModule:
    """Write -x of unsigned integers in "main" as 0 - x, sign(x) as min(x, 1): TVM would make a -1 of their dtype."""
    return _with_main(_SignsOfUnsigned(mod), mod)


@relax.expr_functor.mutator
class _Powers(relax.PyExprMutator):
    def visit_call_(self, call: relax.Call) -> relax.Expr:
        call = self.visit_expr_post_order(call)
        if operator(call) != "relax.power":
            return call
        (base, exponent), dtype, emit = call.args, str(call.ty.dtype), self.builder_.emit
        if is_integer(dtype):
            base, exponent = (relax.op.astype(argument, "float64") for argument in call.args)
            return self.builder_.normalize(relax.op.astype(relax.op.power(base, exponent), dtype))
        number = array_of(exponent) if isinstance(exponent, tvm.ir.GenericConst) else np.zeros(0)
        if number.size != 1 or number.ndim > base.ty.ndim or number.item() not in (3, 4) or dtype in HALVES:
            return call
        square = emit(relax.op.multiply(base, base))
        return self.builder_.normalize(relax.op.multiply(square, base if number.item() == 3 else square))


def with_plain_powers(mod: tvm.IRModule) -> tvm.IRModule:
    """Write powers in "main" as TVM computes them well.

    x^3 and x^4 become products, but not in 16 bits, which would round in between; TVM warns of each such power. Those
    of integers are computed in float64, exactly below 2^53: TVM raises floats alone.
    """
    return _with_main(_Powers(mod), mod)


INTEGER_DIVISIONS = frozenset(f"relax.{name}" for name in ("divide", "floor_divide", "mod", "floor_mod"))

_QUOTIENTS = ("relax.divide", "relax.floor_divide")


@relax.expr_functor.mutator
class _DivisionsByZero(relax.PyExprMutator):
    def visit_call_(self, call: relax.Call) -> relax.Expr:
        call = self.visit_expr_post_order(call)
        if operator(call) in INTEGER_DIVISIONS and is_integer(str(call.ty.dtype)):
            return self._of_integers(call)
        if operator(call) not in _QUOTIENTS or not isinstance(call.args[1], tvm.ir.GenericConst):
            return call
        x, divisor = call.args[0], array_of(call.args[1])
        if divisor.size != 1 or divisor.any() or not is_floating(str(x.ty.dtype)):
            return call
        infinity = np.copysign(np.inf, divisor.astype("float64")).astype(divisor.dtype)
        return self.builder_.normalize(relax.op.multiply(x, constant_of(infinity)))

    def _of_integers(self, call: relax.Call) -> relax.Expr:
        x, divisor = call.args
        if isinstance(divisor, tvm.ir.GenericConst) and array_of(divisor).all():
            return call
        none, one = (relax.const(number, str(divisor.ty.dtype)) for number in (0, 1))
        divisor = self.builder_.emit(relax.op.where(relax.op.equal(divisor, none), one, divisor))
        return self.builder_.normalize(relax.Call(call.op, [x, divisor], call.attrs))


def with_no_division_by_zero(mod: tvm.IRModule) -> tvm.IRModule:
    """Write x / 0 in "main" as x * inf, which is the same infinities and NaNs: TVM refuses to compile the former.

    Integers are divided by 1 where they would be divided by 0, which ends the process.
    """
    return _with_main(_DivisionsByZero(mod), mod)


@relax.expr_functor.mutator
class _UnequalNans(relax.PyExprMutator):
    def visit_call_(self, call: relax.Call) -> relax.Expr:
        call = self.visit_expr_post_order(call)
        if operator(call) == "relax.equal" and call.args[0].same_as(call.args[1]) and _may_be_nan(call.args[0]):
            return self.builder_.normalize(_not(self.builder_.emit(relax.op.isnan(call.args[0]))))
        if operator(call) != "relax.not_equal":
            return call
        left, right = call.args
        for operand in [left] if left.same_as(right) else [left, right]:
            if _may_be_nan(operand):
                call = _or(self.builder_.emit(call), self.builder_.emit(relax.op.isnan(operand)))
        return self.builder_.normalize(call)


def _may_be_nan(operand: relax.Expr) -> bool:
    if not is_floating(str(operand.ty.dtype)):
        return False
    return not isinstance(operand, tvm.ir.GenericConst) or bool(np.isnan(array_of(operand).astype("float32")).any())


def with_unequal_nans(mod: tvm.IRModule) -> tvm.IRModule:
    """Let NaN differ from everything in "main", as IEEE 754 has it: TVM's `not_equal` is false of it.

    not_equal(a, 0) -> logical_or(not_equal(a, 0), isnan(a)). `logical_not(equal(a, 0))` would be simplified to the
    former, as equal(a, a) to True; that is logical_not(isnan(a)).
    """
    return _with_main(_UnequalNans(mod), mod)


@relax.expr_functor.mutator
class _PlacesOfExtrema(relax.PyExprMutator):
    def visit_call_(self, call: relax.Call) -> relax.Expr:
        call = self.visit_expr_post_order(call)
        if operator(call) not in ("relax.argmax", "relax.argmin"):
            return call
        zero = constant_of(np.zeros((), str(call.ty.dtype)))
        return self.builder_.normalize(relax.op.maximum(self.builder_.emit(call), zero))


def with_places_of_extrema(mod: tvm.IRModule) -> tvm.IRModule:
    """Let the largest of the least numbers of a dtype, -inf or 0, be the first, and the smallest of the largest.

    TVM's `argmax` and `argmin` say -1.
    """
    return _with_main(_PlacesOfExtrema(mod), mod)


_TRANSPOSED: dict[str, tuple[Callable[..., relax.Expr], tuple[str, str, str]]] = {
    f"relax.nn.conv{len(axes)}d_transpose": (
        getattr(relax.op.nn, f"conv{len(axes)}d_transpose"),
        (f"NC{axes}", f"IO{axes}", f"NC{axes}"),
    )
    for axes in ("W", "HW", "DHW")
}
"""Transposed convolutions, and the layouts of data, weights and result that TVM lowers."""


@relax.expr_functor.mutator
class _ChannelsFirst(relax.PyExprMutator):
    def visit_call_(self, call: relax.Call) -> relax.Expr:
        call = self.visit_expr_post_order(call)
        if operator(call) not in _TRANSPOSED:
            return call
        a = call.attrs
        convolve, wanted = _TRANSPOSED[operator(call)]
        layouts = (str(a.data_layout), str(a.kernel_layout), str(a.out_layout or a.data_layout))
        if layouts == wanted or any(
            sorted(given) != sorted(order) for given, order in zip(layouts, wanted, strict=True)
        ):
            return call
        x, weights = (
            self.builder_.emit(_reordered(argument, given, order))
            for argument, given, order in zip(call.args, layouts, wanted, strict=False)
        )
        sizes = (list(a.strides), list(a.padding), list(a.output_padding), list(a.dilation))
        result = convolve(x, weights, *sizes, int(a.groups), *wanted, out_dtype=a.out_dtype)
        return self.builder_.normalize(_reordered(self.builder_.emit(result), wanted[2], layouts[2]))


def _reordered(value: relax.Expr, given: str, order: str) -> relax.Expr:
    return relax.op.permute_dims(value, [given.index(axis) for axis in order])


def with_channels_first(mod: tvm.IRModule) -> tvm.IRModule:
    """Write the transposed convolutions of "main" with channels first between permutations: TVM lowers no others."""
    return _with_main(_ChannelsFirst(mod), mod)


@relax.expr_functor.mutator
class _BlockedConvolutions(relax.PyExprMutator):
    def visit_call_(self, call: relax.Call) -> relax.Expr:
        call = self.visit_expr_post_order(call)
        if operator(call) != "relax.nn.conv2d" or not re.search(r"\d", str(call.attrs.data_layout)):
            return call
        a = call.attrs
        block = str(a.data_layout).removeprefix("NCHW").removesuffix("c")
        wanted = (f"NCHW{block}c", f"OIHW{block}i{block}o", f"NCHW{block}c", 1)
        given = (str(a.data_layout), str(a.kernel_layout), str(a.out_layout or a.data_layout), int(a.groups))
        if given != wanted:
            raise InputError(
                f"a conv2d has data, weights and result in {', '.join(given[:3])} and {given[3]} groups, which TVM "
                "cannot lower; convolutions in blocks are tuned as NCHW{b}c, OIHW{b}i{b}o, NCHW{b}c without groups. "
                "Give this one in NCHW or NHWC: eqtune chooses layouts itself"
            )
        sizes: Any = [tuple(int(n) for n in value) for value in (a.strides, a.padding, a.dilation)]
        return blocked_conv2d(call.args[0], call.args[1], Conv2d(*sizes))


def with_blocked_convolutions(mod: tvm.IRModule) -> tvm.IRModule:
    """Make the convolutions of "main" whose channels are in blocks (NCHW16c) ones that TVM can lower.

    Raises InputError for other layouts in blocks.
    """
    return _with_main(_BlockedConvolutions(mod), mod)


@relax.expr_functor.mutator
class _CornersApart(relax.PyExprMutator):
    def visit_call_(self, call: relax.Call) -> relax.Expr:
        call = self.visit_expr_post_order(call)
        if operator(call) == "relax.image.grid_sample":
            return self._sampled(call)
        if operator(call) not in ("relax.image.resize2d", "relax.image.resize3d"):
            return call
        sizes, layout = list(call.args[1].values), str(call.attrs.layout)
        ones = [isinstance(size, tvm.tirx.IntImm) and size.value == 1 for size in sizes]
        if str(call.attrs.coordinate_transformation_mode) != "align_corners" or not any(ones):
            return call
        apart = relax.ShapeExpr([2 if one else size for one, size in zip(ones, sizes, strict=True)])
        image = self.builder_.emit(relax.Call(call.op, [call.args[0], apart], call.attrs))
        axes = [layout.index(axis) for one, axis in zip(ones, "DHW"[-len(ones) :], strict=True) if one]
        return self.builder_.normalize(relax.op.strided_slice(image, axes, [0] * len(axes), [1] * len(axes)))

    def _sampled(self, call: relax.Call) -> relax.Expr:
        image, grid = call.args
        attrs = call.attrs
        if not attrs.align_corners or str(attrs.padding_mode) != "reflection" or image.ty.shape is None:
            return call
        layout = str(attrs.layout)
        for axis in [layout.index(name) for name in "DHW" if name in layout]:
            size = image.ty.shape[axis]
            if isinstance(size, tvm.tirx.IntImm) and size.value == 1:
                image = self.builder_.emit(relax.op.concat([image, image], axis))
        return self.builder_.normalize(relax.Call(call.op, [image, grid], attrs))


def with_corners_apart(mod: tvm.IRModule) -> tvm.IRModule:
    """Write what "main" resizes to one pixel, whose corners are aligned, as the first of two.

    What it samples from one pixel that is reflected, it samples from two equal ones. TVM divides by the distance of the
    corners, which would be zero.
    """
    return _with_main(_CornersApart(mod), mod)
