"""Many small slices of one tensor as one kernel, as the steps of a recurrent layer are.

Slices from different places are kernels of their own: an LSTM of 32 steps had 40 kernels to price and to search, 31 of
them copies of 4 KB. Joined, the model has ten kernels, and takes as long.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tvm_ffi
from tvm import ir, relax, s_tir, tirx
from tvm.ir.expr import TensorLoad

from ..relax_ir.constants import is_static_tensor, type_bytes
from ..relax_ir.functions import map_functions, operator, rewrite_bindings
from ..relax_ir.kernels import is_scheduled
from ..relax_ir.tensors import extents
from ..search.space.statements import function_of
from .block_names import rename_blocks

__all__ = ["join_slices"]

SMALL_BYTES = 64 * 1024
"""Of a slice: one core copies it in a microsecond or two."""

FEWEST, MOST = 4, 64
"""Slices of one kernel; more take long to compile."""


def join_slices(mod: ir.IRModule) -> ir.IRModule:
    """Make the small slices of each tensor of a fused module (`FuseTIR`) where the first of them is made. For CPUs."""
    builder = relax.BlockBuilder(mod)
    return map_functions(mod, lambda function: _rewrite(function, _groups_of(function, mod), mod, builder), builder)


def _groups_of(function: relax.Function, mod: ir.IRModule) -> list[list[Any]]:
    """The bindings of slices that become one call each."""
    by_source: dict[tuple[Any, ...], list[Any]] = {}
    for number, block in enumerate(function.body.blocks):  # what a dataflow block binds, no other one may read
        for binding in block.bindings:
            if _is_small_slice(binding, mod):
                (source,) = binding.value.args[1].fields
                by_source.setdefault((number, source, *extents(binding.var.ty)), []).append(binding)
    return [
        found[start : start + MOST]
        for found in by_source.values()
        for start in range(0, len(found), MOST)
        if len(found) - start >= FEWEST
    ]


def _is_small_slice(binding: Any, mod: ir.IRModule) -> bool:
    value, ty = binding.value, binding.var.ty
    if operator(value) != "relax.call_tir" or not isinstance(binding.var, relax.DataflowVar):
        return False
    if not isinstance(value.args[1], relax.Tuple) or len(value.args[1].fields) != 1 or not is_static_tensor(ty):
        return False
    if not is_static_tensor(value.args[1].fields[0].ty):  # each kernel has its own symbols of the sizes
        return False
    kernel = mod[value.args[0]]
    return type_bytes(ty) <= SMALL_BYTES and not is_scheduled(kernel) and _is_copy(kernel)


def _is_copy(kernel: tirx.PrimFunc) -> bool:
    """Whether the kernel, which is not scheduled, only moves what it reads."""
    blocks: list[Any] = []
    values: list[Any] = []
    tvm_ffi.structural_walk(
        kernel.body,
        [(s_tir.SBlock, blocks.append), (tirx.BufferStore, lambda store: values.append(store.value))],
    )
    plain = all(block.init is None and not block.match_buffers for block in blocks)
    return (
        isinstance(kernel.body, s_tir.SBlockRealize)
        and plain
        and bool(values)
        and all(isinstance(value, TensorLoad) for value in values)
    )


def _rewrite(
    function: relax.Function, groups: Sequence[Sequence[Any]], mod: ir.IRModule, builder: relax.BlockBuilder
) -> relax.Function:
    calls = {group[0].var: _joined_call(group, mod, builder) for group in groups}
    members = {binding.var for group in groups for binding in group}

    def replace(binding: Any) -> list[Any]:
        return calls.get(binding.var, [] if binding.var in members else [binding])

    return rewrite_bindings(function, replace)


def _joined_call(group: Sequence[Any], mod: ir.IRModule, builder: relax.BlockBuilder) -> list[Any]:
    """The bindings that take the place of a group's first: the call, and the variables of its results."""
    results = [binding.var for binding in group]
    kernels = [mod[binding.value.args[0]] for binding in group]
    variable = builder.add_func(_joined(kernels), "slices")
    call = builder.normalize(relax.call_tir(variable, group[0].value.args[1], [var.ty for var in results]))
    every = relax.DataflowVar(f"{results[0].name}_slices", call.ty)
    parts = [relax.VarBinding(var, builder.normalize(relax.TupleGetItem(every, i))) for i, var in enumerate(results)]
    return [relax.VarBinding(every, call), *parts]


def _joined(kernels: Sequence[tirx.PrimFunc]) -> tirx.PrimFunc:
    """One kernel of the one input and all outputs of `kernels`, which does what they do, one after another."""
    fresh = [s_tir.renew_defs(kernel) for kernel in kernels]
    source = fresh[0].params[0]
    statements: list[Any] = []
    allocated: list[Any] = []
    for number, kernel in enumerate(fresh):
        own = kernel.params[0]
        root = kernel.body.block
        body = tvm_ffi.structural_map(root.body, (ir.Var, lambda var, own=own: source if var.same_as(own) else var))
        body = rename_blocks(body, f"{{}}_{number}".format)
        statements.extend(body.seq if isinstance(body, tirx.SeqStmt) else [body])
        allocated.extend(root.alloc_buffers)
    outputs = [kernel.params[1] for kernel in fresh]
    return s_tir.renew_defs(function_of([source, *outputs], statements, {"tirx.noalias": True}, allocated))
