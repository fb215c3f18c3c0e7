"""KeepNarrowWeights: products of few rows by weights that a model stores in 8 bits or fewer read them as stored."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from tvm import ir, relax, transform
from tvm.relax import op

from ..arrays import Array
from ..dtypes import is_byte
from ..narrow_weights import NarrowWeights, narrow_product, narrow_weights
from ..narrow_weights.repeated_array import RepeatedArray
from ..relax_ir.constants import is_static_tensor
from ..relax_ir.functions import bound_values, map_functions, operator, rewrite_bindings
from ..relax_ir.tensors import extents
from ..search.space.narrow_weights import MOST_ROWS
from .fake_quantization import MOVES
from .fold_weights import WeightValues
from .simplify_shapes import RESHAPES, permutation_of

__all__ = ["KeepNarrowWeights"]

_FEW_WEIGHTS = 2**18
"""Of all products of a function: as floats they stay in the near caches, and no code has to be read."""

_LEAST_CODES = 2**12
"""Of a constant that may be weights."""

_SELECTING = 2**4
"""Whole numbers in floats that span no more than this may select, or take differences: those are no weights."""

_WHOLE = 2.0**15
"""Limit of whole numbers in float32 that may be codes."""


@transform.module_pass(opt_level=0, name="KeepNarrowWeights")
class KeepNarrowWeights:
    """Write matmul(x, scale * (codes - zero)) of constant codes as one operator, for up to 16 rows of x in float32.

    What a decoder computes for its next word reads each weight once: 4 bits come in an eighth of the time of float32.
    Folded, as `FoldWeights` does, the same weights are floats. Codes span at most 256 numbers; scales and zeros are
    constants of each column, or of groups of 16 or more places of a column (GPTQ's and AWQ's, weight-only quantisation
    of ONNX Runtime and torchao). Where x is dequantised, too, the product is one of integers, and stays.

    Parameters
    ----------
    least : int
        How many weights all such products of a function must have.
    """

    def __init__(self, least: int = _FEW_WEIGHTS) -> None:
        self._least = least

    def transform_module(self, mod: ir.IRModule, _context: transform.PassContext) -> ir.IRModule:
        """Rewrite `relax.matmul`; before weights are folded."""
        return map_functions(mod, lambda function: _rewrite(function, self._least))


def _rewrite(function: relax.Function, least: int) -> relax.Function:
    values = bound_values(function)
    products = [var for var, value in values.items() if operator(value) == "relax.matmul" and _fits(value, values)]
    stored = _Stored(values, WeightValues(function)) if products else None
    found = {var for var in products if stored is not None and stored.holds(values[var].args[1])}
    if stored is None or sum(math.prod(extents(values[var].args[1].ty)) for var in found) < least:
        return function
    builder = relax.BlockBuilder()

    def narrow(binding: Any) -> list[Any]:
        if binding.var not in found:
            return [binding]
        x, right = binding.value.args
        weights = stored.weights(right)
        if weights is None:
            return [binding]
        product = builder.normalize(narrow_product(x, weights))
        columns = extents(binding.value.ty)[-1]
        if extents(product.ty)[-1] == columns:
            return [relax.VarBinding(binding.var, product)]
        whole = relax.Var("filled_up", product.ty)
        cut = builder.normalize(op.strided_slice(whole, [product.ty.ndim - 1], [0], [columns]))
        return [relax.VarBinding(whole, product), relax.VarBinding(binding.var, cut)]

    return relax.analysis.remove_all_unused(rewrite_bindings(function, narrow))


def _fits(call: relax.Call, values: Mapping[relax.Var, Any]) -> bool:
    """Whether it is a product of a few rows, which were not dequantised, in float32."""
    x, weight = call.args
    if not all(is_static_tensor(tensor.ty) and str(tensor.ty.dtype) == "float32" for tensor in (x, weight, call)):
        return False
    if weight.ty.ndim != 2 or math.prod(extents(weight.ty)) < _LEAST_CODES:
        return False
    source = x
    while operator(values.get(source)) in MOVES:
        source = values[source].args[0]
    is_few = 0 < math.prod(extents(x.ty)[:-1]) <= MOST_ROWS
    return is_few and x.ty.ndim > 1 and operator(values.get(source)) != "relax.dequantize"


@dataclass(frozen=True)
class _Affine:
    """scales * (codes - zeros), all of one shape."""

    codes: Array
    scales: RepeatedArray
    zeros: RepeatedArray

    @property
    def is_unscaled(self) -> bool:
        """Whether nothing was multiplied yet."""
        return bool((self.scales.array == 1).all())

    def moved(self, move: Callable[[Any], Any]) -> _Affine:
        """All three moved in the same way."""
        return _Affine(move(self.codes), move(self.scales), move(self.zeros))


class _Stored:
    """How the values of a function that depend on constants alone are made of codes in 8 bits."""

    def __init__(self, values: Mapping[relax.Var, Any], constants: WeightValues) -> None:
        self._values, self._constants = values, constants
        self._affines: dict[relax.Var, _Affine | None] = {}
        self._found: dict[relax.Var, NarrowWeights | None] = {}

    def holds(self, var: Any) -> bool:
        """Whether a right operand is made of codes."""
        return isinstance(var, relax.Var) and self._affine(var) is not None

    def weights(self, var: Any) -> NarrowWeights | None:
        """A right operand, [places, columns], as `NarrowWeights`; None where it is something else."""
        if not isinstance(var, relax.Var):
            return None
        if var not in self._found:
            affine = self._affine(var)
            self._found[var] = None if affine is None else narrow_weights(*_in_runs(affine))
        return self._found[var]

    def _affine(self, expr: Any) -> _Affine | None:
        """The expression as codes; None where it is something else."""
        if not isinstance(expr, relax.Var):
            return self._made_of_codes(expr)
        if expr not in self._affines:
            self._affines[expr] = self._made_of_codes(expr)
        return self._affines[expr]

    def _made_of_codes(self, expr: Any) -> _Affine | None:
        if not is_static_tensor(expr.ty):
            return None
        dtype = str(expr.ty.dtype)
        if is_byte(dtype) or isinstance(expr, ir.GenericConst):
            return self._constant(expr)
        if dtype not in ("float32", "int16", "int32") or not isinstance(expr, relax.Var):
            return None
        value = self._values.get(expr)
        name = operator(value)
        if name == "relax.dequantize":
            return self._dequantized(value)
        if name in RESHAPES or name == "relax.permute_dims":
            return self._moved(value)
        if name == "relax.astype":
            return self._converted(value)
        if name in ("relax.subtract", "relax.add"):
            return self._shifted(value)
        if name in ("relax.multiply", "relax.divide"):
            return self._scaled(value)
        return None

    def _constant(self, expr: Any) -> _Affine | None:
        """Codes in a constant, which may have been made floats already."""
        codes = self._constants.array(expr) if expr in self._constants else None
        if codes is None or codes.size < _LEAST_CODES:
            return None
        if codes.dtype == np.float32:
            low, high = codes.min(), codes.max()
            if not -_WHOLE < low <= high < _WHOLE or high - low < _SELECTING or (codes != np.rint(codes)).any():
                return None
            codes = codes.astype(np.int32)
        elif codes.dtype.kind not in "iu":
            return None
        one, zero = (RepeatedArray.of(np.asarray(value, np.float32), codes.shape) for value in (1, 0))
        return _Affine(codes, one, zero)

    def _converted(self, call: relax.Call) -> _Affine | None:
        """The same numbers in another type; None where they may not fit it."""
        source, dtype = self._affine(call.args[0]), str(call.ty.dtype)
        if source is None or dtype == "float32":
            return source
        return source if self._are_whole(source, dtype) else None

    def _are_whole(self, affine: _Affine, dtype: str) -> bool:
        """Whether all codes - zeros are whole numbers that an integer type holds."""
        zeros = affine.zeros.array
        if not affine.is_unscaled or not np.isfinite(zeros).all() or (zeros != np.rint(zeros)).any():
            return False
        limits = np.iinfo(dtype)
        low = int(affine.codes.min()) - int(zeros.max())
        return limits.min <= low and int(affine.codes.max()) - int(zeros.min()) <= limits.max

    def _moved(self, call: relax.Call) -> _Affine | None:
        source = self._affine(call.args[0])
        if source is None:
            return None
        if operator(call) == "relax.permute_dims":
            axes = permutation_of(call)
            return source.moved(lambda array: array.transpose(axes))
        shape = extents(call.ty)
        return source.moved(lambda array: array.reshape(shape))

    def _shifted(self, call: relax.Call) -> _Affine | None:
        source, number = self._affine(call.args[0]), self._number(call.args[1], call)
        if source is None or number is None or not source.is_unscaled or extents(call.ty) != list(source.codes.shape):
            return None
        combine = np.add if operator(call) == "relax.subtract" else np.subtract
        shifted = replace(source, zeros=source.zeros.combined(number, combine))
        dtype = str(call.ty.dtype)
        return shifted if dtype == "float32" or self._are_whole(shifted, dtype) else None

    def _scaled(self, call: relax.Call) -> _Affine | None:
        left, right = call.args
        if operator(call) == "relax.multiply" and self._affine(left) is None:
            left, right = right, left
        source, number = self._affine(left), self._number(right, call)
        if source is None or number is None or str(call.ty.dtype) != "float32":
            return None
        if extents(call.ty) != list(source.codes.shape):
            return None
        combine = np.multiply if operator(call) == "relax.multiply" else np.divide
        return replace(source, scales=source.scales.combined(number, combine))

    def _dequantized(self, call: relax.Call) -> _Affine | None:
        source = self._affine(call.args[0])
        if source is None or not source.is_unscaled:
            return None
        rank = call.ty.ndim
        known = [self._constants.array(arg) for arg in call.args[1:] if arg in self._constants]
        arrays = [array.astype(np.float32) for array in known if array is not None]
        if len(arrays) < 2:
            return None
        shape = [1] * rank
        if any(array.ndim for array in arrays):
            shape[int(call.attrs.axis) % rank] = -1
        whole = source.codes.shape
        scales, zeros = (RepeatedArray.of(a.reshape(shape) if a.ndim else a, whole) for a in arrays)
        return _Affine(source.codes, scales, source.zeros.combined(zeros, np.add))

    def _number(self, expr: Any, call: relax.Call) -> RepeatedArray | None:
        """A constant operand, with the shape of the result of the call."""
        array = self._constants.array(expr) if expr in self._constants else None
        return None if array is None else RepeatedArray.of(array.astype(np.float32), extents(call.ty))


def _in_runs(affine: _Affine) -> tuple[Array, Array, Array]:
    """Codes, [places, columns], and scales and zeros, [runs of places, columns], or one for all columns."""
    scales, zeros = (
        array.array if array.array.shape[1] == 1 else array.array.repeat(array.times[1], 1)
        for array in (affine.scales, affine.zeros)
    )
    return affine.codes, scales, zeros
