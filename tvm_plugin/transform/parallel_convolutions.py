"""JoinParallelConvolutions: what convolves one tensor several times and adds the results convolves it once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import numpy as np
import tvm_ffi
from tvm import ir, relax, tirx, transform

from ..arrays import Array
from ..relax_ir.constants import array_of, constant_of, is_static_tensor
from ..relax_ir.functions import map_functions, operator, rewrite_bindings, top_level_bindings, use_counts
from ..relax_ir.tensors import extents

__all__ = ["JoinParallelConvolutions"]

_CONVOLUTIONS = frozenset(f"relax.nn.conv{rank}d" for rank in (1, 2, 3))

_DTYPES = ("float32", "float64")
"""In others, a sum of weights is rounded more than the sums of what they make."""


@transform.module_pass(opt_level=0, name="JoinParallelConvolutions")
class JoinParallelConvolutions:
    """conv(x, w) + b + conv(x, v) + c + x * s -> conv(x, w + v + s) + (b + c), where all weights are constants.

    Networks that are trained with branches (RepVGG, MobileOne, FastViT) compute a 3 x 3 convolution, a 1 x 1 one and
    the data itself, each normalised, and add them; the sum of their weights, in the places of the largest kernel, does
    the same (Ding et al., "RepVGG: making VGG-style ConvNets great again", 2021). Only branches whose taps are among
    those of the largest one: no product is added.
    """

    def transform_module(self, mod: ir.IRModule, _context: transform.PassContext) -> ir.IRModule:
        """Rewrite sums of floats in every Relax function whose convolutions have channels first."""
        return map_functions(mod, _joined)


@dataclass(frozen=True)
class _Branch:
    """A summand that is linear in `data`: a convolution, or where `call` is None, a multiple of each channel."""

    data: relax.Var
    call: Any
    weight: Any

    @property
    def window(self) -> list[int]:
        """Taps of each axis."""
        return list(self.weight.shape[2:])

    @property
    def padding(self) -> list[int]:
        """Before each axis."""
        return [int(pad) for pad in self.call.attrs.padding][: len(self.window)]

    @property
    def dilation(self) -> list[int]:
        """Of each axis; a single tap has none."""
        steps = [int(step) for step in self.call.attrs.dilation]
        return [step if taps > 1 else 0 for step, taps in zip(steps, self.window, strict=True)]

    def alike(self, other: _Branch) -> bool:
        """Whether another convolution slides over the same data in the same steps, in as many groups."""
        mine, its = self.call.attrs, other.call.attrs
        same = self.data.same_as(other.data) and len(self.window) == len(other.window)
        return same and all(str(getattr(mine, name)) == str(getattr(its, name)) for name in ("strides", "groups"))


def _joined(function: relax.Function) -> relax.Function:
    bindings = [binding for binding in top_level_bindings(function) if isinstance(binding, relax.VarBinding)]
    values = {binding.var: binding.value for binding in bindings}
    dataflow = all(isinstance(block, relax.DataflowBlock) for block in function.body.blocks)
    if not dataflow or not any(operator(value) in _CONVOLUTIONS for value in values.values()):
        return function
    uses = use_counts(function)
    inner = {
        argument
        for value in values.values()
        if operator(value) == "relax.add"
        for argument in value.args
        if uses.get(argument) == 1 and operator(values.get(argument)) == "relax.add"
    }
    normalize = relax.BlockBuilder().normalize

    def rewrite(binding: Any) -> list[Any]:
        is_sum = isinstance(binding, relax.VarBinding) and operator(binding.value) == "relax.add"
        if not is_sum or binding.var in inner or str(binding.var.ty.dtype) not in _DTYPES:
            return [binding]
        terms = _joined_terms(_terms(binding.value, values, inner), binding.var, values, uses)
        return [binding] if terms is None else _sum(terms, binding, normalize)

    result = rewrite_bindings(function, rewrite)
    return function if result.same_as(function) else relax.analysis.remove_all_unused(result)


def _terms(value: Any, values: Mapping[Any, Any], inner: set[Any]) -> list[Any]:
    """The summands of nested additions, in order."""
    return [
        term
        for argument in value.args
        for term in (_terms(values[argument], values, inner) if argument in inner else [argument])
    ]


def _joined_terms(
    terms: Sequence[Any], result: relax.Var, values: Mapping[Any, Any], uses: Mapping[Any, int]
) -> list[Any] | None:
    """The summands with as few convolutions as possible; None where they are as few."""
    branches = {}
    for position, term in enumerate(terms):
        branch = _branch(term, result, values, uses)
        if branch is not None:
            branches[position] = branch
    joined: dict[int, Any] = {}
    for position, base in sorted(branches.items(), key=lambda item: -np.prod(item[1].weight.shape[2:])):
        if base.call is None or position in joined:
            continue
        places = {
            other: place
            for other, branch in branches.items()
            if other != position and other not in joined and (place := _place(branch, base)) is not None
        }
        if places:
            weight = base.weight.astype(np.float64)
            for other, place in places.items():
                _add(weight, branches[other], place, int(base.call.attrs.groups))
            new = constant_of(weight.astype(base.weight.dtype))
            joined[position] = relax.Call(base.call.op, [base.data, new], base.call.attrs)
            joined |= dict.fromkeys(places)
    if not joined:
        return None
    kept = [joined.get(position, term) for position, term in enumerate(terms)]
    kept = [term for position, term in enumerate(kept) if joined.get(position, term) is not None]
    biases = [term for term in kept if _of_channels(term, result) is not None]
    others = [term for term in kept if _of_channels(term, result) is None]
    if biases:
        total = reduce(np.add, [array_of(term).astype(np.float64) for term in biases])
        biases = [constant_of(total.astype(array_of(biases[0]).dtype))]
    # A bias right behind the first convolution.
    return [others[0], *biases, *others[1:]]


def _branch(term: Any, result: relax.Var, values: Mapping[Any, Any], uses: Mapping[Any, int]) -> _Branch | None:
    if not isinstance(term, relax.Var) or not _same_shape(term, result):
        return None
    value: Any = values.get(term) if uses.get(term) == 1 else None
    if operator(value) in _CONVOLUTIONS:
        data, weight = value.args
        constant = isinstance(weight, ir.GenericConst) and is_static_tensor(weight.ty)
        same = constant and str(data.ty.dtype) == str(weight.ty.dtype) == str(result.ty.dtype)
        if same and isinstance(data, relax.Var) and _channels_first(value.attrs, weight.ty.ndim):
            return _Branch(data, value, array_of(weight))
        return None
    if operator(value) == "relax.multiply":
        data, factor = value.args if isinstance(value.args[0], relax.Var) else reversed(value.args)
        factors = _of_channels(factor, result)
        if factors is not None and isinstance(data, relax.Var) and _same_shape(data, result):
            return _Branch(data, None, factors)
        return None
    channels = _channels(result)
    return None if channels is None else _Branch(term, None, np.ones(channels, str(result.ty.dtype)))


def _channels_first(attrs: Any, rank: int) -> bool:
    """Whether channels come first in data and result, outputs and inputs in the kernel, and none are packed."""
    data, out, kernel = (str(layout) for layout in (attrs.data_layout, attrs.out_layout, attrs.kernel_layout))
    return data == out and data[:2] == "NC" and kernel[:2] == "OI" and len(data) == len(kernel) == rank


def _same_shape(tensor: Any, other: Any) -> bool:
    """Whether two tensors have the same dtype and certainly the same shape."""
    mine, its = tensor.ty, other.ty
    if not isinstance(mine, relax.TensorType) or mine.shape is None or str(mine.dtype) != str(its.dtype):
        return False
    return bool(tvm_ffi.structural_equal(mine.shape, its.shape))


def _channels(result: relax.Var) -> int | None:
    """How many channels, the second axis of several, there are; None where that is open."""
    shape = result.ty.shape.values
    return int(shape[1]) if len(shape) > 2 and isinstance(shape[1], tirx.IntImm) else None


def _of_channels(term: Any, result: relax.Var) -> Array | None:
    """A constant with one number for each channel of the result, or one for all, as so many numbers."""
    if not isinstance(term, ir.GenericConst) or not is_static_tensor(term.ty):
        return None
    channels, rank = _channels(result), len(result.ty.shape.values)
    shape = [1] * (rank - len(extents(term.ty))) + extents(term.ty)
    if channels is None or len(shape) != rank or shape not in ([1] * rank, [1, channels, *[1] * (rank - 2)]):
        return None
    return np.broadcast_to(array_of(term).reshape(-1), (channels,))


def _place(branch: _Branch, base: _Branch) -> list[int] | None:
    """Where in the base's window the branch's begins; None where it reads anything else."""
    if branch.call is None:
        strides = [int(step) for step in base.call.attrs.strides]
        if not branch.data.same_as(base.data) or any(step != 1 for step in strides):
            return None
        padding, dilation, window = [0] * len(strides), [0] * len(strides), [1] * len(strides)
    else:
        if not base.alike(branch):
            return None
        padding, dilation, window = branch.padding, branch.dilation, branch.window
    place = []
    for mine, its, step, own, taps, wanted in zip(
        base.padding, padding, base.dilation, dilation, base.window, window, strict=True
    ):
        distance = mine - its
        first = distance // step if step else 0
        if (own and own != step) or first * step != distance or not 0 <= first <= taps - wanted:
            return None
        place.append(first)
    return place


def _add(weight: Array, branch: _Branch, place: Sequence[int], groups: int) -> None:
    """Add a branch's weights to those of the base, in place."""
    if branch.call is not None:
        window = tuple(slice(first, first + taps) for first, taps in zip(place, branch.window, strict=True))
        weight[(slice(None), slice(None), *window)] += branch.weight
        return
    outputs = np.arange(len(weight))
    weight[(outputs, outputs % weight.shape[1], *place)] += branch.weight


def _sum(terms: Sequence[Any], binding: Any, normalize: Callable[[Any], Any]) -> list[Any]:
    """The bindings of a sum, of which the last one is `binding`'s variable."""
    bindings: list[Any] = []

    def bound(value: Any) -> Any:
        if not isinstance(value, relax.Call):
            return value
        value = normalize(value)
        bindings.append(relax.VarBinding(relax.DataflowVar("joined", value.ty), value))
        return bindings[-1].var

    total = reduce(lambda a, b: bound(relax.op.add(a, b)), map(bound, terms))
    if total.same_as(bindings[-1].var):
        bindings[-1] = relax.VarBinding(binding.var, bindings[-1].value)
    return bindings
