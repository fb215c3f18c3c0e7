"""JoinNorms: layer norms and RMS norms that are written out become one operator, which is one kernel."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from tvm import ir, relax, transform
from tvm.relax import op
from tvm.relax.expr_functor import mutator
from tvm_ffi import structural_equal

from ..relax_ir.constants import array_of, constant_of, is_number, is_static_tensor
from ..relax_ir.functions import LookupMutator, has_call, map_functions, operator, use_counts
from ..relax_ir.tensors import extents, shape_of

__all__ = ["JoinNorms"]

MOST_WRITTEN_TWICE = 4
"""Operators in a row that may be written twice: a mean, what it is subtracted from, and a little before."""

_GAMMA, _BETA = 1, 2
"""Places among a norm's arguments."""

_NEUTRAL = {_GAMMA: 1.0, _BETA: 0.0}
"""What stands there where nothing is multiplied or added."""

_ROOTS = frozenset({"relax.sqrt", "relax.rsqrt"})


@transform.module_pass(opt_level=0, name="JoinNorms")
class JoinNorms:
    """Sums over axes and what follows them -> `nn.layer_norm`, `nn.rms_norm`, where nothing else reads the sums.

    - x * rsqrt(mean(x^2) + epsilon) * gamma -> rms_norm(x, gamma)
    - d * rsqrt(mean(d^2) + epsilon) * gamma + beta, where d = x - mean(x) -> layer_norm(x, gamma, beta)
    - x * s + (beta - mean(x) * s), where s = rsqrt(mean(d^2) + epsilon) * gamma -> the same: TensorFlow's spelling

    Also with a division by the root, and with `variance(x)` for mean(d^2). Language models of PyTorch write RMS norms
    so, and all that was exported to ONNX before opset 17 its layer norms: three to six kernels that read what one
    reads. Of float32, in which norms of 16 bits are written; over the last axes: over the channels of an image that
    come first, one kernel takes three times as long as these.
    """

    def transform_module(self, mod: ir.IRModule, _context: transform.PassContext) -> ir.IRModule:
        """Rewrite every Relax function."""
        return map_functions(mod, _join)


def _join(function: relax.Function) -> relax.Function:
    if not has_call(function, _ROOTS):
        return function
    return relax.analysis.remove_all_unused(_Joiner(function).visit_expr(function))


