"""Attention over long sequences as one kernel: softmax(f(query @ key)) @ value, which keeps its scores in the cache.

As three kernels, the scores go through memory four times: with 16 heads and 512 places they take 17 MB. Short rows of
scores stay in the cache anyway, and each product is then better tiled for itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from tvm import ir, relax, te, tirx

from ..machine import has_matrix_tiles, vector_registers
from ..relax_ir.constants import array_of, constant_of, is_static_tensor
from ..relax_ir.functions import block_results, bound_values, has_call, operator, use_counts
from ..relax_ir.te_kernels import with_te_kernels
from ..relax_ir.tensors import extents
from ..search.space.attention import (
    EXPONENTIALS,
    KEYS,
    MAXIMA,
    PRODUCTS,
    ROWS_OF_BLOCKS,
    SCORES,
    SUMS,
    VALUES,
    VECTOR,
    WEIGHTED,
    filled_up,
)
from .flops import NEEDED
from .fusion import OPAQUE
from .permuted import Permuted, element, keeps_runs, permute_order, permuted_operands, with_permuted_results

__all__ = ["legalize_attention"]

LEAST_PLACES = 32
"""Scores of a row from which one kernel wins."""

LEAST_PLACES_BESIDE_TILES = 256
"""The same where fast math may multiply by tiles of AMX, which only products alone do."""

_OPERATIONS: Mapping[str, Callable[..., Any]] = {
    "relax.add": lambda a, b: a + b,
    "relax.subtract": lambda a, b: a - b,
    "relax.multiply": lambda a, b: a * b,
    "relax.divide": lambda a, b: a / b,
    "relax.tanh": te.tanh,
    "relax.where": tirx.Select,
}


def legalize_attention(mod: ir.IRModule, target: Any) -> ir.IRModule:
    """One kernel of each attention that the sketch for it fits."""
    least_places = LEAST_PLACES_BESIDE_TILES if has_matrix_tiles(target) else LEAST_PLACES
    _, registers = vector_registers(target)

    def attentions(function: relax.Function) -> dict[relax.Var, _Attention]:
        return _attentions(function, least_places, registers)

    # What FuseOps would add to the kernel, the sketch does not know.
    return with_te_kernels(mod, "attention", attentions, {"op_pattern": OPAQUE})


@dataclass(frozen=True)
class _Step:
    """An element-wise operation on the scores, with its operands in order; None stands for the scores."""

    operation: str
    operands: tuple[Any, ...]

    @property
    def tensors(self) -> list[Any]:
        """The operands beside the scores."""
        return [operand for operand in self.operands if operand is not None]


@dataclass(frozen=True)
class _Attention:
    """Operands of shape [..., rows, depth], [..., depth, places] and [..., places, columns]; see `permuted_products`
    for `order`. Keys may be stored place by place."""

    query: Permuted
    key: Permuted
    steps: tuple[_Step, ...]
    value: Permuted
    shape: tuple[int, ...]
    depth: int
    places: int
    order: tuple[int, ...]
    filled: tuple[int, int, int]
    """Rows, places and columns that are computed (`filled_up`)."""

    @property
    def arguments(self) -> list[Any]:
        """What is read, as it is stored."""
        others = [tensor for step in self.steps for tensor in step.tensors if _number(tensor) is None]
        return [self.query.stored, self.key.stored, self.value.stored, *others]

    def compute(self, *arguments: te.Tensor) -> te.Tensor:
        """The stages by the names that the sketch knows; rows are divided by their sums last."""
        query, key, value, *given = arguments
        *batch, all_rows, all_columns = self.shape
        rows, places, columns = self.filled
        depth = te.reduce_axis((0, self.depth), name="d")
        p, q = (te.reduce_axis((0, places), name=name) for name in "pq")
        r = te.reduce_axis((0, self.places), name="r")  # of missing places, the exponentials are nearly zero

        def zeros_beyond(index: Any, there: int, computed: int, value: Any) -> Any:
            """The value at an index of which there are so many."""
            return value if there == computed else tirx.if_then_else(index < there, value, 0.0)

        def key_at(*at: Any) -> Any:
            if places != self.places and not keeps_runs(self.key.order):  # whole rows are copied; the last one again
                *outer, step, place = at
                at = (*outer, step, tirx.min(place, self.places - 1))
                return element(key, self.key.order, at)
            return zeros_beyond(at[-1], self.places, places, element(key, self.key.order, at))

        def value_at(*at: Any) -> Any:
            return zeros_beyond(at[-1], all_columns, columns, element(value, self.value.order, at))

        keys: Any = key_at
        if places != self.places:
            keys = te.compute([*batch, self.depth, places], key_at, name=KEYS)
        weighted: Any = value_at
        if columns != all_columns:
            weighted = te.compute([*batch, self.places, columns], value_at, name=WEIGHTED)

        def product(*at: Any) -> Any:
            *outer, row, place = at
            row = row if rows == all_rows else tirx.min(row, all_rows - 1)
            left = element(query, self.query.order, [*outer, row, depth])
            return te.sum(left * keys(*outer, depth, place), axis=depth)

        def score(*at: Any) -> Any:
            result, tensors = products(*at), iter(given)

            def operand(tensor: Any) -> Any:
                if tensor is None:
                    return result
                number = _number(tensor)
                if number is not None:
                    return tirx.const(number, str(tensor.ty.dtype))
                stored = next(tensors)
                return element(stored, range(len(stored.shape)), at)

            for step in self.steps:
                result = _OPERATIONS[step.operation](*[operand(tensor) for tensor in step.operands])
            missing = tirx.const(-math.inf, "float32")
            return result if places == self.places else tirx.Select(at[-1] < self.places, result, missing)

        shape = [*batch, rows, places]

        def stage(name: str, shape: Sequence[int], value: Callable[..., Any], needed: float) -> te.Tensor:
            return te.compute(shape, value, name=name, attrs={} if needed == 1 else {NEEDED: needed})

        needed_rows = all_rows / rows
        needed = needed_rows * self.places / places
        products = stage(PRODUCTS, shape, product, needed)
        scores = stage(SCORES, shape, score, needed)
        maxima = stage(MAXIMA, shape[:-1], lambda *at: te.max(scores(*at, p), axis=p), needed)
        powers = stage(EXPONENTIALS, shape, lambda *at: te.exp(scores(*at) - maxima(*at[:-1])), needed)
        sums = stage(SUMS, shape[:-1], lambda *at: te.sum(powers(*at, q), axis=q), needed)

        def logical(at: tuple[Any, ...]) -> list[Any]:
            return [at[self.order.index(axis)] for axis in range(len(self.order))]

        def mixed(*at: Any) -> Any:
            *outer, row, column = logical(at)
            return te.sum(powers(*outer, row, r) * weighted(*outer, r, column), axis=r)

        result_shape = [self.shape[axis] for axis in self.order]
        computed = [(*batch, rows, columns)[axis] for axis in self.order]
        values = stage(VALUES, computed, mixed, needed_rows * all_columns / columns)

        def divided(*at: Any) -> Any:
            return values(*at) / sums(*logical(at)[:-1])

        if (rows, columns) == (all_rows, all_columns):
            return te.compute(result_shape, divided, name="attention")
        blocks = te.compute(computed, divided, name=ROWS_OF_BLOCKS)
        return te.compute(result_shape, lambda *at: blocks(*at), name="attention")


def _attentions(function: relax.Function, least_places: int, registers: int) -> dict[relax.Var, _Attention]:
    """The attentions of a function, by the variable of their (permuted) result."""
    if not has_call(function, {"relax.nn.softmax"}):
        return {}
    values = bound_values(function)
    uses, permuted = use_counts(function), permuted_operands(function, activations=True)
    results = block_results(function)
    within = {var: value for var, value in values.items() if var not in results}
    found = {}
    for var, value in values.items():
        if operator(value) == "relax.matmul":
            attention = _attention(value, within, uses, permuted, registers)
            if attention is not None and attention.places >= least_places:
                found[var] = attention
    found = with_permuted_results(function, found)
    fillings: dict[Any, Any] = {}
    return {var: replace(attention, steps=_filled_steps(attention, fillings)) for var, attention in found.items()}


def _attention(
    product: relax.Call,
    values: Mapping[relax.Var, Any],
    uses: Mapping[relax.Var, int],
    permuted: Mapping[relax.Var, Permuted],
    registers: int,
) -> _Attention | None:
    """What a product's left operand makes an attention of; None where it is something else, or does not fit."""

    def of_its_own(var: Any) -> Any:
        return values.get(var) if uses.get(var) == 1 else None

    softmax = of_its_own(product.args[0])
    if operator(softmax) != "relax.nn.softmax" or int(softmax.attrs.axis) not in (-1, softmax.ty.ndim - 1):
        return None
    steps: list[_Step] = []
    scores = of_its_own(softmax.args[0])
    while operator(scores) in _OPERATIONS:
        # The scores are the operand that has their shape and is computed for them alone.
        side = next((i for i, a in enumerate(scores.args) if _leads_to_scores(a, softmax, of_its_own)), None)
        if side is None:
            return None
        steps.insert(0, _Step(operator(scores), tuple(None if i == side else a for i, a in enumerate(scores.args))))
        scores = of_its_own(scores.args[side])
    if operator(scores) != "relax.matmul":
        return None
    operands = [scores.args[0], scores.args[1], product.args[1]]
    others = [tensor for step in steps for tensor in step.tensors]
    if not all(is_static_tensor(t.ty) for t in (*operands, scores, product, *others)):
        return None
    if not all(str(t.ty.dtype) == "float32" for t in (*operands, scores, product)):
        return None
    if not all(str(t.ty.dtype) in ("float32", "bool") for t in others):
        return None
    shapes = [extents(t.ty) for t in (*operands, scores, product)]
    if min(map(len, shapes)) < 2 or len({tuple(shape[:-2]) for shape in shapes}) > 1 or any(0 in one for one in shapes):
        return None
    if not all(_broadcasts(tensor, shapes[3]) for tensor in others):
        return None
    depth, rows, places, columns = shapes[0][-1], shapes[3][-2], shapes[3][-1], shapes[4][-1]
    # Sums of one product each have no axis that keys could be copied along.
    filled = filled_up(rows, places, columns, registers) if depth > 1 else None
    if filled is None or not all(_can_be_filled(tensor, (rows, places), filled[:2]) for tensor in others):
        return None
    query, key, value = (permuted.get(operand) or Permuted.not_at_all(operand) for operand in operands)
    # Weights may be stored with their columns as rows, for kernels of products alone.
    if not all(keeps_runs(operand.order) for operand in (query, key, value)):
        return None
    if depth % VECTOR == 0:
        key = _stored_by_places(of_its_own(operands[1])) or key
    return _Attention(
        query=query,
        key=key,
        steps=tuple(steps),
        value=value,
        shape=tuple(shapes[4]),
        depth=depth,
        places=places,
        order=tuple(range(len(shapes[4]))),
        filled=filled,
    )


