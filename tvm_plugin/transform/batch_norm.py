"""FoldBatchNorm: batch norms disappear into the weights before them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from tvm import ir, relax, transform
from tvm.relax.expr_functor import PyExprMutator, mutator

from ..arrays import Array
from ..dtypes import is_floating
from ..relax_ir.constants import constant_of
from ..relax_ir.functions import block_results, bound_values, has_call, map_functions, operator, use_counts
from .fold_weights import WeightValues

__all__ = ["FoldBatchNorm"]

_CONVOLUTIONS = frozenset({"relax.nn.conv1d", "relax.nn.conv2d", "relax.nn.conv3d"})
_TRANSPOSED = frozenset(f"{name}_transpose" for name in _CONVOLUTIONS)


@transform.module_pass(opt_level=0, name="FoldBatchNorm")
class FoldBatchNorm:
    """Fold batch norms with constant statistics, scale and shift.

    With scale = gamma / sqrt(variance + epsilon) and shift = beta - mean * scale, for each channel:

    - batch_norm(conv(x, W))[0] -> conv(x, W * scale) + shift
    - batch_norm(conv(x, W) + b)[0] -> conv(x, W * scale) + (b * scale + shift)
    - batch_norm(matmul(x, W))[0], batch_norm(matmul(x, W) + b)[0]: likewise
    - batch_norm(x)[0] -> x * scale + shift

    Convolutions may be grouped or depthwise, of one to three dimensions, and, ungrouped, transposed. Weights are
    changed only where the result has no other use. A batch norm in training mode, or whose updated statistics are read,
    stays.
    """

    def transform_module(self, mod: ir.IRModule, _context: transform.PassContext) -> ir.IRModule:
        """Fold the batch norms of every Relax function."""
        return map_functions(mod, _fold)


def _fold(function: relax.Function) -> relax.Function:
    if not has_call(function, {"relax.nn.batch_norm"}):
        return function
    return relax.analysis.remove_all_unused(_Folder(function).visit_expr(function))


@dataclass(frozen=True)
class _Affine:
    """What a batch norm does to each channel: x * scale + shift, both of shape [channels]."""

    scale: Array
    shift: Array


@dataclass(frozen=True)
class _Linear:
    """A convolution or matmul with constant weights, and the constant that is added to it."""

    call: relax.Call
    weight: Array
    output_axis: int
    bias: Array | None


@mutator
class _Folder(PyExprMutator):
    def __init__(self, function: relax.Function) -> None:
        super().__init__()
        self._weights = WeightValues(function)
        self._uses = use_counts(function)
        results = block_results(function)
        self._bound = {var: value for var, value in bound_values(function).items() if var not in results}

    def visit_tuple_getitem_(self, item: relax.TupleGetItem) -> Any:
        call: Any = self._bound.get(item.tuple_value)
        if item.index != 0 or operator(call) != "relax.nn.batch_norm" or call.attrs.training:
            return super().visit_tuple_getitem_(item)
        affine = self._affine(call)
        if affine is None:
            return super().visit_tuple_getitem_(item)
        axis = int(call.attrs.axis) % call.args[0].ty.ndim
        linear = self._linear_before(call.args[0], axis)
        if linear is None:
            product = relax.op.multiply(self.visit_expr(call.args[0]), _spread(affine.scale, item.ty, axis))
            return relax.op.add(self.builder_.emit(product), _spread(affine.shift, item.ty, axis))
        shape = [1] * linear.weight.ndim
        shape[linear.output_axis] = -1
        weight = (linear.weight * affine.scale.reshape(shape)).astype(linear.weight.dtype)
        bias = affine.shift if linear.bias is None else linear.bias * affine.scale + affine.shift
        data = self.visit_expr(linear.call.args[0])
        scaled = relax.Call(linear.call.op, [data, constant_of(weight)], linear.call.attrs)
        return relax.op.add(self.builder_.emit(scaled), _spread(bias, item.ty, axis))

    def _affine(self, call: relax.Call) -> _Affine | None:
        """The batch norm's effect in float64, or None when an argument is no constant."""
        arrays = [self._weights.array(argument) for argument in call.args[1:5]]
        if any(array is None for array in arrays):
            return None
        gamma, beta, mean, variance = (np.asarray(array, np.float64) for array in arrays)
        scale = 1 / np.sqrt(variance + float(call.attrs.epsilon))
        if call.attrs.scale:
            scale = scale * gamma
        return _Affine(scale, (beta if call.attrs.center else 0.0) - mean * scale)

    def _linear_before(self, expr: Any, axis: int) -> _Linear | None:
        """The convolution or matmul that computes `expr`, whose channels lie on `axis`, for this use alone."""
        value, bias = self._used_once(expr), None
        if operator(value) == "relax.add":
            for data, constant in (value.args, reversed(value.args)):
                array = self._weights.array(constant)
                if array is not None:
                    bias = _per_channel(array, expr.ty, axis)
                    if bias is None:
                        return None
                    value = self._used_once(data)
                    break
        if not isinstance(value, relax.Call) or value.ty.ndim != expr.ty.ndim:  # a bias may have more axes
            return None
        output_axis = _output_axis(value, axis)
        weight = None if output_axis is None else self._weights.array(value.args[1])
        if weight is None or output_axis is None or not is_floating(str(weight.dtype)):
            return None
        return _Linear(value, weight, output_axis, bias)

    def _used_once(self, expr: Any) -> Any:
        return self._bound.get(expr) if isinstance(expr, relax.Var) and self._uses.get(expr) == 1 else None


def _output_axis(call: relax.Call, axis: int) -> int | None:
    """Which axis of the weights makes the channels that the result has on `axis`; None for anything else."""
    name = operator(call)
    if name in _CONVOLUTIONS or (name in _TRANSPOSED and int(call.attrs.groups) == 1):
        layout = str(call.attrs.out_layout or call.attrs.data_layout)
        return str(call.attrs.kernel_layout).index("O") if layout.find("C") == axis else None
    if name == "relax.matmul" and axis == call.ty.ndim - 1 and call.args[1].ty.ndim == 2:
        return 1
    return None


def _per_channel(array: Array, ty: Any, axis: int) -> Array | None:
    """An added constant as one number a channel, or one for all; None when it varies along another axis."""
    shape = (1,) * (ty.ndim - array.ndim) + array.shape
    if any(extent != 1 for position, extent in enumerate(shape) if position != axis):
        return None
    return array.reshape(-1).astype(np.float64)


def _spread(values: Array, ty: Any, axis: int) -> ir.GenericConst:
    """One number a channel as a constant that broadcasts against `ty`."""
    shape = [1] * ty.ndim
    shape[axis] = -1
    return constant_of(np.ascontiguousarray(values.reshape(shape).astype(str(ty.dtype))))
