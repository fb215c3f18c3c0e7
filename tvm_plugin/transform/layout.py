"""ChannelsLast: convolutions in NHWC, without transposes between them."""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
from tvm import ir, relax, transform
from tvm.relax.expr_functor import PyExprMutator, mutator

from .constants import Array, aligned_empty, array_of, constant_of, copy_into, is_static_tensor
from .fold_weights import FoldWeights
from .functions import extents, leaves, map_functions, operator, top_level_bindings, use_counts
from .simplify_shapes import SimplifyShapes, permutation_of

__all__ = ["ChannelsLast"]

_LAYOUTS = {"relax.nn.conv2d": ["NHWC", "HWIO"], "relax.nn.conv2d_transpose": ["NCHW", "IOHW"]}
"""With HWIO the output channels of a weight lie side by side, as vectors want them, also where nothing is packed. TVM
has no transposed convolution with channels last; most are convolutions by now (`SubPixelConvolution`)."""

_ELEMENTWISE = frozenset(
    f"relax.{name}"
    for name in (
        *("abs", "add", "ceil", "clip", "cos", "divide", "erf", "exp", "floor", "greater_equal", "log", "maximum"),
        *("minimum", "multiply", "negative", "power", "round", "rsqrt", "sigmoid", "sign", "sin", "sqrt", "square"),
        *("astype", "nn.gelu", "nn.gelu_tanh", "nn.leakyrelu", "nn.relu", "nn.selu", "nn.silu", "nn.softplus"),
        *("subtract", "tanh"),
    )
)

_POOLING = {
    "relax.nn.max_pool2d": "relax.attrs.Pool2DAttrs",
    "relax.nn.avg_pool2d": "relax.attrs.Pool2DAttrs",
    "relax.nn.adaptive_avg_pool2d": "relax.attrs.AdaptivePool2DAttrs",
}
_REDUCTIONS = frozenset({"relax.sum", "relax.mean", "relax.max", "relax.min"})


@transform.module_pass(opt_level=0, name="ChannelsLast")
class ChannelsLast:
    """Convert two-dimensional convolutions to NHWC, and everything between them.

    TVM's ConvertLayout puts permutes where it must and carries the layout through the operators that it knows. Then:

    - f(permute_dims(x), ...) -> permute_dims(f'(x, ...)), so that permutes meet and cancel: f element-wise, pooling,
      padding, concat or a reduction, which ConvertLayout leaves alone after an operator that it does not know (clip)
    - permutes of constants are folded, and those that move axes of extent 1 only become views
    - reshape(permute_dims(x)) @ W -> reshape(x) @ W', where the rows of the constant W are reordered

    What stays is a transpose at an input or output of the network that is an image.
    """

    def transform_module(self, mod: ir.IRModule, _context: transform.PassContext) -> ir.IRModule:
        """Convert every Relax function that has a convolution, or what the graph search makes of one."""
        if not any(_has_convolution(function) for function in mod.functions.values()):
            return mod
        simplify = [FoldWeights(), SimplifyShapes()]
        return transform.Sequential(
            [
                relax.transform.ConvertLayout(_LAYOUTS),
                relax.transform.CanonicalizeBindings(),
                *simplify,
                _SinkPermutes(),
                *simplify,
                _AbsorbFlattens(),
                relax.transform.CanonicalizeBindings(),
                relax.transform.DeadCodeElimination(),
            ]
        )(mod)


def _has_convolution(function: Any) -> bool:
    convolutions = ("relax.nn.conv2d", "eqtune.winograd_data", "eqtune.winograd_conv2d")
    return isinstance(function, relax.Function) and any(
        operator(binding.value) in convolutions for binding in top_level_bindings(function)
    )


@transform.module_pass(opt_level=0, name="SinkPermutes")
class _SinkPermutes:
    def transform_module(self, mod: ir.IRModule, _context: transform.PassContext) -> ir.IRModule:
        return map_functions(mod, lambda f: relax.analysis.remove_all_unused(_Sinker().visit_expr(f)))


