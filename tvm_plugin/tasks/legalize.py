"""TVM's `LegalizeOps`, where equal calls get one kernel: those of one form of a model, and of the next.

TVM writes the kernel of each call anew, in 4 ms of Python. The forms that compete for InceptionV3 have 1336 calls, most
of them equal to another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import tvm
import tvm_ffi
from tvm import ir, relax, s_tir, tirx, transform

from ..relax_ir.constants import array_of
from .concat import legalize_concat
from .norms import legalize_rms_norm
from .resize import legalize_resize

__all__ = ["legalize_ops"]

_Legalize = Callable[[relax.BlockBuilder, relax.Call], Any]

OURS: dict[str, _Legalize] = {
    "relax.concat": legalize_concat,
    "relax.image.resize2d": legalize_resize,
    "relax.nn.rms_norm": legalize_rms_norm,
}
"""Operators whose kernels are not TVM's."""

MOST_KERNELS = 4096
"""That are kept; the oldest go first."""

MOST_ELEMENTS = 16
"""Of a constant that may be looked at: scalars become part of the kernel."""


@dataclass(frozen=True)
class _Kernel:
    """What a call became: `function`, which takes the call's tensors at `places` and returns these types."""

    name: str
    function: tirx.PrimFunc
    places: tuple[int, ...]
    types: tuple[Any, ...]


_kernels: dict[Any, _Kernel] = {}


@cache
def legalize_ops() -> transform.Pass:
    """The pass. Names of kernels and of their blocks may be those of an equal call in another model."""
    theirs = {name: ir.Op.get(name).get_attr("FLegalize") for name in ir.Op.list_op_names()}
    legalizers = {name: legalize for name, legalize in (theirs | OURS).items() if legalize is not None}
    return relax.transform.LegalizeOps({name: partial(_legalized, made) for name, made in legalizers.items()})


def _legalized(legalize: _Legalize, builder: relax.BlockBuilder, call: relax.Call) -> Any:
    tensors = list(_tensors(call.args))
    first: dict[Any, int] = {}
    which = [first.setdefault(tensor, place) for place, tensor in enumerate(tensors)]  # x * x is not x * y
    known = [_known(operand) for operand in call.args]
    key = tvm_ffi.StructuralKey([tvm.target.Target.current(), call.op, call.attrs, known, which, call.ty_args, call.ty])
    kernel = _kernels.get(key)
    if kernel is None:
        result = legalize(builder, call)
        kernel = _read(builder, result, call, first)
        if kernel is not None:
            _kernels[key] = kernel
            if len(_kernels) > MOST_KERNELS:
                del _kernels[next(iter(_kernels))]
        return result
    # A copy, as schedules may edit what they get in place.
    variable = builder.add_func(s_tir.renew_defs(kernel.function), kernel.name)
    return relax.call_tir(variable, [tensors[place] for place in kernel.places], list(kernel.types))


def _tensors(operands: Any) -> Iterator[Any]:
    for operand in operands:
        if isinstance(operand, relax.Tuple):
            yield from _tensors(operand.fields)
        else:
            yield operand


def _known(operand: Any) -> Any:
    """What a kernel may depend on: sizes and scalars themselves, and the types of tensors."""
    if isinstance(operand, relax.Tuple):
        return [_known(field) for field in operand.fields]
    if isinstance(operand, ir.GenericConst):
        return operand if array_of(operand).size <= MOST_ELEMENTS else operand.ty
    return operand.ty if isinstance(operand.ty, relax.TensorType | relax.TupleType) else operand


def _read(builder: relax.BlockBuilder, result: Any, call: relax.Call, places: dict[Any, int]) -> _Kernel | None:
    """None where a call became something else than the call of one kernel on its tensors: a size that no operand has is
    computed by another kernel before it."""
    if not isinstance(result, relax.Call) or result.op != ir.Op.get("relax.call_tir") or len(result.args) != 2:
        return None
    variable, operands = result.args
    if not all(operand in places for operand in operands.fields):
        return None
    function, (ty,) = s_tir.renew_defs(builder.get()[variable]), result.ty_args
    types = tuple(ty.fields) if isinstance(ty, relax.TupleType) else (ty,)
    sizes = {size for value in (call, *places) for size in relax.analysis.tir_vars_in_type(value.ty)}
    if not sizes.issuperset(relax.analysis.tir_vars_in_type(ty)):
        return None
    return _Kernel(variable.name_hint, function, tuple(places[operand] for operand in operands.fields), types)
