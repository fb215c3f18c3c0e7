"""Concatenations without copies: each part is written where it belongs by the kernel that computes it.

    a = k1(x); b = k2(y); c = concat(a, b)   ->   c' = k1'(x), the first slice; c = k2'(y, c'), the second, in place

k1' is k1 with one more block at its end, which writes the part into its slice of the whole; schedules inline what
comes before into it, so that nothing is written twice.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tvm import ir, relax, s_tir, tirx

from ..relax_ir.functions import map_functions, operator, rewrite_bindings, top_level_bindings, use_counts
from ..relax_ir.kernels import is_scheduled
from ..relax_ir.tensors import shape_of
from ..search.space.statements import function_of
from .copies import copy_block

__all__ = ["CONCAT_AXIS", "legalize_concat", "write_concats_in_place"]

CONCAT_AXIS = "eqtune.concat_axis"
"""Attribute of a kernel that does nothing but concatenate: along which axis."""


@dataclass(frozen=True)
class _Part:
    """One part of a concatenation. `producer` is the binding that computes it for this use alone, if there is one."""

    value: Any
    begin: int
    producer: Any


def legalize_concat(builder: relax.BlockBuilder, call: relax.Call) -> Any:
    """For `LegalizeOps`: as TVM does it, and the kernel says what it is."""
    from tvm import topi

    axis = None if call.attrs.axis is None else int(call.attrs.axis)
    attributes = {} if axis is None else {CONCAT_AXIS: axis % call.ty.ndim}
    given = call.args[0]
    if isinstance(given, relax.Tuple):
        tensors = list(given.fields)
    else:
        tensors = [builder.emit(relax.TupleGetItem(given, index)) for index in range(len(given.ty.fields))]
    return builder.call_te(topi.concatenate, tensors, axis, primfunc_name_hint="concatenate", primfunc_attrs=attributes)


def write_concats_in_place(mod: ir.IRModule) -> ir.IRModule:
    """Rewrite the concatenations of a fused module (`FuseTIR`) whose parts are computed by kernels for them alone.

    A part that is an input, a constant, or used elsewhere too is copied into its slice. A concatenation without a
    single part of its own stays as it is.
    """
    builder = relax.BlockBuilder(mod)
    return map_functions(mod, lambda function: _rewrite(function, mod, builder), builder)


def _rewrite(function: relax.Function, mod: ir.IRModule, builder: relax.BlockBuilder) -> relax.Function:
    bindings = list(top_level_bindings(function))
    order = {binding.var: place for place, binding in enumerate(bindings)}
    uses = use_counts(function)
    chains: dict[relax.Var, list[relax.VarBinding]] = {}
    removed: set[relax.Var] = set()
    bound = {binding.var: binding for binding in bindings}
    for binding in bindings:
        parts = _parts(binding, bound, uses, mod)
        own = [part for part in parts if part.producer is not None]
        if not own:
            continue
        for var in (binding.var, *(part.producer.var for part in own)):
            removed.add(var)
            bound.pop(var, None)
        chain = sorted(parts, key=lambda part: order[part.producer.var] if part.producer else len(order))
        whole: Any = None
        for number, part in enumerate(chain):
            last = number == len(chain) - 1
            written = _write_slice(part, binding, mod, builder, whole)
            var = binding.var if last else relax.DataflowVar(f"{binding.var.name}_{number}", binding.var.ty)
            place = part.producer.var if part.producer else binding.var
            chains.setdefault(place, []).append(relax.VarBinding(var, written))
            whole = var
    return rewrite_bindings(
        function, lambda binding: chains.get(binding.var, [] if binding.var in removed else [binding])
    )


def _parts(
    binding: Any, bound: Mapping[relax.Var, Any], uses: Mapping[relax.Var, int], mod: ir.IRModule
) -> list[_Part]:
    """The parts of a binding that only concatenates, in order; none for any other binding."""
    if operator(binding.value) != "relax.call_tir":
        return []
    attributes = mod[binding.value.args[0]].attrs
    if CONCAT_AXIS not in attributes:
        return []
    axis = int(attributes[CONCAT_AXIS])
    parts, begin = [], 0
    # Behind the tensors may be numbers that the kernel's sizes are made of.
    values = [value for value in binding.value.args[1].fields if isinstance(value.ty, relax.TensorType)]
    if not all(isinstance(shape_of(value)[axis], int) for value in values):
        return []
    for value in values:
        producer = bound.get(value) if isinstance(value, relax.DataflowVar) and uses.get(value) == 1 else None
        parts.append(_Part(value, begin, producer if _can_write_slice(producer, mod) else None))
        begin += shape_of(value)[axis]
    return parts


def _can_write_slice(producer: Any, mod: ir.IRModule) -> bool:
    if producer is None or operator(producer.value) != "relax.call_tir":
        return False
    kernel = mod[producer.value.args[0]]
    return isinstance(kernel.body, s_tir.SBlockRealize) and CONCAT_AXIS not in kernel.attrs and not is_scheduled(kernel)


def _write_slice(
    part: _Part, concat: relax.VarBinding, mod: ir.IRModule, builder: relax.BlockBuilder, whole: Any
) -> relax.Call:
    """The call that writes one part: it allocates the whole, or goes on with the `whole` that earlier calls began."""
    axis = int(mod[concat.value.args[0]].attrs[CONCAT_AXIS])
    extent = shape_of(concat.var)[axis]
    if part.producer is None:
        name, arguments = "copy", [part.value]
        kernel = _slice_kernel(None, part.value, extent, axis, part.begin)
    else:
        call = part.producer.value
        name, arguments = call.args[0].name_hint, list(call.args[1].fields)
        kernel = _slice_kernel(mod[call.args[0]], part.value, extent, axis, part.begin)
    variable = builder.add_func(kernel, f"{name}_concat")
    if whole is None:
        written = relax.call_tir(variable, arguments, concat.var.ty)
    else:
        written = relax.op.call_tir_inplace(variable, [*arguments, whole], len(arguments), concat.var.ty)
    return builder.normalize(written)


def _slice_kernel(kernel: tirx.PrimFunc | None, part: relax.Expr, extent: int, axis: int, begin: int) -> tirx.PrimFunc:
    """`kernel` with its output written into a slice of one with this extent; a copy kernel without one."""

    def shifted(indices: list[Any]) -> list[Any]:
        return [var + begin if i == axis and begin else var for i, var in enumerate(indices)]

    if kernel is None:
        shape = [
            tirx.IntImm("int64", size) if isinstance(size, int) else tirx.Var(f"size{place}", "int64")
            for place, size in enumerate(shape_of(part))
        ]
        source = tirx.decl_buffer(shape, str(part.ty.dtype), "part")
    else:
        source = kernel.params[-1]
    sizes = [tirx.IntImm("int64", extent) if place == axis else size for place, size in enumerate(source.shape)]
    whole = tirx.decl_buffer(sizes, str(source.dtype), "T_concat")
    if kernel is None:
        parameters, statements, allocated = [source, whole], [], []
        attributes = {"tirx.noalias": True}
    else:
        root = kernel.body.block
        parameters = [*list(kernel.params)[:-1], whole]
        statements = list(root.body.seq) if isinstance(root.body, tirx.SeqStmt) else [root.body]
        allocated = [*root.alloc_buffers, source]
        attributes = {key: value for key, value in kernel.attrs.items() if key != "op_pattern"}
    statements.append(copy_block(source, whole, list(source.shape), shifted, "T_concat"))
    function = function_of(parameters, statements, attributes, allocated)
    is_open = any(not isinstance(size, tirx.IntImm) for size in source.shape)
    return function if is_open else s_tir.renew_defs(function)  # which loses symbols in the layouts of buffers