@mutator
class _Sinker(PyExprMutator):
    """f(permute_dims(x), ...) -> permute_dims(f'(x, ...)), from the first operator to the last."""

    def visit_call_(self, call: relax.Call) -> Any:
        call = self.visit_expr_post_order(call)
        order = next((o for o in map(self._order, leaves(call)) if o is not None), None)
        if order is None or not is_static_tensor(call.ty):
            return call
        if operator(call) in _ELEMENTWISE:
            return self._elementwise(call, order)
        if operator(call) in _POOLING:
            return self._pooling(call, order)
        if operator(call) == "relax.concat":
            return self._concat(call, order)
        if operator(call) == "relax.nn.pad":
            return self._pad(call, order)
        if operator(call) in _REDUCTIONS:
            return self._reduction(call, order)
        return call

    def _elementwise(self, call: relax.Call, order: list[int]) -> Any:
        if len(order) != call.ty.ndim:
            return call
        arguments = [self._unpermuted(argument, order) for argument in call.args]
        if any(argument is None for argument in arguments):
            return call
        return self._permuted(relax.Call(call.op, arguments, call.attrs, call.ty_args), order)

    def _pooling(self, call: relax.Call, order: list[int]) -> Any:
        if order != [0, 3, 1, 2] or str(call.attrs.layout) != "NCHW" or str(call.attrs.out_layout) != "NCHW":
            return call
        fields = {
            field.name: getattr(call.attrs, field.name) for field in type(call.attrs).__tvm_ffi_type_info__.fields
        }
        attributes = ir.make_node(_POOLING[operator(call)], **{**fields, "layout": "NHWC", "out_layout": "NHWC"})
        return self._permuted(relax.Call(call.op, [self._unpermuted(call.args[0], order)], attributes), order)

    def _concat(self, call: relax.Call, order: list[int]) -> Any:
        parts = [self._unpermuted(part, order) for part in call.args[0].fields]
        if call.attrs.axis is None or any(part is None for part in parts):
            return call
        return self._permuted(relax.op.concat(parts, order[int(call.attrs.axis)]), order)

    def _pad(self, call: relax.Call, order: list[int]) -> Any:
        widths = [int(width) for width in call.attrs.pad_width]
        moved = [0] * len(widths)
        for position, axis in enumerate(order):
            moved[2 * axis : 2 * axis + 2] = widths[2 * position : 2 * position + 2]
        data = self._unpermuted(call.args[0], order)
        mode, value = str(call.attrs.pad_mode), float(call.attrs.pad_value)
        return self._permuted(relax.op.nn.pad(data, moved, mode, value), order)

    def _reduction(self, call: relax.Call, order: list[int]) -> Any:
        if call.attrs.axis is None:
            return call
        axes = [int(axis) % len(order) for axis in call.attrs.axis]
        data = self._unpermuted(call.args[0], order)
        function = getattr(relax.op, operator(call).removeprefix("relax."))
        reduced = function(data, [order[axis] for axis in axes], keepdims=bool(call.attrs.keepdims))
        if call.attrs.keepdims:
            return self._permuted(reduced, order)
        left = [axis for position, axis in enumerate(order) if position not in axes]
        return self._permuted(reduced, [sorted(left).index(axis) for axis in left])

    def _permuted(self, expr: Any, order: list[int]) -> Any:
        return relax.op.permute_dims(self.builder_.emit(expr), order)

    def _order(self, argument: Any) -> list[int] | None:
        value = self.lookup_binding(argument) if isinstance(argument, relax.Var) else None
        return permutation_of(value) if operator(value) == "relax.permute_dims" else None

    def _unpermuted(self, argument: Any, order: list[int]) -> Any:
        """What `argument` is a permutation of; None when it is none, or another one."""
        if not isinstance(argument.ty, relax.TensorType):
            return argument
        if self._order(argument) == order:
            return self.lookup_binding(argument).args[0]
        if not is_static_tensor(argument.ty):
            return None
        shape = [1] * (len(order) - argument.ty.ndim) + extents(argument.ty)
        if math.prod(shape) == 1:
            return argument
        if isinstance(argument, ir.GenericConst):
            return constant_of(array_of(argument).reshape(shape).transpose(np.argsort(order)))
        return None