def _stored_by_places(keys: Any) -> Permuted | None:
    """What keys of shape [..., depth, places] are a permute of, if the elements of a place lie side by side there."""
    order = permute_order(keys)
    if not order or order[-2] != len(order) - 1 or not is_static_tensor(keys.ty):
        return None
    stored = keys.args[0]
    return None if isinstance(stored, ir.GenericConst) else Permuted(stored, order)


def _leads_to_scores(tensor: Any, softmax: relax.Call, of_its_own: Callable[[Any], Any]) -> bool:
    value: Any = of_its_own(tensor) if isinstance(tensor, relax.Var) else None
    if operator(value) != "relax.matmul" and operator(value) not in _OPERATIONS:
        return False
    return is_static_tensor(value.ty) and is_static_tensor(softmax.ty) and extents(value.ty) == extents(softmax.ty)


def _broadcasts(tensor: Any, shape: list[int]) -> bool:
    """Whether a step's operand has no axes and no places beside those of the scores."""
    own = extents(tensor.ty)
    return len(own) <= len(shape) and all(n in (1, m) for n, m in zip(reversed(own), reversed(shape), strict=False))


def _can_be_filled(tensor: Any, given: tuple[int, int], filled: tuple[int, int]) -> bool:
    """Whether a step's operand has, or can get, as many rows and places as are computed: it is constant, or has one."""
    return isinstance(tensor, ir.GenericConst) or not any(_missing(tensor, given, filled))


