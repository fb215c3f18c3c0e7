"""ChannelsLast: convolutions in NHWC, without transposes between them."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from tvm import ir, relax, transform
from tvm.relax.expr_functor import mutator

from ..arrays import Array, aligned_empty, copy_into
from ..relax_ir.constants import array_of, constant_of, has_shape, is_static_tensor
from ..relax_ir.functions import LookupMutator, has_call, leaves, map_functions, operator, use_counts
from ..relax_ir.tensors import extents, is_seen_as, seen_as, shape_of
from .byte_tables import OPERATOR as BYTE_TABLE
from .fold_weights import FoldWeights
from .simplify_shapes import RESHAPES, SimplifyShapes, permutation_of

__all__ = ["CHANNELS_FIRST", "ChannelsLast"]

CHANNELS_FIRST = 1.05
"""Share by which channels first must cost less than channels last to be preferred. Their kernels read a line of each
channel, which no prefetcher foresees, and find it in a cache when they are timed alone (two threads; Zen 3, nasneta:
prices within 0.2 %, kernels alone 229 ms first and 191 last, the model 286 and 237; Zen 5, mobilenetv2: prices and
kernels alone within 3 %, the model 1.71 ms and 1.62, 2.67 and 2.15 while the cores had a last cache each). Six networks
by estimate on Zen 5: first and last are within 4 %, and last runs 5 to 19 % sooner."""

_IMAGE = [0, 3, 1, 2]
"""permute_dims by these axes makes NCHW of NHWC."""

_ELEMENTWISE = frozenset(
    f"relax.{name}"
    for name in (
        *("abs", "add", "astype", "atan2", "bitwise_and", "bitwise_not", "bitwise_or", "bitwise_xor", "ceil", "clip"),
        *("cos", "cosh", "divide", "equal", "erf", "ewise_fma", "exp", "floor", "floor_divide", "floor_mod", "greater"),
        *("greater_equal", "isfinite", "isinf", "isnan", "left_shift", "less", "less_equal", "log", "log_add_exp"),
        *("logical_and", "logical_not", "logical_or", "logical_xor", "maximum", "minimum", "mod", "multiply"),
        *("negative", "nn.gelu", "nn.gelu_tanh", "nn.leakyrelu", "nn.relu", "nn.selu", "nn.silu", "nn.softplus"),
        *("not_equal", "power", "right_shift", "round", "rsqrt", "sigmoid", "sign", "sin", "sinh", "sqrt", "square"),
        *("subtract", "tan", "tanh", "trunc", "where"),
    )
)
_OF_IMAGES = frozenset(
    f"relax.{name}" for name in ("nn.max_pool2d", "nn.avg_pool2d", "nn.adaptive_avg_pool2d", "image.resize2d")
)
_REDUCTIONS = frozenset(f"relax.{name}" for name in ("sum", "mean", "max", "min", "prod", "variance", "std"))
_POSITIONS = frozenset({"relax.argmax", "relax.argmin"})
_OF_AN_AXIS = frozenset(f"relax.{name}" for name in ("nn.softmax", "nn.log_softmax", "nn.prelu"))
_NORMS = frozenset(f"relax.nn.{name}" for name in ("group_norm", "instance_norm", "layer_norm"))
"""Not rms_norm, which TVM computes over the last axes alone."""


@transform.module_pass(opt_level=0, name="ChannelsLast")
class ChannelsLast:
    """Convert two-dimensional convolutions to NHWC, and everything between them.

    - conv2d(x, W) -> permute_dims(conv2d'(permute_dims(x), permute_dims(W))), W' in HWIO: the output channels lie side
      by side, as vectors want them, also where nothing is packed
    - f(permute_dims(x), ...) -> permute_dims(f'(x, ...)), so that permutes meet and cancel: f element-wise, pooling,
      resize, padding, concat, a slice, a reduction, softmax or a norm. Of several images, those that are not permuted
      get a permute, unless they are the larger part
    - permutes of constants are folded, and those that move axes of extent 1 only become views
    - reshape(permute_dims(x)) @ W -> reshape(x) @ W', where the rows of the constant W are reordered

    What stays is a transpose at an input or output of the network that is an image. Transposed convolutions stay in
    NCHW, TVM has no others; most are convolutions by now (`SubPixelConvolution`).

    TVM's ConvertLayout is not used: in 0.27 it writes outside of its memory at squeezes of axes counted from the end,
    and fails at operators after stack.
    """

    def transform_module(self, mod: ir.IRModule, _context: transform.PassContext) -> ir.IRModule:
        """Convert every Relax function that has a convolution, or what the graph search makes of one."""
        if not any(_has_convolution(function) for function in mod.functions.values()):
            return mod
        simplify = [FoldWeights(), SimplifyShapes()]
        return transform.Sequential(
            [
                relax.transform.CanonicalizeBindings(),
                *simplify,
                _ConvertImages(),
                *simplify,
                _AbsorbFlattens(),
                relax.transform.CanonicalizeBindings(),
                relax.transform.DeadCodeElimination(),
            ]
        )(mod)


def _has_convolution(function: Any) -> bool:
    convolutions = ("relax.nn.conv2d", "eqtune.winograd_data", "eqtune.winograd_conv2d")
    return isinstance(function, relax.Function) and has_call(function, convolutions)


@transform.module_pass(opt_level=0, name="ConvertImages")
class _ConvertImages:
    def transform_module(self, mod: ir.IRModule, _context: transform.PassContext) -> ir.IRModule:
        return map_functions(mod, lambda f: relax.analysis.remove_all_unused(_ImageConverter(f).visit_expr(f)))


@mutator
class _ImageConverter(LookupMutator):
    """Converts convolutions and sinks permutes through what follows them, from the first operator to the last."""

    def __init__(self, function: relax.Function) -> None:
        super().__init__(function)
        self._images: dict[relax.Var, Any] = {}  # in NHWC, by the variable in NCHW
        self._branches = 0

    def visit_binding_block_(self, block: relax.BindingBlock) -> relax.BindingBlock:
        return self._of_block(super().visit_binding_block_, block)

    def visit_dataflow_block_(self, block: relax.DataflowBlock) -> relax.DataflowBlock:
        return self._of_block(super().visit_dataflow_block_, block)

    def _of_block(self, visit: Callable[[Any], Any], block: Any) -> Any:
        """What one block binds, the next one may not know; a branch knows it."""
        if not self._branches:
            self._images = {}
        return visit(block)

    def visit_if_(self, conditional: relax.If) -> Any:
        self._branches += 1
        visited = super().visit_if_(conditional)
        self._branches -= 1
        return visited

    def visit_call_(self, call: relax.Call) -> Any:
        call = self.visit_expr_post_order(call)
        name = operator(call)
        if name == "relax.nn.conv2d":
            return self._convolution(call)
        order = next((o for o in map(self._order, leaves(call)) if o is not None), None)
        if order is None or not has_shape(call.ty):
            return call
        if is_seen_as(call) and len(order) == call.ty.ndim:
            shape = shape_of(call)
            unpermuted = [shape[order.index(axis)] for axis in range(len(order))]
            return self._permuted(seen_as(self._unpermuted(call.args[1], order), unpermuted), order)
        if name in _ELEMENTWISE:
            return self._elementwise(call, order)
        if name == "relax.concat":
            return self._concat(call, order)
        order = self._order(call.args[0])
        if order is None:
            return call
        if name == "relax.permute_dims":
            return self._composed(call, order)
        if name in RESHAPES:
            return self._reshape(call, order)
        if name in _OF_IMAGES:
            return self._of_image(call, order)
        if name == "relax.nn.pad":
            return self._pad(call, order)
        if name == "relax.strided_slice":
            return self._slice(call, order)
        if name == "relax.take" and call.attrs.axis is not None and getattr(call.args[1].ty, "ndim", 0) == 1:
            return self._changed(call, order, axis=order[int(call.attrs.axis) % len(order)])
        if name == BYTE_TABLE:
            return self._changed(call, order)
        if name in _OF_AN_AXIS:
            return self._changed(call, order, axis=order[int(call.attrs.axis) % len(order)])
        if name in _NORMS:
            return self._norm(call, order)
        if name in _REDUCTIONS or name in _POSITIONS:
            return self._reduction(call, order)
        return call

    def _convolution(self, call: relax.Call) -> Any:
        attrs = call.attrs
        if {str(attrs.data_layout), str(attrs.out_layout)} != {"NCHW"} or str(attrs.kernel_layout) != "OIHW":
            return call
        weight = self.builder_.emit(relax.op.permute_dims(call.args[1], [2, 3, 1, 0]))
        layouts = {"data_layout": "NHWC", "out_layout": "NHWC", "kernel_layout": "HWIO"}
        converted = relax.Call(call.op, [self._image(call.args[0]), weight], _with_fields(attrs, **layouts))
        return self._permuted(converted, _IMAGE)

    def _elementwise(self, call: relax.Call, order: list[int]) -> Any:
        if len(order) != call.ty.ndim:
            return call
        arguments = self._all_unpermuted(call.args, order)
        return call if arguments is None else self._permuted(self._with(call, arguments), order)

    def _concat(self, call: relax.Call, order: list[int]) -> Any:
        if call.attrs.axis is None or not isinstance(call.args[0], relax.Tuple):
            return call
        parts = self._all_unpermuted(call.args[0].fields, order)
        return call if parts is None else self._permuted(relax.op.concat(parts, order[int(call.attrs.axis)]), order)

    def _composed(self, call: relax.Call, order: list[int]) -> Any:
        data = self._unpermuted(call.args[0], order)
        composed = [order[axis] for axis in permutation_of(call)]
        return data if composed == sorted(composed) else relax.op.permute_dims(data, composed)

    def _reshape(self, call: relax.Call, order: list[int]) -> Any:
        """Axes split or joined: those of the unpermuted tensor, where it has them side by side.

        Else it is transposed first, but only where the result is an image: a channel shuffle, a pixel shuffle.
        """
        if not is_static_tensor(call.ty) or not is_static_tensor(call.args[0].ty):
            return call
        groups = _regrouped_axes(extents(call.args[0].ty), extents(call.ty))
        if groups is None:
            return call
        groups.sort(key=lambda group: order[group[0][0]])
        gathered = [order[axis] for before, _ in groups for axis in before]
        written = [axis for _, after in groups for axis in after]
        result = [written.index(axis) for axis in range(len(written))]
        in_place = gathered == sorted(gathered)
        if result == sorted(result) or not (in_place or result == _IMAGE):
            return call
        data = self._unpermuted(call.args[0], order)
        data = data if in_place else self.builder_.emit(relax.op.permute_dims(data, gathered))
        return self._permuted(relax.op.reshape(data, [extents(call.ty)[axis] for axis in written]), result)

    def _of_image(self, call: relax.Call, order: list[int]) -> Any:
        layouts = {key: "NHWC" for key in ("layout", "out_layout") if hasattr(call.attrs, key)}
        if order != _IMAGE or any(str(getattr(call.attrs, key)) != "NCHW" for key in layouts):
            return call
        return self._changed(call, order, **layouts)

    def _pad(self, call: relax.Call, order: list[int]) -> Any:
        widths = [int(width) for width in call.attrs.pad_width]
        moved = [0] * len(widths)
        for position, axis in enumerate(order):
            moved[2 * axis : 2 * axis + 2] = widths[2 * position : 2 * position + 2]
        return self._changed(call, order, pad_width=moved)

    def _slice(self, call: relax.Call, order: list[int]) -> Any:
        axes = relax.Tuple([relax.prim_value(order[int(axis) % len(order)]) for axis in call.args[1].fields])
        return self._permuted(self._with(call, [self._unpermuted(call.args[0], order), axes, *call.args[2:]]), order)

    def _norm(self, call: relax.Call, order: list[int]) -> Any:
        axes = [order[int(axis) % len(order)] for axis in call.attrs.axes]
        if operator(call) == "relax.nn.layer_norm":  # its weights have these axes
            return self._changed(call, order, axes=axes) if axes == sorted(axes) else call
        channels = order[int(call.attrs.channel_axis) % len(order)]
        return self._changed(call, order, axes=sorted(axes), channel_axis=channels)

    def _reduction(self, call: relax.Call, order: list[int]) -> Any:
        if call.attrs.axis is None:
            return call
        one = operator(call) in _POSITIONS
        axes = [int(axis) % len(order) for axis in ([call.attrs.axis] if one else call.attrs.axis)]
        moved = [order[axis] for axis in axes]
        arguments = [self._unpermuted(call.args[0], order)]
        reduced = self._with(call, arguments, axis=moved[0] if one else moved)
        if call.attrs.keepdims:
            return self._permuted(reduced, order)
        left = [axis for position, axis in enumerate(order) if position not in axes]
        return self._permuted(reduced, [sorted(left).index(axis) for axis in left])

    def _changed(self, call: relax.Call, order: list[int], **fields: Any) -> Any:
        """`call` of the unpermuted first argument, with other attributes."""
        arguments = [self._unpermuted(call.args[0], order), *call.args[1:]]
        return self._permuted(self._with(call, arguments, **fields), order)

    def _with(self, call: relax.Call, arguments: Sequence[Any], **fields: Any) -> relax.Call:
        attrs = _with_fields(call.attrs, **fields) if fields else call.attrs
        return relax.Call(call.op, arguments, attrs, call.ty_args)

    def _permuted(self, expr: Any, order: list[int]) -> Any:
        return relax.op.permute_dims(self.builder_.emit(expr), order)

    def _order(self, argument: Any) -> list[int] | None:
        value = self._value(argument)
        return permutation_of(value) if operator(value) == "relax.permute_dims" else None

    def _all_unpermuted(self, arguments: Sequence[Any], order: list[int]) -> list[Any] | None:
        """What the arguments are permutations of; None where some are none.

        Images that are not get a permute, unless they are the larger part.
        """
        found = [self._unpermuted(argument, order) for argument in arguments]
        others = [argument for argument, known in zip(arguments, found, strict=True) if known is None]
        if not others:
            return found
        if order != _IMAGE or any(not has_shape(other.ty) or other.ty.ndim != len(order) for other in others):
            return None
        permuted = [argument for argument in arguments if self._order(argument) == order]
        if _elements(others) > _elements(permuted):
            return None
        return [
            self._image(argument) if known is None else known for argument, known in zip(arguments, found, strict=True)
        ]

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

    def _image(self, data: Any) -> Any:
        """`data`, in NCHW, as NHWC."""
        known = self._unpermuted(data, _IMAGE)
        known = self._images.get(data) if known is None and isinstance(data, relax.Var) else known
        if known is not None:
            return known
        image = self.builder_.emit(relax.op.permute_dims(data, [0, 2, 3, 1]))
        if isinstance(data, relax.Var) and not self._branches:
            self._images[data] = image
        return image


def _regrouped_axes(before: Sequence[int], after: Sequence[int]) -> list[tuple[list[int], list[int]]] | None:
    """The smallest groups of neighbouring axes that a reshape turns into one another; None where extents of 1 are over.

    (1, 8, 3, 5) to (1, 2, 4, 15): ([0], [0]), ([1], [1, 2]), ([2, 3], [3]).
    """
    groups: list[tuple[list[int], list[int]]] = []
    left, right = iter(range(len(before))), iter(range(len(after)))
    for first, other in zip(left, right, strict=False):
        axes, others = [first], [other]
        while (size := math.prod(before[a] for a in axes)) != (other_size := math.prod(after[a] for a in others)):
            grown, rest = (axes, left) if size < other_size else (others, right)
            axis = next(rest, None)
            if axis is None:
                return None
            grown.append(axis)
        groups.append((axes, others))
    whole = sum(len(a) for a, _ in groups) == len(before) and sum(len(b) for _, b in groups) == len(after)
    return groups if whole else None


def _elements(tensors: Sequence[Any]) -> int:
    """Open sizes do not count: neighbours share them."""
    return sum(math.prod(size for size in shape_of(tensor) if isinstance(size, int)) for tensor in tensors)


def _with_fields(attrs: Any, **changed: Any) -> Any:
    """Attributes of an operator, some of them changed."""
    fields = {field.name: getattr(attrs, field.name) for field in type(attrs).__tvm_ffi_type_info__.fields}
    return ir.make_node(type(attrs).__tvm_ffi_type_info__.type_key, **{**fields, **changed})


@transform.module_pass(opt_level=0, name="AbsorbFlattens")
class _AbsorbFlattens:
    def transform_module(self, mod: ir.IRModule, _context: transform.PassContext) -> ir.IRModule:
        return map_functions(mod, _absorb_flattens)


def _absorb_flattens(function: relax.Function) -> relax.Function:
    """reshape(permute_dims(x)) @ W -> reshape(x) @ W', where one row of the reshape is one image of x.

    Likewise for permute_dims(W), which `FoldWeights` leaves where W is large.
    """
    return relax.analysis.remove_all_unused(_Absorber(function).visit_expr(function))


@mutator
class _Absorber(LookupMutator):
    def __init__(self, function: relax.Function) -> None:
        super().__init__(function)
        self._uses = use_counts(function)

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