@transform.module_pass(opt_level=0, name="AbsorbFlattens")
class _AbsorbFlattens:
    def transform_module(self, mod: ir.IRModule, _context: transform.PassContext) -> ir.IRModule:
        return map_functions(mod, _absorb_flattens)


def _absorb_flattens(function: relax.Function) -> relax.Function:
    """reshape(permute_dims(x)) @ W -> reshape(x) @ W', where one row of the reshape is one image of x.

    Likewise for permute_dims(W), which `FoldWeights` leaves where W is large.
    """
    absorber = _Absorber(use_counts(function))
    return relax.analysis.remove_all_unused(absorber.visit_expr(function))


@mutator
class _Absorber(PyExprMutator):
    def __init__(self, uses: dict[relax.Var, int]) -> None:
        super().__init__()
        self._uses = uses

    def visit_call_(self, call: relax.Call) -> Any:
        flat: Any = self._value(call.args[0]) if operator(call) == "relax.matmul" else None
        permute: Any = self._value(flat.args[0]) if operator(flat) == "relax.reshape" else None
        if operator(permute) != "relax.permute_dims" or self._uses.get(call.args[0], 0) != 1:
            return self.visit_expr_post_order(call)
        if not is_static_tensor(permute.ty) or not is_static_tensor(flat.ty):
            return self.visit_expr_post_order(call)
        order, weight = permutation_of(permute), call.args[1]
        transpose: Any = self._value(weight)
        transposed = operator(transpose) == "relax.permute_dims" and permutation_of(transpose) == [1, 0]
        weight = transpose.args[0] if transposed else weight
        shape = extents(permute.ty)
        if (
            not isinstance(weight, ir.GenericConst)
            or weight.ty.ndim != 2
            or order[0] != 0
            or extents(flat.ty) != [shape[0], math.prod(shape[1:])]
        ):
            return self.visit_expr_post_order(call)
        inverse = [int(axis) - 1 for axis in np.argsort(order)[1:]]
        reordered: Any = _reordered(weight, int(transposed), shape[1:], inverse)
        if transposed:
            reordered = self.builder_.emit(relax.op.permute_dims(reordered))
        data = self.builder_.emit(relax.op.reshape(self.visit_expr(permute.args[0]), flat.ty.shape))
        return relax.Call(call.op, [data, reordered], call.attrs)

    def _value(self, expr: Any) -> Any:
        return self.lookup_binding(expr) if isinstance(expr, relax.Var) else None


_REORDERED: dict[tuple[Any, ...], tuple[Any, weakref.ref[Array]]] = {}
"""Large weights in other orders, while anybody uses them, with what they were made of, whose address is in the key: the
graph search looks at many modules with the same weights (0.9 s each for the 411 MB of VGG-19's first dense layer)."""

_REMEMBERED_FROM = 1 << 20  # bytes


def _reordered(weight: ir.GenericConst, axis: int, shape: Sequence[int], order: Sequence[int]) -> ir.GenericConst:
    """`_reorder` of a constant, not computed again while an earlier result is in use."""
    matrix = array_of(weight)
    if matrix.nbytes < _REMEMBERED_FROM:
        return constant_of(_reorder(matrix, axis, shape, order))
    key = (matrix.ctypes.data, matrix.shape, str(matrix.dtype), axis, *shape, *order)
    _, known = _REORDERED.get(key, (None, lambda: None))
    result = known()
    if result is None:
        result = _reorder(matrix, axis, shape, order)
        _REORDERED[key] = weight.value, weakref.ref(result, lambda _: _REORDERED.pop(key, None))
    return constant_of(result)


def _reorder(matrix: Array, axis: int, shape: Sequence[int], order: Sequence[int]) -> Array:
    """A copy of a matrix one of whose axes holds tensors of `shape`: with theirs in another order."""
    before = matrix.shape[:axis]
    deep = matrix.reshape(*before, *shape, *matrix.shape[axis + 1 :])
    inner = [axis + other for other in order]
    view = deep.transpose(*range(axis), *inner, *range(axis + len(shape), deep.ndim))
    copy = aligned_empty(view.shape, view.dtype)
    copy_into(copy, view)
    return copy.reshape(matrix.shape)