def _missing(tensor: Any, given: tuple[int, int], filled: tuple[int, int]) -> list[int]:
    """How much each axis of a step's operand lacks."""
    shape = extents(tensor.ty)
    lacking = [0] * len(shape)
    for axis, (there, wanted) in enumerate(zip(reversed(given), reversed(filled), strict=True), 1):
        if axis <= len(shape) and shape[-axis] == there > 1:
            lacking[-axis] = wanted - there
    return lacking


def _filled_steps(attention: _Attention, fillings: dict[Any, Any]) -> tuple[_Step, ...]:
    """Steps whose constants have as many rows and places as are computed; those of `fillings` are not made again."""
    given = (attention.shape[-2], attention.places)

    def filled(tensor: Any) -> Any:
        missing = [] if tensor is None else _missing(tensor, given, attention.filled[:2])
        if not any(missing):
            return tensor
        array = array_of(tensor)
        key = (array.ctypes.data, array.shape, array.strides, str(array.dtype), *missing)
        if key not in fillings:
            fillings[key] = constant_of(np.pad(array, [(0, more) for more in missing]))
        return fillings[key]

    return tuple(replace(step, operands=tuple(map(filled, step.operands))) for step in attention.steps)


def _number(tensor: Any) -> float | None:
    """The value of a constant without axes."""
    return float(array_of(tensor)) if isinstance(tensor, ir.GenericConst) and not tensor.ty.ndim else None