@mutator
class _Joiner(LookupMutator):
    """A norm begins without gamma and beta, as ones and zeros, and takes them from the operators that follow it."""

    def __init__(self, function: relax.Function) -> None:
        super().__init__(function)
        self._uses = use_counts(function)

    def visit_call_(self, call: relax.Call) -> Any:
        call = self.visit_expr_post_order(call)
        if not isinstance(call.ty, relax.TensorType) or str(call.ty.dtype) != "float32" or call.ty.ndim < 1:
            return call
        ways: dict[str, Sequence[Callable[[relax.Call], Any]]] = {
            "relax.multiply": (self._by_inverse_root, self._scaled),
            "relax.divide": (self._by_root,),
            "relax.add": (self._shifted, self._shifted_before),
        }
        norm = _first(way(call) for way in ways.get(operator(call), ()))
        return call if norm is None else norm

    def _by_inverse_root(self, call: relax.Call) -> Any:
        """x * rsqrt(mean square + epsilon)"""
        for x, root in (call.args, reversed(call.args)):
            found = self._under_root(root, "relax.rsqrt")
            if found is not None:
                return self._norm(x, *found)
        return None

    def _by_root(self, call: relax.Call) -> Any:
        """x / sqrt(mean square + epsilon)"""
        found = self._under_root(call.args[1], "relax.sqrt")
        return None if found is None else self._norm(call.args[0], *found)

    def _under_root(self, expr: Any, root: str) -> tuple[relax.Call, float] | None:
        """The mean square or variance whose root it is, which keeps its axes, and epsilon."""
        value = self._value(expr)
        if operator(value) != root or self._uses.get(expr) != 1:
            return None
        total = self._value(value.args[0])
        if operator(total) != "relax.add":
            return None
        for mean, epsilon in (total.args, reversed(total.args)):
            mean = self._value(mean)
            kind = operator(mean)
            if kind in ("relax.mean", "relax.variance") and mean.attrs.keepdims and is_number(epsilon, mean.ty.ndim):
                return mean, float(array_of(epsilon).reshape(()))
        return None

    def _norm(self, x: Any, square: relax.Call, epsilon: float) -> Any:
        """What divides x by the root of `square`; None where that is of something else."""
        axes = _axes(square)
        if operator(square) == "relax.mean":
            base = self._squared(square.args[0])
            if base is None or not self._same(base, x):
                return None
            centred = self._centred(x, axes)
        else:
            centred = self._centred(x, axes)
            if centred is None or not self._same(centred, square.args[0]):
                return None
        source = x if centred is None else centred
        sizes = _sizes(source, axes)
        if sizes is None or axes != list(range(source.ty.ndim))[-len(axes) :]:
            return None
        ones, zeros = (constant_of(np.full(sizes, value, np.float32)) for value in _NEUTRAL.values())
        if centred is None:
            return op.nn.rms_norm(source, ones, axes, epsilon)
        return op.nn.layer_norm(source, ones, zeros, axes, epsilon)

    def _squared(self, expr: Any) -> Any:
        """What is squared, or None."""
        value = self._value(expr)
        kind = operator(value)
        if kind == "relax.square":
            return value.args[0]
        if kind == "relax.multiply" and self._same(*value.args):
            return value.args[0]
        is_square = kind == "relax.power" and is_number(value.args[1], value.ty.ndim)
        return value.args[0] if is_square and float(array_of(value.args[1]).reshape(())) == 2.0 else None

    def _centred(self, expr: Any, axes: list[int]) -> Any:
        """x, where the expression is x - mean(x) over such axes."""
        value = self._value(expr)
        if operator(value) != "relax.subtract":
            return None
        x, mean = value.args[0], self._value(value.args[1])
        is_mean = operator(mean) == "relax.mean" and mean.attrs.keepdims and _axes(mean) == axes
        return x if is_mean and self._same(mean.args[0], x) else None

    def _scaled(self, call: relax.Call) -> Any:
        """norm(x) * gamma; beta would be multiplied, too."""
        ways = (call.args, reversed(call.args))
        return _first(self._with(self._norm_without(norm, _GAMMA, _BETA), _GAMMA, gamma) for norm, gamma in ways)

    def _shifted(self, call: relax.Call) -> Any:
        """norm(x) + beta"""
        ways = (call.args, reversed(call.args))
        return _first(self._with(self._norm_without(norm, _BETA), _BETA, beta) for norm, beta in ways)

    def _shifted_before(self, call: relax.Call) -> Any:
        """x * s + (beta - mean(x) * s), s = rsqrt(variance + epsilon) * gamma"""
        for scaled, offset in (call.args, reversed(call.args)):
            product, difference = self._value(scaled), self._value(offset)
            if operator(product) != "relax.multiply" or operator(difference) != "relax.subtract":
                continue
            beta, shift = difference.args[0], self._value(difference.args[1])
            if operator(shift) != "relax.multiply":
                continue
            for x, scale in (product.args, reversed(product.args)):
                mean = next((m for m, s in (shift.args, reversed(shift.args)) if self._same(s, scale)), None)
                norm = None if mean is None else self._with(self._norm_of_scale(x, mean, scale), _BETA, beta)
                if norm is not None:
                    return norm
        return None

    def _norm_of_scale(self, x: Any, mean: Any, scale: Any) -> Any:
        """layer_norm(x, gamma, zeros), of what x is multiplied by, and the mean that was subtracted from it."""
        value = self._value(scale)
        if operator(value) != "relax.multiply":
            return None
        for root, gamma in (value.args, reversed(value.args)):
            found = self._under_root(root, "relax.rsqrt")
            if found is None:
                continue
            norm = self._norm(self.builder_.emit(op.subtract(x, mean)), *found)
            return self._with(norm, _GAMMA, gamma) if operator(norm) == "relax.nn.layer_norm" else None
        return None

    def _norm_without(self, var: Any, *places: int) -> Any:
        """The norm that a variable is, which has nothing at these places, as far as it has them, and no other reader.

        A RMS norm has no beta, and takes none.
        """
        norm = self._value(var)
        if operator(norm) not in ("relax.nn.layer_norm", "relax.nn.rms_norm") or self._uses.get(var) != 1:
            return None
        taken = [place for place in places if place < len(norm.args)]
        return norm if taken and all(_is_neutral(norm.args[place], place) for place in taken) else None

    def _with(self, norm: Any, place: int, operand: Any) -> Any:
        """The norm with gamma or beta; None without a norm, or where the operand is of other axes."""
        by = None if norm is None else self._of_axes(operand, norm)
        if by is None:
            return None
        return relax.Call(norm.op, [*norm.args[:place], by, *norm.args[place + 1 :]], norm.attrs)

    def _of_axes(self, operand: Any, norm: relax.Call) -> Any:
        """The operand with the shape of gamma; None where it differs along other axes, or is the same along these."""
        axes, rank = _axes(norm), norm.args[0].ty.ndim
        if not is_static_tensor(operand.ty) or operand.ty.ndim > rank:
            return None
        shape = [1] * (rank - operand.ty.ndim) + extents(operand.ty)
        wanted = _sizes(norm.args[0], axes)
        if [shape[axis] for axis in axes] != wanted or any(shape[a] != 1 for a in range(rank) if a not in axes):
            return None
        if isinstance(operand, ir.GenericConst):
            return constant_of(array_of(operand).reshape(wanted))
        return operand if extents(operand.ty) == wanted else self.builder_.emit(op.reshape(operand, wanted))

    def _value(self, expr: Any) -> Any:
        """What a variable is bound to, but for casts that change nothing; itself where its block does not know."""
        while isinstance(expr, relax.Var):
            value = super()._value(expr)
            if value is None:
                return expr
            if operator(value) != "relax.astype" or str(value.ty.dtype) != str(value.args[0].ty.dtype):
                return value
            expr = value.args[0]
        return expr

    def _same(self, left: Any, right: Any, depth: int = MOST_WRITTEN_TWICE) -> bool:
        """Whether two expressions compute the same, also where that is written twice."""
        if left.same_as(right):
            return True
        left, right = self._value(left), self._value(right)
        if left.same_as(right):
            return True
        if depth == 0 or not operator(left) or operator(left) != operator(right) or len(left.args) != len(right.args):
            return False
        pairs = zip(left.args, right.args, strict=True)
        return structural_equal(left.attrs, right.attrs) and all(self._same(a, b, depth - 1) for a, b in pairs)


def _first(found: Iterable[Any]) -> Any:
    """The first that is not None, which expressions cannot be asked as a truth."""
    return next((one for one in found if one is not None), None)


def _axes(call: relax.Call) -> list[int]:
    """The axes of a reduction or a norm, in order."""
    given = getattr(call.attrs, "axes", None) if "norm" in operator(call) else call.attrs.axis
    rank = call.args[0].ty.ndim
    return list(range(rank)) if given is None else sorted(int(axis) % rank for axis in given)


def _sizes(x: Any, axes: Sequence[int]) -> list[int] | None:
    """The extents of a tensor along some axes, where they are known."""
    if not isinstance(x.ty.shape, relax.ShapeExpr):
        return None
    sizes = [shape_of(x)[axis] for axis in axes]
    return sizes if all(isinstance(size, int) for size in sizes) else None


def _is_neutral(operand: Any, place: int) -> bool:
    return isinstance(operand, ir.GenericConst) and bool((array_of(operand) == _NEUTRAL[place]).all())
