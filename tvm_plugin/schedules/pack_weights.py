"""Weights repacked ahead of time, as schedules ask for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tvm
from tvm import ir, relax, s_tir, tirx

from ..arrays import Array
from ..dtypes import numpy_dtype
from ..relax_ir.constants import array_of, constant_of
from ..relax_ir.functions import map_functions, operator, rewrite_calls, top_level_bindings
from ..relax_ir.kernels import KERNEL_CALLS
from ..search.space.amx.halves import split_panels, splits_panels
from ..search.space.expressions import nodes_of
from ..search.space.marks import AHEAD_OF_TIME
from .packing import pack

__all__ = ["SplitKernel", "pack_weights", "split_packing"]


@dataclass(frozen=True)
class SplitKernel:
    """A scheduled kernel in two: what packs the weights at `positions`, and what takes them packed."""

    packing: tirx.PrimFunc
    kernel: tirx.PrimFunc
    positions: tuple[int, ...]


def pack_weights(mod: ir.IRModule, known: Mapping[str, SplitKernel] | None = None) -> ir.IRModule:
    """Run the blocks of kernels that repack constant weights now, and give the packed weights to the kernels.

    Such blocks are marked AHEAD_OF_TIME (`search/space/marks.py`). Where a weight is no constant, and in a module
    without Relax functions, they stay in the kernel. Kernels that are `known`, by name, are split already.
    """
    calls = [
        binding.value
        for function in mod.functions.values()
        if isinstance(function, relax.Function)
        for binding in top_level_bindings(function)
        if operator(binding.value) in KERNEL_CALLS
    ]
    inputs = {
        call.args[0].name_hint: len(call.args[1].fields) - (operator(call) == "relax.call_tir_inplace")
        for call in calls
    }
    splits = {name: split for name, count in inputs.items() if (split := split_packing(mod[name], count)) is not None}
    splits |= known or {}
    jobs: dict[tuple[Any, ...], tuple[SplitKernel, list[ir.GenericConst]]] = {}
    for call in calls:
        split = splits.get(call.args[0].name_hint)
        weights = None if split is None else _weights(call, split)
        if split is not None and weights is not None:
            jobs[_key(call, weights)] = split, weights
    if not jobs:
        return mod
    packed = dict(zip(jobs, _run(list(jobs.values())), strict=True))

    builder = relax.BlockBuilder(mod)
    variables = {name: builder.add_func(split.kernel, f"{name}_packed") for name, split in splits.items()}

    def rewrite(binding: relax.VarBinding) -> relax.VarBinding:
        call = binding.value
        split = splits.get(call.args[0].name_hint) if operator(call) in KERNEL_CALLS else None
        weights = None if split is None else _weights(call, split)
        if split is None or weights is None:
            return binding
        arguments = list(call.args[1].fields)
        for position, constant in zip(split.positions, packed[_key(call, weights)], strict=True):
            arguments[position] = constant
        target = variables[call.args[0].name_hint]
        value = relax.Call(call.op, [target, relax.Tuple(arguments), *call.args[2:]], call.attrs, call.ty_args)
        return relax.VarBinding(binding.var, builder.normalize(value))

    result = map_functions(builder.get(), lambda function: rewrite_calls(function, rewrite))
    return relax.transform.DeadCodeElimination()(result)


def split_packing(kernel: tirx.PrimFunc, inputs: int) -> SplitKernel | None:
    """A scheduled kernel in two, of which `inputs` parameters are not written; None where it packs nothing.

    TVM's pass, on a module with this kernel alone: it fails on kernels that are no blocks (cumsum).
    """
    if not any(AHEAD_OF_TIME in block.annotations for block in nodes_of(kernel.body, s_tir.SBlock)):
        return None
    builder = relax.BlockBuilder()
    variable = builder.add_func(kernel, "kernel")
    types = [relax.TensorType([int(extent) for extent in p.shape], str(p.dtype)) for p in kernel.params]
    arguments = [relax.Var(f"argument{i}", ty) for i, ty in enumerate(types[:inputs])]
    with builder.function("call", arguments):
        builder.emit_func_output(builder.emit(relax.call_tir(variable, arguments, types[inputs:])))
    mod = relax.transform.SplitLayoutRewritePreproc()(builder.get())
    packing_call = next(
        binding.value for binding in top_level_bindings(mod["call"]) if operator(binding.value) == "relax.call_tir"
    )
    params = list(mod["call"].params)
    positions = tuple(
        next(i for i, param in enumerate(params) if param.same_as(source)) for source in packing_call.args[1].fields
    )
    return SplitKernel(mod["kernel_weight_prepack"], mod["kernel_prepacked"], positions)


def _weights(call: relax.Call, split: SplitKernel) -> list[ir.GenericConst] | None:
    weights = [call.args[1].fields[position] for position in split.positions]
    return weights if all(isinstance(weight, ir.GenericConst) for weight in weights) else None


def _key(call: relax.Call, weights: Sequence[ir.GenericConst]) -> tuple[Any, ...]:
    """The same for calls of one kernel with the same weights, which are packed once."""
    return (call.args[0].name_hint, *(array_of(weight).ctypes.data for weight in weights))


def _run(jobs: Sequence[tuple[SplitKernel, list[ir.GenericConst]]]) -> list[list[ir.GenericConst]]:
    """The packed weights of each job: by numpy, or where it cannot, by one compiled module."""
    results = [pack(split.packing, [array_of(weight) for weight in weights]) for split, weights in jobs]
    functions = {
        f"packing{number}": split.packing.with_attr("global_symbol", f"packing{number}")
        for number, ((split, _), result) in enumerate(zip(jobs, results, strict=True))
        if result is None
    }
    if functions:
        library = tvm.compile(ir.IRModule(functions), tvm.target.Target("llvm")).jit()
        for number, (split, weights) in enumerate(jobs):
            if results[number] is None:
                results[number] = _call(library[f"packing{number}"], split, weights)
    for number, (split, _) in enumerate(jobs):
        if splits_panels(split.packing):
            results[number] = [split_panels(array) for array in results[number] or []]
    return [[constant_of(array) for array in result or []] for result in results]


def _call(function: Any, split: SplitKernel, weights: Sequence[ir.GenericConst]) -> list[Array]:
    outputs = [
        constant_of(np.zeros([int(extent) for extent in parameter.shape], numpy_dtype(str(parameter.dtype))))
        for parameter in list(split.packing.params)[len(weights) :]
    ]
    function(*(constant.value for constant in (*weights, *outputs)))
    return [array_of(output) for output in outputs]
